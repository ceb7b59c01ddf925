//! The one loop of a guest shim: it waits for home, for its guests' traps and stops, and for its node.

use crate::arrive::{self, Arriving};
use crate::aside::{Aside, Event};
use crate::clocks::Clocks;
use crate::cpu::Meter;
use crate::depart::{Departing, Going};
use crate::forward::Failed;
use crate::member::{Member, State};
use crate::sandbox::Sandbox;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_control::shim::{ShimReply, ShimRequest, ShimStart};
use tern_control::{ProcessRow, door::Door};
use tern_ids::{Epoch, Fingerprint, HomePid, MigrationId, NodeId, ShimId};
use tern_image::content::Cache;
use tern_migrate::message::{Arrived, Departure, Inbox, Machine, Message, Offer, send};
use tern_migrate::source::{SendError, Sending};
use tern_migrate::{CpuTime, Phase, fault, wall};
use tern_tracee::listener::Listener;
use tern_tracee::stop::{self, Change, Siginfo, Stop, Stopped};
use tern_tracee::{Memory, procfs};
use tern_wire::{Ephemeral, Link};

/// How often the link is shown to be alive.
const BEAT: Duration = Duration::from_secs(1);
/// How long home may leave us without a guest.
const LAST_WORDS: Duration = Duration::from_secs(30);
/// How often home's daemon is asked whether home still waits for guests that have lost it.
const ASK: Duration = Duration::from_secs(1);

/// The away half of one family on one node.
#[derive(Debug)]
struct Family {
    start: ShimStart,
    home_node: NodeId,
    accept: Vec<Fingerprint>,
    identity: (u32, u32),
    aside: Aside,
    door: Door,
    home: Option<Link>,
    /// Which caller `home` was; an older one who is slow to prove who he is does not take its place.
    home_came: u64,
    /// Home's shim, once it has offered something, and when its node was last asked for it.
    home_shim: Option<ShimId>,
    asked: Instant,
    /// From a source on an onward journey.
    sources: Vec<(Link, Inbox)>,
    /// Guests whose next node is being reached, and where they are to go.
    setting_off: HashMap<HomePid, Departure>,
    /// To the next nodes of guests that have been sent off.
    leaving: Vec<Leaving>,
    inbox: Inbox,
    heard: Instant,
    spoke: Instant,
    sandbox: Option<Sandbox>,
    cache: Cache,
    machine: Machine,
    clocks: Clocks,
    members: HashMap<HomePid, Member>,
    by_host: HashMap<i32, HomePid>,
    /// Since when there has been no guest.
    empty_since: Instant,
    /// There has been a guest: when the last is gone, so are we.
    populated: bool,
    /// What the last wait has shown.
    home_ready: bool,
    trap_ready: bool,
}

/// Runs the shim until its family has left this node.
///
/// # Errors
/// If it cannot begin.
pub fn run(start: ShimStart, key: Ephemeral, door: Door) -> anyhow::Result<()> {
    let tern_control::ShimRole::Guest { home, accept, uid, gid, .. } = start.role.clone() else {
        anyhow::bail!("this shim was not told to hold guests");
    };
    let me = std::process::id() as i32;
    let machine = tern_migrate::source::machine(&Memory::open(me)?, &procfs::maps(me)?, xstate_len()?)?;
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
        leaving: Vec::new(),
        inbox: Inbox::default(),
        heard: Instant::now(),
        spoke: Instant::now(),
        sandbox: None,
        cache: Cache::new(&start.cache_dir),
        machine,
        clocks: Clocks::default(),
        members: HashMap::new(),
        by_host: HashMap::new(),
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
    // Its helper is the last that was in the group.
    family.sandbox = None;
    tern_cgroup::guests::tidy();
    if let Some(home) = &mut family.home {
        let _best_effort = home.drain(Instant::now() + Duration::from_secs(1));
    }
    Ok(())
}

/// How long this machine's extended register area is, as ptrace shows it.
fn xstate_len() -> anyhow::Result<u32> {
    Ok(tern_tracee::registers::xstate_len()?)
}

impl Family {
    fn is_over(&self) -> bool {
        // Home gives up first; a guest that outlived that would be alone.
        let lost = self.home.is_none() && self.heard.elapsed() > self.patience() + Duration::from_secs(5);
        // Home closes the link when it needs us no more. One that forgets us is not waited for for ever.
        let left =
            self.members.is_empty() && (self.home.is_none() || self.empty_since.elapsed() > LAST_WORDS);
        (self.populated && left) || lost
    }

