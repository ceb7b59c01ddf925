//! The one loop of a home shim: it waits for guests, deputies, and its node.

use crate::family::{Event, Family, Found, Homed, PATIENCE};
use crate::mailbox::Bell;
use crate::member::{Member, State, Task};
use crate::peer::Peer;
use crate::ternd;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tern_control::door::{self, Caller, Door};
use tern_control::shim::{ShimReply, ShimRequest, ShimStart};
use tern_control::{Destination, ProcessRow, Refusal, RefusalKind, Reply, Request};
use tern_ids::{Epoch, HomePid, MigrationId, NodeId};
use tern_image::content::{HomeFiles, read_piece};
use tern_image::process::Unmovable;
use tern_migrate::message::{Arrived, Message, send};
use tern_tracee::stop::{self, Change, Stop, Stopped};
use tern_tracee::{Memory, procfs};
use tern_wire::{Ephemeral, Link, Preamble};

/// How often links are shown to be alive.
const BEAT: Duration = Duration::from_secs(1);
/// How long a guest shim may take to prove who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How often a guest shim is told what our clocks show; it keeps the word that came fastest.
const CLOCK_WORDS: usize = 6;
/// A family without members ends after this time, in which its node may still ask it for something.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Runs the shim until its family has no more to do with other nodes.
///
/// # Errors
/// If it cannot begin.
pub fn run(start: ShimStart, key: Ephemeral, door: Door) -> anyhow::Result<()> {
    let mut family = Family {
        start,
        key: Arc::new(key),
        door,
        bell: Bell::new()?,
        rung: true,
        peers: Vec::new(),
        members: HashMap::new(),
        events: channel(),
        newborn: HashMap::new(),
        parked: Vec::new(),
        homed: Vec::new(),
        empty_since: Instant::now(),
    };
    // The first request comes right after our start.
    family.empty_since += Duration::from_secs(10);
    while !family.is_over() {
        family.turn()?;
    }
    for peer in &mut family.peers {
        if let Some(link) = &mut peer.link {
            let _best_effort = link.drain(Instant::now() + Duration::from_secs(2));
        }
    }
    tracing::info!("the family is home");
    Ok(())
}

impl Family {
    fn is_over(&mut self) -> bool {
        self.homed.retain(Homed::lives);
        if !self.members.is_empty() || !self.parked.is_empty() || !self.homed.is_empty() {
            self.empty_since = Instant::now();
        }
        Instant::now() > self.empty_since + LAST_WORDS
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        self.wait()?;
        self.answer_node();
        self.take_events();
        self.take_stops();
        self.take_messages();
        self.collect_ended();
        self.go_on_sending();
        self.ask_the_busy();
        self.unpark();
        self.keep_alive();
        Ok(())
    }

