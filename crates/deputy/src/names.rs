//! Names of home's files that guests know, so that what they ask of them needs no trip (docs/design/direct.md, "Names").
//!
//! A directory in which a process has looked up several names is listed, and watched. The process is told what is in it with the result of a
//! call that has looked up another name there meanwhile: so it may, by the same way, and nothing has changed on that since. From then on whatever it is told
//! comes after what has changed: nobody can have heard of a change that he does not find.
//!
//! What is told is good for this life, and until the process goes elsewhere or becomes somebody else.

use crate::family::Family;
use crate::mailbox::Bell;
use crate::thread::Current;
use look::{Ask, Event, Eyes, Looked, Meets, Seen, Watched, Why};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::time::Duration;
use tern_ids::{Epoch, HomePid};
use tern_migrate::message::Message;
use tern_migrate::names::{Asks, Listing, MOST_NAMES, NameWord, OnPath, split};
use tern_syscall::{Arg, ByteBuf, Call, Outcome};

/// A directory is looked at after so many calls about names in it, the next time after twice as many.
const FIRST: u32 = 4;
/// So many names each of these calls is worth: they are sent in about the time that one more call would take.
const WORTH: u32 = 32;
/// After so many listings of it, what changes in between is no reason for yet another one so soon.
const MOST_SOON: u32 = 6;
/// So many directories of a process are listed at most.
const MOST_DIRECTORIES: usize = 256;
/// And so many names in all.
const MOST_KNOWN: usize = 32 << 10;
/// What has been seen waits so long to be told.
const FRESH: Duration = Duration::from_millis(500);
/// After so many changes a directory is not watched any more: each of them wakes us.
const MOST_EVENTS: u32 = 2000;
/// While one is looked at so many are remembered.
const MOST_MEANWHILE: usize = 10_000;

/// What watches the directories of a family.
#[derive(Debug, Default)]
pub(crate) struct Names {
    eyes: Option<Eyes>,
    /// It cannot be had, or is of no use: processes that share where they are cannot be told apart.
    off: bool,
    /// How many directories are being looked at, and what has changed since the first of them was: the changes are numbered.
    under_way: usize,
    meanwhile: Vec<(u64, Event)>,
    changes: u64,
}

/// What a process knows of names.
#[derive(Debug, Default)]
pub(crate) struct Known {
    life: Epoch,
    /// Counts up when paths may lead elsewhere.
    turn: u64,
    /// Its threads need not be the same before the file system.
    off: bool,
    directories: BTreeMap<Vec<u8>, Directory>,
    /// How many names have been told.
    names: usize,
}

#[derive(Debug, Default)]
struct Directory {
    /// How many calls about it came here since it was told last.
    calls: u32,
    /// With how many it is looked at.
    due: u32,
    listed: u32,
    is_looked_at: bool,
    /// What has been seen, and has changed since: to be told.
    seen: Option<(Seen, BTreeSet<Vec<u8>>)>,
    /// What has been told, and of which names that it is so no more.
    told: Option<(Watched, BTreeSet<Vec<u8>>)>,
    events: u32,
}

impl Names {
    /// Readable when something has changed.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.eyes.as_ref().map(Eyes::fd)
    }

    /// What has changed will count for what is being looked at as well.
    fn remember(&mut self, events: Vec<Event>) {
        if self.under_way == 0 {
            return;
        }
        for event in events {
            self.changes += 1;
            self.meanwhile.push((self.changes, event));
        }
        if self.meanwhile.len() > MOST_MEANWHILE {
            self.meanwhile = vec![(self.changes, Event::ALL)];
        }
    }

    /// What has changed after so many changes.
    fn since(&mut self, changes: u64) -> Vec<Event> {
        let since = self.meanwhile.iter().filter(|(number, _)| *number > changes);
        let since = since.map(|(_, event)| event.clone()).collect();
        if self.under_way == 0 {
            self.meanwhile.clear();
        }
        since
    }

    fn look(&mut self, ask: Ask, bell: &Bell) -> bool {
        if self.eyes.is_none() && !self.off {
            self.eyes = Eyes::open(bell.clone())
                .inspect_err(|error| tracing::info!(%error, "names cannot be watched"))
                .ok();
            self.off = self.eyes.is_none();
        }
        let Some(eyes) = &self.eyes else { return false };
        eyes.ask(ask);
        self.under_way += 1;
        true
    }
}

impl Known {
    /// Nothing is known any more, and what is being looked at is of no use; whether the process had been told anything.
    pub(crate) fn forget(&mut self) -> bool {
        (self.turn, self.names) = (self.turn + 1, 0);
        std::mem::take(&mut self.directories).into_values().any(|directory| directory.told.is_some())
    }
}

