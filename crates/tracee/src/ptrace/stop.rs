//! Seize, wait, resume: all use of ptrace.
//!
//! ```text
//!            seize                 interrupt, signal, fork, exec, exit
//!  (untraced) ────▶ running ─────────────────────────────▶ Stopped
//!                      ▲                                      │
//!                      └──── resume, listen, run_to_syscall ──┤
//!                                                             └─ detach ─▶ (untraced)
//! ```
//! A [`Stopped`] exists only where the kernel reported a stop, and resuming consumes it. So no
//! request that needs a stopped process can be made on a running one. The process may still be
//! killed at any time, so every request can fail with [`Error::Gone`].

use crate::error::{Error, Result};
use crate::procfs;
use crate::registers::{Registers, Xstate};
use crate::siginfo::Siginfo;
use std::cell::{Cell, RefCell};
use std::os::raw::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// ptrace options: report forks, vforks, clones and execs, and mark the stops of
/// [`Stopped::run_to_syscall`] so that they differ from signals.
pub const FOLLOW: u32 = (libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEEXEC) as u32;
/// ptrace options: report execs and new threads, which are traced as well.
pub const FOLLOW_THREADS: u32 =
    (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACEEXEC) as u32;
/// ptrace option: kill the process when its tracer exits.
pub const EXIT_KILL: u32 = libc::PTRACE_O_EXITKILL as u32;

const EVENT_STOP: c_int = 128;

/// Number of breakpoints that a thread can have, each in a debug register of x86.
pub(crate) const MAX_BREAKPOINTS: usize = 4;

/// A process or thread at a ptrace stop.
#[derive(Debug)]
#[must_use = "a stopped process stands still until it is resumed or detached"]
pub struct Stopped {
    pid: i32,
    /// Why it is stopped.
    pub stop: Stop,
}

/// Why a process is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Signal delivery; `resume(signal)` delivers the signal, `resume(0)` drops it.
    Signal(i32),
    /// A group stop by this signal (SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU); `listen` keeps it stopped.
    Group(i32),
    /// PTRACE_EVENT_STOP: after an interrupt, of a new tracee, or at SIGCONT.
    Interrupt,
    /// After [`Stopped::run_to_syscall`]: entry or exit of a system call.
    Syscall,
    /// It forked. [`Stopped::message`] returns the child's pid.
    Fork,
    /// It forked by vfork.
    Vfork,
    /// It made a thread, or a process by clone without SIGCHLD.
    Clone,
    /// It executed a new program.
    Exec,
}

/// A change of a traced process's state.
#[derive(Debug)]
pub enum WaitEvent {
    /// It stopped.
    Stopped(Stopped),
    /// It exited with this status (0 to 255).
    Exited(i32),
    /// It was killed by this signal. The flag says whether a core was dumped.
    Killed(i32, bool),
}

fn request(operation: &'static str, op: u32, pid: i32, addr: usize, data: usize) -> Result<i64> {
    // SAFETY: every request takes integers, or a `data` pointer that the caller in this crate keeps
    // valid, and large enough for the request, during the call.
    let done = unsafe {
        libc::ptrace(op as _, pid, ptr::without_provenance_mut::<c_void>(addr), data as *mut c_void)
    };
    if done == -1 {
        return Err(Error::last(operation, pid));
    }
    Ok(done)
}

/// Attaches to a process or thread without stopping it (PTRACE_SEIZE).
///
/// # Errors
/// If the caller may not trace it, if another process traces it, or if it is gone. It is unchanged
/// then.
pub fn seize(pid: i32, options: u32) -> Result<()> {
    request("seize", libc::PTRACE_SEIZE, pid, 0, options as usize).map(drop)
}

/// Asks a running tracee to stop, which [`wait`] reports. Several requests before the stop count as
/// one. The kernel clears the request at any stop, so a caller that waits for this stop must repeat
/// the request after each stop of another kind.
///
/// # Errors
/// If it is gone.
pub fn interrupt(pid: i32) -> Result<()> {
    request("interrupt", libc::PTRACE_INTERRUPT, pid, 0, 0).map(drop)
}

