//! Seize, wait, continue: the only door to ptrace.
//!
//! ```text
//!            seize                 interrupt, signal, fork, exec, exit
//!  (untraced) ────▶ running ─────────────────────────────▶ Stopped
//!                      ▲                                      │
//!                      └──────── resume, listen, to_call ─────┤
//!                                                             └─ detach ─▶ (untraced)
//! ```
//! A [`Stopped`] exists only where the kernel has reported a stop, and continuing consumes it: no request
//! that needs a stopped process can be made on a running one. The process may still be killed at any
//! instant; every request can therefore fail with [`Error::Gone`].

use crate::error::{Error, Result};
use crate::procfs;
use crate::registers::{Registers, Xstate};
use crate::siginfo::Siginfo;
use std::cell::RefCell;
use std::os::raw::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Trace the process, let it run, and have forks, execs and its exit reported. The stops of [`Stopped::to_call`]
/// can be told from signals.
pub const FOLLOW: u32 = (libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEEXEC) as u32;
/// Have only execs reported and new threads, which are traced as well.
pub const FOLLOW_THREADS: u32 =
    (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACEEXEC) as u32;
/// Kill the process when its tracer dies.
pub const EXIT_KILL: u32 = libc::PTRACE_O_EXITKILL as u32;

const EVENT_STOP: c_int = 128;

/// A process, or a thread, at a stop.
#[derive(Debug)]
#[must_use = "a stopped process stands still until it is resumed or detached"]
pub struct Stopped {
    pid: i32,
    /// Why it stopped.
    pub stop: Stop,
}

/// Why a process stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// About to be delivered this signal; `resume(signal)` delivers it, `resume(0)` drops it.
    Signal(i32),
    /// A group stop by this signal (SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU); `listen` keeps it stopped.
    Group(i32),
    /// We interrupted it, or it is new and was attached by its parent's stop; also seen at SIGCONT.
    Interrupt,
    /// After [`Stopped::to_call`]: a system call begins, or ends.
    Call,
    /// It forked; [`Stopped::message`] is the child's pid.
    Fork,
    /// As fork, by vfork.
    Vfork,
    /// It made a thread, or cloned with odd flags.
    Clone,
    /// It executed a new program.
    Exec,
}

/// What the kernel reported of a traced process.
#[derive(Debug)]
pub enum Change {
    /// It stopped.
    Stopped(Stopped),
    /// It ended with this exit status (0 to 255).
    Exited(i32),
    /// It was killed by this signal; whether a core was dumped.
    Killed(i32, bool),
}

fn request(operation: &'static str, op: u32, pid: i32, addr: usize, data: usize) -> Result<i64> {
    // SAFETY: every request passed here takes integers, or a `data` pointer that the caller in this crate
    // keeps valid and large enough for that request over the call.
    let done = unsafe {
        libc::ptrace(op as _, pid, ptr::without_provenance_mut::<c_void>(addr), data as *mut c_void)
    };
    if done == -1 {
        return Err(Error::last(operation, pid));
    }
    Ok(done)
}

/// Begins to trace a process or thread without stopping it (PTRACE_SEIZE).
///
/// # Errors
/// If the caller may not trace it, if somebody else does, or if it is gone; it is untouched then.
pub fn seize(pid: i32, options: u32) -> Result<()> {
    request("seize", libc::PTRACE_SEIZE, pid, 0, options as usize).map(drop)
}

/// Asks a running tracee to stop; the stop is reported by [`wait`]. Asked again before the stop, it counts
/// once. A stop for another reason that comes first may take the request with it (the kernel clears it at any
/// stop): whoever waits for this one must ask again after each other.
///
/// # Errors
/// If it is gone.
pub fn interrupt(pid: i32) -> Result<()> {
    request("interrupt", libc::PTRACE_INTERRUPT, pid, 0, 0).map(drop)
}

