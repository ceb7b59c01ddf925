//! Batched injection: several stopped threads make several calls each, all at once and with one
//! stop per thread. A single injected call takes two stops ([`crate::inject`]), and in a process
//! with many threads the stops take most of the time.
//!
//! Each thread gets a list of calls in the process's memory, and runs code that makes them one
//! after the other, stores each result over the call's number, sets the flag at the end of the
//! list, and sleeps on a futex until the tracer interrupts it. The thread then stops where the
//! kernel checks for signals. From there it can be resumed with any registers, also into the
//! restart of a call. The tracer waits only for the flag, and for a limited time.
//!
//! A list for a single thread may fill all memory that is available for it; the calls of a longer
//! list are made in parts ([`run_calls`]). If a filter traps the calls, the tracer answers the
//! traps meanwhile.

use crate::allowance::Allowance;
use crate::error::{Error, Result};
use crate::inject::Injection;
use crate::memory::Memory;
use crate::stop::{self, Stop, Stopped, WaitEvent};
use std::time::Duration;

/// Memory for batches in a process.
#[derive(Debug, Clone, Copy)]
pub struct BatchArea {
    /// Address of the code, in executable memory.
    pub code: u64,
    /// Start of the writable part.
    pub start: u64,
    /// End of the writable part.
    pub end: u64,
}

/// A call to inject: its number and arguments.
pub type InjectedCall = (i64, [u64; 6]);

/// The calls of one thread.
#[derive(Debug, Clone, Default)]
pub struct InjectBatch {
    /// The calls, [`MAX_BATCH_CALLS`] at most.
    pub calls: Vec<InjectedCall>,
    /// Data of the thread that the calls point to, and may write.
    pub data: [u64; DATA_WORDS],
}

/// The results of one thread.
#[derive(Debug, Clone)]
pub struct BatchResult {
    /// The result of each call, errors as negative numbers.
    pub calls: Vec<i64>,
    /// The thread's data after the calls.
    pub data: [u64; DATA_WORDS],
}

/// Maximum number of calls per thread.
pub const MAX_BATCH_CALLS: usize = 4;
/// Words of data per thread.
pub const DATA_WORDS: usize = 6;

/// Words per entry of a list: the call's number, which its result replaces, and six arguments.
const ENTRY_WORDS: usize = 7;
/// Ends a list: takes the place of a number, and is followed by a word that is set to 1 when all
/// calls are made.
const END_MARK: u64 = u64::MAX;
/// Words of a list's end: [`END_MARK`] and the flag.
const END_WORDS: usize = 2;
/// Words of a list with its data.
const SLOT_WORDS: usize = MAX_BATCH_CALLS * ENTRY_WORDS + END_WORDS + DATA_WORDS;
const SLOT_BYTES: u64 = SLOT_WORDS as u64 * 8;
/// The time that each thread has for all calls of a batch ([`Allowance`]).
const BATCH_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between checks of the flags.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

std::arch::global_asm!(
    ".pushsection .rodata",
    ".globl tern_batch_begin, tern_batch_end",
    // rbx: position in the list
    "tern_batch_begin:",
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
    "tern_batch_end:",
    ".popsection",
);

unsafe extern "C" {
    static tern_batch_begin: u8;
    static tern_batch_end: u8;
}

fn code() -> &'static [u8] {
    let begin = &raw const tern_batch_begin;
    let len = (&raw const tern_batch_end).addr() - begin.addr();
    // SAFETY: the symbols enclose the code above, in read-only memory of this program.
    unsafe { std::slice::from_raw_parts(begin, len) }
}

/// Runs batches in threads of one process, all of which are stopped. `batch` returns the calls of
/// a thread, given its index and the address of its data. Returns the results in the order of the
/// threads.
///
/// # Errors
/// If a thread is gone or in an unexpected state, or the calls take too long. Other threads may
/// still be making calls then.
pub fn run_batches(
    threads: &mut [Injection],
    memory: &Memory,
    area: BatchArea,
    batch: &dyn Fn(usize, u64) -> InjectBatch,
) -> Result<Vec<BatchResult>> {
    // Written each time: a hostile process may have changed it.
    memory.write_forced(area.code, code())?;
    let per_round = ((area.end - area.start) / SLOT_BYTES).max(1) as usize;
    let mut all = Vec::with_capacity(threads.len());
    for (part, threads) in threads.chunks_mut(per_round).enumerate() {
        let started: Vec<InjectBatch> = (0..threads.len())
            .map(|at| {
                batch(
                    part * per_round + at,
                    area.start + at as u64 * SLOT_BYTES + SLOT_BYTES - DATA_WORDS as u64 * 8,
                )
            })
            .collect();
        let mut lists = Vec::with_capacity(threads.len() * SLOT_WORDS);
        for batch in &started {
            lists.extend(batch.list(memory.pid())?);
        }
        let bytes: Vec<u8> = lists.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write_forced(area.start, &bytes)?;
        for (at, thread) in threads.iter_mut().enumerate() {
            let begun = thread.start_batch(area.code, area.start + at as u64 * SLOT_BYTES);
            thread.note_gone(begun)?;
        }
        let lists = wait_for_all(threads, memory, area.start, &started)?;
        // Interrupt all before waiting for the first.
        threads.iter().try_for_each(|thread| stop::interrupt(thread.pid()))?;
        threads.iter_mut().try_for_each(|thread| {
            let finished = thread.finish_batch();
            thread.note_gone(finished)
        })?;
        all.extend(started.iter().zip(lists.chunks(SLOT_WORDS)).map(|(batch, list)| batch.returned(list)));
    }
    Ok(all)
}