    fn wait(&mut self) -> anyhow::Result<()> {
        let mut fds: Vec<(BorrowedFd<'_>, i16)> = vec![(self.bell.fd(), libc::POLLIN)];
        let mut timeout = BEAT / 2;
        if !self.parked.is_empty() || self.members.values().any(|m| m.ask_again.is_some()) {
            timeout = Duration::from_millis(5);
        }
        for link in self.peers.iter().filter_map(|p| p.link.as_ref()) {
            fds.push((
                link.as_fd(),
                if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
            ));
            if link.has_frame() {
                timeout = Duration::ZERO;
            }
        }
        self.rung = self.door.wait(&fds, timeout)?.first().copied().unwrap_or(true);
        Ok(())
    }

    // ---- the node

    fn answer_node(&mut self) {
        while let Some(caller) = self.door.next() {
            match caller.request().clone() {
                ShimRequest::Processes => caller.answer(&ShimReply::Processes(self.rows())),
                ShimRequest::Owns { pid } => {
                    let ours = self.members.contains_key(&pid) || self.homed.iter().any(|h| h.row.pid == pid);
                    caller.answer(&if ours { ShimReply::Done } else { door::not_here() });
                }
                ShimRequest::Awaits { pid, epoch } => {
                    let awaits = self.members.get(&pid).is_some_and(|m| m.awaits(epoch));
                    caller.answer(&if awaits { ShimReply::Done } else { door::not_here() });
                }
                ShimRequest::Migrate { pid, to } => self.migrate(pid, to, caller, Instant::now()),
                ShimRequest::AtExec { pid, candidates, .. } => self.at_exec(pid, &candidates, caller),
                ShimRequest::Connection => caller.answer(&door::not_here()),
            }
        }
    }

    fn rows(&self) -> Vec<ProcessRow> {
        let homed =
            self.homed.iter().filter(|h| !self.members.contains_key(&h.row.pid)).map(|h| h.row.clone());
        self.members.values().map(|m| self.row(m)).chain(homed).collect()
    }

    /// What `mps` shows of a process.
    pub(crate) fn row(&self, m: &Member) -> ProcessRow {
        let suspended = m.is_away() && self.peers[m.peer].link.is_none();
        let at_home = procfs::stat(m.pid.0).map_or(0.0, |s| s.cpu_seconds());
        ProcessRow {
            pid: m.pid,
            uid: m.uid,
            r#where: Some(self.node_of(m)),
            from: None,
            state: if suspended { "suspended" } else { m.state_name() }.into(),
            cpu_seconds: at_home + m.used.seconds(),
            migrations: m.migrations,
            reason: m.reason.clone(),
            command: m.command.clone(),
        }
    }

    /// Takes a process into our hands that runs at home.
    fn seize(&mut self, pid: HomePid) -> tern_tracee::Result<()> {
        if self.members.contains_key(&pid) {
            return Ok(());
        }
        let status = procfs::status(pid.0)?;
        let memory = Memory::open(pid.0)?;
        stop::seize(pid.0, stop::FOLLOW_EXEC)?;
        let before = self.homed.iter().find(|h| h.row.pid == pid && h.lives());
        let member = Member {
            pid,
            own_pid: status.own_pid,
            command: procfs::command_line(pid.0),
            uid: status.uid[1],
            state: State::Resident,
            epoch: Epoch(0),
            offered: Epoch(0),
            revived: false,
            peer: 0,
            reserve: None,
            memory,
            files: HomeFiles::new(pid.0, &self.start.cache_dir),
            machine: None,
            mailbox: None,
            current: None,
            last: None,
            signals: 0,
            unheard: VecDeque::new(),
            actions: vec![[0; 4]; 64],
            task: None,
            migrations: 0,
            reason: String::new(),
            homecomings: before.map(|h| h.homecomings.clone()).unwrap_or_default(),
            used: before.map(|h| h.used).unwrap_or_default(),
            partial: None,
            holders: 0,
            ask_again: None,
            next_call: None,
            mask_due: None,
            job_stopped: false,
            faulted: false,
        };
        self.members.insert(pid, member);
        Ok(())
    }

    /// Begins a move that was asked for at `since`. What cannot begin at this very moment waits a while.
    fn migrate(&mut self, pid: HomePid, to: Destination, caller: Caller, since: Instant) {
        let home = self.start.node;
        let refuse =
            |caller: Caller, kind, why: &str| caller.answer(&ShimReply::Refused(Refusal::new(kind, why)));
        let to = if to == Destination::Node(home) { Destination::Home } else { to };
        let known = self.members.get(&pid);
        if known.is_some_and(is_busy) {
            self.parked.push((since, pid, to, caller));
            return;
        }
        let away = known.is_some_and(Member::is_away);
        let here = known.map_or(home, |m| self.node_of(m));
        match (to, away) {
            (Destination::Balance, _) => {
                refuse(caller, RefusalKind::BadRequest, "the balancer does not choose yet");
            }
            (Destination::Home, false) => {
                refuse(caller, RefusalKind::BadRequest, &format!("process {pid} is at home already"));
            }
            (Destination::Node(node), _) if node == here => {
                refuse(caller, RefusalKind::BadRequest, &format!("process {pid} is on node {node} already"));
            }
            (Destination::Home, true) => {
                let Some(member) = self.members.get_mut(&pid) else { return };
                if !matches!(member.state, State::Away) || self.peers[member.peer].link.is_none() {
                    return refuse(caller, RefusalKind::CannotMove, "suspended: its node is out of reach");
                }
                member.task = Some(Task::new(Some(caller), here));
                self.begin_home(pid);
            }
            (Destination::Node(node), _) => {
                match if away { Ok(()) } else { self.can_leave(pid) } {
                    Ok(()) => {}
                    // A vfork is over as soon as the child has executed its program.
                    Err((_, passing)) if passing && since.elapsed() < PATIENCE => {
                        self.parked.push((since, pid, to, caller));
                        return;
                    }
                    Err((why, _)) => return caller.answer(&ShimReply::Refused(why)),
                }
                let task = Task::new(Some(caller), here);
                self.prepare_one_of(pid, vec![node], task.migration);
                if let Some(member) = self.members.get_mut(&pid) {
                    member.task = Some(task);
                }
            }
        }
    }

    /// Takes up the moves that had to wait.
    fn unpark(&mut self) {
        for (since, pid, to, caller) in std::mem::take(&mut self.parked) {
            if !self.members.get(&pid).is_some_and(is_busy) {
                self.migrate(pid, to, caller, since);
            } else if since.elapsed() < PATIENCE {
                self.parked.push((since, pid, to, caller));
            } else {
                let why = "busy: it is on its way, or a call of it is still under way at home; try again";
                caller.answer(&ShimReply::Refused(Refusal::new(RefusalKind::CannotMove, why)));
            }
        }
    }

    /// Looks whether a process at home can leave, and takes hold of it; why not, and whether that may pass.
    fn can_leave(&mut self, pid: HomePid) -> Result<(), (Refusal, bool)> {
        let gone = |_e: tern_tracee::Error| {
            (Refusal::new(RefusalKind::NotFound, format!("there is no process {pid}")), false)
        };
        let tracer = if self.members.contains_key(&pid) { std::process::id() as i32 } else { 0 };
        let movable = tern_image::process::check(pid.0, tracer).map_err(gone)?;
        movable.map_err(|reason| {
            let passing = matches!(reason, Unmovable::SharedAddressSpace(_));
            (Refusal::new(RefusalKind::CannotMove, reason.to_string()), passing)
        })?;
        self.seize(pid).map_err(|error| {
            let refusal = Refusal::new(RefusalKind::CannotMove, error.to_string());
            (refusal.hint("it may be traced by another program, or not be yours; see tern doctor"), false)
        })
    }

    fn at_exec(&mut self, pid: HomePid, candidates: &[NodeId], caller: Caller) {
        if let Err(error) = self.seize(pid) {
            return caller
                .answer(&ShimReply::Refused(Refusal::new(RefusalKind::CannotMove, error.to_string())));
        }
        let from = self.start.node;
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.state = State::AtExec;
        let task = Task::new(Some(caller), from);
        let migration = task.migration;
        member.task = Some(task);
        self.prepare_one_of(pid, candidates.to_vec(), migration);
    }

    /// Has a guest shim started on the first of these nodes that will, and connects to it.
    fn prepare_one_of(&self, pid: HomePid, nodes: Vec<NodeId>, migration: MigrationId) {
        let (run_dir, key, events, bell) =
            (self.start.run_dir.clone(), Arc::clone(&self.key), self.events.0.clone(), self.bell.clone());
        let member = self.members.get(&pid);
        // On an onward journey the present holder sends.
        let source = member.filter(|m| m.is_away()).map(|m| self.peers[m.peer].fingerprint);
        let status = procfs::status(pid.0).unwrap_or_default();
        std::thread::spawn(move || {
            let mut accept = vec![key.fingerprint()];
            accept.extend(source);
            let mut result = Err(Refusal::new(RefusalKind::BadRequest, "no node to go to"));
            for node in nodes {
                let (accept, uid, gid) = (accept.clone(), status.uid[1], status.gid[1]);
                let request = Request::Prepare { node, migration, accept, uid, gid };
                result = ternd::ask(&run_dir, &request).and_then(|reply| connect(node, reply, &key));
                if result.is_ok() {
                    break;
                }
            }
            let _loop_is_gone = events.send(Event::Prepared(pid, migration, result.map(Box::new)));
            bell.ring();
        });
    }

    fn take_events(&mut self) {
        while let Ok(event) = self.events.1.try_recv() {
            match event {
                Event::Prepared(pid, migration, prepared) => self.prepared(pid, migration, prepared),
                Event::Sought(peer, found) => self.sought(peer, found),
            }
        }
    }

    fn prepared(&mut self, pid: HomePid, migration: MigrationId, prepared: Result<Box<Peer>, Refusal>) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        // A move that was given up meanwhile; its shim, not needed, goes by itself.
        if member.task.as_ref().is_none_or(|t| t.migration != migration) {
            return;
        }
        let at_exec = matches!(member.state, State::AtExec);
        let peer = match prepared {
            Ok(peer) => {
                self.peers.push(*peer);
                self.peers.len() - 1
            }
            Err(refusal) => {
                self.refuse_with(pid, refusal);
                if !self.members.get(&pid).is_some_and(Member::is_away)
                    && let Ok(Some(stopped)) = self.halt_at_home(pid)
                {
                    self.let_go(pid, stopped, 0);
                }
                return;
            }
        };
        if at_exec {
            // It waits for our word in mosrun; what follows is its exec.
            member.peer = peer;
            if let Some(caller) = member.task.as_mut().and_then(|t| t.caller.take()) {
                caller.answer(&ShimReply::Done);
            }
            return;
        }
        if member.is_away() {
            if matches!(member.state, State::Away) {
                self.begin_onward(pid, peer);
            } else {
                self.refuse(pid, "it moved meanwhile");
            }
            return;
        }
        match self.halt_at_home(pid) {
            Ok(Some(stopped)) => self.begin_out(pid, stopped, peer),
            Ok(None) => {}
            Err(error) => self.lost(pid, &error),
        }
    }

