//! Calls on files in hand that do not even stop: call sites that are often used are made to lead to a **stub** in the guest
//! ([`stub`], [`site`]), which reads, writes and seeks in what the shim has lent it of those files.
//!
//! Nothing is shared but the guest's own memory, a table and two rooms in our range, and both sides write it by turns:
//! * The shim writes it while the thread is in a trap, right before it answers a call on a file in hand itself ([`Hot::lend`]).
//! * From then on the stub alone knows the lent files' offsets and what is written to them, until the thread traps the next time
//!   or is stopped ([`Hot::take_back`]): that is the first thing done then, before anybody looks at the files. So whatever
//!   goes home takes along what there is, as ever, and a thread cannot be in the stub while its table is looked at.
//! * While the thread runs the shim writes only one thing: that something is not lent any more ([`Hot::revoke`]), a byte each. What the
//!   stub has begun then it ends: it has read before that, by a moment.
//!
//! A thread is never seen in the stub: whoever stops it to look at its registers, or to let a handler run, takes it
//! out ([`Hot::leave`]), to before its call or behind it. A fault there is of the program's buffer: the call is made again by the
//! program's own `syscall`, and home, or the shim, says what there is to say.
//!
//! All that is only in processes of one thread with memory of their own. Before another thread or process is made, and before
//! the memory is sent elsewhere, the code is as it was ([`Hot::cool`]).
//!
//! **Files of this node's own** ([`crate::near`]) are not lent: the stub has the kernel make the call, without a stop. Which ones they are stands in the table
//! as long as it stands there what is lent, and the program counts as being in a call that was let through.
//!
//! **The process's CPU time** is told without a stop as well, by programs that have such files: what this kernel has counted, and on top of it what
//! home has said last ([`crate::cpu::AtHome`]) and what was used elsewhere. The shim says so in the table whenever it has told the time itself.
//!
//! The guest can write all over the table and the rooms: what is read there is checked, and harms only its own files.

mod clock;
mod site;
mod slot;
mod stub;

use crate::inhand::Files;
use crate::inhand::lending::Offer;
use crate::member::{Member, Process};
use crate::thread::Thread;
use clock::Clock;
use site::{Room, Shape, Site};
use slot::Slot;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use stub::Stage;
use tern_image::Reserve;
use tern_tracee::listener::Notification;
use tern_tracee::registers::Registers;
use tern_tracee::stop::{self, Stopped};
use tern_tracee::{Memory, PAGE, Result, procfs};

/// So many calls make a site hot.
const HOT: u32 = 64;
/// Sites that are counted, and that lead to the stub, at most.
const MOST_COUNTED: usize = 64;
const MOST_SITES: usize = 16;
/// Larger pieces are not worth a copy more.
const BULK: u64 = 32 << 10;
/// What is written may wait so long.
const SOON: Duration = Duration::from_secs(1);
/// Where the rooms begin in our range, and how long each is.
const ROOMS: u64 = stub::TABLE + PAGE;
pub(crate) const ROOM: u64 = (Reserve::LEN - PAGE - ROOMS) / 2;

/// What of a process's calls is made without a stop.
#[derive(Debug, Default)]
pub struct Hot {
    /// Whether any may be.
    pub allowed: bool,
    /// How often calls on files in hand were made behind these addresses, until they were tried as sites.
    counts: HashMap<u64, u32>,
    sites: Vec<Site>,
    rooms: Vec<Room>,
    slots: [Slot; 2],
    /// The slot that was given away last.
    last: usize,
    own: Own,
    clock: Option<Clock>,
}

/// The files that are this node's own, whose calls the stub has the kernel make.
#[derive(Debug, Default)]
struct Own {
    /// There were some: those that there are may stand in the table.
    some: bool,
    /// They do.
    named: bool,
    /// The program may have made calls on them, or be in one.
    out: bool,
    until: Option<Instant>,
}

