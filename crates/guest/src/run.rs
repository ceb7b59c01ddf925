//! The one loop of a guest shim: it waits for home, for its guests' traps and stops, and for its node.

use crate::aside::Aside;
use crate::clocks::Clocks;
use crate::family::Family;
use crate::member::{Member, State};
use crate::near::Beside;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_control::door::Door;
use tern_control::shim::ShimStart;
use tern_ids::{Epoch, HomePid};
use tern_image::content::Cache;
use tern_migrate::message::{Inbox, Message};
use tern_tracee::listener::Listener;
use tern_tracee::{Memory, procfs};
use tern_wire::{Ephemeral, Link};

/// How often the link is shown to be alive.
const BEAT: Duration = Duration::from_secs(1);

/// How long home may leave us without a guest.
const LAST_WORDS: Duration = Duration::from_secs(30);

/// How often home's daemon is asked whether home still waits for guests that have lost it.
const ASK: Duration = Duration::from_secs(1);

/// So many seconds a guest may take for a call that we have it make. What takes long is the end of a large mapping.
const PATIENCE: u32 = 30;

/// Runs the shim until its family has left this node.
///
/// # Errors
/// If it cannot begin.
pub fn run(start: ShimStart, key: Ephemeral, door: Door) -> anyhow::Result<()> {
    let tern_control::ShimRole::Guest { home, accept, uid, gid, .. } = start.role.clone() else {
        anyhow::bail!("this shim was not told to hold guests");
    };
    tern_tracee::patience::limit(PATIENCE, Duration::from_secs(1));
    let me = std::process::id() as i32;
    let machine = tern_migrate::machine::machine(&Memory::open(me)?, &procfs::maps(me)?)?;
    let beside = Beside::new(start.node, &start.run_dir, &start.shared);
    let mut family = Family {
        home_node: home,
        aside: Aside::new(key, accept.clone())?,
        accept,
        identity: (uid, gid),
        door,
        home: None,
        home_came: 0,
        home_shim: None,
        asked: Instant::now(),
        sources: Vec::new(),
        setting_off: HashMap::new(),
        putting_down: HashMap::new(),
        leaving: Vec::new(),
        inbox: Inbox::default(),
        heard: Instant::now(),
        spoke: Instant::now(),
        sandbox: None,
        cache: Cache::new(&start.cache_dir).with_own(beside.files_to_map(home)),
        machine,
        clocks: Clocks::default(),
        members: HashMap::new(),
        by_host: HashMap::new(),
        by_home: HashMap::new(),
        beside,
        empty_since: Instant::now(),
        populated: false,
        home_ready: true,
        trap_ready: true,
        start,
    };
    while !family.is_over() {
        family.turn()?;
    }
    tracing::info!("the family has left");
    drop(family.door);
    // Its helper is the last that was in the group.
    family.sandbox = None;
    tern_cgroup::guests::tidy();
    if let Some(home) = &mut family.home {
        let _best_effort = home.drain(Instant::now() + Duration::from_secs(1));
    }
    Ok(())
}

impl Family {
    pub(crate) fn is_over(&self) -> bool {
        // Home gives up first; a guest that outlived that would be alone. Where none has come yet, whoever was to send
        // one has gone on without us long before.
        let patience = if self.populated { self.patience() + Duration::from_secs(5) } else { LAST_WORDS };
        let lost = self.home.is_none() && self.heard.elapsed() > patience;
        // Home closes the link when it needs us no more. One that forgets us is not waited for for ever.
        let left =
            self.members.is_empty() && (self.home.is_none() || self.empty_since.elapsed() > LAST_WORDS);
        (self.populated && left) || lost
    }

