//! Processes that share memory move together: all of them, or none.
//!
//! What one of them wrote where it runs the others could not read elsewhere. So when one is to leave, all are found that map
//! the same memory, and all that share other memory with these. The same migration then concerns each of them
//! ([`crate::member::Task`]), and that is all that says that they belong together:
//!
//! ```text
//!  each sends its own memory while it runs ─▶ all are ready ─▶ all stand ─▶ what they share is sent, once ─▶ images
//!  all have arrived ─▶ GoTogether, one message ─▶ one runs: so do all
//! ```
//! Until then whatever happens to one calls it off for all. Away they hold each other by the objects that they map
//! ([`tern_image::object`]); a child inherits these. On the way home each image waits here until the last has come.
//!
//! Home keeps each object as it was when they left. So nobody else may see it: not a process outside that maps it or has it
//! open (then they stay), and not they themselves through a descriptor: a read or write of it brings them home.

use crate::family::Family;
use crate::member::{Member, State, Task};
use crate::sharers::{Maps, Sharers, is_shim, obstacle, shared_maps, who_opens};
use crate::watch::Watch;
use rustix::fs::SealFlags;
use std::collections::{BTreeSet, HashSet};
use std::os::unix::fs::MetadataExt;
use tern_control::{Refusal, RefusalKind};
use tern_ids::{HomePid, MigrationId};
use tern_image::Unmovable;
use tern_image::layout;
use tern_image::object::{self, ObjectId};
use tern_migrate::message::Message;
use tern_tracee::procfs::{self, Mapping};

/// Those with whom a process leaves, seen from that one.
#[derive(Debug)]
pub(crate) struct Company {
    /// There are no others.
    pub(crate) alone: bool,
    /// All others are ready to stand.
    pub(crate) ready: bool,
    /// All others stand.
    pub(crate) stands: bool,
    /// It is known that there are no more.
    pub(crate) complete: bool,
    /// The shared memory that others of them have sent, or are sending.
    pub(crate) taken: HashSet<ObjectId>,
}

/// Why those that share memory cannot leave together.
#[derive(Debug)]
pub(crate) struct Hindrance {
    pub(crate) refusal: Refusal,
    /// It may pass.
    pub(crate) passing: bool,
    /// Another shim, this process, holds one of them, this one.
    pub(crate) held: Option<(i32, HomePid)>,
}

impl From<(Refusal, bool)> for Hindrance {
    fn from((refusal, passing): (Refusal, bool)) -> Self {
        Self { refusal, passing, held: None }
    }
}

fn stays(why: String, passing: bool) -> (Refusal, bool) {
    (Refusal::new(RefusalKind::CannotMove, Unmovable::SharedWith(why).to_string()), passing)
}

/// What is said of a process that was not found, and whether that passes: a thread through which it was looked at may just have
/// gone, as another one executes a program.
pub(crate) fn absent(pid: HomePid) -> (Refusal, bool) {
    (Refusal::new(RefusalKind::NotFound, format!("there is no process {pid}")), procfs::lives(pid.0))
}

impl Family {
    /// Takes hold of a process at home that is to leave, and of those that share memory with it, and opens what they share.
    ///
    /// # Errors
    /// Why they cannot leave. None is held then that was not before.
    pub(crate) fn gather(&mut self, pid: HomePid) -> Result<Vec<HomePid>, Hindrance> {
        let sharers = Sharers::of(pid.0).map_err(|_gone| absent(pid))?;
        let all: Vec<HomePid> = sharers.processes.iter().map(|pid| HomePid(*pid)).collect();
        // Of two shims that hold some of them one must let go: so none waits while it holds any.
        let own = std::process::id() as i32;
        for other in &all {
            let by = procfs::status(other.0).map_or(0, |status| status.tracer);
            if by != 0 && by != own && is_shim(by) {
                let why = format!("process {other}, with which it shares memory, is on its way or away");
                let (refusal, passing) = stays(why, true);
                return Err(Hindrance { refusal, passing, held: Some((by, *other)) });
            }
        }
        let gathered = self.take_hold(pid, &sharers);
        if gathered.is_err() {
            self.let_go_of(&all);
        }
        gathered.map(|()| all).map_err(Hindrance::from)
    }