/// The address behind the one `syscall` of the stub in this range.
pub(crate) fn behind_native(reserve: Reserve) -> u64 {
    reserve.start + stub::CODE + stub::behind_native()
}

fn room(reserve: Reserve, slot: usize) -> u64 {
    reserve.start + ROOMS + slot as u64 * ROOM
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u64::from_le_bytes)
}

impl Hot {
    /// Whether the code of the process is not as it was.
    pub(crate) fn is_on(&self) -> bool {
        !self.sites.is_empty()
    }

    /// A call on a file in hand was made by this site, whose thread is in its trap. The site may become one that leads to the stub.
    pub(crate) fn made(&mut self, behind: u64, nr: u32, memory: &Memory, reserve: Reserve) -> Result<()> {
        if !self.allowed || stub::entry(nr, false).is_none() {
            return Ok(());
        }
        if self.counts.len() >= MOST_COUNTED && !self.counts.contains_key(&behind) {
            self.counts.clear();
        }
        let count = self.counts.entry(behind).or_default();
        *count = count.saturating_add(1);
        if *count != HOT || self.sites.len() >= MOST_SITES {
            return Ok(());
        }
        let Some(shape) = Shape::of(memory, behind, nr)? else { return Ok(()) };
        if !self.rooms.iter().any(|room| room.serves(shape.start)) {
            let maps = procfs::maps(memory.pid())?;
            self.rooms.extend(Room::beside(shape.start, &maps, memory));
        }
        let room = self.rooms.iter_mut().find(|room| room.serves(shape.start) && room.is_for(nr));
        let Some(hop) = room.and_then(Room::next) else { return Ok(()) };
        let table = reserve.start + stub::TABLE;
        let code = reserve.start + stub::CODE;
        if self.sites.is_empty() {
            self.allowed = memory.write_forced(code, stub::code()).is_ok();
            memory.write(table, &[0; stub::RECORDS])?;
            self.slots = <[Slot; 2]>::default();
        }
        let record = table + (stub::RECORDS + self.sites.len() * stub::RECORD) as u64;
        let Some(site) = Site::new(shape, hop, record, table) else { return Ok(()) };
        let Some(bytes) = site.record(code) else { return Ok(()) };
        memory.write(record, &bytes)?;
        if self.allowed && site.place(memory) {
            tracing::debug!(pid = memory.pid(), site = behind, nr, "calls without a stop");
            self.sites.push(site);
        }
        Ok(())
    }

    /// Lends the stub what there is of this file, of which so much has just been read or written, and anew of those that it had. The
    /// thread is in a trap, whose answer is all that comes behind this.
    pub(crate) fn lend(
        &mut self,
        (fd, moved): (i32, Option<u64>),
        files: &mut Files,
        memory: &Memory,
        reserve: Reserve,
    ) -> Result<()> {
        if !self.is_on() {
            return Ok(());
        }
        if !self.slots.iter().any(|slot| slot.fd == fd) {
            let free = self.slots.iter().position(|slot| slot.fd < 0);
            self.last = free.unwrap_or(1 - self.last);
            self.slots[self.last] = Slot { fd, ..Slot::default() };
        }
        if let (Some(moved), Some(slot)) = (moved, self.slots.iter_mut().find(|slot| slot.fd == fd)) {
            slot.bulk = moved > BULK;
        }
        self.lend_again(files, memory, reserve)
    }