    /// How long a node may be out of reach before it is given up: home, or the next one of a departing guest.
    fn patience(&self) -> Duration {
        Duration::from_secs(u64::from(self.start.give_up_after))
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        self.wait()?;
        if !self.members.is_empty() {
            self.empty_since = Instant::now();
        }
        self.answer_node();
        self.take_events();
        self.take_stops();
        self.take_messages();
        self.take_traps();
        self.go_on_departing();
        self.see_off();
        self.report_the_dying();
        self.keep_alive();
        Ok(())
    }

    fn wait(&mut self) -> anyhow::Result<()> {
        let listeners = self.listeners();
        let mut fds: Vec<(BorrowedFd<'_>, i16)> = Vec::new();
        let busy = self.members.values().any(|m| matches!(m.state, State::Departing(_)));
        for link in self.home.iter().chain(self.sources.iter().map(|s| &s.0)) {
            fds.push((
                link.as_fd(),
                if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
            ));
        }
        for member in self.members.values() {
            if let State::Departing(departing) = &member.state
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
            aside || self.home.iter().chain(self.sources.iter().map(|s| &s.0)).any(Link::has_frame);
        let full = self.home.as_ref().is_some_and(Link::wants_write);
        let timeout = if buffered || (busy && !full) { Duration::from_millis(1) } else { BEAT / 2 };
        let ready = self.door.wait(&fds, if buffered { Duration::ZERO } else { timeout })?;
        // Most turns are for one of the two that every call needs: the other is not asked in vain.
        self.home_ready = buffered || self.home.is_none() || ready.first().copied().unwrap_or(true);
        self.trap_ready = aside || ready.iter().rev().take(listeners.len()).any(|r| *r);
        Ok(())
    }

    fn listeners(&self) -> Vec<Rc<Listener>> {
        let mut all: Vec<Rc<Listener>> = Vec::new();
        for listener in self.members.values().filter_map(|m| m.listener.as_ref()) {
            if !all.iter().any(|l| Rc::ptr_eq(l, listener)) {
                all.push(Rc::clone(listener));
            }
        }
        all
    }

    // ---- the node

    fn answer_node(&mut self) {
        while let Some(caller) = self.door.next() {
            match caller.request() {
                ShimRequest::Processes => caller.answer(&ShimReply::Processes(self.rows())),
                ShimRequest::Owns { .. } => caller.answer(&tern_control::door::not_here()),
                ShimRequest::Connection => {
                    if let Some(socket) = caller.connection() {
                        self.aside.came(socket);
                    }
                }
                _ => caller.answer(&tern_control::door::not_here()),
            }
        }
    }

    fn rows(&self) -> Vec<ProcessRow> {
        let row = |m: &Member| ProcessRow {
            pid: m.pid,
            uid: self.identity.0,
            r#where: None,
            from: Some(self.home_node),
            state: match m.state {
                State::Arriving(_) | State::Departing(_) | State::Frozen(_) => "migrating",
                State::Held(_) => "suspended",
                _ => "running",
            }
            .into(),
            cpu_seconds: procfs::stat(m.host).map_or(0.0, |s| s.cpu_seconds()),
            migrations: u32::try_from(m.epoch.0).unwrap_or(u32::MAX),
            reason: m.open.as_ref().and_then(|o| o.homeward.clone()).unwrap_or_default(),
            command: m.command(),
        };
        self.members.values().map(row).collect()
    }

    fn take_events(&mut self) {
        for event in self.aside.events() {
            match event {
                Event::Came(caller, link) => self.connected(caller, *link),
                Event::Reached(pid, migration, link) => self.reached(pid, migration, link),
                Event::Over(lives) => self.over(&lives),
            }
        }
    }

    fn connected(&mut self, caller: u64, link: Link) {
        if link.peer_fingerprint() != self.accept.first().copied() {
            self.sources.push((link, Inbox::default()));
            return;
        }
        if caller < self.home_came {
            return;
        }
        // What was on its way over the link before is off, as if we had seen that break first.
        self.lose_home();
        self.home_came = caller;
        tracing::debug!("home is connected");
        self.home = Some(link);
        // It waits for this, to know that we are ready.
        self.tell(HomePid(0), &Message::Beat);
        self.inbox = Inbox::default();
        self.heard = Instant::now();
        let pids: Vec<HomePid> = self.members.keys().copied().collect();
        for pid in pids {
            self.present(pid);
        }
    }

    /// Tells home, on a new link, where a guest stands, and asks again for what is open.
    fn present(&mut self, pid: HomePid) {
        let (Some(member), Some(home)) = (self.members.get_mut(&pid), self.home.as_mut()) else { return };
        if matches!(member.state, State::Arriving(_)) {
            // Home has given this migration up when the link broke.
            self.end(pid);
            return;
        }
        if let State::Dying { told, .. } = &mut member.state {
            // It may have been said into a link that was cut.
            *told = false;
        }
        let told = send(home, pid, &Message::Present(member.epoch, member.talk.signals), &[]);
        let asked = member.ask_again(Some(home));
        if told.is_err() || asked.is_err() {
            self.lose_home();
        }
    }

    // ---- guests

    fn take_stops(&mut self) {
        if !self.door.has_changes() {
            return;
        }
        let _drained = self.door.clear_children();
        while let Ok(Some((host, change))) = stop::wait(-1, false) {
            let Some(pid) = self.by_host.get(&host).copied() else {
                self.stray(host, change);
                continue;
            };
            let Some(member) = self.members.get_mut(&pid) else { continue };
            match change {
                Change::Stopped(stopped) => {
                    if let Err(error) = take_stop(member, stopped) {
                        self.failed(pid, &error.into());
                    }
                }
                Change::Exited(_) | Change::Killed(..) => {
                    // Not by us: then it would be no member any more.
                    tracing::warn!(%pid, ?change, "a guest ended here");
                    self.tell(pid, &Message::Died(libc::SIGKILL));
                    self.remove(pid);
                }
            }
        }
    }

    /// A stop of the helper, or of a process that is no guest (any more).
    fn stray(&mut self, host: i32, change: Change) {
        match change {
            Change::Stopped(stopped) => {
                let _gone = stopped.resume(0);
            }
            _ if self.sandbox.as_ref().is_some_and(|s| s.helper() == host) => {
                tracing::error!("the guests' helper was killed, and all guests with it");
                for pid in self.members.keys().copied().collect::<Vec<_>>() {
                    self.tell(pid, &Message::Died(libc::SIGKILL));
                    self.remove(pid);
                }
            }
            _ => {}
        }
    }

    fn take_traps(&mut self) {
        if !self.trap_ready {
            return;
        }
        for listener in self.listeners() {
            // A few at a time, so that home is heard in between.
            for _ in 0..64 {
                let trap = match listener.receive() {
                    Ok(Some(trap)) => trap,
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "a trap was lost");
                        break;
                    }
                };
                let pid = self.by_host.get(&trap.pid).copied();
                let Some((pid, member)) = pid.and_then(|p| self.members.get_mut(&p).map(|m| (p, m))) else {
                    let _refused = listener.fail(trap.id, libc::EPERM);
                    continue;
                };
                if let Err(error) = member.trapped(trap, self.home.as_mut()) {
                    self.failed(pid, &error);
                }
                // Who waits for an answer cannot trap again: with nobody else, there is nothing to look for.
                if self.members.values().all(|m| m.open.is_some()) && !listener.has_aside() {
                    break;
                }
            }
        }
    }