impl Directory {
    /// Takes what has changed: what the process is to be told.
    fn hear(&mut self, path: &[u8], event: &Event) -> Option<NameWord> {
        let told = self.told.as_ref().map(|(told, _)| told);
        let seen = self.seen.as_ref().map(|(seen, _)| &seen.watched);
        if told.into_iter().chain(seen).any(|watched| watched.is_told(event)) {
            self.events += 1;
        }
        let is_busy = self.events > MOST_EVENTS;
        if let Some((seen, changed)) = &mut self.seen {
            match seen.watched.meets(event) {
                Meets::Name(name) => drop(changed.insert(name)),
                Meets::Directory => self.seen = None,
                Meets::Nothing => {}
            }
        }
        let (told, changed) = self.told.as_mut()?;
        let here = || ByteBuf::from(path.to_vec());
        match told.meets(event) {
            Meets::Name(name) if !is_busy => {
                let new = changed.insert(name.clone());
                new.then(|| NameWord::Changed(here(), ByteBuf::from(name)))
            }
            Meets::Nothing if !is_busy => None,
            _ => {
                self.told = None;
                if is_busy {
                    self.due = u32::MAX;
                }
                Some(NameWord::Forget(here()))
            }
        }
    }
}

/// Whether paths may lead elsewhere after this call, or be closed; and whether only for the thread that makes it.
fn leads_elsewhere(nr: u32) -> (bool, bool) {
    let place = [libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_chroot, libc::SYS_pivot_root];
    let mounts = [
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_move_mount,
        libc::SYS_mount_setattr,
        libc::SYS_setns,
        libc::SYS_unshare,
    ];
    let who = [
        libc::SYS_setuid,
        libc::SYS_setgid,
        libc::SYS_setreuid,
        libc::SYS_setregid,
        libc::SYS_setresuid,
        libc::SYS_setresgid,
        libc::SYS_setfsuid,
        libc::SYS_setfsgid,
        libc::SYS_setgroups,
        libc::SYS_capset,
    ];
    let nr = i64::from(nr);
    let by_itself = who.contains(&nr) || nr == libc::SYS_unshare || nr == libc::SYS_setns;
    (by_itself || place.contains(&nr) || mounts.contains(&nr), by_itself)
}

/// Whether a call makes a process that shares with its parent where it is.
fn shares_place(call: &Call) -> bool {
    let flags = match i64::from(call.nr) {
        libc::SYS_clone => call.values()[0],
        _ => 0,
    };
    flags & libc::CLONE_FS as u64 != 0 && flags & libc::CLONE_THREAD as u64 == 0
}

/// The directory that a call has looked a name up in, if it was let, or that it has looked at, by its path; and whether it would have been
/// answered by one who knows that directory.
fn looked_in(call: &Call, outcome: &Outcome) -> Option<(Vec<u8>, bool)> {
    let ret = outcome.ret;
    let args = call.values();
    let on = OnPath::of(call.nr, &args)?;
    let no_link = ret == -i64::from(libc::EINVAL) && matches!(on.asks, Asks::Link(_));
    let Arg::Bytes(path) = &call.args[on.path] else { return None };
    let path = path.strip_suffix(b"\0")?;
    if !(ret >= 0 || ret == -i64::from(libc::ENOENT) || no_link) || !on.begins(&args, path) {
        return None;
    }
    let (directory, _) = split(path)?;
    let mode_at = match on.asks {
        Asks::Stat(..) => Some(24),
        Asks::Statx(_) => Some(28),
        _ => None,
    };
    let said = outcome.outs.first().filter(|_| ret == 0);
    let mode =
        mode_at.and_then(|at| said?.as_slice().get(at..at + 2)?.try_into().ok()).map(u16::from_le_bytes);
    if mode.is_some_and(|mode| u32::from(mode) & libc::S_IFMT == libc::S_IFDIR) {
        return Some(([path, b"/"].concat(), true));
    }
    Some((directory.to_vec(), on.asks != Asks::Open || ret < 0))
}

impl Family {
    /// A call is to be made, or has been: if that may lead paths elsewhere, nothing is known any more.
    pub(crate) fn may_lead_elsewhere(&mut self, pid: HomePid, call: &Call) {
        let (elsewhere, by_itself) = leads_elsewhere(call.nr);
        if shares_place(call) && !std::mem::replace(&mut self.names.off, true) {
            self.members.values_mut().for_each(|member| member.names.off = true);
        }
        let Some(member) = self.members.get_mut(&pid) else { return };
        let known = &mut member.names;
        known.off |= by_itself && member.threads.len() > 1;
        if (elsewhere || known.off) && known.forget() {
            self.tell(pid, &Message::Names(NameWord::ForgetAll));
        }
    }