    /// Lends anew what of those that it had is in hand.
    fn lend_again(&mut self, files: &mut Files, memory: &Memory, reserve: Reserve) -> Result<()> {
        let mut table = [0; stub::RECORDS];
        let mut taken = 0;
        for (at, slot) in self.slots.iter_mut().enumerate() {
            let place = room(reserve, at);
            match (slot.fd >= 0).then(|| files.lend(slot.fd, taken)).flatten() {
                Some(Offer::Reads { offset, ahead }) => {
                    let ahead = ahead.filter(|_| !slot.bulk);
                    slot.lend_read(offset, ahead, memory, place)?;
                }
                Some(Offer::Writes { offset, room }) => {
                    let room = room.min(ROOM);
                    taken += room;
                    slot.lend_room(offset, room);
                }
                None => *slot = Slot::default(),
            }
            table[at] = slot.kind;
            let bytes = &mut table[stub::SLOTS + at * stub::SLOT..][..stub::SLOT];
            bytes[..4].copy_from_slice(&slot.fd.to_le_bytes());
            for (n, word) in [slot.offset, slot.start, slot.end, place].into_iter().enumerate() {
                bytes[8 + 8 * n..][..8].copy_from_slice(&word.to_le_bytes());
            }
        }
        let bits = if self.own.some { files.own_files(stub::MOST_NEAR) } else { 0 };
        table[2..stub::CLOCK].copy_from_slice(&bits.to_le_bytes()[..stub::CLOCK - 2]);
        if bits != 0 {
            files.pass();
            // The server that opened them may have been followed by one that does not know of it.
            let soon = Instant::now() + SOON;
            let until = Some(files.vouched_until().map_or(soon, |vouched| vouched.min(soon)));
            self.own = Own { some: true, named: true, out: true, until };
        }
        if let Some(clock) = &mut self.clock {
            clock.named = Instant::now() < clock.until;
            table[stub::CLOCK] = clock.named.into();
            table[stub::MORE..][..16].copy_from_slice(&clock.bytes());
        }
        memory.write(reserve.start + stub::TABLE, &table)
    }