    // ---- processes

    fn take_stops(&mut self) {
        if self.door.has_changes() {
            self.take_all_stops();
        }
    }

    /// Brings a deputy to a stand, and sees to what comes first: a signal meets its fate, a fork's child is taken
    /// in, and after an exec there is no deputy any more, nor after its end (`None`).
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stand(&mut self, pid: HomePid) -> tern_tracee::Result<Option<Stopped>> {
        loop {
            stop::interrupt(pid.0)?;
            let stopped = stop::wait_stop(pid.0)?;
            match stopped.stop {
                Stop::Interrupt => {
                    self.continued(pid);
                    return Ok(Some(stopped));
                }
                // Stopped by job control: it stands as well as any.
                Stop::Group(_) => return Ok(Some(stopped)),
                _ => self.take_stop(pid, stopped)?,
            }
            let deputy = |m: &Member| m.is_away() || matches!(m.state, State::Lingering(_));
            if !self.members.get(&pid).is_some_and(deputy) {
                return Ok(None);
            }
        }
    }

    /// SIGCONT after a group stop shows itself as an interrupt that nobody asked for.
    fn continued(&mut self, pid: HomePid) {
        if self.members.get_mut(&pid).is_some_and(|m| std::mem::take(&mut m.job_stopped)) {
            self.tell(pid, &Message::Stop(false));
        }
    }