    fn failed(&mut self, pid: HomePid, error: &Failed) {
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

    fn tell(&mut self, pid: HomePid, message: &Message) {
        let Some(home) = &mut self.home else { return };
        if send(home, pid, message, &[]).is_err() {
            self.lose_home();
        }
    }

    fn lose_home(&mut self) {
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

    /// Home's daemon says that home does not wait for these lives any more: they were taken back, or have ended
    /// there, while we were out of its reach.
    fn over(&mut self, lives: &[(HomePid, Epoch)]) {
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

    /// Ends a guest: kills it and waits until its pid is free.
    fn end(&mut self, pid: HomePid) {
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

    fn remove(&mut self, pid: HomePid) {
        if let Some(member) = self.members.remove(&pid) {
            self.by_host.remove(&member.host);
        }
        self.setting_off.remove(&pid);
    }

    fn report_the_dying(&mut self) {
        let mut dying = Vec::new();
        for member in self.members.values_mut() {
            if let State::Dying { signal, told, .. } = &mut member.state
                && !std::mem::replace(told, true)
            {
                dying.push((member.pid, *signal));
            }
        }
        for (pid, signal) in dying {
            self.tell(pid, &Message::Died(signal));
        }
    }

    // ---- home

    fn keep_alive(&mut self) {
        if self.home.is_some() && self.spoke.elapsed() > BEAT {
            self.spoke = Instant::now();
            let live = self.members.values_mut().filter(|m| m.is_live());
            let used: Vec<(HomePid, CpuTime)> = live.map(|m| (m.pid, m.meter.used())).collect();
            self.tell(HomePid(0), &Message::Beat);
            for (pid, used) in used {
                self.tell(pid, &Message::Used(used));
            }
        }
        let suspend = Duration::from_secs(u64::from(self.start.suspend_after));
        if self.heard.elapsed() > suspend && self.populated {
            if self.home.is_some() {
                tracing::warn!("home has not been heard for {suspend:?}");
                self.lose_home();
            }
            for member in
                self.members.values_mut().filter(|m| matches!(m.state, State::Running) && m.can_halt())
            {
                match member.halt() {
                    Ok(stopped) => member.state = State::Held(stopped),
                    Err(error) => tracing::warn!(%error, "a guest could not be suspended"),
                }
            }
        }
        self.ask_for_home();
    }

    /// Without home: has its node asked whether it still waits for us, so that guests which home has taken back or
    /// given up while the link was cut end as soon as that can be known.
    fn ask_for_home(&mut self) {
        let Some(shim) = self.home_shim.filter(|_| self.home.is_none() && self.asked.elapsed() > ASK) else {
            return;
        };
        self.asked = Instant::now();
        let lives: Vec<(HomePid, Epoch)> = self.members.values().map(|m| (m.pid, m.epoch)).collect();
        if !lives.is_empty() {
            self.aside.ask(self.start.run_dir.clone(), self.home_node, shim, lives);
        }
    }

    fn take_messages(&mut self) {
        // A few at a time: a link that is never idle must not keep us from our other duties.
        for _ in 0..64 {
            if !self.home_ready {
                break;
            }
            let Some(home) = &mut self.home else { break };
            let taken = match home.receive() {
                Ok(Some(frame)) => self.inbox.take(frame).map_err(|e| e.to_string()),
                Ok(None) => break,
                Err(error) => Err(error.to_string()),
            };
            self.heard = Instant::now();
            match taken {
                Ok(Some(arrived)) => self.take_message(arrived),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(error, "the link to home is cut");
                    self.lose_home();
                }
            }
        }
        self.take_from_sources();
        self.take_from_next();
    }

    fn take_from_sources(&mut self) {
        let mut sources = std::mem::take(&mut self.sources);
        sources.retain_mut(|(link, inbox)| {
            for _ in 0..64 {
                match link.receive() {
                    Ok(Some(frame)) => match inbox.take(frame) {
                        Ok(Some(arrived)) => {
                            let pid = arrived.pid;
                            if let Err(error) = self.receive_part(arrived, Some(link)) {
                                tracing::warn!(%pid, %error, "an arrival failed");
                                self.decline(pid, &error.to_string());
                            }
                        }
                        Ok(None) => {}
                        Err(_) => return false,
                    },
                    Ok(None) => return true,
                    Err(_) => return false,
                }
            }
            true
        });
        self.sources.append(&mut sources);
    }

    fn take_message(&mut self, arrived: Arrived) {
        let pid = arrived.pid;
        let failed = match &arrived.message {
            Message::Offer(offer) => self.offered(offer),
            Message::Space(_)
            | Message::File { .. }
            | Message::Pages(_)
            | Message::Forget(_)
            | Message::Image(..) => {
                let done = self.receive_part(arrived, None);
                if let Err(error) = done {
                    tracing::warn!(%pid, %error, "an arrival failed");
                    self.decline(pid, &error.to_string());
                }
                Ok(())
            }
            Message::Go(epoch) => self.go(pid, *epoch),
            Message::Depart(departure) => self.depart(pid, departure),
            Message::Clocks(home) => {
                self.clocks.heard(*home);
                self.tell(HomePid(0), &Message::Beat);
                Ok(())
            }
            Message::Drop => {
                self.end(pid);
                Ok(())
            }
            Message::Thaw => self.thaw(pid),
            Message::Want(_, indices) => self.wanted(pid, indices),
            Message::Result(_) => self.result(arrived),
            Message::Content { hash, offset } => {
                let (hash, offset) = (*hash, *offset);
                match self.members.get_mut(&pid) {
                    Some(member) => member.take_content(hash, offset, arrived.bytes(), &mut self.cache),
                    None => Ok(()),
                }
            }
            Message::Signal(count, info) => {
                match (self.members.get_mut(&pid), Siginfo::try_from(info.as_slice())) {
                    (Some(member), Ok(info)) => member.raise(*count, info).map_err(Failed::from),
                    _ => Ok(()),
                }
            }
            Message::Stop(stop) => self.job_control(pid, *stop),
            _ => Ok(()),
        };
        if let Err(error) = failed {
            self.failed(pid, &error);
        }
    }

    // ---- arrivals

    fn offered(&mut self, offer: &Offer) -> Result<(), Failed> {
        let pid = offer.pid;
        self.home_shim = Some(offer.shim);
        // A process that has executed another program comes again under its old pid.
        self.end(pid);
        let span = tracing::info_span!("migration", id = %offer.migration, %pid);
        let _in = span.enter();
        fault::point("guest", Phase::Offer);
        let begun = arrive::judge(offer, &self.machine, wall::now())
            .and_then(|()| self.begin(offer).map_err(|e| e.to_string()));
        match begun {
            Ok(member) => {
                tracing::info!(command = offer.command, "an offer was accepted");
                self.by_host.insert(member.host, pid);
                self.members.insert(pid, member);
                self.populated = true;
                self.tell(pid, &Message::Accepted(offer.epoch));
            }
            Err(why) => {
                tracing::info!(why, "an offer was declined");
                self.populated |= self.members.is_empty();
                self.tell(pid, &Message::Declined(offer.epoch, why));
            }
        }
        Ok(())
    }

    fn begin(&mut self, offer: &Offer) -> anyhow::Result<Member> {
        if self.sandbox.is_none() {
            let Some(shifts) = self.clocks.shifts() else {
                anyhow::bail!("home has not said what its clocks show")
            };
            let sandbox = Sandbox::make(self.identity.0, self.identity.1, shifts)?;
            // Nobody has been forked in it yet.
            if let Err(error) = tern_cgroup::guests::enter(sandbox.helper()) {
                tracing::warn!(%error, "these guests are not in a control group of their own; see tern doctor");
            }
            self.sandbox = Some(sandbox);
        }
        let Some(sandbox) = &self.sandbox else { anyhow::bail!("no sandbox") };
        Ok(Arriving::begin(offer.clone(), sandbox.fork(offer.own_pid)?)?)
    }

    fn decline(&mut self, pid: HomePid, why: &str) {
        let offered = match self.members.get(&pid) {
            Some(member) if matches!(member.state, State::Arriving(_)) => member.epoch,
            _ => return,
        };
        self.end(pid);
        self.tell(pid, &Message::Declined(offered, why.into()));
    }

    /// Takes a part of an arriving process; answers go to `source` if it comes from another node.
    fn receive_part(&mut self, arrived: Arrived, source: Option<&mut Link>) -> Result<(), Failed> {
        let pid = arrived.pid;
        if matches!(self.members.get(&pid).map(|m| &m.state), Some(State::Running))
            || !self.members.contains_key(&pid)
        {
            return Ok(());
        }
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        let State::Arriving(arriving) = &mut member.state else { return Ok(()) };
        let bytes_at = arrived.bytes();
        match &arrived.message {
            Message::Space(layout) => {
                fault::point("guest", Phase::Prepare);
                let had = arriving.listener().is_some();
                let missing = arriving.take_space((**layout).clone(), &member.memory, &mut self.cache)?;
                keep(self.sandbox.as_ref(), arriving, had)?;
                match source.or(self.home.as_mut()) {
                    Some(link) => send(link, pid, &Message::Want(member.epoch, missing), &[])?,
                    None => return Ok(()),
                }
            }
            Message::File { file, offset } => {
                let had = arriving.listener().is_some();
                arriving.take_file(*file, *offset, bytes_at, &member.memory, &mut self.cache)?;
                keep(self.sandbox.as_ref(), arriving, had)?;
            }
            Message::Pages(runs) => arriving.take_pages(runs, bytes_at, &member.memory)?,
            Message::Forget(runs) => arriving.forget(runs, &self.cache)?,
            Message::Image(image, talk) => {
                fault::point("guest", Phase::Freeze);
                arriving.take_image(image.clone(), talk.clone(), &member.memory, &self.cache)?;
                let ready = Message::Ready(member.epoch, talk.frozen_us, talk.sent);
                self.tell(pid, &ready);
            }
            _ => {}
        }
        Ok(())
    }

    fn go(&mut self, pid: HomePid, epoch: tern_ids::Epoch) -> Result<(), Failed> {
        fault::point("guest", Phase::HandOver);
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        let arriving = match std::mem::replace(&mut member.state, State::Running) {
            State::Arriving(arriving) => arriving,
            // Sent on, to a node that was lost when home had decided for it already: this life goes on, as a
            // further one.
            State::Frozen(stopped) => {
                member.epoch = epoch;
                stopped.resume(0)?;
                tracing::info!(%pid, ?epoch, "a guest goes on here");
                self.tell(pid, &Message::Running(epoch));
                return Ok(());
            }
            other => {
                member.state = other;
                return Ok(());
            }
        };
        let arrived = arriving.finish()?;
        member.epoch = epoch;
        member.home_mask = arrived.image.thread.sigmask;
        member.image = Some(arrived.image);
        member.talk = arrived.talk;
        member.listener = Some(arrived.listener);
        member.shown = arrived.shown;
        member.since = Instant::now();
        member.meter = Meter::begin(member.host, member.talk.used)?;
        member.raise_carried()?;
        // Next to nothing, on nodes whose clocks are kept by NTP: the others can wait for so long.
        std::thread::sleep(wall::wait(member.talk.wall, wall::now()).unwrap_or_default());
        arrived.stopped.resume(0)?;
        tracing::info!(%pid, ?epoch, "a guest runs");
        let mask = member.home_mask;
        self.tell(pid, &Message::Running(epoch));
        // What the last life told home of its mask may have come too late to be heard.
        self.tell(pid, &Message::Mask(mask));
        fault::point("guest", Phase::Resume);
        Ok(())
    }

    // ---- results and job control

    fn result(&mut self, arrived: Arrived) -> Result<(), Failed> {
        let pid = arrived.pid;
        let Message::Result(result) = arrived.message else { return Ok(()) };
        if result.child.is_some() {
            // It cannot go while it makes a child; home asks again in a moment.
            self.stay(pid, Some("busy: it is making a child".into()));
        }
        let Some(member) = self.members.get_mut(&pid).filter(|m| m.is_live()) else { return Ok(()) };
        let Some((open, result)) = member.answered(*result)? else { return Ok(()) };
        if let Some(child) = result.child {
            let Some(sandbox) = &self.sandbox else { return Ok(()) };
            match member.fork(&open, child, result.outcome.ret as i32, sandbox) {
                Ok(child) => {
                    self.by_host.insert(child.host, child.pid);
                    self.members.insert(child.pid, child);
                }
                Err(error) => {
                    tracing::error!(%error, "a fork failed here");
                    self.tell(child, &Message::Died(libc::SIGKILL));
                }
            }
            return Ok(());
        }
        member.local_part(open, result, &mut self.cache, self.home.as_mut())
    }

    fn job_control(&mut self, pid: HomePid, stop: bool) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        if stop {
            if matches!(member.state, State::Running) && member.can_halt() {
                let stopped = member.halt()?;
                member.state = State::Held(stopped);
            }
            return Ok(());
        }
        self.thaw(pid)
    }

    fn thaw(&mut self, pid: HomePid) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        match std::mem::replace(&mut member.state, State::Running) {
            State::Frozen(stopped) | State::Held(stopped) => stopped.resume(0)?,
            State::Departing(departing) => {
                member.state = State::Departing(departing);
                self.stay(pid, None);
            }
            other => member.state = other,
        }
        Ok(())
    }

    // ---- departures

    fn depart(&mut self, pid: HomePid, departure: &Departure) -> Result<(), Failed> {
        match departure {
            Departure::Home(_) => self.set_off(pid, departure.clone(), None),
            Departure::Onward { migration, address, shim, fingerprint } => {
                self.setting_off.insert(pid, departure.clone());
                self.aside.reach(pid, *migration, address.clone(), *shim, *fingerprint);
                Ok(())
            }
        }
    }

    /// The next node of a guest has been reached, or not. The migration may be off by now, or begun anew.
    fn reached(&mut self, pid: HomePid, migration: MigrationId, link: Result<Box<Link>, String>) {
        let this = |d: &Departure| matches!(d, Departure::Onward { migration: m, .. } if *m == migration);
        if !self.setting_off.get(&pid).is_some_and(this) {
            return;
        }
        let Some(departure) = self.setting_off.remove(&pid) else { return };
        let done = match link {
            Ok(link) => self.set_off(pid, departure, Some(*link)),
            Err(why) => {
                self.tell(pid, &Message::Stayed(why));
                Ok(())
            }
        };
        if let Err(error) = done {
            self.failed(pid, &error);
        }
    }

    fn set_off(&mut self, pid: HomePid, departure: Departure, link: Option<Link>) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else {
            self.tell(pid, &Message::Stayed("it is not here".into()));
            return Ok(());
        };
        let (mut dying, mut still) = (None, None);
        match std::mem::replace(&mut member.state, State::Running) {
            State::Held(stopped) => stopped.resume(0)?,
            // It is to die at home: it goes as it stands, and makes its last instruction again there.
            State::Dying { signal, stopped, .. } => (dying, still) = (Some(signal), Some(stopped)),
            other => member.state = other,
        }
        let begun = match member.can_depart() {
            true => self.begin_departure(pid, departure, link, dying, &mut still).map_err(|e| e.to_string()),
            false => Err("busy: it is making a child".into()),
        };
        if let Err(why) = begun {
            self.tell(pid, &Message::Stayed(why));
            if let (Some(member), Some(signal), Some(stopped)) = (self.members.get_mut(&pid), dying, still) {
                // Home is told once more, and ends it as it is.
                member.state = State::Dying { signal, told: false, stopped };
            }
        }
        Ok(())
    }

