//! The files of a process that are in hand: what of them has been read ahead, what is to be written, and what home knows.
//! Nothing here asks anybody for anything (that is `direct.rs`).

use crate::near::{Beside, Near};
use opened::Closing;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_migrate::message::{FileWord, InHand};
use tern_migrate::opened::About;
use tern_syscall::{Arg, ByteBuf, Call};
use touch::Touch;

/// How long what was read ahead is good without a word from home.
const TERM: Duration = Duration::from_secs(1);
/// So much is read ahead at first, and at most.
const FIRST: u64 = 16 << 10;
/// The most is what the stub takes in two goes.
const MOST_AHEAD: u64 = 2 * crate::hot::ROOM;
/// So much is written behind at most, of all files together, in so many pieces.
const MOST_BEHIND: usize = 256 << 10;
const MOST_PIECES: usize = 64;
/// So many files are in hand at most.
const MOST_FILES: usize = 32;

/// The files of a process that are in hand.
#[derive(Debug, Default)]
pub struct Files {
    open: BTreeMap<i32, OpenFile>,
    /// Since when something waits to be written.
    waits: Option<Instant>,
    /// What goes, or has gone, with the call of this number, and home has not confirmed.
    sent: Option<(u64, Vec<(i32, Step)>)>,
    /// So much of what went with the call of this number has been confirmed: home may say it again.
    confirmed: (u64, usize),
    /// Counts up when what was read ahead, or is being read, may be old.
    doubts: u64,
    /// Descriptors of files of this node's own that are not in hand any more; the guest has them still.
    stale: Vec<i32>,
    /// The program may be in a call that was let through: its offset is not what it will be.
    passed: bool,
    /// How often something was read ahead.
    fills: u64,
    /// The process shares its descriptors with another one: no file is its own.
    pub shared: bool,
    /// They are being put down: none is taken in hand.
    putting_down: bool,
    /// Closed, but for home.
    closing: Closing,
    /// What came along with the last file that was closed was not read: it is not wanted.
    skips: bool,
    /// [`Files::doubts`] when a call of the program's went home last.
    asked: u64,
    /// The program has asked for a lock: what others did before it gets one it finds at home.
    locks: bool,
}

/// An open file that nobody else has.
#[derive(Debug)]
pub(crate) struct OpenFile {
    /// Where it is read and written next, what it may be used for, and which file it is.
    pub(crate) known: InHand,
    /// The deputy's offset.
    home: u64,
    ahead: Option<Ahead>,
    /// Where the next read is expected, and how much is then read ahead.
    window: (u64, u64),
    /// What is to be written, in this order.
    behind: Vec<(u64, ByteBuf)>,
    /// It is put down as soon as home has everything.
    leaves: bool,
    /// It is this node's own, or shared with it.
    pub(crate) near: Option<Near>,
    /// When home was asked for what it has said last, that nobody has changed it; if nothing has been heard since.
    vouched: Option<Instant>,
    /// Only the stub's table knows its offset, and what was written (`lending.rs`).
    lent: bool,
    /// What home has said of it when it was opened, asked then: until anything is heard of it, or done with it.
    about: Option<(About, Instant)>,
    /// What came along with it has not been read yet.
    unread: bool,
    /// Others may wait for its end.
    holds: bool,
}

/// What was read ahead.
#[derive(Debug)]
struct Ahead {
    start: u64,
    bytes: ByteBuf,
    /// The file ended there.
    end: bool,
    /// A read at that end has been told so.
    told_end: bool,
    /// It was not changing just then: it is good for more than the one read that has waited for it.
    steady: bool,
    since: Instant,
    /// That read has had it.
    used: bool,
    /// Which one it is of all.
    number: u64,
}

/// A piece of a file that is wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fill {
    pub(crate) fd: i32,
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// [`Files::doubts`] when it was asked for.
    pub(crate) doubts: u64,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Written(usize),
    Sought(u64),
    Closed,
}

impl Files {
    /// The file behind a descriptor, if it is in hand.
    pub(crate) fn get(&mut self, fd: i32) -> Option<&mut OpenFile> {
        self.open.get_mut(&fd).filter(|file| !file.leaves)
    }

    /// Whether nothing waits to be written, and none is read but by what home says.
    pub(crate) fn are_homes(&self) -> bool {
        self.open.values().all(|file| file.is_written() && !file.is_near())
    }

    /// Whether home has all of them.
    pub(crate) fn are_clean(&self) -> bool {
        let written = self.open.values().all(OpenFile::is_clean) && self.closing.fds.is_empty();
        self.sent.is_none() && written && !self.await_return()
    }