    fn take_all_stops(&mut self) {
        let _drained = self.door.clear_children();
        while let Ok(Some((host, change))) = stop::wait(-1, false) {
            let pid = HomePid(host);
            match change {
                Change::Stopped(stopped) if self.members.contains_key(&pid) => {
                    if let Err(error) = self.take_stop(pid, stopped) {
                        self.lost(pid, &error);
                    }
                }
                // A child whose parent's own stop, which says so, is still to come.
                Change::Stopped(stopped) => drop(self.newborn.insert(host, stopped)),
                Change::Exited(_) | Change::Killed(..) => {
                    self.newborn.remove(&host);
                    self.ended_at_home(pid);
                }
            }
        }
    }

    fn take_stop(&mut self, pid: HomePid, stopped: Stopped) -> tern_tracee::Result<()> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        match (stopped.stop, member.is_away()) {
            (Stop::Exec, _) => self.executed(pid, stopped),
            (Stop::Fork | Stop::Vfork | Stop::Clone, true) => self.forked(pid, stopped),
            (Stop::Group(_), away) => {
                if away {
                    member.job_stopped = true;
                    self.tell(pid, &Message::Stop(true));
                }
                stopped.listen()
            }
            (Stop::Signal(signal), true) => {
                let message = member.signalled(stopped, signal)?;
                message.into_iter().for_each(|m| self.tell(pid, &m));
                Ok(())
            }
            (Stop::Signal(signal), false) if matches!(member.state, State::Lingering(_)) => {
                if let Some((stopped, signal)) = member.signalled_lingering(stopped, signal)? {
                    self.let_go(pid, stopped, signal);
                }
                Ok(())
            }
            (Stop::Signal(signal), false) => stopped.resume(signal),
            (Stop::Interrupt, true) => {
                self.continued(pid);
                self.members.get_mut(&pid).map_or(Ok(()), |m| m.go_on(stopped))
            }
            _ => stopped.resume(0),
        }
    }

    // ---- guests

    fn take_messages(&mut self) {
        for at in 0..self.peers.len() {
            // A few at a time, so that one guest does not starve the others.
            for _ in 0..64 {
                let peer = &mut self.peers[at];
                let Some(link) = &mut peer.link else { break };
                let taken = match link.receive() {
                    Ok(Some(frame)) => peer.inbox.take(frame).map_err(|e| e.to_string()),
                    Ok(None) => break,
                    Err(error) => Err(error.to_string()),
                };
                peer.heard = Instant::now();
                match taken {
                    Ok(Some(arrived)) => self.take_message(at, arrived),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::warn!(error, "a guest's link failed");
                        self.lose(at);
                    }
                }
            }
        }
    }

    fn take_message(&mut self, from: usize, arrived: Arrived) {
        let pid = arrived.pid;
        let Some(member) = self.members.get_mut(&pid) else {
            // A guest whose process has ended here, and which has not heard of it.
            if matches!(arrived.message, Message::Present(..) | Message::Call(_)) {
                self.tell_peer(from, pid, &Message::Drop);
            }
            return;
        };
        // What another shim says of it than the one that holds it, or is to hold it, does not count.
        let next = match &member.state {
            State::Outbound(o) | State::Going(o) => o.peer,
            State::Onward(next) => *next,
            _ => member.peer,
        };
        let (holds, will) = (member.is_away() && from == member.peer, from == next);
        match arrived.message {
            Message::Accepted(epoch) if will && epoch == member.offered => self.accepted(pid),
            Message::Declined(epoch, why) if will && epoch == member.offered => self.declined(pid, &why),
            Message::Want(epoch, ref indices) if will && epoch == member.offered => self.wanted(pid, indices),
            Message::Ready(epoch, us, bytes) if will && epoch == member.offered => {
                if let (State::Onward(_), Some(task)) = (&member.state, &mut member.task) {
                    task.bytes = bytes;
                    task.frozen = Instant::now().checked_sub(Duration::from_micros(us));
                }
                self.hand_over(pid);
            }
            Message::Running(epoch) if (will || holds) && epoch == member.epoch => {
                member.revived = false;
                self.running(pid);
            }
            Message::Call(request) if holds => {
                if matches!(member.state, State::Going(_) | State::Crossing(_)) {
                    self.running(pid);
                }
                self.called(pid, *request);
            }
            Message::Space(_) | Message::Pages(_) | Message::Forget(_) | Message::Image(..) if holds => {
                self.inbound(pid, arrived);
            }
            Message::Stayed(why) if holds => {
                self.stayed(pid, &why);
                // If it had sent everything it stands still, and cannot know whether home had decided.
                if self.members.get(&pid).is_some_and(|m| matches!(m.state, State::Away) && !m.job_stopped) {
                    self.tell(pid, &Message::Thaw);
                }
            }
            Message::Died(signal) if holds => self.died(pid, signal),
            Message::FetchHome(why) if holds => self.fetch(pid, &why),
            Message::WantContent(hash) if holds => self.send_content(pid, from, hash),
            Message::Present(epoch, signals) => self.present(pid, from, epoch, signals),
            Message::Used(used) if holds => member.used = used,
            Message::Mask(mask) if holds => member.set_mask(mask),
            _ => {}
        }
    }

    fn declined(&mut self, pid: HomePid, why: &str) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        match std::mem::replace(&mut member.state, State::Away) {
            State::Onward(_) => {
                // The old life has not been told, or is told to go on.
                self.tell(pid, &Message::Thaw);
                self.refuse(pid, why);
            }
            State::Outbound(outbound) => {
                member.state = State::Outbound(outbound);
                self.stay_home(pid, None, why);
            }
            State::Going(outbound) => {
                member.state = State::Going(outbound);
                self.revoke(pid, why);
            }
            State::Crossing(old) => {
                member.state = State::Crossing(old);
                self.cross_back(pid);
            }
            other => member.state = other,
        }
    }

    /// The program was killed at the guest by a fault of its own: so is the deputy, by the same signal. If it is to
    /// leave a core it comes home first, and dies there. That is tried once: if it says so again it has not come.
    fn died(&mut self, pid: HomePid, signal: i32) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        if matches!(member.state, State::Away)
            && crate::coredump::raised_again(signal)
            && crate::coredump::wanted(pid.0)
            && !std::mem::replace(&mut member.faulted, true)
        {
            return self
                .fetch(pid, &format!("core: it dies by signal {signal}, and leaves a core at home only"));
        }
        crate::coredump::prevent(pid.0);
        tracing::info!(%pid, signal, "the program was killed where it ran");
        if let Err(error) = self.with_deputy(pid, |member, stopped| member.die(stopped, signal)) {
            self.lost(pid, &error);
        }
    }

    fn send_content(&mut self, pid: HomePid, to: usize, hash: tern_ids::ContentHash) {
        let Some(member) = self.members.get(&pid) else { return };
        let Some(reference) = member.files.by_hash(&hash).cloned() else { return };
        let Ok(file) = crate::out::open_mapped(member, &reference) else { return };
        let mut offset = 0;
        loop {
            let Ok(piece) = read_piece(&file, offset, 256 << 10, reference.size) else { return };
            if self.peers[to].tell(pid, &Message::Content { hash, offset }, &piece).is_err() {
                return self.lose(to);
            }
            offset += piece.len() as u64;
            if offset >= reference.size {
                return;
            }
        }
    }

    fn inbound(&mut self, pid: HomePid, arrived: Arrived) {
        let bytes = arrived.bytes();
        match self.members.get_mut(&pid).map(|m| &mut m.state) {
            Some(State::Inbound(inbound)) => inbound.bytes += bytes.len() as u64,
            _ => return,
        }
        let done = match &arrived.message {
            Message::Space(layout) => self.with_deputy(pid, |member, stopped| {
                if let State::Inbound(inbound) = &mut member.state {
                    inbound.layout = (**layout).clone();
                }
                member.take_space(stopped, layout)
            }),
            Message::Forget(runs) => self.with_deputy(pid, |member, stopped| member.forget(stopped, runs)),
            Message::Pages(runs) => self.members.get(&pid).map_or(Ok(()), |m| m.take_pages(runs, bytes)),
            Message::Image(image, talk) => return self.arrived_home(pid, image, talk),
            _ => Ok(()),
        };
        match done {
            Ok(()) if matches!(arrived.message, Message::Space(_)) => {
                self.tell(pid, &Message::Want(Epoch(0), Vec::new()));
            }
            Ok(()) => {}
            Err(error) if error.is_gone() => self.lost(pid, &error),
            Err(error) => {
                // It cannot be taken in here; its guest is as it was.
                tracing::warn!(%pid, %error, "it could not come home");
                self.stayed(pid, &error.to_string());
                self.tell(pid, &Message::Thaw);
            }
        }
    }

    /// Does something with a deputy that stands.
    pub(crate) fn with_deputy<T: Default>(
        &mut self,
        pid: HomePid,
        work: impl FnOnce(&mut Member, Stopped) -> tern_tracee::Result<T>,
    ) -> tern_tracee::Result<T> {
        match (self.stand(pid)?, self.members.get_mut(&pid)) {
            (Some(stopped), Some(member)) => work(member, stopped),
            _ => Ok(T::default()),
        }
    }

    // ---- links

    pub(crate) fn lose(&mut self, at: usize) {
        self.peers[at].lose();
        let pids: Vec<HomePid> = self.members.keys().copied().collect();
        for pid in pids {
            let Some(member) = self.members.get(&pid) else { continue };
            match &member.state {
                State::Outbound(o) if o.peer == at => {
                    self.stay_home(pid, None, "the link to that node was cut");
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

    fn keep_alive(&mut self) {
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
    fn seek(&mut self, at: usize) {
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

    fn sought(&mut self, at: usize, found: Found) {
        self.peers[at].seeking = false;
        match found {
            Found::Link(link) => self.peers[at].found(*link),
            Found::Gone => self.give_up(at, "its guest is gone"),
            Found::Nothing => {}
        }
    }

    /// The guests that this peer held are lost: their deputies end, by SIGKILL.
    fn give_up(&mut self, at: usize, why: &str) {
        let held: Vec<HomePid> =
            self.members.values().filter(|m| m.peer == at && m.is_away()).map(|m| m.pid).collect();
        for pid in held {
            tracing::error!(%pid, why, "a process is lost; its deputy is killed");
            self.refuse(pid, why);
            tern_tracee::pidfd::kill(pid.0);
        }
    }

    /// A guest shows itself on a new link.
    fn present(&mut self, pid: HomePid, from: usize, epoch: Epoch, signals: u64) {
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
        if revived {
            self.tell(pid, &Message::Go(now));
        }
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.revived = revived;
        member.unheard.retain(|(count, _)| *count > signals);
        let stopped = member.job_stopped;
        self.signal_again(pid);
        self.tell(pid, &if stopped { Message::Stop(true) } else { Message::Thaw });
    }
}

/// Whether its last call is still under way at home, or a move of it.
fn is_busy(member: &Member) -> bool {
    matches!(member.state, State::Lingering(_)) || member.task.is_some()
}

fn connect(node: NodeId, reply: Reply, key: &Ephemeral) -> Result<Peer, Refusal> {
    let Reply::Prepared { address, shim, fingerprint } = reply else {
        return Err(Refusal::new(RefusalKind::Internal, "ternd answered something else"));
    };
    let failed =
        |e: &dyn std::fmt::Display| Refusal::new(RefusalKind::Unavailable, format!("node {node}: {e}"));
    let tls = tern_wire::pinned_client(key, fingerprint).map_err(|e| failed(&e))?;
    let mut link = Link::connect(&address, Preamble::Shim(shim), &tls, Instant::now() + HANDSHAKE)
        .map_err(|e| failed(&e))?;
    // Its first words: it has accepted us, and is in its loop. What it is sent next is read at once.
    let deadline = Instant::now() + HANDSHAKE;
    link.recv(deadline).map_err(|e| failed(&e))?;
    for _ in 0..CLOCK_WORDS {
        let clocks = [rustix::time::ClockId::Monotonic, rustix::time::ClockId::Boottime].map(|clock| {
            let now = rustix::time::clock_gettime(clock);
            (now.tv_sec * 1_000_000_000 + now.tv_nsec).cast_unsigned()
        });
        send(&mut link, HomePid(0), &Message::Clocks(clocks), &[]).map_err(|e| failed(&e))?;
        link.recv(deadline).map_err(|e| failed(&e))?;
    }
    Ok(Peer::new(node, shim, address, fingerprint, link))
}
