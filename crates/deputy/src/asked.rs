//! What the node wants of a home shim: lists, and moves to begin.

use crate::company::{Hindrance, absent};
use crate::family::{Event, Family, PATIENCE};
use crate::frozen::Frozen;
use crate::member::{Member, State, Task};
use crate::peer::Peer;
use crate::ternd;
use crate::thread::Thread;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::door::{self, Caller};
use tern_control::shim::{ShimReply, ShimRequest};
use tern_control::{Destination, ProcessRow, Refusal, RefusalKind, Reply, Request, Usage};
use tern_ids::{HomePid, MigrationId, NodeId};
use tern_image::process::Unmovable;
use tern_migrate::message::{Message, send};
use tern_tracee::procfs;
use tern_tracee::stop::{self};
use tern_wire::{Ephemeral, Link, Preamble};

/// How long a guest shim may take to prove who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long another shim is waited for that holds a process which is to move with one of ours.
const TAKES_LONG: Duration = Duration::from_secs(1);

/// How often a guest shim is at least told what our clocks show; it keeps the word that came fastest.
const CLOCK_WORDS: usize = 6;

/// Its clocks lag ours by the way of that word. While none was answered in this time, as where all CPUs are taken, it is told
/// more often...
const QUICK: Duration = Duration::from_micros(200);

/// ... until so many have taken as long as the fastest, within a tenth, as on a slower network...
const ALIKE: usize = 5;

/// ... or for so long. Beside four other moves and busy shims on two CPUs, 2 of 150 had no word below 2 ms in 50 ms.
const CLOCK_TIME: Duration = Duration::from_millis(200);