    /// From now on nothing is taken in hand, and what is goes home.
    pub(crate) fn put_down(&mut self) {
        self.putting_down = true;
        self.open.values_mut().for_each(|file| file.leaves = true);
        self.part();
        self.open.retain(|_, file| !file.has_left());
    }

    /// The process lives on here.
    pub(crate) fn take_up(&mut self) {
        self.putting_down = false;
    }

    /// What was read ahead may be old.
    pub(crate) fn distrust(&mut self) {
        self.doubts += 1;
        self.open.values_mut().for_each(|file| (file.ahead, file.about, file.vouched) = (None, None, None));
    }

    /// Whether so much more has no room.
    pub(crate) fn are_full(&self, more: usize) -> bool {
        let pieces = || self.open.values().flat_map(|file| &file.behind);
        let bytes: usize = pieces().map(|(_, bytes)| bytes.len()).sum();
        bytes + more > MOST_BEHIND || pieces().count() >= MOST_PIECES
    }

    /// What the program writes to a file in hand.
    pub(crate) fn write(&mut self, fd: i32, place: u64, bytes: Vec<u8>) {
        // What is on its way is confirmed piece by piece, as it was sent.
        let is_sent = self.sent.is_some();
        if let Some(file) = self.open.get_mut(&fd) {
            file.about = None;
            if is_sent {
                file.behind.push((place, bytes.into()));
            } else {
                file.write(place, bytes);
            }
            self.waits.get_or_insert_with(Instant::now);
        }
    }

    /// What is to be made at home before the call of this number: everything that waits to be written, and offsets. Until that
    /// is confirmed, the next call is to be asked the same. So while a call is under way, which may be for ever, nothing is left
    /// to do for a process that is to depart.
    pub(crate) fn send_before(&mut self, number: u64, nr: u32, args: &[u64; 6]) -> Vec<Call> {
        self.asked = self.doubts;
        if let Some(file) = self.open.get_mut(&(args[0] as i32)) {
            file.holds |= touch::holds(nr, args);
        }
        if touch::holds(nr, args) {
            self.locks = true;
            self.open.values_mut().for_each(OpenFile::share_no_more);
        }
        self.send(number, Touch::of(nr, args), true)
    }

    /// The same, for no call of the program's; and a call that does nothing, before which it is to be made, if there is anything.
    pub(crate) fn send_all(&mut self, number: u64) -> (Vec<Call>, Option<Call>) {
        let before = self.send(number, Touch::None, false);
        let files = self.open.iter().filter(|(_, file)| !file.is_clean()).map(|(fd, _)| fd);
        // On what is closed by then it fails, and does nothing either.
        let nothing = files.chain(&self.closing.fds).next();
        let nothing = nothing.map(|fd| asks_nothing(*fd));
        (before, nothing)
    }

    /// What was to be sent could not be: in a while again.
    pub(crate) fn wait_on(&mut self) {
        self.waits = self.waits.map(|_| Instant::now());
        self.closing.wait_on();
    }

    /// A piece of a file that is wanted.
    pub(crate) fn want(&mut self, fd: i32, start: u64, count: u64) -> Option<Fill> {
        let length = self.open.get_mut(&fd)?.want(start, count);
        self.skips = false;
        Some(Fill { fd, start, length, doubts: self.doubts })
    }

    fn send(&mut self, number: u64, touch: Touch, offsets: bool) -> Vec<Call> {
        let ends = self.closing.fds.iter();
        let mut calls: Vec<Call> = ends.clone().map(|fd| call_on(*fd, libc::SYS_close, 0, 0)).collect();
        let mut steps: Vec<(i32, Step)> = ends.map(|fd| (*fd, Step::Closed)).collect();
        for (fd, file) in &mut self.open {
            file.leaves |= touch == Touch::TakesAll || touch == Touch::Takes(*fd);
            file.known.offset = file.offset();
            for (at, bytes) in &file.behind {
                calls.push(call_on(*fd, libc::SYS_pwrite64, bytes.len() as u64, *at));
                if let Some(call) = calls.last_mut() {
                    call.args[1] = Arg::Bytes(bytes.clone());
                }
                steps.push((*fd, Step::Written(bytes.len())));
            }
            let offset = file.known.offset;
            if (file.leaves || offsets) && file.home != offset {
                let mut seek = call_on(*fd, libc::SYS_lseek, libc::SEEK_SET as u64, 0);
                seek.args[1] = Arg::Value(offset);
                calls.push(seek);
                steps.push((*fd, Step::Sought(offset)));
            }
        }
        self.sent = (!steps.is_empty()).then_some((number, steps));
        self.part();
        self.open.retain(|_, file| !file.has_left());
        calls
    }