/// Waits for a change of a tracee's state. `pid` -1 stands for any tracee or child of this thread.
/// `block` says whether to wait or only to poll.
///
/// # Errors
/// `Gone` if there is no such tracee or child left.
pub fn wait(pid: i32, block: bool) -> Result<Option<(i32, WaitEvent)>> {
    if let Some(deferred) = take_deferred(pid) {
        return Ok(Some(deferred));
    }
    if block && pid > 0 {
        return wait_for_one(pid, || false);
    }
    let mut status = 0;
    let flags = libc::__WALL | libc::__WNOTHREAD | if block { 0 } else { libc::WNOHANG };
    let who = loop {
        // SAFETY: `status` is a valid place for the status.
        let mut wait = || unsafe { libc::waitpid(pid, &raw mut status, flags) };
        let who = if block { count_as_slept(wait) } else { wait() };
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
    Ok(Some((who, decode_status(who, status))))
}

thread_local! {
    /// How long the thread has slept in [`count_as_slept`].
    static SLEPT: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Stops that were reported while the thread waited for another process.
    static DEFERRED: RefCell<Vec<Stopped>> = const { RefCell::new(Vec::new()) };
}

/// Sleeps between two looks at a tracee that is about to stop, or to end its call.
pub fn pause(time: Duration) {
    count_as_slept(|| std::thread::sleep(time));
}

/// The total time that this thread has slept while it waited for tracees to stop or to end a call,
/// and for the kernel to create processes and threads. How soon a tracee stops depends on the CPU
/// time that it gets.
#[must_use]
pub fn time_slept() -> Duration {
    SLEPT.get()
}

/// Counts the time that `sleep` takes as slept.
pub fn count_as_slept<T>(sleep: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = sleep();
    SLEPT.set(SLEPT.get() + begun.elapsed());
    done
}

/// Keeps a stop for the next [`wait`] for this process or for any.
pub(crate) fn defer(stopped: Stopped) {
    DEFERRED.with_borrow_mut(|deferred| deferred.push(stopped));
}

/// Whether stops are kept. The kernel does not report them again.
#[must_use]
pub fn has_deferred_stop() -> bool {
    DEFERRED.with_borrow(|deferred| !deferred.is_empty())
}

fn take_deferred(pid: i32) -> Option<(i32, WaitEvent)> {
    DEFERRED.with_borrow_mut(|deferred| {
        let at = deferred.iter().position(|stopped| pid == -1 || stopped.pid == pid)?;
        let stopped = deferred.remove(at);
        Some((stopped.pid, WaitEvent::Stopped(stopped)))
    })
}

/// Waits for one tracee by polling. If the first thread of a process exits before the others, a
/// blocking waitpid does not report this until all others have been reaped, and this thread would
/// have to reap them. Returns `None` when `gives_up`, which is called every 16 polls, returns true.
fn wait_for_one(pid: i32, gives_up: impl Fn() -> bool) -> Result<Option<(i32, WaitEvent)>> {
    /// Number of polls before it sleeps between them: most stops arrive soon.
    const MAX_YIELDS: u32 = 200;
    for turn in 0u32.. {
        if let Some(found) = wait(pid, false)? {
            return Ok(Some(found));
        }
        if turn < MAX_YIELDS {
            std::thread::yield_now();
            continue;
        }
        if turn % 16 == 0 && procfs::has_exited(pid) {
            // It may have reported something just before it exited.
            return wait(pid, false)?.ok_or(Error::Gone { pid }).map(Some);
        }
        if turn % 16 == 0 && gives_up() {
            return Ok(None);
        }
        pause(Duration::from_micros(50));
    }
    Err(Error::Gone { pid })
}

fn decode_status(pid: i32, status: c_int) -> WaitEvent {
    if libc::WIFEXITED(status) {
        return WaitEvent::Exited(libc::WEXITSTATUS(status));
    }
    if libc::WIFSIGNALED(status) {
        return WaitEvent::Killed(libc::WTERMSIG(status), libc::WCOREDUMP(status));
    }
    let signal = libc::WSTOPSIG(status);
    let stop = match status >> 16 {
        EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupt,
        EVENT_STOP => Stop::Group(signal),
        libc::PTRACE_EVENT_FORK => Stop::Fork,
        libc::PTRACE_EVENT_VFORK => Stop::Vfork,
        libc::PTRACE_EVENT_CLONE => Stop::Clone,
        libc::PTRACE_EVENT_EXEC => Stop::Exec,
        _ if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
        _ => Stop::Signal(signal),
    };
    WaitEvent::Stopped(Stopped { pid, stop })
}

/// Waits until this tracee stops.
///
/// # Errors
/// `Gone` if it exits instead.
pub fn wait_stop(pid: i32) -> Result<Stopped> {
    match wait(pid, true)? {
        Some((_, WaitEvent::Stopped(stopped))) => Ok(stopped),
        _ => Err(Error::Gone { pid }),
    }
}

/// Like [`wait_stop`], but returns `None` if the tracee is in an uninterruptible sleep after
/// `until`, for example while it reads a page from another node. It stops when it wakes.
///
/// # Errors
/// `Gone` if it exits instead.
pub fn wait_stop_unless_blocked(pid: i32, until: Instant) -> Result<Option<Stopped>> {
    let is_blocked = || procfs::status(pid).is_ok_and(|is| is.state == b'D');
    wait_stop_or(pid, || Instant::now() > until && is_blocked())
}

/// Like [`wait_stop`], but returns `None` if the tracee has not stopped by this time.
///
/// # Errors
/// `Gone` if it exits instead.
pub(crate) fn wait_stop_until(pid: i32, until: Instant) -> Result<Option<Stopped>> {
    wait_stop_or(pid, || Instant::now() > until)
}

fn wait_stop_or(pid: i32, gives_up: impl Fn() -> bool) -> Result<Option<Stopped>> {
    match wait_for_one(pid, gives_up)? {
        Some((_, WaitEvent::Stopped(stopped))) => Ok(Some(stopped)),
        Some(_) => Err(Error::Gone { pid }),
        None => Ok(None),
    }
}

impl Stopped {
    /// Its pid, in this process's namespace.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Sets the ptrace options.
    ///
    /// # Errors
    /// If it is gone.
    pub fn set_options(&self, options: u32) -> Result<()> {
        request("set options", libc::PTRACE_SETOPTIONS, self.pid, 0, options as usize).map(drop)
    }

    /// The message of an event: the child's pid at a fork.
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
    /// If it is gone, or the address is not mapped.
    pub fn word(&self, addr: u64) -> Result<u64> {
        let mut word = 0u64;
        // The raw system call stores the word through a pointer, unlike libc's function.
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

    /// Replaces its general registers. With `orig_rax >= 0` and a restart code in `rax`, the kernel
    /// restarts the call when the process resumes, as it would natively.
    ///
    /// # Errors
    /// If it is gone, or if a segment or base address is invalid.
    pub fn set_registers(&self, registers: &Registers) -> Result<()> {
        let data = ptr::from_ref(registers) as usize;
        request("write registers", libc::PTRACE_SETREGS, self.pid, 0, data).map(drop)
    }

    /// Its extended registers (x87 to AMX), in this machine's layout.
    ///
    /// # Errors
    /// If it is gone.
    pub fn xstate(&self) -> Result<Xstate> {
        const MAX_XSTATE: usize = 64 << 10;
        // The length of the last read plus some, so that a truncated read is noticed.
        static LENGTH_HINT: AtomicUsize = AtomicUsize::new(MAX_XSTATE);
        let mut bytes = vec![0u8; LENGTH_HINT.load(Ordering::Relaxed)];
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let data = (&raw mut part) as usize;
        request("read extended registers", libc::PTRACE_GETREGSET, self.pid, Xstate::NOTE, data)?;
        if part.iov_len == bytes.len() && bytes.len() < MAX_XSTATE {
            bytes.resize(MAX_XSTATE, 0);
            (part.iov_base, part.iov_len) = (bytes.as_mut_ptr().cast(), MAX_XSTATE);
            let data = (&raw mut part) as usize;
            request("read extended registers", libc::PTRACE_GETREGSET, self.pid, Xstate::NOTE, data)?;
        }
        bytes.truncate(part.iov_len);
        LENGTH_HINT.store((bytes.len() + 64).min(MAX_XSTATE), Ordering::Relaxed);
        Ok(Xstate(bytes))
    }

    /// Replaces its extended registers.
    ///
    /// # Errors
    /// If it is gone, or if the layout is that of another machine.
    pub fn set_xstate(&self, xstate: &Xstate) -> Result<()> {
        let mut part = libc::iovec { iov_base: xstate.0.as_ptr() as *mut c_void, iov_len: xstate.0.len() };
        let data = (&raw mut part) as usize;
        request("write extended registers", libc::PTRACE_SETREGSET, self.pid, Xstate::NOTE, data).map(drop)
    }

    /// Its signal mask (bit n-1 for signal n). During a call with a temporary mask, the mask that
    /// is restored afterwards.
    ///
    /// # Errors
    /// If it is gone.
    pub fn sigmask(&self) -> Result<u64> {
        let mut mask = 0u64;
        request("read signal mask", libc::PTRACE_GETSIGMASK, self.pid, 8, (&raw mut mask) as usize)?;
        Ok(mask)
    }

    /// Replaces its signal mask.
    ///
    /// # Errors
    /// If it is gone.
    pub fn set_sigmask(&self, mask: u64) -> Result<()> {
        request("write signal mask", libc::PTRACE_SETSIGMASK, self.pid, 8, (&raw const mask) as usize)
            .map(drop)
    }

    /// The siginfo of the signal that is about to be delivered.
    ///
    /// # Errors
    /// If it is gone, or not at a signal stop.
    pub fn siginfo(&self) -> Result<[u8; 128]> {
        let mut info = [0u8; 128];
        request("read siginfo", libc::PTRACE_GETSIGINFO, self.pid, 0, info.as_mut_ptr() as usize)?;
        Ok(info)
    }

    /// Replaces the siginfo of the signal.
    ///
    /// # Errors
    /// If it is gone, or not at a signal stop.
    pub fn set_siginfo(&self, info: &[u8; 128]) -> Result<()> {
        request("write siginfo", libc::PTRACE_SETSIGINFO, self.pid, 0, info.as_ptr() as usize).map(drop)
    }

    /// Pending signals: of the thread, and of the whole process.
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
            // SAFETY: there is space for 16 records, and `ask` requests at most 16.
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
    /// If it is gone, or the kernel is older than 5.13.
    pub fn rseq(&self) -> Result<(u64, u32, u32)> {
        // struct ptrace_rseq_configuration: u64 pointer, u32 size, u32 signature, u32 flags, u32
        // pad.
        const GET_RSEQ: u32 = 0x420f;
        let mut words = [0u32; 6];
        request("read rseq", GET_RSEQ, self.pid, 24, words.as_mut_ptr() as usize)?;
        Ok((u64::from(words[0]) | u64::from(words[1]) << 32, words[2], words[3]))
    }

    /// Whether it has calls dispatched to its own handler (PR_SET_SYSCALL_USER_DISPATCH). False if
    /// the kernel, older than 6.4, does not report that.
    #[must_use]
    pub fn dispatches_calls(&self) -> bool {
        // struct ptrace_sud_config: u64 mode, selector, offset, len.
        const GET_SYSCALL_USER_DISPATCH: u32 = 0x4211;
        let mut words = [0u64; 4];
        let what = "read syscall user dispatch";
        let read = request(what, GET_SYSCALL_USER_DISPATCH, self.pid, 32, words.as_mut_ptr() as usize);
        read.is_ok() && words[0] != 0
    }

    /// Resumes it, and delivers `signal` if it is not 0.
    ///
    /// # Errors
    /// If it is gone.
    pub fn resume(self, signal: i32) -> Result<()> {
        request("resume", libc::PTRACE_CONT, self.pid, 0, signal as usize).map(drop)
    }

    /// Resumes it until its next system call begins or ends.
    ///
    /// # Errors
    /// If it is gone.
    pub fn run_to_syscall(self) -> Result<()> {
        request("run to a call", libc::PTRACE_SYSCALL, self.pid, 0, 0).map(drop)
    }

    /// Resumes it for one instruction.
    ///
    /// # Errors
    /// If it is gone.
    pub fn step(self, signal: i32) -> Result<()> {
        request("step", libc::PTRACE_SINGLESTEP, self.pid, 0, signal as usize).map(drop)
    }

    /// Sets at most four breakpoints: when resumed, the thread stops with SIGTRAP before it
    /// executes the instruction at one of these addresses. An empty slice removes all breakpoints.
    /// Other threads of its process are not affected: the addresses are in the thread's debug
    /// registers.
    ///
    /// # Errors
    /// If it is gone, or this machine has no debug registers.
    pub(crate) fn set_breakpoints(&self, addresses: &[u64]) -> Result<()> {
        let register = |number: usize| {
            std::mem::offset_of!(libc::user, u_debugreg) + number * std::mem::size_of::<u64>()
        };
        let set = |number: usize, value: u64| {
            request("set a breakpoint", libc::PTRACE_POKEUSER, self.pid, register(number), value as usize)
                .map(drop)
        };
        let mut enabled = 0;
        for (number, address) in addresses.iter().take(MAX_BREAKPOINTS).enumerate() {
            set(number, *address)?;
            // The bit enables the register for this thread. With all other bits zero, the thread
            // stops at execution.
            enabled |= 1 << (2 * number);
        }
        set(7, enabled)
    }

    /// Keeps it in its group stop, and has SIGCONT reported.
    ///
    /// # Errors
    /// If it is gone, or not in a group stop.
    pub fn listen(self) -> Result<()> {
        request("listen", libc::PTRACE_LISTEN, self.pid, 0, 0).map(drop)
    }

    /// Detaches from it, and delivers `signal` if it is not 0.
    ///
    /// # Errors
    /// If it is gone.
    pub fn detach(self, signal: i32) -> Result<()> {
        request("detach", libc::PTRACE_DETACH, self.pid, 0, signal as usize).map(drop)
    }

    /// Creates a `Stopped` for a process that the caller knows to be stopped for this reason.
    pub(crate) fn again(pid: i32, stop: Stop) -> Self {
        Self { pid, stop }
    }
}