/// Has one stopped thread make these calls in order, and returns their results, errors as negative
/// numbers. A call that fails does not end the list. `wait` is called again and again until the calls
/// are made: it waits a short time, and answers the calls that a filter has trapped.
///
/// # Errors
/// If the thread is gone or in an unexpected state, if the calls take too long, or the error of
/// `wait`.
pub fn run_calls(
    thread: &mut Injection,
    memory: &Memory,
    area: BatchArea,
    calls: &[InjectedCall],
    wait: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<i64>> {
    // Written each time: a hostile process may have changed it.
    memory.write_forced(area.code, code())?;
    let mut results = Vec::with_capacity(calls.len());
    for part in calls.chunks(max_list_calls(area)) {
        let made = thread.run_list(memory, area, part, wait);
        results.extend(thread.note_gone(made)?);
    }
    Ok(results)
}

/// The default `wait` of [`run_calls`].
///
/// # Errors
/// None.
pub fn wait_briefly() -> Result<()> {
    stop::pause(POLL_INTERVAL);
    Ok(())
}

/// Number of calls in the longest list for which an area has space.
fn max_list_calls(area: BatchArea) -> usize {
    let words = (area.end - area.start) as usize / 8;
    (words.saturating_sub(END_WORDS) / ENTRY_WORDS).max(1)
}

/// The words of a list of calls.
fn list_of(calls: &[InjectedCall]) -> Vec<u64> {
    let mut list = Vec::with_capacity(calls.len() * ENTRY_WORDS + END_WORDS);
    for (nr, args) in calls {
        list.push(nr.cast_unsigned());
        list.extend_from_slice(args);
    }
    list.extend([END_MARK, 0]);
    list
}

/// Waits until all threads have made their calls, and returns their lists.
fn wait_for_all(
    threads: &mut [Injection],
    memory: &Memory,
    start: u64,
    started: &[InjectBatch],
) -> Result<Vec<u64>> {
    let mut allowances: Vec<Allowance> =
        threads.iter().map(|thread| Allowance::new(thread.pid(), BATCH_TIMEOUT)).collect();
    let mut bytes = vec![0; threads.len() * SLOT_WORDS * 8];
    let mut read = || -> Result<Vec<u64>> {
        memory.read(start, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    };
    loop {
        std::thread::yield_now();
        let lists = read()?;
        let is_pending = |at: usize| lists[at * SLOT_WORDS + started[at].calls.len() * ENTRY_WORDS + 1] != 1;
        if (0..threads.len()).all(|at| !is_pending(at)) {
            // Read again: results come before the flag in memory, and a thread may have stored both
            // between the reading of the two.
            return read();
        }
        let pending = |(at, allowance): (usize, &mut Allowance)| is_pending(at) && allowance.is_exceeded();
        if allowances.iter_mut().enumerate().any(pending) {
            let what = "it did not make the injected calls in time".into();
            return Err(Error::Inconsistent { what, pid: memory.pid() });
        }
        for (_, thread) in threads.iter_mut().enumerate().filter(|(at, _)| is_pending(*at)) {
            if let Some((_, change)) = stop::wait(thread.pid(), false)? {
                let resumed = thread.stopped_early(change);
                thread.note_gone(resumed)?;
            }
        }
        stop::pause(POLL_INTERVAL);
    }
}

impl InjectBatch {
    fn list(&self, pid: i32) -> Result<[u64; SLOT_WORDS]> {
        if self.calls.len() > MAX_BATCH_CALLS {
            return Err(Error::Inconsistent { what: "a batch with too many calls".into(), pid });
        }
        let mut list = [0; SLOT_WORDS];
        let calls = list_of(&self.calls);
        list[..calls.len()].copy_from_slice(&calls);
        list[SLOT_WORDS - DATA_WORDS..].copy_from_slice(&self.data);
        Ok(list)
    }

    fn returned(&self, list: &[u64]) -> BatchResult {
        let entries = list.chunks_exact(ENTRY_WORDS).take(self.calls.len());
        let mut data = [0; DATA_WORDS];
        data.copy_from_slice(&list[SLOT_WORDS - DATA_WORDS..]);
        BatchResult { calls: entries.map(|entry| entry[0].cast_signed()).collect(), data }
    }
}

impl Injection {
    /// Makes the calls of one list.
    fn run_list(
        &mut self,
        memory: &Memory,
        area: BatchArea,
        calls: &[InjectedCall],
        wait: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<i64>> {
        /// Number of polls before the first wait: most lists are short.
        const MAX_YIELDS: u32 = 20;
        let list: Vec<u8> = list_of(calls).iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write_forced(area.start, &list)?;
        self.start_batch(area.code, area.start)?;
        let flag = area.start + list.len() as u64 - 8;
        let mut allowance = Allowance::new(self.pid(), BATCH_TIMEOUT);
        for turn in 0u32.. {
            let state = memory.word(flag);
            // If the thread is gone, its memory cannot be read, and this wait reports the exit.
            if let Some((_, change)) = stop::wait(self.pid(), false)? {
                self.stopped_early(change)?;
            }
            if state? == 1 {
                break;
            }
            if allowance.is_exceeded() {
                let what = "it did not make the injected calls in time".into();
                return Err(Error::Inconsistent { what, pid: self.pid() });
            }
            if turn < MAX_YIELDS { std::thread::yield_now() } else { wait()? }
        }
        let mut made = vec![0; calls.len() * ENTRY_WORDS * 8];
        memory.read(area.start, &mut made)?;
        stop::interrupt(self.pid())?;
        self.finish_batch()?;
        let (words, _) = made.as_chunks::<8>();
        Ok(words.iter().step_by(ENTRY_WORDS).map(|word| i64::from_le_bytes(*word)).collect())
    }

    fn start_batch(&mut self, code: u64, list: u64) -> Result<()> {
        let registers = self.saved_registers().calling(code, 0, &[0; 6]);
        let stopped = self.take()?;
        stopped.set_registers(&crate::Registers { rbx: list, ..registers })?;
        stopped.resume(0)
    }

    /// The thread stopped before its calls were made, by job control or an earlier interrupt.
    fn stopped_early(&mut self, change: WaitEvent) -> Result<()> {
        let WaitEvent::Stopped(stopped) = change else { return Err(Error::Gone { pid: self.pid() }) };
        match stopped.stop {
            stop @ (Stop::Signal(libc::SIGSTOP) | Stop::Group(_)) => self.note_stop(stop),
            Stop::Interrupt => {}
            stop => return Err(self.unexpected_stop(stop)),
        }
        stopped.resume(0)
    }

    /// The thread has made its calls and was interrupted: waits for that stop.
    fn finish_batch(&mut self) -> Result<()> {
        loop {
            let stopped = stop::wait_stop(self.pid())?;
            match stopped.stop {
                Stop::Interrupt | Stop::Group(_) => {
                    self.set_stopped(stopped);
                    return Ok(());
                }
                stop @ Stop::Signal(libc::SIGSTOP) => self.note_stop(stop),
                stop => return Err(self.unexpected_stop(stop)),
            }
            // The kernel may have cleared the interrupt request at another stop.
            stop::interrupt(self.pid())?;
            stopped.resume(0)?;
        }
    }

    /// At the exec stop another thread has executed a program, and has this thread's number now.
    fn unexpected_stop(&self, stop: Stop) -> Error {
        if stop == Stop::Exec {
            stop::defer(Stopped::again(self.pid(), stop));
            return Error::Gone { pid: self.pid() };
        }
        Error::Inconsistent { what: format!("{stop:?} during batched calls"), pid: self.pid() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_fill_their_area() {
        let area = BatchArea { code: 0, start: 0x1000, end: 0x1800 };
        let most = max_list_calls(area);
        let calls = vec![(libc::SYS_munmap, [1, 2, 3, 4, 5, 6]); most];
        let list = list_of(&calls);
        assert!(list.len() * 8 <= 0x800 && (list.len() + ENTRY_WORDS) * 8 > 0x800);
        assert_eq!(list[..ENTRY_WORDS], [11, 1, 2, 3, 4, 5, 6]);
        assert_eq!(list[list.len() - END_WORDS..], [END_MARK, 0]);
        assert_eq!(max_list_calls(BatchArea { end: area.start, ..area }), 1);
    }
}