    /// Takes back what is lent: from now on the files are as they were left, and the stub does nothing with them. The thread is not in the stub.
    pub(crate) fn take_back(&mut self, files: &mut Files, memory: &Memory, reserve: Reserve) -> Result<()> {
        if !self.is_out() {
            return Ok(());
        }
        self.own.out = false;
        let mut table = [0; stub::RECORDS];
        memory.read(reserve.start + stub::TABLE, &mut table)?;
        self.revoke(memory, reserve)?;
        for (at, slot) in self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.out) {
            slot.out = false;
            let bytes = &table[stub::SLOTS + at * stub::SLOT..];
            let (offset, elsewhere) = (word(bytes, 8), word(bytes, 40));
            if slot.writes {
                // Whoever has written something else there has written nothing.
                let length = offset.checked_sub(slot.start).filter(|length| *length <= slot.end - slot.start);
                let mut bytes = vec![0; length.unwrap_or(0) as usize];
                memory.read(room(reserve, at), &mut bytes)?;
                files.take_back_written(slot.fd, bytes, slot.since);
            } else {
                let offset = if offset >> crate::direct::FAR_BITS == 0 { offset } else { slot.offset };
                files.take_back_read(slot.fd, offset, (elsewhere != 0).then_some(elsewhere));
            }
        }
        Ok(())
    }

    /// From now on nothing is lent, whatever the thread does. What has been done with it is still to be taken back.
    pub(crate) fn revoke(&mut self, memory: &Memory, reserve: Reserve) -> Result<()> {
        let clock = self.clock.as_mut().is_some_and(|clock| std::mem::take(&mut clock.named));
        if self.slots.iter().all(|slot| slot.kind == 0) && !self.own.named && !clock {
            return Ok(());
        }
        self.slots.iter_mut().for_each(|slot| slot.kind = 0);
        self.own.named = false;
        memory.write(reserve.start + stub::TABLE, &[0; 8])
    }

    /// The code is as it was. The thread is not in the stub.
    pub(crate) fn cool(&mut self, memory: &Memory) {
        for site in self.sites.drain(..) {
            site.restore(memory);
        }
        self.rooms.clear();
        self.slots = <[Slot; 2]>::default();
        self.own = Own::default();
        self.clock = None;
        // Those that were hot are soon again.
        self.counts.values_mut().for_each(|count| *count = (*count).min(HOT / 2));
    }

    /// Takes the registers of a stopped thread out of the stub; what it was doing there, if it was there.
    fn leave(&self, registers: &mut Registers, memory: &Memory, reserve: Reserve) -> Result<Option<Stage>> {
        let table = reserve.start + stub::TABLE;
        let kept = |at: usize| memory.word(table + at as u64);
        if let Some((site, inside)) =
            self.sites.iter().find_map(|site| Some((site, site.in_hop(registers.rip)?)))
        {
            registers.rip = site.shape.start;
            if inside && site.shape.asks.is_some() {
                registers.rax = kept(stub::KEPT_RAX)?;
            }
            return Ok(Some(Stage::Enters));
        }
        let stage = registers.rip.checked_sub(reserve.start + stub::CODE).and_then(stub::stage);
        let Some(stage) = stage.filter(|_| self.is_on()) else { return Ok(None) };
        let record = if stage == Stage::Enters { registers.rax } else { kept(stub::FROM)? };
        let astray =
            || tern_tracee::Error::Astray { what: "in our code without a site".into(), pid: memory.pid() };
        let site = self.sites.iter().find(|site| site.record == record).ok_or_else(astray)?;
        let shape = &site.shape;
        match stage {
            Stage::Enters | Stage::Asks(_) => {
                registers.rip = shape.start;
                if shape.asks.is_some() {
                    registers.rax = kept(stub::KEPT_RAX)?;
                }
                if stage == Stage::Asks(true) {
                    registers.rcx = kept(stub::KEPT_RCX)?;
                }
            }
            Stage::Returned if !site::is_clock(shape.nr) => registers.rip = shape.call + 2,
            Stage::Looks | Stage::Copies | Stage::Slow | Stage::Returned => {
                (registers.rip, registers.rax) = (shape.call, shape.nr.into());
                // What it has made it makes again.
                registers.orig_rax = u64::MAX;
                if stage == Stage::Copies {
                    (registers.rdi, registers.rsi) = (kept(stub::KEPT_RDI)?, kept(stub::KEPT_RSI)?);
                }
            }
            Stage::Done => registers.rip = shape.call + 2,
        }
        Ok(Some(stage))
    }

    /// When something is to be done without an occasion: written, or not lent any more.
    fn due(&self) -> Option<Instant> {
        let due = |slot: &Slot| slot.out && (slot.writes || slot.kind != 0);
        let own = self.own.until.filter(|_| self.own.named);
        let clock = self.clock.as_ref().filter(|clock| clock.named).map(|clock| clock.until);
        self.slots.iter().filter(|slot| due(slot)).map(|slot| slot.until).chain(own).chain(clock).min()
    }

    /// What of it is due by now: that something be taken back, or else that it be not lent any more.
    fn is_due(&self) -> (bool, bool) {
        let now = Instant::now();
        let due = || self.slots.iter().filter(|slot| slot.out && slot.until <= now);
        let own = self.own.named && self.own.until.is_some_and(|until| until <= now);
        let clock = self.clock.as_ref().is_some_and(|clock| clock.named && clock.until <= now);
        (due().any(|slot| slot.writes), own || clock || due().any(|slot| !slot.writes && slot.kind != 0))
    }

    /// Whether something is lent, or may have been done with what was.
    pub(crate) fn is_out(&self) -> bool {
        self.own.out || self.slots.iter().any(|slot| slot.out)
    }
}

impl Process {
    /// What is lent of its files is taken back. Its thread is in a trap, or stopped and out of the stub.
    ///
    /// # Errors
    /// If it is gone.
    pub fn take_back(&mut self) -> Result<()> {
        self.hot.take_back(&mut self.files, &self.memory, self.reserve)?;
        self.files.is_back();
        if self.files.are_put_down() {
            self.cool();
        }
        Ok(())
    }