    fn take_hold(&mut self, pid: HomePid, sharers: &Sharers) -> Result<(), (Refusal, bool)> {
        if !sharers.objects.is_empty() {
            // What is not moved at all is the better reason, and is not to be opened.
            if let Some(why) = obstacle(pid.0) {
                return Err((Refusal::new(RefusalKind::CannotMove, why.to_string()), false));
            }
        }
        self.can_leave(pid)?;
        for other in sharers.processes.iter().map(|other| HomePid(*other)).filter(|other| *other != pid) {
            match self.may_join(other, pid) {
                // It has ended since.
                Err((refusal, false)) if refusal.kind == RefusalKind::NotFound => {}
                joins => joins?,
            }
        }
        self.open_all(sharers)
    }

    /// Lets those of them go that are held, and run at home, for no purpose.
    fn let_go_of(&mut self, all: &[HomePid]) {
        for pid in all {
            let idle =
                |m: &Member| matches!(m.state, State::Resident) && m.task.is_none() && m.frozen.is_none();
            if !self.members.get(pid).is_some_and(idle) {
                continue;
            }
            match self.halt_at_home(*pid) {
                Ok(true) => self.let_go(*pid),
                Ok(false) => {}
                Err(error) => self.lost(*pid, &error),
            }
        }
    }

    /// Whether a process at home can leave with another one whose memory it shares; takes hold of it.
    fn may_join(&mut self, pid: HomePid, other: HomePid) -> Result<(), (Refusal, bool)> {
        let known = self.members.get(&pid);
        let passes =
            |m: &Member| !matches!(m.state, State::Resident) || m.task.is_some() || m.frozen.is_some();
        let busy = known.is_some_and(passes);
        let status = |pid: HomePid| procfs::status(pid.0).map_err(|_gone| absent(pid));
        let (own, others) = (status(pid)?, status(other)?);
        if busy || own.uid != others.uid || own.gid != others.gid {
            let what = if busy { "is on its way, away or frozen" } else { "is another user's" };
            return Err(stays(format!("process {pid}, with which it shares memory, {what}"), busy));
        }
        // Before it is touched: it may be a display server.
        if let Some(why) = obstacle(pid.0) {
            let why = format!("process {pid}, with which it shares memory, does not move: {why}");
            return Err(stays(why, false));
        }
        // What is ending has given its memory back.
        let ends = || procfs::status(pid.0).map_or(true, |now| now.resident_kib == 0 && now.threads <= 1);
        self.can_leave(pid).map_err(|(why, passing)| match why.kind {
            RefusalKind::NotFound => (why, passing),
            _ if ends() => absent(pid),
            _ => stays(
                format!("process {pid}, with which it shares memory, does not move: {}", why.message),
                passing,
            ),
        })
    }

    /// Opens what these share, of whom we have a hold, unless somebody else has it open as well.
    fn open_all(&mut self, sharers: &Sharers) -> Result<(), (Refusal, bool)> {
        let mut new = HashSet::new();
        for id in &sharers.objects {
            if self.objects.get(*id).is_none() {
                new.extend(self.open_shared(sharers, *id).map_err(|why| stays(why, false))?);
            }
        }
        if let Some(other) =
            Some(new).filter(|new| !new.is_empty()).and_then(|new| who_opens(&new, &sharers.processes))
        {
            // Who inherits or opens it may be about to map it.
            return Err(stays(format!("process {other} has open what it shares"), true));
        }
        for pid in &sharers.processes {
            if let Some(member) = self.members.get_mut(&HomePid(*pid)) {
                member.files.share(&sharers.objects);
            }
        }
        Ok(())
    }