    /// Home has made what was to come before the call of this number, or a part of it, with these results. It may say so more
    /// than once, and of a part first: of that it has not been asked again.
    pub(crate) fn confirm(&mut self, number: u64, results: &[i64]) {
        let Some((_, steps)) = self.sent.take_if(|(sent, _)| *sent == number) else { return };
        let before = if self.confirmed.0 == number { self.confirmed.1 } else { 0 };
        self.confirmed = (number, before.max(results.len()));
        for ((fd, step), result) in steps.into_iter().zip(results.iter().skip(before)) {
            if matches!(step, Step::Closed) {
                self.closing.is_closed(fd);
                continue;
            }
            let Some(file) = self.open.get_mut(&fd) else { continue };
            match step {
                Step::Closed => {}
                Step::Written(length) => {
                    file.behind.remove(0);
                    // Home tells the program, at its next call about it that it makes itself.
                    file.leaves |= *result != length as i64;
                }
                Step::Sought(offset) if offset.cast_signed() == *result => file.home = offset,
                // The file system knows no such offset.
                Step::Sought(_) => file.seek(file.home),
            }
        }
        if self.open.values().all(|file| file.behind.is_empty()) {
            self.waits = None;
        }
        self.open.retain(|_, file| !file.has_left());
    }

    /// A call of the program's own has been made at home, with this result.
    pub(crate) fn made(&mut self, nr: u32, args: &[u64; 6], ret: i64) {
        let Some(file) = self.open.get_mut(&(args[0] as i32)).filter(|_| ret >= 0) else { return };
        let at = match i64::from(nr) {
            libc::SYS_lseek => ret.cast_unsigned(),
            libc::SYS_read | libc::SYS_write | libc::SYS_readv | libc::SYS_writev => {
                file.known.offset + ret.cast_unsigned()
            }
            libc::SYS_preadv2 | libc::SYS_pwritev2 if args[3] == u64::MAX => {
                file.known.offset + ret.cast_unsigned()
            }
            _ => return,
        };
        (file.home, file.window.0) = (at, at);
        file.seek(at);
    }

    /// Takes what home says of files with the result of a call that was asked then, if that is known. Only who is `alone`, and stays, takes files
    /// in hand.
    pub(crate) fn hear(
        &mut self,
        words: &[(i32, FileWord)],
        asked: Option<Instant>,
        alone: bool,
        beside: &Beside,
    ) {
        self.open.values_mut().for_each(|file| (file.about, file.vouched) = (None, None));
        for (fd, word) in words {
            // Said right behind that it is in hand; what is open already stays as it is.
            let fresh = self.open.get_mut(fd).filter(|file| file.near.is_none() && !file.leaves);
            if let (FileWord::Near(place), Some(file)) = (word, fresh) {
                file.near = Near::offered(place, beside);
            }
            self.hear_of_shared(*fd, word, asked, beside);
            let ahead = self.open.get_mut(fd).map(|file| &mut file.ahead);
            match (word, ahead) {
                (FileWord::Changed, Some(ahead)) => *ahead = None,
                (FileWord::Steady, Some(Some(ahead))) => ahead.since = asked.unwrap_or(ahead.since),
                (FileWord::InHand(known), _) if alone && !self.shared && !self.putting_down => {
                    self.take_in_hand(*fd, *known);
                }
                (FileWord::Begins(begins), _) => {
                    asked.iter().for_each(|asked| self.begin(*fd, begins, *asked));
                }
                _ => {}
            }
        }
    }

    /// One file under two descriptors of which one writes is not for us: what one writes the other reads.
    fn take_in_hand(&mut self, fd: i32, known: InHand) {
        let mut has_twin = false;
        for (other, file) in &mut self.open {
            let twin = *other != fd && file.known.id == known.id && (file.known.writes || known.writes);
            file.leaves |= twin;
            has_twin |= twin;
        }
        // What had this descriptor before is closed.
        let known_here = self.open.get(&fd);
        if !has_twin && known_here.is_none_or(OpenFile::is_clean) && self.open.len() < MOST_FILES {
            let before = self.open.insert(fd, OpenFile::new(known));
            self.stale.extend(before.filter(OpenFile::is_near).map(|_closed| fd));
        }
        self.open.retain(|_, file| !file.has_left());
    }

