//! A family away: its guests on this node, and its link home.

use crate::aside::Aside;
use crate::clocks::Clocks;
use crate::departures::Leaving;
use crate::forward::Failed;
use crate::member::{Member, State};
use crate::sandbox::Sandbox;
use std::collections::HashMap;
use std::time::Instant;
use tern_control::door::Door;
use tern_control::shim::ShimStart;
use tern_ids::{Epoch, Fingerprint, HomePid, NodeId, ShimId};
use tern_image::content::Cache;
use tern_migrate::message::{Departure, Inbox, Machine, Message, send};
use tern_tracee::stop::{self, Change};
use tern_wire::Link;

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
    /// From a source on an onward journey.
    pub(crate) sources: Vec<(Link, Inbox)>,
    /// Guests whose next node is being reached, and where they are to go.
    pub(crate) setting_off: HashMap<HomePid, Departure>,
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
    pub(crate) by_host: HashMap<i32, HomePid>,
    /// Since when there has been no guest.
    pub(crate) empty_since: Instant,
    /// There has been a guest: when the last is gone, so are we.
    pub(crate) populated: bool,
    /// What the last wait has shown.
    pub(crate) home_ready: bool,
    pub(crate) trap_ready: bool,
}

impl Family {
    pub(crate) fn tell(&mut self, pid: HomePid, message: &Message) {
        let Some(home) = &mut self.home else { return };
        if send(home, pid, message, &[]).is_err() {
            self.lose_home();
        }
    }

    pub(crate) fn lose_home(&mut self) {
        if self.home.take().is_none() {
            return;
        }
        // Migrations that home has not decided are off: what was coming is ended, what was going stays.
        self.setting_off.clear();
        let pids: Vec<HomePid> = self.members.keys().copied().collect();
        for pid in pids {
            match self.members.get(&pid).map(|m| &m.state) {
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
            Failed::Guest(error) => {
                // If it was killed, its end is reported by its own stop.
                if !error.is_gone() {
                    tracing::error!(%pid, %error, "a guest cannot go on here");
                    self.tell(pid, &Message::Died(libc::SIGKILL));
                    self.end(pid);
                }
            }
        }
    }

    /// Ends a guest: kills it and waits until its pid is free.
    pub(crate) fn end(&mut self, pid: HomePid) {
        if let Some(member) = self.members.get(&pid) {
            let host = member.host;
            tern_tracee::pidfd::kill(host);
            loop {
                match stop::wait(host, true) {
                    Ok(Some((_, Change::Stopped(stopped)))) => drop(stopped.resume(0)),
                    Ok(None) => {}
                    Ok(Some(_)) | Err(_) => break,
                }
            }
        }
        self.remove(pid);
    }

    pub(crate) fn remove(&mut self, pid: HomePid) {
        if let Some(member) = self.members.remove(&pid) {
            self.by_host.remove(&member.host);
        }
        self.setting_off.remove(&pid);
    }

    /// Home's daemon says that home does not wait for these lives any more: they were taken back, or have ended
    /// there, while we were out of its reach.
    pub(crate) fn over(&mut self, lives: &[(HomePid, Epoch)]) {
        if self.home.is_some() {
            // It has come back since, and decides by itself.
            return;
        }
        for (pid, epoch) in lives {
            if self.members.get(pid).is_some_and(|m| m.epoch == *epoch) {
                tracing::info!(%pid, ?epoch, "home does not wait for this guest any more");
                self.end(*pid);
            }
        }
    }
}