    /// The thread has trapped, or is stopped: what was let through is over. But what it does without a stop it may be in the middle
    /// of, until that is taken back.
    pub fn is_back(&mut self) {
        if !self.hot.is_out() {
            self.files.is_back();
        }
    }

    /// Before the answer to a call that home has made, about which everything has been heard: what the stub had it has again.
    ///
    /// # Errors
    /// If it is gone.
    pub fn lend_again(&mut self) -> Result<()> {
        let Self { hot, files, memory, reserve, .. } = self;
        if !hot.own.some && !hot.slots.iter().any(|slot| slot.fd >= 0) {
            return Ok(());
        }
        hot.lend_again(files, memory, *reserve)
    }

    /// A call on a file of this node's own is about to be let through.
    ///
    /// # Errors
    /// If it is gone.
    pub fn passes(&mut self, trap: &Notification) -> Result<()> {
        let Self { hot, files, memory, reserve, borrowed, .. } = self;
        files.pass();
        if *borrowed {
            return Ok(());
        }
        hot.made(trap.ip, trap.nr, memory, *reserve)?;
        hot.own.some = hot.is_on();
        if hot.own.some { hot.lend_again(files, memory, *reserve) } else { Ok(()) }
    }

    /// Its code is as it was, before anybody else has it. Its thread is as for [`take_back`](Self::take_back).
    pub fn cool(&mut self) {
        if self.hot.is_on() {
            self.hot.cool(&self.memory);
        }
    }

    /// What was read ahead may be old.
    ///
    /// # Errors
    /// If it is gone.
    pub fn distrust(&mut self) -> Result<()> {
        self.files.distrust();
        self.hot.revoke(&self.memory, self.reserve)
    }
}

impl Thread {
    /// Takes the thread, which is stopped, out of the stub. True if it was copying there: a fault then was not the program's own.
    ///
    /// # Errors
    /// If it is gone, or has a place there that it cannot have.
    pub(crate) fn leave_stub(&self, stopped: &Stopped, process: &Process) -> Result<bool> {
        if !process.hot.is_on() {
            return Ok(false);
        }
        let mut registers = stopped.registers()?;
        let stage = process.hot.leave(&mut registers, &process.memory, process.reserve)?;
        if stage.is_some() {
            stopped.set_registers(&registers)?;
        }
        Ok(stage == Some(Stage::Copies))
    }

    /// At a stop that somebody has asked for: it may have been for this.
    ///
    /// # Errors
    /// As [`leave_stub`](Self::leave_stub).
    pub(crate) fn hand_back(&self, stopped: &Stopped, process: &mut Process) -> Result<()> {
        if process.hot.is_on() {
            self.leave_stub(stopped, process)?;
            process.take_back()?;
        }
        Ok(())
    }
}

impl Member {
    /// Takes back what is lent of its files, and lets its code be as it was if they are put down; false if its thread must be stopped
    /// for that. Then it is being stopped, and this is to be asked again.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn recall(&mut self) -> Result<bool> {
        let Self { process, threads } = self;
        let all = process.files.are_put_down();
        if !(process.hot.is_out() || all && process.hot.is_on()) {
            return Ok(true);
        }
        let Some(thread) = threads.values().next() else { return Ok(true) };
        let traps = thread.open.is_some() || process.queued.iter().any(|trap| trap.pid == thread.host);
        if traps || thread.standing.is_some() {
            process.take_back()?;
            return Ok(true);
        }
        stop::interrupt(thread.host)?;
        Ok(false)
    }

    /// When something of what is lent is to be taken back.
    pub(crate) fn lent_until(&self) -> Option<Instant> {
        self.process.hot.due()
    }

    /// Takes back what has been lent long enough.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn recall_what_is_due(&mut self) -> Result<()> {
        let (written, read) = self.process.hot.is_due();
        if written {
            self.recall()?;
        } else if read {
            let Process { hot, memory, reserve, .. } = &mut self.process;
            hot.revoke(memory, *reserve)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