    /// How long a node may be out of reach before it is given up: home, or the next one of a departing guest.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(u64::from(self.start.give_up_after))
    }

    pub(crate) fn turn(&mut self) -> anyhow::Result<()> {
        self.wait()?;
        if !self.members.is_empty() {
            self.empty_since = Instant::now();
        }
        self.answer_node();
        self.take_events();
        self.take_stops();
        self.take_messages();
        self.take_traps();
        self.write_behind();
        self.put_files_down();
        self.go_on_departing();
        self.see_off();
        self.report_the_dying();
        self.report_the_homesick();
        self.report_the_used();
        self.keep_alive();
        self.bring_to_stand();
        Ok(())
    }

    pub(crate) fn wait(&mut self) -> anyhow::Result<()> {
        let listeners = self.listeners();
        let mut fds: Vec<(BorrowedFd<'_>, i16)> = Vec::new();
        let busy = self.members.values().any(|m| matches!(m.process.state, State::Departing(_)));
        for link in self.home.iter().chain(self.sources.iter().map(|s| &s.link)) {
            fds.push((
                link.as_fd(),
                if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
            ));
        }
        for member in self.members.values() {
            if let State::Departing(departing) = &member.process.state
                && let Some(link) = &departing.link
            {
                fds.push((
                    link.as_fd(),
                    if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
                ));
            }
        }
        fds.push((self.aside.as_fd(), libc::POLLIN));
        let leaving = self.leaving.iter().map(|l| &l.link);
        fds.extend(leaving.filter(|l| l.wants_write()).map(|l| (l.as_fd(), libc::POLLOUT)));
        // The last, in which they are looked for below.
        fds.extend(listeners.iter().map(|l| (l.as_fd(), libc::POLLIN)));
        let aside = listeners.iter().any(|l| l.has_aside());
        let buffered =
            aside || self.home.iter().chain(self.sources.iter().map(|s| &s.link)).any(Link::has_frame);
        let full = self.home.as_ref().is_some_and(Link::wants_write);
        let due = self.members.values().filter_map(Member::due).min();
        let due = due.map(|due| due.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let timeout = if buffered || (busy && !full) { Duration::from_millis(1) } else { BEAT / 2 };
        let timeout = due.map_or(timeout, |due| due.min(timeout));
        let ready = self.door.wait(&fds, if buffered { Duration::ZERO } else { timeout })?;
        // Most turns are for one of the two that every call needs: the other is not asked in vain.
        self.home_ready = buffered || self.home.is_none() || ready.first().copied().unwrap_or(true);
        self.trap_ready = aside || ready.iter().rev().take(listeners.len()).any(|r| *r);
        Ok(())
    }

    pub(crate) fn listeners(&self) -> Vec<Rc<Listener>> {
        let mut all: Vec<Rc<Listener>> = Vec::new();
        for listener in self.members.values().filter_map(|m| m.process.listener.as_ref()) {
            if !all.iter().any(|l| Rc::ptr_eq(l, listener)) {
                all.push(Rc::clone(listener));
            }
        }
        all
    }

    pub(crate) fn keep_alive(&mut self) {
        if self.home.is_some() && self.spoke.elapsed() > BEAT {
            self.spoke = Instant::now();
            // Those that were to go in haste, and stay.
            for member in self.members.values().filter(|m| matches!(m.process.state, State::Running)) {
                member.be_nice(self.start.guest_nice.into());
            }
            let live = self.members.values_mut().filter(|m| m.is_live());
            let told: Vec<_> =
                live.map(|m| (m.process.pid, Message::Used(m.process.meter.used(), m.demand()))).collect();
            self.tell(HomePid(0), &Message::Beat);
            self.ask_to_be_fetched();
            for (pid, used) in told {
                self.tell(pid, &used);
            }
        }
        let suspend = Duration::from_secs(u64::from(self.start.suspend_after));
        if self.heard.elapsed() > suspend {
            if self.home.is_some() {
                tracing::warn!("home has not been heard for {suspend:?}");
                self.lose_home();
            }
            for member in self.members.values_mut() {
                member.process.held |= matches!(member.process.state, State::Running);
            }
        }
        self.ask_for_home();
    }

    /// Once more for those that wait for it: a journey home may have failed, or have been asked for while another was
    /// under way that did.
    fn ask_to_be_fetched(&mut self) {
        let waiting = |m: &&Member| matches!(m.process.state, State::Running);
        let waiting = self.members.values().filter(waiting);
        let asked =
            waiting.filter_map(|m| Some((m.process.pid, Message::FetchHome(m.homeward()?.to_owned()))));
        for (pid, message) in asked.collect::<Vec<_>>() {
            self.tell(pid, &message);
        }
    }

    /// Without home: has its node asked whether it still waits for us, so that guests which home has taken back or
    /// given up while the link was cut end as soon as that can be known.
    pub(crate) fn ask_for_home(&mut self) {
        let Some(shim) = self.home_shim.filter(|_| self.home.is_none() && self.asked.elapsed() > ASK) else {
            return;
        };
        self.asked = Instant::now();
        let lives: Vec<(HomePid, Epoch)> =
            self.members.values().map(|m| (m.process.pid, m.process.epoch)).collect();
        if !lives.is_empty() {
            self.aside.ask(self.start.run_dir.clone(), self.home_node, shim, lives);
        }
    }
}
