//! Files in hand: reads and writes of a guest that are made here, without a trip home each
//! (docs/design/direct.md).
//!
//! Home says of an open file that nobody but this process has it ([`InHand`]). From then on its offset is ours, what it
//! reads is read ahead, and what it writes is written behind. Home's kernel still makes each transfer, by the deputy; only when
//! is ours to choose:
//! * Whatever else goes home takes along what is to be written, and offsets (`CallRequest::before`). So nobody can have heard of anything that comes after a write without finding that write.
//! * What was read ahead is good until home says, with the result of any call, that the file has changed, or until a signal
//!   comes, and for a second at most without a word from home. So nobody can have told the program anything that comes after a change which it then does not
//!   find.
//! * What waits longer than a second is written without an occasion.
//!
//! If the process is lost here, what it had written behind is lost with it: it is as if it had been killed a moment earlier, of
//! which nobody had heard anything.
//!
//! Only processes of one thread have files in hand: then one call comes after the other. What is asked of home for them is an
//! [`Errand`]; a trap that comes meanwhile waits in `Process::queued`. Before the process departs, or ends by a fault, its files
//! are put down: all is written, home has the offsets, and its calls go home as others' do.

use crate::forward::Failed;
use crate::inhand::Fill;
use crate::member::{GuestMemory, Member, Process, State};
use crate::near::Beside;
use crate::thread::Thread;
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::message::{CallRequest, CallResult, FileWord, MOST_IN_HAND, Message, send};
use tern_syscall::{Call, Memory};
use tern_tracee::listener::Notification;
use tern_tracee::registers::restart;
use tern_tracee::stop;
use tern_wire::Link;

/// Offsets beyond this are home's to judge: not all file systems know them.
const FAR: u64 = 1 << FAR_BITS;
pub(crate) const FAR_BITS: u32 = 33;

/// What is asked of home for files in hand, while the thread waits or runs on.
#[derive(Debug)]
pub struct Errand {
    number: u64,
    /// How many calls come before it.
    before: usize,
    /// The request: it may have to be sent again.
    message: Message,
    /// What it is for.
    wanted: Option<Wanted>,
    since: Instant,
}

/// What is asked of home besides that all is written.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wanted {
    /// A piece of a file, to be read ahead.
    Fill(Fill),
    /// Whether anybody has changed this file, which nodes share.
    Word(i32),
}

/// Whether a call was made here; if not, home makes it.
type Done = std::result::Result<bool, Failed>;

/// A transfer on a descriptor.
struct Transfer {
    fd: i32,
    /// Where in the file, and whether the offset moves along.
    place: u64,
    moves: bool,
    /// Where in memory, and how many bytes in all.
    pieces: Vec<(u64, u64)>,
    count: u64,
}

/// The pieces that an array of iovecs names, if they are for us.
fn pieces_of(at: u64, count: u64, memory: &mut GuestMemory<'_>) -> Option<Vec<(u64, u64)>> {
    if count > tern_syscall::limits::SEGMENTS {
        return None;
    }
    let mut entries = vec![0; count as usize * 16];
    memory.read(at, &mut entries).ok()?;
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
    entries.as_chunks::<16>().0.iter().map(|entry| Some((word(&entry[..8])?, word(&entry[8..])?))).collect()
}

impl Transfer {
    /// The transfer that a call is on a file with this offset, if it is one that may be made here.
    fn of(trap: &Notification, offset: u64, memory: &mut GuestMemory<'_>) -> Option<Self> {
        let [fd, at, length, place, _, flags] = trap.args;
        let nr = i64::from(trap.nr);
        let moves = match nr {
            libc::SYS_read | libc::SYS_write | libc::SYS_readv | libc::SYS_writev => true,
            libc::SYS_pread64 | libc::SYS_pwrite64 | libc::SYS_preadv | libc::SYS_pwritev => false,
            libc::SYS_preadv2 | libc::SYS_pwritev2 if flags == 0 => place == u64::MAX,
            _ => return None,
        };
        let whole = [libc::SYS_read, libc::SYS_write, libc::SYS_pread64, libc::SYS_pwrite64].contains(&nr);
        let pieces = if whole { vec![(at, length)] } else { pieces_of(at, length, memory)? };
        let sum = |sum: u64, (_, length): &(u64, u64)| sum.checked_add(*length);
        let count = pieces.iter().try_fold(0, sum).filter(|count| (1..=MOST_IN_HAND).contains(count))?;
        let place = if moves { offset } else { place };
        (place < FAR).then_some(Self { fd: fd as i32, place, moves, pieces, count })
    }
}