    fn begin_departure(
        &mut self,
        pid: HomePid,
        departure: Departure,
        mut link: Option<Link>,
        dying: Option<i32>,
        still: &mut Option<Stopped>,
    ) -> anyhow::Result<()> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        let source = member.prepare_departure(&self.cache, still.is_some())?;
        let out = link.as_mut().or(self.home.as_mut()).ok_or(tern_wire::LinkError::Closed)?;
        let mut going = Going { member, cache: &self.cache, stopped: still.take() };
        let sending = Sending::begin(source, &mut going, out);
        *still = going.stopped.take();
        let (sending, stopped) = (sending?, still.take());
        member.state = State::Departing(Box::new(Departing {
            departure,
            link,
            sending,
            stopped,
            dying,
            stirred: (Instant::now(), (0, 0, false)),
        }));
        Ok(())
    }

    fn with_departing(
        &mut self,
        pid: HomePid,
        go: impl FnOnce(&mut Sending, &mut Going<'_>, &mut Link) -> Result<bool, SendError>,
    ) {
        let patience = self.patience();
        let Some(member) = self.members.get_mut(&pid) else { return };
        if !matches!(member.state, State::Departing(_)) {
            return;
        }
        let State::Departing(mut departing) = std::mem::replace(&mut member.state, State::Running) else {
            return;
        };
        let mut going = Going { member, cache: &self.cache, stopped: departing.stopped.take() };
        let done = match departing.link.as_mut().or(self.home.as_mut()) {
            Some(link) => go(&mut departing.sending, &mut going, link),
            None => Err(tern_wire::LinkError::Closed.into()),
        };
        departing.stopped = going.stopped.take();
        match (done, departing.stopped.take()) {
            (Ok(true), Some(stopped)) => {
                member.state = State::Frozen(stopped);
                let leaving = |link| Leaving { pid, link, stirred: Instant::now(), unsent: 0 };
                self.leaving.extend(departing.link.take().map(leaving));
            }
            (Ok(_), stopped) => {
                departing.stopped = stopped;
                let silent = departing.silent() > patience;
                member.state = State::Departing(departing);
                if silent {
                    self.stay(pid, Some("the next node takes nothing".into()));
                }
            }
            (Err(error), stopped) => {
                departing.stopped = stopped;
                member.state = State::Departing(departing);
                self.stay(pid, Some(error.to_string()));
            }
        }
    }

    fn wanted(&mut self, pid: HomePid, indices: &[u32]) -> Result<(), Failed> {
        self.with_departing(pid, |sending, going, _link| sending.wanted(indices, going).map(|()| false));
        Ok(())
    }

    fn take_from_next(&mut self) {
        let pids: Vec<HomePid> = self.members.keys().copied().collect();
        for pid in pids {
            while let Some(State::Departing(departing)) = self.members.get_mut(&pid).map(|m| &mut m.state) {
                let Some(link) = &mut departing.link else { break };
                match link.receive() {
                    Ok(Some(frame)) => match Inbox::default().take(frame) {
                        Ok(Some(Arrived { message: Message::Want(_, indices), .. })) => {
                            drop(self.wanted(pid, &indices));
                        }
                        _ => self.stay(pid, Some("the next node broke the protocol".into())),
                    },
                    Ok(None) => break,
                    Err(error) => self.stay(pid, Some(error.to_string())),
                }
            }
        }
    }

    fn go_on_departing(&mut self) {
        let departing = |m: &&Member| matches!(m.state, State::Departing(_));
        let pids: Vec<HomePid> = self.members.values().filter(departing).map(|m| m.pid).collect();
        for pid in pids {
            self.with_departing(pid, |sending, going, link| sending.advance(going, link));
        }
    }

    /// Sends what is left for the next nodes of guests that have been sent off. A link is kept, also with nothing left
    /// to send, until home has decided: then the next node has everything, or needs nothing.
    fn see_off(&mut self) {
        let mut failed = Vec::new();
        let (members, patience) = (&self.members, self.patience());
        self.leaving.retain_mut(|leaving| {
            if !members.get(&leaving.pid).is_some_and(|m| matches!(m.state, State::Frozen(_))) {
                return false;
            }
            let why = match leaving.go_on() {
                Ok(()) if leaving.stirred.elapsed() <= patience => return true,
                Ok(()) => "the next node takes nothing".into(),
                Err(error) => error.to_string(),
            };
            failed.push((leaving.pid, why));
            false
        });
        for (pid, why) in failed {
            // It may have arrived there all the same: whether it did, only home knows. It stands still until home
            // says `Thaw`, or that it is over.
            self.tell(pid, &Message::Stayed(why));
        }
    }

    /// A departure is off: the guest runs on.
    fn stay(&mut self, pid: HomePid, why: Option<String>) {
        if self.setting_off.remove(&pid).is_some()
            && let Some(why) = &why
        {
            self.tell(pid, &Message::Stayed(why.clone()));
        }
        let Some(member) = self.members.get_mut(&pid) else { return };
        if !matches!(member.state, State::Departing(_)) {
            return;
        }
        let State::Departing(departing) = std::mem::replace(&mut member.state, State::Running) else {
            return;
        };
        match (departing.stopped, departing.dying) {
            (Some(stopped), Some(signal)) => {
                member.state = State::Dying { signal, told: false, stopped };
            }
            (Some(stopped), None) => {
                let _gone = stopped.resume(0);
            }
            (None, _) => {}
        }
        if let Some(why) = why {
            self.tell(pid, &Message::Stayed(why));
        }
    }
}

