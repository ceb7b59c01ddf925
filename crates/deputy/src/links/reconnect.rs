//! Links to guest shims: kept alive, lost, re-established, or declared dead.

use crate::links::peers::PeerId;
use crate::links::ternd;
use crate::process::Process;
use crate::process::state::State;
use crate::shim::{ReconnectResult, Shim, ShimEvent};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::{Reply, Request};
use tern_ids::{Epoch, HomePid, NodeId};
use tern_migrate::message::Message;
use tern_wire::Link;

/// Interval between heartbeats on each link.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

impl Shim {
    pub(crate) fn peer_lost(&mut self, at: PeerId) {
        if let Some(peer) = self.peers.get_mut(at) {
            peer.mark_lost();
        }
        self.forget_names_of_peer(at);
        let pids: Vec<HomePid> = self.processes.keys().copied().collect();
        for pid in pids {
            let Some(process) = self.processes.get(&pid) else { continue };
            match &process.state {
                State::Outgoing(o) if o.peer == at => {
                    self.cancel_outgoing(pid, "the link to that node was cut");
                }
                State::HandedOver(o) if o.peer == at => self.revoke(pid, "the link to that node was cut"),
                State::Switching(_) if process.peer == at => self.cancel_switch(pid),
                State::Remigrating(next) if *next == at || process.peer == at => {
                    self.departure_failed(pid, "a link was cut");
                    self.send(pid, &Message::Thaw);
                }
                State::Returning(_) if process.peer == at => {
                    self.departure_failed(pid, "the link to its node was cut");
                }
                _ => {}
            }
        }
    }

    pub(crate) fn keep_alive(&mut self) {
        let give_up = Duration::from_secs(u64::from(self.start.give_up_after));
        let silent = Duration::from_secs(u64::from(self.start.suspend_after));
        let in_use: BTreeSet<PeerId> = self.processes.values().flat_map(Process::peers).collect();
        for at in self.peers.ids() {
            let needed = self.processes.values().any(|process| process.peer == at && process.is_away());
            let Some(peer) = self.peers.get_mut(at) else { continue };
            if !in_use.contains(&at) {
                if peer.flush_and_check_removable() {
                    self.peers.remove(at);
                }
                continue;
            }
            peer.unused_since = None;
            if peer.link.is_some() && peer.last_heartbeat.elapsed() > HEARTBEAT_INTERVAL {
                peer.last_heartbeat = Instant::now();
                let sent = peer.send(HomePid(0), &Message::Heartbeat, &[]).is_ok();
                let silence = peer.link.as_mut().map(Link::time_without_ack).unwrap_or_default();
                if !sent || silence > silent {
                    self.peer_lost(at);
                }
            } else if let Some(link) = &mut peer.link {
                if link.flush().is_err() {
                    self.peer_lost(at);
                }
            } else if needed && peer.time_since_loss() > give_up {
                self.kill_deputies_of(at, "its node was out of reach for too long");
            } else if needed && !peer.is_reconnecting {
                self.reconnect(at);
            }
        }
    }

    /// Reconnects to a lost peer, in a helper thread. If none can be started, the next turn tries
    /// again.
    pub(crate) fn reconnect(&mut self, at: PeerId) {
        let (run_dir, key) = (self.start.run_dir.clone(), Arc::clone(&self.key));
        let Some(peer) = self.peers.get(at) else { return };
        let (node, shim, fingerprint, mut address) =
            (peer.node, peer.shim, peer.fingerprint, peer.address.clone());
        let is_reconnecting = self.start_helper(move || {
            let mut found = ReconnectResult::Unreachable;
            if let Ok(Reply::Located { address: now, alive }) =
                ternd::request(&run_dir, &Request::Locate { node, shim })
            {
                address = now.unwrap_or(address);
                if alive == Some(false) {
                    found = ReconnectResult::Gone;
                }
            }
            if !matches!(found, ReconnectResult::Gone)
                && let Ok(tls) = tern_wire::pinned_client(&key, fingerprint)
                && let Ok(link) = Link::connect_to_shim(&address, shim, &tls)
            {
                found = ReconnectResult::Link(Box::new(link));
            }
            if matches!(found, ReconnectResult::Unreachable) {
                std::thread::sleep(Duration::from_millis(200));
            }
            ShimEvent::ReconnectDone(at, found)
        });
        if let Some(peer) = self.peers.get_mut(at) {
            peer.is_reconnecting = is_reconnecting;
        }
    }

    pub(crate) fn reconnect_done(&mut self, at: PeerId, found: ReconnectResult) {
        let Some(peer) = self.peers.get_mut(at) else { return };
        peer.is_reconnecting = false;
        match found {
            ReconnectResult::Link(link) => peer.reconnected(*link),
            ReconnectResult::Gone => self.kill_deputies_of(at, "its guest is gone"),
            ReconnectResult::Unreachable => {}
        }
    }

    /// Ends the links with a node that is no longer a member of the cluster.
    pub(crate) fn node_removed(&mut self, node: NodeId) {
        for at in self.peers.ids() {
            if self.peers.get(at).is_some_and(|peer| peer.node == node) {
                self.peer_lost(at);
                self.kill_deputies_of(at, "its node was removed from the cluster");
            }
        }
    }

    /// Kills the deputies whose guests this peer held, because the guests are lost.
    pub(crate) fn kill_deputies_of(&mut self, at: PeerId, why: &str) {
        let lost: Vec<HomePid> = self
            .processes
            .values()
            .filter(|process| process.peer == at && process.is_away())
            .map(|process| process.pid)
            .collect();
        for pid in lost {
            tracing::error!(%pid, why, "a process is lost; its deputy is killed");
            self.abort_task(pid, why);
            tern_tracee::pidfd::kill(pid.0);
        }
    }

    /// Handles the report of a guest shim, on a new link, that it still has this thread. The first
    /// thread of a process comes last; after it everything unacknowledged is sent again.
    pub(crate) fn handle_reattach(
        &mut self,
        pid: HomePid,
        tid: HomePid,
        from: PeerId,
        epoch: Epoch,
        signals: u64,
    ) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if matches!(process.state, State::Switching(old) if old == from) {
            // The previous guest: it stays frozen until it is known whether the next one runs.
            return;
        }
        let holds = process.is_away() && process.peer == from;
        let (now, old_guest_has_new_epoch) =
            (process.epoch, process.old_guest_has_new_epoch && epoch < process.epoch);
        if !holds || !(epoch == now || old_guest_has_new_epoch) {
            self.send_to_peer(from, pid, &Message::Drop);
            return;
        }
        if let Ok(thread) = process.thread(tid) {
            thread.acknowledge_signals(signals);
        }
        if tid != pid {
            return;
        }
        if old_guest_has_new_epoch {
            self.send(pid, &Message::Go(now));
        }
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.old_guest_has_new_epoch = old_guest_has_new_epoch;
        let (stopped, returns) = (process.job_stopped, matches!(process.state, State::Returning(_)));
        self.resend_signals(pid);
        // The second also resumes a guest that had sent everything when the link was cut.
        self.send(pid, &Message::Stop(stopped));
        self.send(pid, &Message::Thaw);
        self.resend_thresholds(pid);
        if returns {
            // It was fetched home while there was no link.
            self.begin_return(pid);
        }
    }
}