    /// What was wanted of a file has come, or an error: home then says it better.
    pub(crate) fn filled(&mut self, fill: Fill, bytes: Option<ByteBuf>, steady: bool, since: Instant) {
        let Some(file) = self.open.get_mut(&fill.fd) else { return };
        let Some(bytes) = bytes else {
            file.leaves = true;
            return;
        };
        if fill.doubts != self.doubts {
            return;
        }
        if !steady {
            // One that is being written is read anew each time.
            file.window.1 = FIRST;
        }
        let end = (bytes.len() as u64) < fill.length;
        self.fills += 1;
        let number = self.fills;
        file.ahead = Some(Ahead {
            start: fill.start,
            bytes,
            end,
            told_end: false,
            steady,
            since,
            used: false,
            number,
        });
    }
}

/// A call on a descriptor whose second argument is to be set.
fn call_on(fd: i32, nr: i64, third: u64, fourth: u64) -> Call {
    Call { nr: nr as u32, args: [u64::from(fd.cast_unsigned()), 0, third, fourth, 0, 0].map(Arg::Value) }
}

/// A call that does nothing: with its result comes what home says of files.
pub(crate) fn asks_nothing(fd: i32) -> Call {
    call_on(fd, libc::SYS_lseek, libc::SEEK_CUR as u64, 0)
}

impl Fill {
    /// The call that reads it.
    pub(crate) fn call(self) -> Call {
        let mut call = call_on(self.fd, libc::SYS_pread64, self.length, self.start);
        call.args[1] = Arg::Room;
        call
    }
}

impl OpenFile {
    fn new(known: InHand) -> Self {
        Self {
            known,
            home: known.offset,
            ahead: None,
            window: (known.offset, FIRST),
            behind: Vec::new(),
            leaves: false,
            near: None,
            vouched: None,
            lent: false,
            about: None,
            unread: false,
            holds: false,
        }
    }

    fn seek(&mut self, to: u64) {
        self.known.offset = to;
        if let Some(near) = &self.near {
            near.seek(to);
        }
    }

    fn is_clean(&self) -> bool {
        !self.lent && self.behind.is_empty() && self.home == self.offset()
    }

    fn is_near(&self) -> bool {
        self.near.as_ref().is_some_and(Near::is_open)
    }

    /// Whether nothing waits to be written.
    pub(crate) fn is_written(&self) -> bool {
        self.behind.is_empty()
    }

    /// Where it is read and written next.
    fn offset(&self) -> u64 {
        self.near.as_ref().and_then(Near::offset).unwrap_or(self.known.offset)
    }

    /// Whether nothing of it is ours any more.
    fn has_left(&self) -> bool {
        self.leaves && self.is_clean() && !self.is_near()
    }

    /// What there is here for a read: all of it, or up to the file's end.
    pub(crate) fn read(&mut self, at: u64, count: u64) -> Option<&[u8]> {
        let ahead = self.ahead.as_mut()?;
        let found = ahead.bytes.get(usize::try_from(at.checked_sub(ahead.start)?).ok()?..)?;
        let found = &found[..found.len().min(count as usize)];
        let first = !std::mem::replace(&mut ahead.used, true);
        // The end itself is told once, as part of what was read: it is where files grow, and who comes again waits for that.
        let whole =
            found.len() as u64 == count || ahead.end && (first || !found.is_empty() || !ahead.told_end);
        let good = first || ahead.steady && ahead.since.elapsed() < TERM;
        if !(whole && good) {
            return None;
        }
        ahead.told_end |= found.is_empty();
        (self.about, self.unread) = (None, false);
        self.window.0 = at + found.len() as u64;
        Some(found)
    }

    /// How much is to be read for a read of which nothing is here. More, the longer it goes straight on.
    fn want(&mut self, at: u64, count: u64) -> u64 {
        let (expected, ahead) = self.window;
        if at != expected {
            self.window.1 = FIRST;
            return count;
        }
        // Who reads slowly lets it become old.
        let old = self.ahead.take_if(|ahead| ahead.since.elapsed() >= TERM);
        let ahead =
            old.map_or(ahead, |old| (2 * at.saturating_sub(old.start)).clamp(FIRST, ahead.max(FIRST)));
        self.window.1 = (ahead * 2).min(MOST_AHEAD);
        ahead.max(count)
    }

    fn write(&mut self, at: u64, bytes: Vec<u8>) {
        if let Some((start, last)) = self.behind.last_mut()
            && let Some(from) = at.checked_sub(*start).and_then(|from| usize::try_from(from).ok())
        {
            if from == last.len() {
                return last.extend(bytes);
            }
            if let Some(place) = last.get_mut(from..from.saturating_add(bytes.len())) {
                return place.copy_from_slice(&bytes);
            }
        }
        self.behind.push((at, bytes.into()));
    }
}

pub(crate) mod lending;
mod opened;
mod passing;
#[cfg(test)]
pub(crate) mod tests;
mod touch;