/// Waits for what becomes of a tracee. `pid` -1 stands for any of this thread's tracees and children;
/// `block` says whether to wait until there is something.
///
/// # Errors
/// `Gone` if there is no such tracee or child left.
pub fn wait(pid: i32, block: bool) -> Result<Option<(i32, Change)>> {
    if let Some(kept) = take_kept(pid) {
        return Ok(Some(kept));
    }
    if block && pid > 0 {
        return wait_for_one(pid, None);
    }
    let mut status = 0;
    let flags = libc::__WALL | libc::__WNOTHREAD | if block { 0 } else { libc::WNOHANG };
    let who = loop {
        // SAFETY: `status` is a valid place for the status.
        let who = unsafe { libc::waitpid(pid, &raw mut status, flags) };
        if who >= 0 {
            break who;
        }
        match std::io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::EINTR) => {}
            e if e.raw_os_error() == Some(libc::ECHILD) => return Err(Error::Gone { pid }),
            e => return Err(Error::from_io("wait", pid, e)),
        }
    };
    if who == 0 {
        return Ok(None);
    }
    Ok(Some((who, understand(who, status))))
}

thread_local! {
    /// Stops that have come to somebody who waited for something else.
    static KEPT: RefCell<Vec<Stopped>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a stop for whoever waits next for this one, or for any.
pub(crate) fn keep(stopped: Stopped) {
    KEPT.with_borrow_mut(|kept| kept.push(stopped));
}

/// Whether there are such stops: the kernel does not tell of them again.
#[must_use]
pub fn has_kept() -> bool {
    KEPT.with_borrow(|kept| !kept.is_empty())
}

fn take_kept(pid: i32) -> Option<(i32, Change)> {
    KEPT.with_borrow_mut(|kept| {
        let at = kept.iter().position(|stopped| pid == -1 || stopped.pid == pid)?;
        let stopped = kept.remove(at);
        Some((stopped.pid, Change::Stopped(stopped)))
    })
}

/// Waits for one. Not by waiting in the kernel: that tells nothing of a first thread which has ended before all others of its
/// process have been waited for too, which nobody would do meanwhile. `None` if it sleeps where no signal wakes it, and it is later than `until`.
fn wait_for_one(pid: i32, until: Option<Instant>) -> Result<Option<(i32, Change)>> {
    /// What stops soon stops while we yield so often.
    const SOON: u32 = 200;
    for turn in 0u32.. {
        if let Some(found) = wait(pid, false)? {
            return Ok(Some(found));
        }
        if turn < SOON {
            std::thread::yield_now();
            continue;
        }
        if turn % 16 == 0 && procfs::has_ended(pid) {
            // What it had to say it may have said just then.
            return wait(pid, false)?.ok_or(Error::Gone { pid }).map(Some);
        }
        let over = turn % 16 == 0 && until.is_some_and(|until| Instant::now() > until);
        if over && procfs::status(pid).is_ok_and(|is| is.state == b'D') {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Err(Error::Gone { pid })
}

fn understand(pid: i32, status: c_int) -> Change {
    if libc::WIFEXITED(status) {
        return Change::Exited(libc::WEXITSTATUS(status));
    }
    if libc::WIFSIGNALED(status) {
        return Change::Killed(libc::WTERMSIG(status), libc::WCOREDUMP(status));
    }
    let signal = libc::WSTOPSIG(status);
    let stop = match status >> 16 {
        EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupt,
        EVENT_STOP => Stop::Group(signal),
        libc::PTRACE_EVENT_FORK => Stop::Fork,
        libc::PTRACE_EVENT_VFORK => Stop::Vfork,
        libc::PTRACE_EVENT_CLONE => Stop::Clone,
        libc::PTRACE_EVENT_EXEC => Stop::Exec,
        _ if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        _ => Stop::Signal(signal),
    };
    Change::Stopped(Stopped { pid, stop })
}

/// Waits until this process stops.
///
/// # Errors
/// `Gone` if it ends instead.
pub fn wait_stop(pid: i32) -> Result<Stopped> {
    match wait(pid, true)? {
        Some((_, Change::Stopped(stopped))) => Ok(stopped),
        _ => Err(Error::Gone { pid }),
    }
}

/// The same, unless it sleeps then where no signal wakes it, as for a page that is another node's: nothing then, and it stops when it
/// wakes.
///
/// # Errors
/// `Gone` if it ends instead.
pub fn wait_stop_awake(pid: i32, until: Instant) -> Result<Option<Stopped>> {
    if let Some((_, Change::Stopped(kept))) = take_kept(pid) {
        return Ok(Some(kept));
    }
    match wait_for_one(pid, Some(until))? {
        Some((_, Change::Stopped(stopped))) => Ok(Some(stopped)),
        Some(_) => Err(Error::Gone { pid }),
        None => Ok(None),
    }
}

impl Stopped {
    /// Its pid, as this process sees it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Changes which events are reported.
    ///
    /// # Errors
    /// If it is gone.
    pub fn set_options(&self, options: u32) -> Result<()> {
        request("set options", libc::PTRACE_SETOPTIONS, self.pid, 0, options as usize).map(drop)
    }

    /// What an event is about: the child's pid at a fork.
    ///
    /// # Errors
    /// If it is gone.
    pub fn message(&self) -> Result<u64> {
        let mut message = 0u64;
        request("event message", libc::PTRACE_GETEVENTMSG, self.pid, 0, (&raw mut message) as usize)?;
        Ok(message)
    }

    /// The eight bytes at an address.
    ///
    /// # Errors
    /// If it is gone, or nothing is mapped there.
    pub fn word(&self, addr: u64) -> Result<u64> {
        let mut word = 0u64;
        // The kernel's own interface, unlike the library's, returns what is read through a pointer.
        // SAFETY: `word` is a valid place for a word.
        let done = unsafe {
            libc::syscall(libc::SYS_ptrace, u64::from(libc::PTRACE_PEEKDATA), self.pid, addr, &raw mut word)
        };
        if done < 0 { Err(Error::last("read a word", self.pid)) } else { Ok(word) }
    }

    /// Its general registers.
    ///
    /// # Errors
    /// If it is gone.
    pub fn registers(&self) -> Result<Registers> {
        let mut registers = Registers::default();
        request("read registers", libc::PTRACE_GETREGS, self.pid, 0, (&raw mut registers) as usize)?;
        Ok(registers)
    }

    /// Replaces its general registers. With `orig_rax >= 0` and a restart code in `rax`, the kernel does the
    /// restart when it resumes, as it would have done natively.
    ///
    /// # Errors
    /// If it is gone, or if a segment or base address is not allowed.
    pub fn set_registers(&self, registers: &Registers) -> Result<()> {
        let data = ptr::from_ref(registers) as usize;
        request("write registers", libc::PTRACE_SETREGS, self.pid, 0, data).map(drop)
    }

    /// Its extended registers (x87 to AMX), in the machine's own layout.
    ///
    /// # Errors
    /// If it is gone.
    pub fn xstate(&self) -> Result<Xstate> {
        // As long as it was the last time, and a little longer, by which it is seen that it is not cut off.
        const MOST: usize = 64 << 10;
        static ROOM: AtomicUsize = AtomicUsize::new(MOST);
        let mut bytes = vec![0u8; ROOM.load(Ordering::Relaxed)];
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let data = (&raw mut part) as usize;
        request("read extended registers", libc::PTRACE_GETREGSET, self.pid, Xstate::NOTE, data)?;
        if part.iov_len == bytes.len() && bytes.len() < MOST {
            bytes.resize(MOST, 0);
            (part.iov_base, part.iov_len) = (bytes.as_mut_ptr().cast(), MOST);
            let data = (&raw mut part) as usize;
            request("read extended registers", libc::PTRACE_GETREGSET, self.pid, Xstate::NOTE, data)?;
        }
        bytes.truncate(part.iov_len);
        ROOM.store((bytes.len() + 64).min(MOST), Ordering::Relaxed);
        Ok(Xstate(bytes))
    }

    /// Replaces its extended registers.
    ///
    /// # Errors
    /// If it is gone, or if the layout is not this machine's.
    pub fn set_xstate(&self, xstate: &Xstate) -> Result<()> {
        let mut part = libc::iovec { iov_base: xstate.0.as_ptr() as *mut c_void, iov_len: xstate.0.len() };
        let data = (&raw mut part) as usize;
        request("write extended registers", libc::PTRACE_SETREGSET, self.pid, Xstate::NOTE, data).map(drop)
    }

    /// Its mask of blocked signals (bit n-1 for signal n). Inside a call with a temporary mask, the mask
    /// that it will get back.
    ///
    /// # Errors
    /// If it is gone.
    pub fn sigmask(&self) -> Result<u64> {
        let mut mask = 0u64;
        request("read signal mask", libc::PTRACE_GETSIGMASK, self.pid, 8, (&raw mut mask) as usize)?;
        Ok(mask)
    }

    /// Replaces its mask of blocked signals.
    ///
    /// # Errors
    /// If it is gone.
    pub fn set_sigmask(&self, mask: u64) -> Result<()> {
        request("write signal mask", libc::PTRACE_SETSIGMASK, self.pid, 8, (&raw const mask) as usize)
            .map(drop)
    }

    /// The signal that it is about to be delivered, in full.
    ///
    /// # Errors
    /// If it is gone, or not at a signal stop.
    pub fn siginfo(&self) -> Result<[u8; 128]> {
        let mut info = [0u8; 128];
        request("read siginfo", libc::PTRACE_GETSIGINFO, self.pid, 0, info.as_mut_ptr() as usize)?;
        Ok(info)
    }

    /// Replaces it.
    ///
    /// # Errors
    /// If it is gone, or not at a signal stop.
    pub fn set_siginfo(&self, info: &[u8; 128]) -> Result<()> {
        request("write siginfo", libc::PTRACE_SETSIGINFO, self.pid, 0, info.as_ptr() as usize).map(drop)
    }

    /// Signals that are pending but not delivered: `(own to the thread, shared by the process)`.
    ///
    /// # Errors
    /// If it is gone.
    pub fn pending(&self) -> Result<(Vec<Siginfo>, Vec<Siginfo>)> {
        Ok((self.peek(0)?, self.peek(1)?))
    }

    fn peek(&self, flags: u32) -> Result<Vec<Siginfo>> {
        let mut all = Vec::new();
        loop {
            let mut infos = [[0u8; 128]; 16];
            let ask = libc::ptrace_peeksiginfo_args { off: all.len() as u64, flags, nr: 16 };
            // SAFETY: room for 16 records is given, and `ask` asks for at most 16.
            let n = unsafe {
                libc::ptrace(
                    libc::PTRACE_PEEKSIGINFO as _,
                    self.pid,
                    &raw const ask,
                    infos.as_mut_ptr().cast::<c_void>(),
                )
            };
            let n = usize::try_from(n).map_err(|_e| Error::last("read pending signals", self.pid))?;
            all.extend_from_slice(&infos[..n]);
            if n < infos.len() {
                return Ok(all);
            }
        }
    }

    /// The thread's rseq area: `(address, size, signature)`; address 0 if there is none.
    ///
    /// # Errors
    /// If it is gone or the kernel (before 5.13) cannot tell.
    pub fn rseq(&self) -> Result<(u64, u32, u32)> {
        // struct ptrace_rseq_configuration: u64 pointer, u32 size, u32 signature, u32 flags, u32 pad.
        const GET_RSEQ: u32 = 0x420f;
        let mut words = [0u32; 6];
        request("read rseq", GET_RSEQ, self.pid, 24, words.as_mut_ptr() as usize)?;
        Ok((u64::from(words[0]) | u64::from(words[1]) << 32, words[2], words[3]))
    }

    /// Lets it run, delivering `signal` if it is not 0.
    ///
    /// # Errors
    /// If it is gone.
    pub fn resume(self, signal: i32) -> Result<()> {
        request("resume", libc::PTRACE_CONT, self.pid, 0, signal as usize).map(drop)
    }

    /// Lets it run until its next system call begins or ends.
    ///
    /// # Errors
    /// If it is gone.
    pub fn to_call(self) -> Result<()> {
        request("run to a call", libc::PTRACE_SYSCALL, self.pid, 0, 0).map(drop)
    }

    /// Lets it run for one instruction.
    ///
    /// # Errors
    /// If it is gone.
    pub fn step(self, signal: i32) -> Result<()> {
        request("step", libc::PTRACE_SINGLESTEP, self.pid, 0, signal as usize).map(drop)
    }

    /// Keeps it in its group stop, but lets SIGCONT be reported.
    ///
    /// # Errors
    /// If it is gone, or not in a group stop.
    pub fn listen(self) -> Result<()> {
        request("listen", libc::PTRACE_LISTEN, self.pid, 0, 0).map(drop)
    }

    /// Lets it go, delivering `signal` if it is not 0. From then on we are nothing to it.
    ///
    /// # Errors
    /// If it is gone.
    pub fn detach(self, signal: i32) -> Result<()> {
        request("detach", libc::PTRACE_DETACH, self.pid, 0, signal as usize).map(drop)
    }

    /// The same stop, seen as another: for code that stepped or interrupted it and hands it back.
    pub(crate) fn again(pid: i32, stop: Stop) -> Self {
        Self { pid, stop }
    }
}