/// The link over which a guest was sent on, with what has not left yet.
#[derive(Debug)]
struct Leaving {
    pid: HomePid,
    link: Link,
    /// When something of it left last.
    stirred: Instant,
    unsent: usize,
}

impl Leaving {
    /// Sends what can be sent. It is read as well: closed with something unread, the link would be reset, and what the
    /// next node has not read yet would be lost.
    fn go_on(&mut self) -> Result<(), tern_wire::LinkError> {
        for _ in 0..64 {
            if self.link.receive()?.is_none() {
                break;
            }
        }
        self.link.flush()?;
        if std::mem::replace(&mut self.unsent, self.link.unsent()) != self.link.unsent() {
            self.stirred = Instant::now();
        }
        Ok(())
    }
}

/// Has the helper hold a guest's listener too, once there is one.
fn keep(sandbox: Option<&Sandbox>, arriving: &Arriving, had: bool) -> Result<(), Failed> {
    match (sandbox, arriving.listener()) {
        (Some(sandbox), Some(listener)) if !had => Ok(sandbox.keep(listener.as_fd())?),
        _ => Ok(()),
    }
}

fn take_stop(member: &mut Member, stopped: stop::Stopped) -> tern_tracee::Result<()> {
    if let State::Forking(forking) = &member.state
        && stopped.stop == Stop::Call
    {
        stopped.set_registers(&forking.after)?;
        stopped.set_sigmask(forking.mask)?;
        member.state = State::Running;
        return stopped.resume(0);
    }
    match stopped.stop {
        Stop::Signal(signal) => member.deliver(stopped, signal),
        _ if matches!(member.state, State::Forking(_)) => stopped.to_call(),
        _ => stopped.resume(0),
    }
}
