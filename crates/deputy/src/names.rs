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
use eyes::{Event, Eyes, Watched};
pub(crate) use known::Known;
use known::Told;
use look::{Ask, Looked, Seen, Why};
use std::collections::{BTreeSet, HashMap};
use std::os::fd::BorrowedFd;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_migrate::names::{Asks, Listing, NameWord, OnPath, split};
use tern_migrate::opened::mode_in;
use tern_syscall::{Arg, ByteBuf, Call, Outcome};

/// While a directory is looked at so many changes are remembered.
const MOST_MEANWHILE: usize = 10_000;
/// So many are being looked at, at most.
const MOST_UNDER_WAY: usize = 8;
/// So much is noted of who is to hear of a change, until it is looked through for what is of no use any more.
const MOST_NOTED: usize = 16 << 10;

/// What watches the directories of a family.
#[derive(Debug, Default)]
pub(crate) struct Names {
    eyes: Option<Eyes>,
    /// It is of no use: processes that share where they are cannot be told apart.
    off: bool,
    /// How many directories are being looked at, and what has changed since the first of them was: the changes are numbered.
    under_way: usize,
    meanwhile: Vec<(u64, Event)>,
    changes: u64,
    /// Whose directories each watch is of, perhaps no more; and how many these are.
    of: HashMap<i32, BTreeSet<(HomePid, Vec<u8>)>>,
    noted: usize,
}

/// A word for a process, and its peer.
type Word = (HomePid, usize, NameWord);

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
        if self.eyes.is_none() {
            // Perhaps next time.
            let opened = Eyes::open(bell.clone());
            self.eyes = opened.inspect_err(|error| tracing::info!(%error, "names cannot be watched")).ok();
        }
        let Some(eyes) = &self.eyes else { return false };
        eyes.ask(ask);
        self.under_way += 1;
        true
    }

    /// These watches are of a directory of a process.
    fn note(&mut self, pid: HomePid, path: &[u8], watched: &Watched) {
        for watch in watched.watches() {
            let new = self.of.entry(watch).or_default().insert((pid, path.to_vec()));
            self.noted += usize::from(new);
        }
    }
}

/// Whether paths may lead elsewhere after this call, or be closed; and whether only for the thread that makes it.
fn leads_elsewhere(nr: u32) -> (bool, bool) {
    let for_all = [
        libc::SYS_chdir,
        libc::SYS_fchdir,
        libc::SYS_chroot,
        libc::SYS_pivot_root,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_move_mount,
        libc::SYS_mount_setattr,
    ];
    let by_itself = [
        libc::SYS_setns,
        libc::SYS_unshare,
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
    ]
    .contains(&i64::from(nr));
    (by_itself || for_all.contains(&i64::from(nr)), by_itself)
}

/// Whether a call gives a file another name, of which nothing is told where it has its first one.
fn gives_another_name(nr: u32) -> bool {
    [libc::SYS_link, libc::SYS_linkat].contains(&i64::from(nr))
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
    let looks = ret == 0 && matches!(on.asks, Asks::Stat(..) | Asks::Statx(_));
    let said = outcome.outs.first().filter(|_| looks);
    if said
        .and_then(|said| mode_in(said.as_slice()))
        .is_some_and(|mode| u32::from(mode) & libc::S_IFMT == libc::S_IFDIR)
    {
        return Some(([path, b"/"].concat(), true));
    }
    Some((directory.to_vec(), on.asks != Asks::Open || ret < 0))
}

impl Family {
    /// A call is to be made, or has been: if that may lead paths elsewhere, nothing is known any more.
    pub(crate) fn may_lead_elsewhere(&mut self, pid: HomePid, call: &Call) {
        let (elsewhere, by_itself) = leads_elsewhere(call.nr);
        if let Some(member) = self.members.get_mut(&pid).filter(|_| by_itself) {
            member.names.off |= member.threads.len() > 1;
        }
        let of_all = gives_another_name(call.nr);
        if shares_place(call) && !std::mem::replace(&mut self.names.off, true) || of_all {
            self.forget_all_names();
        } else if elsewhere {
            self.forget_names(pid);
        }
    }

    /// A process knows nothing any more.
    fn forget_names(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let peer = member.peer;
        if member.names.forget() && member.is_away() {
            self.say(peer, pid, &Message::Names(NameWord::ForgetAll));
        }
    }

    /// No process knows anything any more.
    fn forget_all_names(&mut self) {
        let all: Vec<HomePid> = self.members.keys().copied().collect();
        all.into_iter().for_each(|pid| self.forget_names(pid));
    }