    /// Opens one object, if it is still shared; which inode it is, if anybody could open that.
    fn open_shared(&mut self, sharers: &Sharers, id: ObjectId) -> Result<Option<(u64, u64)>, String> {
        for pid in &sharers.processes {
            let Some(member) = self.members.get(&HomePid(*pid)) else { continue };
            let maps = procfs::smaps(*pid).unwrap_or_default();
            // One that it may write: on some file systems another file has the same name for the kernel.
            let writes = |m: &&Mapping| layout::is_shared_memory(m) && object::id(m) == id;
            let Some(m) = maps.iter().find(writes) else { continue };
            match member.files.open_object(m) {
                Ok(file) => {
                    self.keep_object(id, file).map_err(|error| error.to_string())?;
                    let nameless = m.name.starts_with(b"/dev/zero") || m.name.starts_with(b"/SYSV");
                    return Ok(self.inodes.get(&id).copied().filter(|_| !nameless));
                }
                // Unmapped just now.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    let name = String::from_utf8_lossy(&m.name);
                    return Err(format!("{name:?}, which it shares, cannot be opened: {error}"));
                }
            }
        }
        Ok(None)
    }

    /// Keeps an object as long as we are there.
    pub(crate) fn keep_object(&mut self, id: ObjectId, file: std::fs::File) -> std::io::Result<()> {
        let meta = file.metadata()?;
        // What nobody can write any more who opens it now we could not bring home.
        const SEALED: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);
        if rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.intersects(SEALED)) {
            return Err(std::io::Error::other("it is sealed against writing"));
        }
        if meta.nlink() > 0 {
            let watch = match &mut self.watch {
                Some(watch) => watch,
                none => none.insert(Watch::new()?),
            };
            watch.add(id, &file)?;
            self.guard(id, &file);
        }
        self.inodes.insert(id, (meta.dev(), meta.ino()));
        self.objects.add(id, file);
        Ok(())
    }

    /// Closes the objects that no process of ours shares any more.
    pub(crate) fn close_objects(&mut self) {
        if self.inodes.is_empty() {
            return;
        }
        let members = &self.members;
        let of_use = |id: &ObjectId| members.values().any(|member| member.files.objects.contains(id));
        self.objects.keep(of_use);
        self.inodes.retain(|id, _| of_use(id));
        if let Some(watch) = &mut self.watch {
            watch.keep(of_use);
        }
        if let Some(gate) = &mut self.gate {
            gate.retain(of_use);
        }
    }

    /// With whom a process moves, itself among them: those that the same migration concerns.
    pub(crate) fn company(&self, pid: HomePid) -> Vec<HomePid> {
        match self.members.get(&pid).and_then(|m| m.task.as_ref()) {
            Some(task) => self.concerned(task.migration),
            None => vec![pid],
        }
    }

    /// Those that a migration concerns.
    pub(crate) fn concerned(&self, migration: MigrationId) -> Vec<HomePid> {
        let concerned = |m: &&Member| m.task.as_ref().is_some_and(|t| t.migration == migration);
        let mut all: Vec<HomePid> = self.members.values().filter(concerned).map(|m| m.pid).collect();
        all.sort_unstable();
        all
    }

    /// How far those are with whom this process leaves home.
    pub(crate) fn seen_from(&self, pid: HomePid) -> Company {
        let migration = self.members.get(&pid).and_then(|m| m.task.as_ref()).map(|task| task.migration);
        let complete = migration.is_some() && self.complete == migration;
        let others = self.company(pid);
        let (alone, taken) = (others.len() == 1, HashSet::new());
        let mut company = Company { alone, ready: true, stands: true, complete, taken };
        for other in others.iter().filter(|other| **other != pid) {
            let Some(member) = self.members.get(other) else { continue };
            let (ready, stands) = match &member.state {
                State::Outbound(other) => {
                    company.taken.extend(&other.carries);
                    let frozen = other.sending.as_ref().is_some_and(|sending| sending.frozen.is_some());
                    (other.ready, frozen && member.stands())
                }
                _ => (false, false),
            };
            company.ready &= ready;
            company.stands &= stands;
        }
        company
    }

    /// When all stand that leave with this process it is looked once more whether they are all, and what they share: one
    /// may have forked since, or mapped more. Who is found then comes with them.
    pub(crate) fn complete_company(&mut self, pid: HomePid) {
        let Some(member) = self.members.get(&pid) else { return };
        let (State::Outbound(outbound), Some(task)) = (&member.state, &member.task) else { return };
        let (migration, peer) = (task.migration, outbound.peer);
        let frozen = outbound.sending.as_ref().is_some_and(|sending| sending.frozen.is_some());
        if !frozen || self.complete == Some(migration) || !member.stands() || !self.seen_from(pid).stands {
            return;
        }
        let company = self.concerned(migration);
        if let Err(why) = self.find_the_rest(&company, migration, peer) {
            self.tell_peer(peer, pid, &Message::Drop);
            self.stay_home(pid, &why);
        }
    }

    fn find_the_rest(
        &mut self,
        company: &[HomePid],
        migration: MigrationId,
        peer: usize,
    ) -> Result<(), String> {
        let live = |pid: &HomePid| match self.members.get(pid).map(|m| &m.state) {
            Some(State::Outbound(outbound)) => outbound.live.clone(),
            _ => HashSet::new(),
        };
        let objects: HashSet<ObjectId> = company.iter().flat_map(live).collect();
        let processes: BTreeSet<i32> = company.iter().map(|pid| pid.0).collect();
        let maps = if objects.is_empty() { Maps::new() } else { shared_maps() };
        let rest = maps.iter().filter(|(pid, maps)| !processes.contains(pid) && !maps.is_disjoint(&objects));
        let rest: Vec<HomePid> = rest.map(|(pid, _)| HomePid(*pid)).collect();
        for pid in &rest {
            match self.may_join(*pid, company[0]) {
                Err((refusal, _)) if refusal.kind == RefusalKind::NotFound => continue,
                joins => joins.map_err(|(why, _)| why.message)?,
            }
            let here = self.start.node;
            if let Some(member) = self.members.get_mut(pid) {
                member.task = Some(Task { migration, ..Task::new(None, here) });
            }
            match self.halt_at_home(*pid) {
                Ok(true) => self.begin_out(*pid, peer, true),
                Ok(false) => {}
                Err(error) => self.lost(*pid, &error),
            }
        }
        if rest.is_empty() {
            let sharers = Sharers { processes, objects };
            self.open_all(&sharers).map_err(|(why, _)| why.message)?;
            // They stand: what they map is there.
            if sharers.objects.iter().any(|id| self.objects.get(*id).is_none()) {
                return Err("what it shares is not found".into());
            }
            self.complete = Some(migration);
        }
        Ok(())
    }

    /// Has a move that is about to be called off begin anew, if somebody waits for it and not for long.
    pub(crate) fn begin_anew(&mut self, migration: MigrationId) {
        for pid in self.concerned(migration) {
            let moves = |m: &&Member| matches!(m.state, State::Outbound(_) | State::Inbound(_));
            if self.members.get(&pid).filter(moves).is_some() {
                self.wait_on(pid);
            }
        }
    }

    /// A move is off for one that did not move alone: so it is for the others.
    pub(crate) fn disband(&mut self, migration: MigrationId, of: HomePid, why: &str) {
        let known = why.starts_with("shared memory:");
        let stays = Unmovable::SharedWith(format!("process {of}, with which it shares memory, stays: {why}"));
        let why = if known { why.to_owned() } else { stays.to_string() };
        for pid in self.concerned(migration) {
            self.stay_behind(pid, &why);
        }
    }

    /// One of those whom this migration concerns has ended, or shares nothing any more: the others need not wait for it.
    pub(crate) fn one_less(&mut self, migration: MigrationId) {
        if let Some(pid) = self.concerned(migration).first() {
            self.hand_over_together(*pid);
            self.take_home_together(*pid);
        }
    }

    fn stay_behind(&mut self, pid: HomePid, why: &str) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        match &member.state {
            State::Outbound(outbound) => {
                let peer = outbound.peer;
                self.tell_peer(peer, pid, &Message::Drop);
                self.stay_home(pid, why);
            }
            State::Going(outbound) => {
                let peer = outbound.peer;
                self.revoke(pid, why);
                self.tell_peer(peer, pid, &Message::Drop);
            }
            State::Inbound(_) => {
                member.state = State::Away;
                self.refuse(pid, why);
                self.tell(pid, &Message::Thaw);
            }
            State::Resident => {
                self.refuse(pid, why);
                match self.halt_at_home(pid) {
                    Ok(true) => self.let_go(pid),
                    Ok(false) => {}
                    Err(error) => self.lost(pid, &error),
                }
            }
            _ => self.refuse(pid, why),
        }
    }

    /// Those away that share memory with one that is away, itself among them.
    ///
    /// Not a child in its parent's memory. Its parent cannot move before it has executed a program or ended, and if home
    /// has to do something for it before that it comes alone: to wait for each other, they would wait for ever.
    pub(crate) fn sharing_away(&self, pid: HomePid) -> Vec<HomePid> {
        let Some(member) = self.members.get(&pid) else { return Vec::new() };
        let mut all = vec![pid];
        if member.lent {
            return all;
        }
        let mut objects = member.files.objects.clone();
        loop {
            let shares = |m: &&Member| {
                let other = m.is_away() && !m.lent && !all.contains(&m.pid);
                other && !m.files.objects.is_disjoint(&objects)
            };
            let Some(other) = self.members.values().find(shares) else { break };
            all.push(other.pid);
            objects.extend(&other.files.objects);
        }
        all.sort_unstable();
        all
    }

    /// Has those that share memory with one that is told to come home come too. All are told with whom they come, also
    /// those who have been told before: who has forked since comes with its child.
    pub(crate) fn bring_along(&mut self, pid: HomePid, migration: MigrationId) -> Vec<HomePid> {
        let all = self.sharing_away(pid);
        for other in all.iter().filter(|other| **other != pid) {
            let Some(member) = self.members.get_mut(other) else { continue };
            if matches!(member.state, State::Inbound(_)) {
                continue;
            }
            // A move that somebody waits for goes on from home.
            self.wait_on(*other);
            self.refuse(*other, "shared memory: it comes home with a process with which it shares memory");
            let Some(member) = self.members.get_mut(other) else { continue };
            let from = self.peers[member.peer].node;
            member.task = Some(Task { migration, ..Task::new(None, from) });
            member.state = State::Inbound(Box::default());
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    /// How many programs the one that is looked at has still to execute.
    const LEFT: &str = "TERN_TEST_LEFT";

    /// Tests run in threads that are not the first: so one that executes a program takes the first one's number.
    #[test]
    fn who_executes_programs_is_never_taken_for_gone() {
        let left = std::env::var(LEFT).map_or(150, |left| left.parse().unwrap());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["company::tests::who_executes_programs_is_never_taken_for_gone", "--exact"]);
        command.env(LEFT, (left - 1).to_string());
        command.args(["--test-threads", "2"]).stdout(std::process::Stdio::null());
        if left == 0 {
            return;
        }
        if std::env::var_os(LEFT).is_some() {
            panic!("{}", command.exec());
        }
        let mut child = command.spawn().unwrap();
        let pid = HomePid(child.id() as i32);
        let mut looks = 0;
        let ended = loop {
            if Sharers::of(pid.0).is_err() && !absent(pid).1 {
                break child.try_wait().unwrap();
            }
            // Those that have ended and are not waited for share nothing.
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            looks += 1;
        };
        assert!(ended.is_some_and(|status| status.success()), "gone after {looks} looks: {ended:?}");
    }
}
