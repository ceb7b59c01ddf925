//! The state of a guest shim: its guests on this node, and its links.

mod messages;
mod requests;

use crate::depart::messages::DrainingLink;
use crate::error::GuestError;
use crate::files::local::LocalNode;
use crate::process::{Guest, State};
use crate::sandbox::Sandbox;
use crate::time::clocks::HomeClocks;
use crate::workers::Workers;
use std::collections::HashMap;
use std::time::Instant;
use tern_control::control_socket::ControlSocket;
use tern_control::shim::ShimStart;
use tern_control::turn_watch::TurnWatch;
use tern_ids::{Epoch, Fingerprint, HomePid, NodeId, ShimId};
use tern_image::content::ContentCache;
use tern_migrate::message::{Departure, Machine, Message, Reassembler, send};
use tern_tracee::procfs;
use tern_tracee::stop::{self, WaitEvent};
use tern_wire::Link;

/// The link from the previous node of a guest that migrates onward to this one.
#[derive(Debug)]
pub(crate) struct SourceLink {
    pub(crate) link: Link,
    pub(crate) inbox: Reassembler,
    /// The guest that it sends, with its new epoch.
    pub(crate) sends: Option<(HomePid, Epoch)>,
}

/// The away half of one family on one node.
#[derive(Debug)]
pub(crate) struct Shim {
    pub(crate) start: ShimStart,
    pub(crate) home_node: NodeId,
    pub(crate) accept: Vec<Fingerprint>,
    pub(crate) identity: (u32, u32),
    pub(crate) workers: Workers,
    pub(crate) control_socket: ControlSocket,
    pub(crate) home: Option<Link>,
    /// The sequence number of the connection that became `home`. An older connection whose
    /// handshake completes later does not replace it.
    pub(crate) home_connection: u64,
    /// Home's shim, known from its first offer, and when home's daemon was last asked about it.
    pub(crate) home_shim: Option<ShimId>,
    pub(crate) last_asked_home: Instant,
    pub(crate) source_links: Vec<SourceLink>,
    /// Guests that are to migrate onward, while the next node is being connected to.
    pub(crate) connecting: HashMap<HomePid, Departure>,
    /// Guests that depart as soon as home has confirmed their pending writes, with the link to the
    /// next node, if any.
    pub(crate) returning: HashMap<HomePid, (Departure, Option<Link>)>,
    /// Links to the next nodes of guests that were sent onward, until home has decided.
    pub(crate) draining_links: Vec<DrainingLink>,
    pub(crate) inbox: Reassembler,
    /// When something last came from home, or its machine acknowledged what was sent to it.
    pub(crate) last_contact: Instant,
    pub(crate) last_heartbeat: Instant,
    pub(crate) sandbox: Option<Sandbox>,
    pub(crate) cache: ContentCache,
    pub(crate) machine: Machine,
    pub(crate) clocks: HomeClocks,
    pub(crate) guests: HashMap<HomePid, Guest>,
    /// Threads by their tid on this node: the process and the thread by their ids at home. It also
    /// has arriving processes, and processes whose first thread has ended.
    pub(crate) by_host_tid: HashMap<i32, (HomePid, HomePid)>,
    /// The process of each thread, both by their ids at home.
    pub(crate) by_home_tid: HashMap<HomePid, HomePid>,
    /// This node, and access to its files.
    pub(crate) local_node: LocalNode,
    /// Since when the shim has had no guest.
    pub(crate) empty_since: Instant,
    /// Whether the shim has had a guest, or declined its first one. It then ends when it has none.
    pub(crate) has_had_guest: bool,
    /// Whether the last poll found the link to home readable, and a trap pending.
    pub(crate) is_home_readable: bool,
    pub(crate) is_trap_pending: bool,
    /// Reports steps of the main loop that take too long.
    pub(crate) turn_watch: TurnWatch,
}

impl Shim {
    /// Sends a message to home about a process or one of its threads. A failure drops the link.
    pub(crate) fn send_home(&mut self, tag: HomePid, message: &Message) {
        let Some(home) = &mut self.home else { return };
        if send(home, tag, message, &[]).is_err() {
            self.drop_home_link();
        }
    }

