//! Several threads that stand make several calls each, all at once and with one stop a thread. To lead a thread through
//! one call takes two stops ([`crate::inject`]), and in a process of many threads stops are what takes the time.
//!
//! Each thread is given a list of calls in its own memory, and code that makes them one after the other, puts each
//! result in the place of its number, says in the list that it is done, and then sleeps until we interrupt it. So it
//! stops where the kernel looks for signals: from there it can be sent on with any registers, also into the restart of a
//! call. Nothing but that sleep is waited for, for a limited time.

use crate::error::{Error, Result};
use crate::inject::Injection;
use crate::memory::Memory;
use crate::stop::{self, Change, Stop};
use std::time::{Duration, Instant};

/// Where in a process errands are written.
#[derive(Debug, Clone, Copy)]
pub struct Desk {
    /// Address of the code, in memory that is executable.
    pub code: u64,
    /// Where the writable part begins.
    pub start: u64,
    /// Where it ends.
    pub end: u64,
}

/// What one thread is to do.
#[derive(Debug, Clone, Default)]
pub struct Errand {
    /// The calls, [`MOST_CALLS`] at most.
    pub calls: Vec<(i64, [u64; 6])>,
    /// What they point to: bytes of the thread's own, which it may also have written afterwards.
    pub data: [u64; DATA],
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Returned {
    /// What each call returned, errors as negative numbers.
    pub calls: Vec<i64>,
    /// The thread's bytes.
    pub data: [u64; DATA],
}

/// So many calls are made at most.
pub const MOST_CALLS: usize = 4;
/// Words that a thread has for what its calls point to.
pub const DATA: usize = 6;

/// Words of one entry of a list: the call's number, in whose place its result is put, and its arguments.
const ENTRY: usize = 7;
/// Behind the last entry: this instead of a number, then a word that becomes 1.
const END: u64 = u64::MAX;
/// Words of a list and its data.
const SLOT: usize = MOST_CALLS * ENTRY + 2 + DATA;
const BYTES: u64 = SLOT as u64 * 8;
/// How long they may take, all together.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long we sleep between looks.
const NAP: Duration = Duration::from_micros(50);

std::arch::global_asm!(
    ".pushsection .rodata",
    ".globl tern_errand_begin, tern_errand_end",
    // rbx: where it is in the list
    "tern_errand_begin:",
    "2: mov rax, [rbx]",
    "cmp rax, -1",
    "je 3f",
    "mov rdi, [rbx + 8]",
    "mov rsi, [rbx + 16]",
    "mov rdx, [rbx + 24]",
    "mov r10, [rbx + 32]",
    "mov r8, [rbx + 40]",
    "mov r9, [rbx + 48]",
    "syscall",
    "mov [rbx], rax",
    "add rbx, 56",
    "jmp 2b",
    "3: add rbx, 8",
    "mov dword ptr [rbx], 1",
    // futex(done, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, 1, no time limit)
    "4: mov rdi, rbx",
    "mov esi, 128",
    "mov edx, 1",
    "xor r10d, r10d",
    "mov eax, 202",
    "syscall",
    "jmp 4b",
    "tern_errand_end:",
    ".popsection",
);

unsafe extern "C" {
    static tern_errand_begin: u8;
    static tern_errand_end: u8;
}

fn code() -> &'static [u8] {
    let begin = &raw const tern_errand_begin;
    let len = (&raw const tern_errand_end).addr() - begin.addr();
    // SAFETY: the symbols enclose the code above, which lies in read-only memory of this program.
    unsafe { std::slice::from_raw_parts(begin, len) }
}

/// Sends threads of one process, all of which stand, on these errands: `errand` is told which thread, and where that will
/// have its data. What came of them, in their order.
///
/// # Errors
/// If one is gone or strays, or they take too long; others may then still be under way.
pub fn errands(
    threads: &mut [Injection],
    memory: &Memory,
    desk: Desk,
    errand: &dyn Fn(usize, u64) -> Errand,
) -> Result<Vec<Returned>> {
    // Each time: a hostile process may have put something else there since.
    memory.write_forced(desk.code, code())?;
    let at_once = ((desk.end - desk.start) / BYTES).max(1) as usize;
    let mut all = Vec::with_capacity(threads.len());
    for (part, threads) in threads.chunks_mut(at_once).enumerate() {
        let begun: Vec<Errand> = (0..threads.len())
            .map(|at| errand(part * at_once + at, desk.start + at as u64 * BYTES + BYTES - DATA as u64 * 8))
            .collect();
        let mut lists = Vec::with_capacity(threads.len() * SLOT);
        for errand in &begun {
            lists.extend(errand.list(memory.pid())?);
        }
        let bytes: Vec<u8> = lists.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write_forced(desk.start, &bytes)?;
        for (at, thread) in threads.iter_mut().enumerate() {
            thread.set_out(desk.code, desk.start + at as u64 * BYTES)?;
        }
        let lists = await_all(threads, memory, desk.start, &begun)?;
        // All of them before the first is waited for.
        threads.iter().try_for_each(|thread| stop::interrupt(thread.pid()))?;
        threads.iter_mut().try_for_each(Injection::come_back)?;
        all.extend(begun.iter().zip(lists.chunks(SLOT)).map(|(errand, list)| errand.returned(list)));
    }
    Ok(all)
}

