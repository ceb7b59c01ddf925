//! A family away: its guests on this node, and its link home.

use crate::aside::Aside;
use crate::clocks::Clocks;
use crate::departures::Leaving;
use crate::forward::Failed;
use crate::member::{Member, State};
use crate::near::Beside;
use crate::sandbox::Sandbox;
use std::collections::HashMap;
use std::time::Instant;
use tern_control::door::Door;
use tern_control::shim::ShimStart;
use tern_ids::{Epoch, Fingerprint, HomePid, NodeId, ShimId};
use tern_image::content::Cache;
use tern_migrate::message::{Departure, Inbox, Machine, Message, send};
use tern_tracee::procfs;
use tern_tracee::stop::{self, Change};
use tern_wire::Link;

/// A node from which a guest comes that goes onward.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) link: Link,
    pub(crate) inbox: Inbox,
    /// Whom it brings, and as which life.
    pub(crate) brings: Option<(HomePid, Epoch)>,
}

/// The away half of one family on one node.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) start: ShimStart,
    pub(crate) home_node: NodeId,
    pub(crate) accept: Vec<Fingerprint>,
    pub(crate) identity: (u32, u32),
    pub(crate) aside: Aside,
    pub(crate) door: Door,
    pub(crate) home: Option<Link>,
    /// Which caller `home` was; an older one who is slow to prove who he is does not take its place.
    pub(crate) home_came: u64,
    /// Home's shim, once it has offered something, and when its node was last asked for it.
    pub(crate) home_shim: Option<ShimId>,
    pub(crate) asked: Instant,
    pub(crate) sources: Vec<Source>,
    /// Guests whose next node is being reached, and where they are to go.
    pub(crate) setting_off: HashMap<HomePid, Departure>,
    /// Guests that depart as soon as home has what they have written, and over which links.
    pub(crate) putting_down: HashMap<HomePid, (Departure, Option<Link>)>,
    /// To the next nodes of guests that have been sent off.
    pub(crate) leaving: Vec<Leaving>,
    pub(crate) inbox: Inbox,
    pub(crate) heard: Instant,
    pub(crate) spoke: Instant,
    pub(crate) sandbox: Option<Sandbox>,
    pub(crate) cache: Cache,
    pub(crate) machine: Machine,
    pub(crate) clocks: Clocks,
    pub(crate) members: HashMap<HomePid, Member>,
    /// Threads by their numbers here: the process and the thread, as home numbers them. So too processes that arrive,
    /// and those whose first thread has ended.
    pub(crate) by_host: HashMap<i32, (HomePid, HomePid)>,
    /// The processes of threads.
    pub(crate) by_home: HashMap<HomePid, HomePid>,
    /// Its node, and the files of that.
    pub(crate) beside: Beside,
    /// Since when there has been no guest.
    pub(crate) empty_since: Instant,
    /// There has been a guest: when the last is gone, so are we.
    pub(crate) populated: bool,
    /// What the last wait has shown.
    pub(crate) home_ready: bool,
    pub(crate) trap_ready: bool,
}

impl Family {
    /// Says something to home, about a process or one of its threads.
    pub(crate) fn tell(&mut self, tag: HomePid, message: &Message) {
        let Some(home) = &mut self.home else { return };
        if send(home, tag, message, &[]).is_err() {
            self.lose_home();
        }
    }

    /// From now on a thread is known by its numbers at home and here.
    pub(crate) fn note(&mut self, pid: HomePid, tid: HomePid, host: i32) {
        self.by_host.insert(host, (pid, tid));
        self.by_home.insert(tid, pid);
    }

    /// And now no more.
    pub(crate) fn forget(&mut self, tid: HomePid, host: i32) {
        if let Some((pid, _)) = self.by_host.remove(&host)
            && self.by_home.get(&tid) == Some(&pid)
        {
            self.by_home.remove(&tid);
        }
    }

    /// The guest whose thread has this number at home.
    pub(crate) fn of_thread(&self, tid: HomePid) -> Option<HomePid> {
        self.by_home.get(&tid).copied()
    }

    pub(crate) fn lose_home(&mut self) {
        if self.home.take().is_none() {
            return;
        }
        self.members.values_mut().for_each(|member| member.process.names.forget());
        // Migrations that home has not decided are off: what was coming is ended, what was going stays.
        self.setting_off.clear();
        for (pid, _) in self.putting_down.drain() {
            self.members.entry(pid).and_modify(|member| member.process.files.take_up());
        }
        let pids: Vec<HomePid> = self.members.keys().copied().collect();
        for pid in pids {
            match self.members.get(&pid).map(|m| &m.process.state) {
                Some(State::Arriving(_)) => self.end(pid),
                Some(State::Departing(_)) => self.stay(pid, None),
                _ => {}
            }
        }
    }

    pub(crate) fn failed(&mut self, pid: HomePid, error: &Failed) {
        match error {
            Failed::Link(error) => {
                tracing::warn!(%error, "the link to home is cut");
                self.lose_home();
            }
            Failed::Guest(_) | Failed::Unmovable(_) => {
                // Whoever has found it gone may have taken its end from the kernel already, so that nobody else will.
                if self.members.contains_key(&pid) {
                    tracing::error!(%pid, %error, "a guest cannot go on here");
                    self.tell(pid, &Message::Died(libc::SIGKILL));
                    self.end(pid);
                }
            }
        }
    }

    /// Ends a guest: kills it and waits until its numbers are free.
    pub(crate) fn end(&mut self, pid: HomePid) {
        if let Some(member) = self.members.get(&pid) {
            let host = member.process.host;
            tern_tracee::pidfd::kill(host);
            // The kernel says that the first thread has ended when all others have and have been waited for: also those
            // that were made and never became known.
            while let Ok(threads) = procfs::threads(host) {
                let others: Vec<i32> = threads.into_iter().filter(|thread| *thread != host).collect();
                if others.is_empty() {
                    break;
                }
                others.into_iter().for_each(await_end);
            }
            await_end(host);
        }
        self.remove(pid);
    }

    pub(crate) fn remove(&mut self, pid: HomePid) {
        if let Some(member) = self.members.remove(&pid) {
            for thread in member.threads.values() {
                self.forget(thread.tid, thread.host);
            }
            self.forget(pid, member.process.host);
        }
        self.setting_off.remove(&pid);
        self.putting_down.remove(&pid);
    }

    /// Home's daemon says that home does not wait for these lives any more: they were taken back, or have ended
    /// there, while we were out of its reach.
    pub(crate) fn over(&mut self, lives: &[(HomePid, Epoch)]) {
        if self.home.is_some() {
            // It has come back since, and decides by itself.
            return;
        }
        for (pid, epoch) in lives {
            if self.members.get(pid).is_some_and(|m| m.process.epoch == *epoch) {
                tracing::info!(%pid, ?epoch, "home does not wait for this guest any more");
                self.end(*pid);
            }
        }
    }
}

/// Waits for the end of a thread that has been killed.
fn await_end(thread: i32) {
    loop {
        match stop::wait(thread, true) {
            Ok(Some((_, Change::Stopped(stopped)))) => drop(stopped.resume(0)),
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => break,
        }
    }
}