impl Wanted {
    fn call(self) -> Call {
        match self {
            Self::Fill(fill) => fill.call(),
            Self::Word(fd) => crate::inhand::asks_nothing(fd),
        }
    }
}

fn writes(nr: i64) -> bool {
    [libc::SYS_write, libc::SYS_pwrite64, libc::SYS_writev, libc::SYS_pwritev, libc::SYS_pwritev2]
        .contains(&nr)
}

impl Thread {
    /// Makes a call on a file in hand; false if it is another call, or one that home is to make.
    ///
    /// # Errors
    /// As [`trapped`](Self::trapped).
    pub fn direct(
        &mut self,
        trap: &Notification,
        process: &mut Process,
        mut home: Option<&mut Link>,
    ) -> Done {
        // A call that home may have made already keeps its number.
        if self.talk.call_open || self.talk.partial.is_some() {
            return Ok(false);
        }
        let [fd, second, third, ..] = trap.args;
        let fd = fd as i32;
        if self.passed_to_near(trap, process, home.as_deref_mut())? {
            return Ok(true);
        }
        let Some(file) = process.files.get(fd) else { return Ok(false) };
        let nr = i64::from(trap.nr);
        if nr == libc::SYS_lseek {
            let base = match third as i32 {
                libc::SEEK_SET => Some(0),
                libc::SEEK_CUR => Some(file.known.offset),
                _ => None,
            };
            let to = base.and_then(|base| base.checked_add_signed(second.cast_signed()));
            let Some(to) = to.filter(|to| *to < FAR) else { return Ok(false) };
            file.known.offset = to;
            return self.answer_here(trap, to.cast_signed(), process);
        }
        let known = file.known;
        let Some(transfer) = Transfer::of(trap, known.offset, &mut GuestMemory(&process.memory)) else {
            return self.answer_of_opened(trap, process);
        };
        match writes(nr) {
            // What it writes itself it would have to find.
            false if known.reads && !known.writes => self.read_here(trap, &transfer, process, home),
            true if known.writes => self.write_here(trap, &transfer, process, home),
            _ => Ok(false),
        }
    }

    fn answer_here(&mut self, trap: &Notification, ret: i64, process: &mut Process) -> Done {
        self.talk.resumes = None;
        let Process { hot, files, memory, reserve, borrowed, .. } = process;
        if !*borrowed {
            hot.made(trap.ip, trap.nr, memory, *reserve)?;
            let moved = (i64::from(trap.nr) != libc::SYS_lseek).then_some(ret.cast_unsigned());
            hot.lend((trap.args[0] as i32, moved), files, memory, *reserve)?;
        }
        self.reply(trap.id, ret)?;
        Ok(true)
    }

    fn read_here(
        &mut self,
        trap: &Notification,
        transfer: &Transfer,
        process: &mut Process,
        home: Option<&mut Link>,
    ) -> Done {
        let Transfer { fd, place, moves, ref pieces, count } = *transfer;
        let Some(file) = process.files.get(fd) else { return Ok(false) };
        let Some(found) = file.read(place, count) else {
            let fill = process.files.want(fd, place, count).map(Wanted::Fill);
            return self.wait_for_errand(*trap, fill, process, home);
        };
        let (mut length, mut rest) = (0, found);
        for (at, room) in pieces {
            let (piece, others) = rest.split_at(rest.len().min(*room as usize));
            if GuestMemory(&process.memory).write(*at, piece).is_err() {
                // It ends there; at the first, home says what there is to say.
                if length > 0 { break } else { return Ok(false) }
            }
            (length, rest) = (length + piece.len() as u64, others);
        }
        if moves {
            file.known.offset = place + length;
        }
        self.answer_here(trap, length.cast_signed(), process)
    }