impl Family {
    pub(crate) fn answer_node(&mut self) {
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
                ShimRequest::Continue { pid } => self.let_go_on(pid, caller),
                // Of other doors.
                _ => caller.answer(&door::not_here()),
            }
        }
    }

    pub(crate) fn rows(&self) -> Vec<ProcessRow> {
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
            usage: Usage {
                memory: if m.is_away() { m.demand.memory } else { 0 },
                waited_seconds: m.demand.waited as f64 / 1e9,
                calls: m.calls[0],
                call_bytes: m.calls[1],
                near_bytes: if m.is_away() { m.demand.near } else { 0 },
            },
            started: None,
        }
    }

    /// Takes a process into our hands that runs at home.
    pub(crate) fn seize(&mut self, pid: HomePid) -> tern_tracee::Result<()> {
        if self.members.contains_key(&pid) {
            return Ok(());
        }
        let mut member = Member::at_home(pid, &self.start.cache_dir)?;
        // Most have one thread.
        if !seize_threads(&mut member, false)? {
            tern_tracee::attend::attended(pid.0, || seize_threads(&mut member, true))?;
        }
        let before = self.homed.iter().find(|h| h.row.pid == pid && h.lives());
        let mut member =
            Member { homecomings: before.map(|h| h.homecomings.clone()).unwrap_or_default(), ..member };
        if let Some(spent) = self.ledger.take(pid, member.started) {
            member.recall(spent);
        }
        self.members.insert(pid, member);
        Ok(())
    }

    /// Begins a move that was asked for at `since`. What cannot begin at this very moment waits a while.
    pub(crate) fn migrate(&mut self, pid: HomePid, to: Destination, caller: Caller, since: Instant) {
        let home = self.start.node;
        let refuse =
            |caller: Caller, kind, why: &str| caller.answer(&ShimReply::Refused(Refusal::new(kind, why)));
        let to = if to == Destination::Node(home) { Destination::Home } else { to };
        if let Some(member) = self.members.get_mut(&pid) {
            if member.frozen.is_some() {
                let again = to == Destination::Frozen;
                let kind = if again { RefusalKind::BadRequest } else { RefusalKind::CannotMove };
                let said = format!("process {pid} is frozen{}", if again { " already" } else { "" });
                let refusal = Refusal::new(kind, said).hint(format!("migrate {pid} continue"));
                return caller.answer(&ShimReply::Refused(refusal));
            }
            if to == Destination::Frozen && matches!(member.state, State::Lingering) {
                member.frozen = Some(Frozen::Wanted);
                return caller.answer(&ShimReply::Done);
            }
        }
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
            (Destination::Frozen, false) => self.freeze_at_home(pid, caller, since),
            (Destination::Home | Destination::Frozen, true) => {
                let Some(member) = self.members.get_mut(&pid) else { return };
                if !matches!(member.state, State::Away) || self.peers[member.peer].link.is_none() {
                    return refuse(caller, RefusalKind::CannotMove, "suspended: its node is out of reach");
                }
                member.task = Some(Task::new(Some((caller, to)), here));
                member.frozen = (to == Destination::Frozen).then_some(Frozen::Wanted);
                self.begin_home(pid);
            }
            (Destination::Node(_), true) if self.sharing_away(pid).len() > 1 => {
                self.go_round_by_home(pid, to, caller, since);
            }
            (Destination::Node(node), _) => {
                let company = match if away { Ok(vec![pid]) } else { self.gather(pid) } {
                    Ok(company) => company,
                    // Who has begun first takes them all, unless it takes long.
                    Err(Hindrance { held: Some((by, other)), .. })
                        if by < std::process::id() as i32 || since.elapsed() > TAKES_LONG =>
                    {
                        return caller.answer(&ShimReply::HeldWith { pid: other });
                    }
                    Err(Hindrance { passing: true, .. }) if since.elapsed() < PATIENCE => {
                        self.parked.push((since, pid, to, caller));
                        return;
                    }
                    Err(why) => return caller.answer(&ShimReply::Refused(why.refusal)),
                };
                let task = Task::new(Some((caller, to)), here);
                self.prepare_one_of(pid, company.clone(), vec![node], task.migration);
                for other in company.into_iter().filter(|other| *other != pid) {
                    if let Some(member) = self.members.get_mut(&other) {
                        member.task = Some(Task { migration: task.migration, ..Task::new(None, here) });
                    }
                }
                if let Some(member) = self.members.get_mut(&pid) {
                    member.task = Some(task);
                }
            }
        }
    }

    /// Those that share memory go on to another node by way of home, from where they are sent together.
    fn go_round_by_home(&mut self, pid: HomePid, to: Destination, caller: Caller, since: Instant) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let reachable = matches!(member.state, State::Away) && self.peers[member.peer].link.is_some();
        if !reachable || since.elapsed() > PATIENCE {
            let why = if reachable {
                "busy: it does not come home; try again"
            } else {
                "suspended: its node is out of reach"
            };
            return caller.answer(&ShimReply::Refused(Refusal::new(RefusalKind::CannotMove, why)));
        }
        let here = self.peers[member.peer].node;
        member.task = Some(Task::new(None, here));
        self.begin_home(pid);
        self.parked.push((since, pid, to, caller));
    }

    /// Takes up the moves that had to wait.
    pub(crate) fn unpark(&mut self) {
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
    pub(crate) fn can_leave(&mut self, pid: HomePid) -> Result<(), (Refusal, bool)> {
        let tracer = if self.members.contains_key(&pid) { std::process::id() as i32 } else { 0 };
        let movable = tern_image::process::check(pid.0, tracer).map_err(|_gone| absent(pid))?;
        movable.map_err(|reason| {
            // A vfork is over as soon as the child has executed its program.
            let passing = matches!(reason, Unmovable::SharedAddressSpace(_));
            (Refusal::new(RefusalKind::CannotMove, reason.to_string()), passing)
        })?;
        let several = || procfs::status(pid.0).is_ok_and(|status| status.threads > 1);
        let before = several();
        // Twice, since one that ended just then, as another one executed a program, may not be held (EPERM).
        self.seize(pid).or_else(|_passing| self.seize(pid)).map_err(|error| {
            let refusal = Refusal::new(RefusalKind::CannotMove, error.to_string());
            // The first thread is ending while another one executes a program, which may have been done by now; then a
            // thread is gone, and the process is not.
            let only_a_thread = || error.is_gone() && procfs::status(pid.0).is_ok();
            let passing = before || several() || only_a_thread();
            (refusal.hint("it may be traced by another program, or not be yours; see tern doctor"), passing)
        })
    }

    pub(crate) fn at_exec(&mut self, pid: HomePid, candidates: &[NodeId], caller: Caller) {
        if let Err(error) = self.seize(pid) {
            return caller
                .answer(&ShimReply::Refused(Refusal::new(RefusalKind::CannotMove, error.to_string())));
        }
        let from = self.start.node;
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.state = State::AtExec;
        let first = candidates.first().map_or(Destination::Home, |node| Destination::Node(*node));
        let task = Task::new(Some((caller, first)), from);
        let migration = task.migration;
        member.task = Some(task);
        self.prepare_one_of(pid, vec![pid], candidates.to_vec(), migration);
    }

    /// Has a guest shim started on the first of these nodes that will, and connects to it.
    pub(crate) fn prepare_one_of(
        &self,
        pid: HomePid,
        company: Vec<HomePid>,
        nodes: Vec<NodeId>,
        migration: MigrationId,
    ) {
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
                let company = company.clone();
                let request = Request::Prepare { node, migration, accept, uid, gid, company };
                result = ternd::ask(&run_dir, &request).and_then(|reply| connect(node, reply, &key));
                if result.is_ok() {
                    break;
                }
            }
            let _loop_is_gone = events.send(Event::Prepared(pid, migration, result.map(Box::new)));
            bell.ring();
        });
    }

    pub(crate) fn prepared(
        &mut self,
        pid: HomePid,
        migration: MigrationId,
        prepared: Result<Box<Peer>, Refusal>,
    ) {
        // If it has ended meanwhile the others go, who share its memory.
        let concerned = self.concerned(migration);
        let Some(pid) = concerned.iter().find(|one| **one == pid).or(concerned.first()).copied() else {
            return;
        };
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
                    && let Ok(true) = self.halt_at_home(pid)
                {
                    self.let_go(pid);
                }
                return;
            }
        };
        if at_exec {
            // It waits for our word in mosrun; what follows is its exec.
            member.peer = peer;
            if let Some((caller, _)) = member.task.as_mut().and_then(|t| t.caller.take()) {
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
        for pid in self.company(pid) {
            for _ in 0..PERSISTENCE {
                match self.halt_at_home(pid) {
                    Ok(true) => self.begin_out(pid, peer, false),
                    Ok(false) => {}
                    Err(error) => {
                        self.lost(pid, &error);
                        // A thread of it has gone, as when another one executes a program, and not the process.
                        continue;
                    }
                }
                break;
            }
            let unbegun = |m: &Member| matches!(m.state, State::Resident) && m.task.is_some();
            if self.members.get(&pid).is_some_and(unbegun) {
                self.refuse(pid, "busy: it does not come to a stand; try again");
            }
        }
    }
}