    /// Registers a thread by its ids at home and on this node.
    pub(crate) fn register_thread(&mut self, pid: HomePid, tid: HomePid, host: i32) {
        self.by_host_tid.insert(host, (pid, tid));
        self.by_home_tid.insert(tid, pid);
    }

    /// Removes what [`register_thread`](Self::register_thread) has registered.
    pub(crate) fn unregister_thread(&mut self, tid: HomePid, host: i32) {
        if let Some((pid, _)) = self.by_host_tid.remove(&host)
            && self.by_home_tid.get(&tid) == Some(&pid)
        {
            self.by_home_tid.remove(&tid);
        }
    }

    /// The guest that has this thread, given by its tid at home.
    pub(crate) fn process_of_thread(&self, tid: HomePid) -> Option<HomePid> {
        self.by_home_tid.get(&tid).copied()
    }

    pub(crate) fn drop_home_link(&mut self) {
        if self.home.take().is_none() {
            return;
        }
        self.guests.values_mut().for_each(|guest| guest.process.names.clear());
        // Migrations that home has not decided are cancelled: arriving guests end, departing ones
        // stay.
        self.connecting.clear();
        for (pid, _) in self.returning.drain() {
            self.guests.entry(pid).and_modify(|guest| guest.process.files.allow_delegations());
        }
        let pids: Vec<HomePid> = self.guests.keys().copied().collect();
        for pid in pids {
            match self.guests.get(&pid).map(|guest| &guest.process.state) {
                Some(State::Arriving(_)) => self.kill(pid),
                Some(State::Departing(_)) => self.cancel_departure(pid, None),
                _ => {}
            }
        }
    }

    pub(crate) fn handle_error(&mut self, pid: HomePid, error: &GuestError) {
        match error {
            GuestError::Link(error) => {
                tracing::warn!(%error, "the link to home is cut");
                self.drop_home_link();
            }
            GuestError::Process(_) | GuestError::Unmovable(_) => {
                // The exit status may have been collected already, so the main loop will not see
                // the end.
                if self.guests.contains_key(&pid) {
                    tracing::error!(%pid, %error, "a guest cannot continue here");
                    self.send_home(pid, &Message::KilledBySignal(libc::SIGKILL));
                    self.kill(pid);
                }
            }
        }
    }

    /// Kills a guest and waits until its pids are free.
    pub(crate) fn kill(&mut self, pid: HomePid) {
        if let Some(guest) = self.guests.get(&pid) {
            let host = guest.process.host_pid;
            tern_tracee::pidfd::kill(host);
            // The kernel reports the end of the first thread only when all others have ended and
            // have been waited for, including those that were created and never registered.
            while let Ok(threads) = procfs::threads(host) {
                let others: Vec<i32> = threads.into_iter().filter(|thread| *thread != host).collect();
                if others.is_empty() {
                    break;
                }
                others.into_iter().for_each(await_exit);
            }
            await_exit(host);
        }
        self.remove(pid);
    }

    pub(crate) fn remove(&mut self, pid: HomePid) {
        if let Some(guest) = self.guests.remove(&pid) {
            for thread in guest.threads.values() {
                self.unregister_thread(thread.tid, thread.host_tid);
            }
            self.unregister_thread(pid, guest.process.host_pid);
        }
        self.connecting.remove(&pid);
        self.returning.remove(&pid);
    }

    /// Ends guests of these epochs, for which home no longer waits, as home's daemon reports. They
    /// were taken back, or have ended at home, while the link was down.
    pub(crate) fn end_not_awaited(&mut self, epochs: &[(HomePid, Epoch)]) {
        if self.home.is_some() {
            // The link is back, and home decides by itself.
            return;
        }
        for (pid, epoch) in epochs {
            if self.guests.get(pid).is_some_and(|guest| guest.process.epoch == *epoch) {
                tracing::info!(%pid, ?epoch, "home no longer waits for this guest");
                self.kill(*pid);
            }
        }
    }
}

/// Waits for the end of a killed thread.
fn await_exit(thread: i32) {
    loop {
        match stop::wait(thread, true) {
            Ok(Some((_, WaitEvent::Stopped(stopped)))) => drop(stopped.resume(0)),
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => break,
        }
    }
}