    fn write_here(
        &mut self,
        trap: &Notification,
        transfer: &Transfer,
        process: &mut Process,
        home: Option<&mut Link>,
    ) -> Done {
        let Transfer { fd, place, moves, ref pieces, count: most } = *transfer;
        if process.files.are_full(most as usize) {
            return self.wait_for_errand(*trap, None, process, home);
        }
        let mut bytes = vec![0; most as usize];
        let (mut count, mut rest) = (0, &mut bytes[..]);
        for (at, length) in pieces {
            let (piece, others) = rest.split_at_mut(rest.len().min(*length as usize));
            if GuestMemory(&process.memory).read(*at, piece).is_err() {
                if count > 0 { break } else { return Ok(false) }
            }
            (count, rest) = (count + piece.len() as u64, others);
        }
        bytes.truncate(count as usize);
        let Some(file) = process.files.get(fd) else { return Ok(false) };
        if moves {
            file.known.offset = place + count;
        }
        process.files.write(fd, place, bytes);
        self.answer_here(trap, count.cast_signed(), process)
    }

    /// The trap is taken again when home has done what it needs.
    pub(crate) fn wait_for_errand(
        &mut self,
        trap: Notification,
        wanted: Option<Wanted>,
        process: &mut Process,
        home: Option<&mut Link>,
    ) -> Done {
        process.queued.push_back(trap);
        self.send_errand(wanted, process, home)?;
        Ok(true)
    }

    /// Whether its deputy makes a call, or may: it has one at a time.
    fn awaits_home(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.sent.is_some())
            || self.errand.is_some()
            || self.talk.call_open
    }

    /// Asks home for what its files need: that all is written, and perhaps something read ahead. Not while its deputy is busy:
    /// then it has got everything already.
    fn send_errand(
        &mut self,
        wanted: Option<Wanted>,
        process: &mut Process,
        home: Option<&mut Link>,
    ) -> std::result::Result<(), Failed> {
        if self.awaits_home() || self.ending {
            return Ok(());
        }
        let number = self.talk.call + 1;
        let (before, nothing) = process.files.send_all(number);
        let Some(call) = wanted.map(Wanted::call).or(nothing) else { return Ok(()) };
        self.talk.call = number;
        let request = CallRequest {
            epoch: process.epoch,
            number,
            signals: self.talk.signals,
            resumes: self.talk.resumes,
            before,
            brings: 0,
            call,
            view: None,
        };
        let before = request.before.len();
        let message = Message::Call(Box::new(request));
        self.errand = Some(Box::new(Errand { number, before, message, wanted, since: Instant::now() }));
        self.send_errand_again(home)
    }

    /// Asks for what the errand needs, on a new link too.
    ///
    /// # Errors
    /// If home is out of reach.
    pub fn send_errand_again(&self, home: Option<&mut Link>) -> std::result::Result<(), Failed> {
        if let (Some(errand), Some(home)) = (&self.errand, home) {
            send(home, self.tid, &errand.message, &[])?;
        }
        Ok(())
    }

    /// Takes what home says of files with a result; true if that is all there is to it: it was an errand's.
    fn take_words(
        &mut self,
        result: &CallResult,
        process: &mut Process,
        alone: bool,
        beside: &Beside,
    ) -> bool {
        let Process { files, names, .. } = process;
        let made = !restart::is(result.outcome.ret);
        let Some(errand) = self.errand.take_if(|errand| errand.number == result.number) else {
            files.confirm(result.number, &result.before);
            let asked = self.open.as_ref().filter(|open| made && open.sent.is_some());
            let asked = asked.filter(|_| result.number == self.talk.call);
            if let Some(open) = asked {
                files.made(open.trap.nr, &open.trap.args, result.outcome.ret);
                names.hear(open.since);
            }
            files.hear(&result.files, asked.map(|open| open.since), alone, beside);
            return false;
        };
        names.hear(errand.since);
        files.confirm(result.number, &result.before);
        // Not if it could not even be begun.
        let made = made && result.before.len() == errand.before;
        if !made {
            files.wait_on();
        }
        files.hear(&result.files, Some(errand.since), alone, beside);
        if let Some(Wanted::Word(fd)) = errand.wanted.filter(|_| made)
            && !files.is_vouched(fd)
        {
            // It cannot be said, or not in time: home reads it then.
            files.put_down_near(fd);
        }
        if let Some(Wanted::Fill(fill)) = errand.wanted.filter(|_| made) {
            let bytes = result.outcome.outs.first().cloned().unwrap_or_default();
            let length = usize::try_from(result.outcome.ret).ok();
            let read = length.filter(|length| *length as u64 <= fill.length).map(|length| {
                let mut bytes = bytes;
                if bytes.len() != length {
                    bytes.resize(length, 0);
                }
                bytes
            });
            let steady = result.files.contains(&(fill.fd, FileWord::Steady));
            files.filled(fill, read, steady, errand.since);
        }
        true
    }
}