/// How often a process is brought to a stand again of which a thread ends in the middle.
const PERSISTENCE: u32 = 16;

/// Takes hold of all threads of a process. Those that are made from then on by one that is held are held as well; so when
/// a look finds no other, there is none.
///
/// One of them may execute a program meanwhile, and has the process' number then: held, if it was held before, and of the
/// others nobody is left. Once one is held this must not be given up, or nobody would answer its stops. False if there are
/// others, which are left alone unless they are `attended`.
///
/// # Errors
/// If the process cannot be held, or is gone: then none of it is.
fn seize_threads(member: &mut Member, attended: bool) -> tern_tracee::Result<bool> {
    let (pid, own) = (member.pid, std::process::id() as i32);
    let held = |tid: HomePid| procfs::status(tid.0).is_ok_and(|status| status.tracer == own);
    loop {
        let mut new = false;
        // The first one first: if that cannot be held, none is.
        let first = Some(pid.0).into_iter();
        for tid in first.chain(procfs::threads(pid.0)?) {
            let tid = HomePid(tid);
            if member.threads.contains_key(&tid) {
                continue;
            }
            // The first one may have ended before others: it is not there to be held, but known.
            let ended = has_ended(tid).filter(|_| tid == pid);
            if !attended && tid != pid {
                return Ok(false);
            }
            let seized = match ended {
                Some(false) => return Err(tern_tracee::Error::Gone { pid: pid.0 }),
                Some(true) => Ok(()),
                None => stop::seize(tid.0, stop::FOLLOW_THREADS),
            };
            match seized.or_else(|error| if held(tid) { Ok(()) } else { Err(error) }) {
                Ok(()) => {
                    let Ok(thread) = Thread::at_home(tid) else { continue };
                    member.threads.insert(tid, Thread { ending: ended.is_some(), ..thread });
                    new = true;
                }
                Err(error) if tid == pid && member.threads.is_empty() => return Err(error),
                // It has ended; or one that is not held yet executes a program, which is seen below.
                Err(_) => {}
            }
        }
        if new {
            continue;
        }
        let first_ends = member.threads.get(&pid).map(|first| first.ending);
        if first_ends.is_some() && has_ended(pid) == Some(true) || first_ends == Some(false) && held(pid) {
            return Ok(true);
        }
        // Who has its number now was another thread: not held yet, or held under its old number, which is not known any more.
        member.threads.remove(&pid);
    }
}

/// Whether a thread that has ended was not the last of its process; nothing if it lives.
fn has_ended(tid: HomePid) -> Option<bool> {
    let status = procfs::status(tid.0).ok().filter(procfs::Status::has_ended)?;
    Some(status.threads > 1)
}

/// Whether its last call is still under way at home, or a move of it.
fn is_busy(member: &Member) -> bool {
    matches!(member.state, State::Lingering) || member.task.is_some()
}

/// Whether the fastest of the words that took so long is as fast as they get.
fn are_enough(took: &[Duration]) -> bool {
    let Some(fastest) = took.iter().min() else { return false };
    *fastest <= QUICK || took.iter().filter(|each| **each <= *fastest * 11 / 10).count() >= ALIKE
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
    let (begun, mut took) = (Instant::now(), Vec::new());
    while took.len() < CLOCK_WORDS || !are_enough(&took) && begun.elapsed() < CLOCK_TIME {
        let said = Instant::now();
        let clocks = [rustix::time::ClockId::Monotonic, rustix::time::ClockId::Boottime].map(|clock| {
            let now = rustix::time::clock_gettime(clock);
            (now.tv_sec * 1_000_000_000 + now.tv_nsec).cast_unsigned()
        });
        send(&mut link, HomePid(0), &Message::Clocks(clocks), &[]).map_err(|e| failed(&e))?;
        link.recv(deadline).map_err(|e| failed(&e))?;
        took.push(said.elapsed());
    }
    tracing::info!(%node, words = took.len(), fastest = ?took.iter().min(), "it knows our clocks");
    Ok(Peer::new(node, shim, address, fingerprint, link))
}