    /// A process has made a call: tells what has been seen where that has looked, or has it looked at.
    pub(crate) fn has_looked(&mut self, pid: HomePid, tid: HomePid, current: &Current, outcome: &Outcome) {
        self.may_lead_elsewhere(pid, &current.request.call);
        let Some((path, counts)) = looked_in(&current.request.call, outcome) else { return };
        let Some(member) = self.members.get_mut(&pid) else { return };
        let (life, same_users) = (member.epoch, member.sees_users_as_we());
        if std::mem::replace(&mut member.names.life, life) != life {
            member.names.forget();
        }
        // Of who is just going elsewhere nobody can say where he was.
        let goes = |call: &Call| leads_elsewhere(call.nr).0;
        let mut calls = member.threads.values().filter_map(|thread| thread.current.as_ref());
        if self.names.off || member.names.off || !same_users || calls.any(|c| goes(&c.request.call)) {
            return;
        }
        if !member.names.has_room_for(&path) {
            return self.forget_names(pid);
        }
        let Self { members, names, bell, .. } = self;
        let Some(known) = members.get_mut(&pid).map(|member| &mut member.names) else { return };
        let turn = known.turn;
        let directory = known.directories.entry(path.clone()).or_default();
        if counts {
            directory.is_asked_for();
        }
        // It was let, since that is watched.
        if directory.is_to_be_told(current.since) {
            return self.tell_names(pid, &path);
        }
        if counts
            && names.under_way < MOST_UNDER_WAY
            && let Some(most) = directory.worth()
        {
            let changes = names.changes;
            directory.is_looked_at = names.look(Ask { pid, tid, directory: path, most, turn, changes }, bell);
        }
    }

    fn tell_names(&mut self, pid: HomePid, path: &[u8]) {
        // What has changed until now goes with it; and what changes from now on is told behind it.
        self.hear_of_names();
        let Some(member) = self.members.get_mut(&pid) else { return };
        let peer = member.peer;
        let seen = member.names.directories.get_mut(path).and_then(|directory| directory.seen.take());
        let Some((Seen { about, direct, names, at, watched }, changed)) = seen else { return };
        let here = ByteBuf::from(path.to_vec());
        let age = u32::try_from(at.elapsed().as_micros()).unwrap_or(u32::MAX);
        let count = names.len();
        tracing::debug!(%pid, directory = %String::from_utf8_lossy(path), count, "is told names");
        let listing = Listing { directory: here.clone(), about, direct, names, age };
        let listed = NameWord::Listed(Box::new(listing));
        let mut said = self.say(peer, pid, &Message::Names(listed));
        for name in &changed {
            let word = NameWord::Changed(here.clone(), ByteBuf::from(name.clone()));
            said = said && self.say(peer, pid, &Message::Names(word));
        }
        let known = self.members.get_mut(&pid).filter(|_| said).map(|member| &mut member.names);
        if let Some(directory) = known.and_then(|known| known.directories.get_mut(path)) {
            directory.is_told(Told { watched, names: count, changed });
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
            let Self { members, names, .. } = self;
            let known = members.get_mut(&pid).map(|member| &mut member.names);
            let Some(known) = known.filter(|known| known.turn == turn) else { continue };
            known.drop_stale();
            let Some(directory) = known.directories.get_mut(&path) else { continue };
            directory.is_looked_at = false;
            match seen {
                Ok(seen) => {
                    names.note(pid, &path, &seen.watched);
                    directory.seen = Some((seen, BTreeSet::new()));
                    meanwhile.iter().for_each(|event| directory.hear_since_seen(event));
                }
                Err(Why::Never) => directory.never(),
                Err(Why::Now) => {}
            }
        }
        self.forget_who_is_gone();
    }

    /// Takes what has changed, and tells it whoever knows something else.
    pub(crate) fn hear_of_names(&mut self) {
        let Some(eyes) = &self.names.eyes else { return };
        let events = eyes.events();
        if events.is_empty() {
            return;
        }
        if events.iter().any(|event| event.lost) {
            self.forget_all_names();
        }
        let words: Vec<Word> = events.iter().flat_map(|event| self.words_of(event)).collect();
        self.names.remember(events);
        for (pid, peer, word) in words {
            self.say(peer, pid, &Message::Names(word));
        }
    }

    fn words_of(&mut self, event: &Event) -> Vec<Word> {
        let Self { members, names, .. } = self;
        let Some(whose) = names.of.get_mut(&event.watch) else { return Vec::new() };
        let (mut words, before) = (Vec::new(), whose.len());
        whose.retain(|(pid, path)| {
            let Some(member) = members.get_mut(pid) else { return false };
            let (peer, is_away) = (member.peer, member.is_away());
            let directory = member.names.directories.get_mut(path);
            let Some(directory) = directory.filter(|directory| directory.needs(event.watch)) else {
                return false;
            };
            words.extend(directory.hear(path, event).filter(|_| is_away).map(|word| (*pid, peer, word)));
            true
        });
        names.noted -= before - whose.len();
        words
    }

    /// Of directories that nobody knows any more nothing need be noted.
    fn forget_who_is_gone(&mut self) {
        let Self { members, names, .. } = self;
        if names.noted <= MOST_NOTED {
            return;
        }
        names.of.retain(|watch, whose| {
            whose.retain(|(pid, path)| {
                let known = members.get(pid).and_then(|member| member.names.directories.get(path));
                known.is_some_and(|directory| directory.needs(*watch))
            });
            !whose.is_empty()
        });
        names.noted = names.of.values().map(BTreeSet::len).sum();
    }

    /// The link to a peer is cut: its guests know nothing any more.
    pub(crate) fn know_nothing(&mut self, peer: usize) {
        for member in self.members.values_mut().filter(|member| member.peer == peer) {
            member.names.forget();
        }
    }
}

mod eyes;
mod known;
mod look;
#[cfg(test)]
mod tests;
mod who;