impl Member {
    /// Has home take all that was written, and the offsets, of a process that is to leave; whether it has.
    ///
    /// # Errors
    /// If home is out of reach.
    pub fn put_files_down(&mut self, home: Option<&mut Link>) -> Done {
        self.process.files.put_down();
        if !self.recall()? {
            return Ok(false);
        }
        let Self { process, threads } = self;
        if threads.values().all(|thread| thread.standing.is_some()) {
            process.files.is_back();
        }
        process.files.put_down();
        if process.files.await_return() {
            // It is resumed as it comes by the main loop.
            for thread in threads.values() {
                stop::interrupt(thread.host)?;
            }
            return Ok(false);
        }
        if process.files.are_clean() && threads.values().all(|thread| thread.errand.is_none()) {
            return Ok(true);
        }
        // It has one thread, or no file in hand.
        if let Some(thread) = threads.values_mut().next() {
            thread.send_errand(None, process, home)?;
        }
        Ok(false)
    }

    /// When something of it is to be written without an occasion. While its deputy is busy it has been told already.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let thread = self.threads.values().next()?;
        let waits = self.process.files.due().filter(|_| !thread.awaits_home());
        waits.into_iter().chain(self.lent_until()).min()
    }

    /// Writes what has waited long enough.
    ///
    /// # Errors
    /// If home is out of reach.
    pub fn write_behind(&mut self, home: Option<&mut Link>) -> std::result::Result<(), Failed> {
        self.recall_what_is_due()?;
        let due = self.process.files.due().is_some_and(|due| due <= Instant::now());
        let Self { process, threads } = self;
        match threads.values_mut().next().filter(|_| due) {
            Some(thread) => thread.send_errand(None, process, home),
            None => Ok(()),
        }
    }

    /// Takes what home says of files with a result; true if nothing else is in it.
    pub fn take_words(&mut self, tid: HomePid, result: &CallResult, beside: &Beside) -> bool {
        let Self { process, threads } = self;
        let alone = threads.len() == 1 && matches!(process.state, State::Running);
        // If it is gone that is found soon.
        let _gone = process.hot.revoke(&process.memory, process.reserve);
        threads.get_mut(&tid).is_some_and(|thread| thread.take_words(result, process, alone, beside))
    }

    /// Whether a thread waits for an errand.
    #[must_use]
    pub fn runs_errands(&self) -> bool {
        self.threads.values().any(|thread| thread.errand.is_some())
    }
}