    /// A process has made a call: tells what has been seen where that has looked, or has it looked at.
    pub(crate) fn has_looked(&mut self, pid: HomePid, tid: HomePid, current: &Current, outcome: &Outcome) {
        self.may_lead_elsewhere(pid, &current.request.call);
        let Some((path, counts)) = looked_in(&current.request.call, outcome) else { return };
        let Self { members, names, bell, .. } = self;
        let Some(member) = members.get_mut(&pid) else { return };
        let (epoch, same_users) = (member.epoch, member.sees_users_as_we());
        let known = &mut member.names;
        if std::mem::replace(&mut known.life, epoch) != epoch {
            known.forget();
        }
        if names.off || known.off || !same_users {
            return;
        }
        if known.directories.len() >= MOST_DIRECTORIES && !known.directories.contains_key(&path) {
            known.directories.retain(|_, directory| directory.told.is_some());
        }
        if known.directories.len() >= MOST_DIRECTORIES || known.names > MOST_KNOWN {
            if known.forget() {
                self.tell(pid, &Message::Names(NameWord::ForgetAll));
            }
            return;
        }
        let turn = known.turn;
        let directory = known.directories.entry(path.clone()).or_default();
        directory.calls += u32::from(counts);
        // It was let, since that is watched.
        let in_time = |seen: &Seen| seen.at < current.since && seen.at.elapsed() < FRESH;
        if let Some((seen, changed)) = directory.seen.take_if(|(seen, _)| in_time(seen)) {
            return self.tell_names(pid, &path, seen, changed);
        }
        let due = directory.due.max(FIRST << directory.listed.min(MOST_SOON));
        if directory.calls >= due && !directory.is_looked_at {
            directory.due = directory.calls.saturating_mul(2);
            directory.seen = None;
            let changes = names.changes;
            let most = MOST_NAMES.min(directory.calls.saturating_mul(WORTH) as usize);
            directory.is_looked_at = names.look(Ask { pid, tid, directory: path, most, turn, changes }, bell);
        }
    }

    fn tell_names(&mut self, pid: HomePid, path: &[u8], seen: Seen, changed: BTreeSet<Vec<u8>>) {
        let Seen { about, direct, names, at, watched } = seen;
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.names.names += names.len();
        let Some(directory) = member.names.directories.get_mut(path) else { return };
        (directory.calls, directory.due, directory.listed) = (0, 0, directory.listed + 1);
        directory.told = Some((watched, changed.clone()));
        let here = ByteBuf::from(path.to_vec());
        let age = u32::try_from(at.elapsed().as_micros()).unwrap_or(u32::MAX);
        tracing::debug!(%pid, directory = %String::from_utf8_lossy(path), names = names.len(), "is told names");
        let listing = Listing { directory: here.clone(), about, direct, names, age };
        self.tell(pid, &Message::Names(NameWord::Listed(Box::new(listing))));
        for name in changed {
            self.tell(pid, &Message::Names(NameWord::Changed(here.clone(), ByteBuf::from(name))));
        }
    }

    /// Takes what has been looked at.
    pub(crate) fn take_looked(&mut self) {
        while let Some(looked) = self.names.eyes.as_ref().and_then(Eyes::looked) {
            // What has changed before it was taken counts as well.
            self.hear_of_names();
            self.names.under_way -= 1;
            let Looked { ask: Ask { pid, directory: path, turn, changes, .. }, seen } = looked;
            let meanwhile = self.names.since(changes);
            let names = seen.as_ref().map(|seen| seen.names.len());
            tracing::trace!(%pid, directory = %String::from_utf8_lossy(&path), ?names, "has looked");
            let known = self.members.get_mut(&pid).map(|member| &mut member.names);
            let Some(known) = known.filter(|known| known.turn == turn) else { continue };
            let Some(directory) = known.directories.get_mut(&path) else { continue };
            directory.is_looked_at = false;
            match seen {
                Ok(seen) => {
                    let told = directory.told.take();
                    directory.seen = Some((seen, BTreeSet::new()));
                    meanwhile.iter().for_each(|event| drop(directory.hear(&path, event)));
                    directory.told = told;
                }
                Err(Why::Never) => directory.due = u32::MAX,
                Err(Why::Now) => {}
            }
        }
    }

    /// Takes what has changed, and tells it whoever knows something else.
    pub(crate) fn hear_of_names(&mut self) {
        let Some(eyes) = &self.names.eyes else { return };
        let events = eyes.events();
        if events.is_empty() {
            return;
        }
        let mut words = Vec::new();
        for member in self.members.values_mut() {
            let (pid, peer, is_away) = (member.pid, member.peer, member.is_away());
            for (path, directory) in &mut member.names.directories {
                let heard = events.iter().filter_map(|event| directory.hear(path, event));
                words.extend(heard.filter(|_| is_away).map(|word| (pid, peer, word)));
            }
        }
        self.names.remember(events);
        for (pid, peer, word) in words {
            let told = self.peers[peer].tell(pid, &Message::Names(word), &[]);
            if told.is_err() && self.peers[peer].link.is_some() {
                self.lose(peer);
            }
        }
    }

    /// The link to a peer is cut: its guests know nothing any more.
    pub(crate) fn know_nothing(&mut self, peer: usize) {
        for member in self.members.values_mut().filter(|member| member.peer == peer) {
            member.names.forget();
        }
    }
}

mod look;
#[cfg(test)]
mod tests;