/// Waits until all have done what they were told, and returns their lists.
fn await_all(threads: &mut [Injection], memory: &Memory, start: u64, begun: &[Errand]) -> Result<Vec<u64>> {
    let give_up = Instant::now() + PATIENCE;
    let mut bytes = vec![0; threads.len() * SLOT * 8];
    loop {
        std::thread::yield_now();
        memory.read(start, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        let lists: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let undone = |at: usize| lists[at * SLOT + begun[at].calls.len() * ENTRY + 1] != 1;
        if (0..threads.len()).all(|at| !undone(at)) {
            return Ok(lists);
        }
        if Instant::now() > give_up {
            let what = "it never makes the calls that it is to make".into();
            return Err(Error::Astray { what, pid: memory.pid() });
        }
        for (_, thread) in threads.iter_mut().enumerate().filter(|(at, _)| undone(*at)) {
            if let Some((_, change)) = stop::wait(thread.pid(), false)? {
                thread.stopped_on_the_way(change)?;
            }
        }
        std::thread::sleep(NAP);
    }
}

impl Errand {
    fn list(&self, pid: i32) -> Result<[u64; SLOT]> {
        if self.calls.len() > MOST_CALLS {
            return Err(Error::Astray { what: "an errand of too many calls".into(), pid });
        }
        let mut list = [0; SLOT];
        for (entry, (nr, args)) in list.chunks_exact_mut(ENTRY).zip(&self.calls) {
            entry[0] = nr.cast_unsigned();
            entry[1..].copy_from_slice(args);
        }
        list[self.calls.len() * ENTRY] = END;
        list[SLOT - DATA..].copy_from_slice(&self.data);
        Ok(list)
    }

    fn returned(&self, list: &[u64]) -> Returned {
        let entries = list.chunks_exact(ENTRY).take(self.calls.len());
        let mut data = [0; DATA];
        data.copy_from_slice(&list[SLOT - DATA..]);
        Returned { calls: entries.map(|entry| entry[0].cast_signed()).collect(), data }
    }
}

impl Injection {
    fn set_out(&mut self, code: u64, list: u64) -> Result<()> {
        let registers = self.before().calling(code, 0, &[0; 6]);
        let stopped = self.take()?;
        stopped.set_registers(&crate::Registers { rbx: list, ..registers })?;
        stopped.resume(0)
    }

    /// It has stopped before it was done: by job control, or by an interrupt from before.
    fn stopped_on_the_way(&mut self, change: Change) -> Result<()> {
        let Change::Stopped(stopped) = change else { return Err(Error::Gone { pid: self.pid() }) };
        match stopped.stop {
            stop @ (Stop::Signal(libc::SIGSTOP) | Stop::Group(_)) => self.noted(stop),
            Stop::Interrupt => {}
            stop => return Err(self.strayed(stop)),
        }
        stopped.resume(0)
    }

    /// It is done, and has been interrupted: waits for that stop.
    fn come_back(&mut self) -> Result<()> {
        loop {
            let stopped = stop::wait_stop(self.pid())?;
            match stopped.stop {
                Stop::Interrupt | Stop::Group(_) => {
                    self.is_back(stopped);
                    return Ok(());
                }
                stop @ Stop::Signal(libc::SIGSTOP) => self.noted(stop),
                stop => return Err(self.strayed(stop)),
            }
            // Another stop may have taken the request with it.
            stop::interrupt(self.pid())?;
            stopped.resume(0)?;
        }
    }

    fn strayed(&self, stop: Stop) -> Error {
        Error::Astray { what: format!("{stop:?} during calls of ours"), pid: self.pid() }
    }
}
