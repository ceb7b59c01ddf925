//! Links to guest shims: lost, looked for, found, given up.

use crate::family::{Event, Family, Found};
use crate::member::State;
use crate::ternd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::{Reply, Request};
use tern_ids::{Epoch, HomePid};
use tern_migrate::message::Message;
use tern_wire::{Link, Preamble};

/// How often links are shown to be alive.
const BEAT: Duration = Duration::from_secs(1);

/// How long a guest shim may take to prove who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);

impl Family {
    pub(crate) fn lose(&mut self, at: usize) {
        self.peers[at].lose();
        self.know_nothing(at);
        let pids: Vec<HomePid> = self.members.keys().copied().collect();
        for pid in pids {
            let Some(member) = self.members.get(&pid) else { continue };
            match &member.state {
                State::Outbound(o) if o.peer == at => {
                    self.stay_home(pid, "the link to that node was cut");
                }
                State::Going(o) if o.peer == at => self.revoke(pid, "the link to that node was cut"),
                State::Crossing(_) if member.peer == at => self.cross_back(pid),
                State::Onward(next) if *next == at || member.peer == at => {
                    self.stayed(pid, "a link was cut");
                    self.tell(pid, &Message::Thaw);
                }
                State::Inbound(_) if member.peer == at => self.stayed(pid, "the link to its node was cut"),
                _ => {}
            }
        }
    }

    pub(crate) fn keep_alive(&mut self) {
        let give_up = Duration::from_secs(u64::from(self.start.give_up_after));
        let silent = Duration::from_secs(u64::from(self.start.suspend_after));
        for at in 0..self.peers.len() {
            let needed = self.members.values().any(|m| m.peer == at && m.is_away());
            let used = needed || self.members.values().any(|m| m.task.is_some());
            if !used && self.peers[at].link.is_some() {
                self.peers[at].close();
            }
            let peer = &mut self.peers[at];
            if peer.link.is_some() && peer.spoke.elapsed() > BEAT {
                peer.spoke = Instant::now();
                if peer.tell(HomePid(0), &Message::Beat, &[]).is_err() || peer.heard.elapsed() > silent {
                    self.lose(at);
                }
            } else if let Some(link) = &mut peer.link {
                if link.flush().is_err() {
                    self.lose(at);
                }
            } else if needed && peer.missing() > give_up {
                self.give_up(at, "its node was out of reach for too long");
            } else if needed && !peer.seeking {
                self.seek(at);
            }
        }
    }

    /// Looks for a lost peer, in a thread of its own.
    pub(crate) fn seek(&mut self, at: usize) {
        let (run_dir, key, events, bell) =
            (self.start.run_dir.clone(), Arc::clone(&self.key), self.events.0.clone(), self.bell.clone());
        let peer = &mut self.peers[at];
        peer.seeking = true;
        let (node, shim, fingerprint, mut address) =
            (peer.node, peer.shim, peer.fingerprint, peer.address.clone());
        std::thread::spawn(move || {
            let mut found = Found::Nothing;
            if let Ok(Reply::Located { address: now, alive }) =
                ternd::ask(&run_dir, &Request::Locate { node, shim })
            {
                address = now.unwrap_or(address);
                if alive == Some(false) {
                    found = Found::Gone;
                }
            }
            if !matches!(found, Found::Gone)
                && let Ok(tls) = tern_wire::pinned_client(&key, fingerprint)
                && let Ok(link) =
                    Link::connect(&address, Preamble::Shim(shim), &tls, Instant::now() + HANDSHAKE)
            {
                found = Found::Link(Box::new(link));
            }
            if matches!(found, Found::Nothing) {
                std::thread::sleep(Duration::from_millis(200));
            }
            let _loop_is_gone = events.send(Event::Sought(at, found));
            bell.ring();
        });
    }

    pub(crate) fn sought(&mut self, at: usize, found: Found) {
        self.peers[at].seeking = false;
        match found {
            Found::Link(link) => self.peers[at].found(*link),
            Found::Gone => self.give_up(at, "its guest is gone"),
            Found::Nothing => {}
        }
    }

    /// The guests that this peer held are lost: their deputies end, by SIGKILL.
    pub(crate) fn give_up(&mut self, at: usize, why: &str) {
        let held: Vec<HomePid> =
            self.members.values().filter(|m| m.peer == at && m.is_away()).map(|m| m.pid).collect();
        for pid in held {
            tracing::error!(%pid, why, "a process is lost; its deputy is killed");
            self.refuse(pid, why);
            tern_tracee::pidfd::kill(pid.0);
        }
    }

    /// A thread of a guest shows itself on a new link; the first one last.
    pub(crate) fn present(&mut self, pid: HomePid, tid: HomePid, from: usize, epoch: Epoch, signals: u64) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        if matches!(member.state, State::Crossing(old) if old == from) {
            // The life before: it stands still, and hears when it is known whether the next one runs.
            return;
        }
        let holds = member.is_away() && member.peer == from;
        let (now, revived) = (member.epoch, member.revived && epoch < member.epoch);
        if !holds || !(epoch == now || revived) {
            self.tell_peer(from, pid, &Message::Drop);
            return;
        }
        if let Ok(thread) = member.thread(tid) {
            thread.heard(signals);
        }
        if tid != pid {
            return;
        }
        if revived {
            self.tell(pid, &Message::Go(now));
        }
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.revived = revived;
        let stopped = member.job_stopped;
        self.signal_again(pid);
        self.tell(pid, &if stopped { Message::Stop(true) } else { Message::Thaw });
        self.watch_anew(pid);
    }
}
