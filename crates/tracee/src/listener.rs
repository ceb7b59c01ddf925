//! Trapped system calls: the listener of a seccomp filter (seccomp_unotify(2)).
//!
//! The filter is always installed with WAIT_KILLABLE_RECV: once a call has been received here, only
//! SIGKILL interrupts it. So a call that is performed elsewhere is never performed twice. A reply
//! may be one of the kernel's restart codes, *provided that a signal or a ptrace stop is pending on
//! the thread*. The guest's kernel then restarts or fails the call exactly as it would natively.

use crate::batch::{BatchArea, InjectedCall, run_calls, wait_briefly};
use crate::call_timeout::WaitGuard;
use crate::error::{Error, Result};
use crate::inject::Injection;
use crate::memory::Memory;
use crate::pidfd::Pidfd;
use crate::procfs;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

const FLAG_NEW_LISTENER: u64 = 1 << 3;
const FLAG_WAIT_KILLABLE_RECV: u64 = 1 << 5;
/// `SECCOMP_IOWR(4, __u64)`
const SET_FLAGS: u64 = 0x4008_2104;
const SYNC_WAKE_UP: u64 = 1;

/// An instruction of a classic BPF program.
pub type Instruction = libc::sock_filter;

/// The listener of a guest's filter, which its children inherit.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    /// Calls of other threads that were received while the shim waited for the call of one thread.
    deferred: RefCell<VecDeque<Notification>>,
}

/// A trapped call. The thread waits until the call is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notification {
    /// The kernel's identifier of this call.
    pub id: u64,
    /// The thread that makes it, in this process's pid namespace.
    pub pid: i32,
    /// The number of the system call.
    pub nr: u32,
    /// Address after its `syscall` instruction.
    pub ip: u64,
    /// Its arguments.
    pub args: [u64; 6],
}

/// A call to inject that the process's filter traps.
#[derive(Debug, Clone, Copy)]
pub struct TrappedCall<'a> {
    /// The call.
    pub call: InjectedCall,
    /// A descriptor to install in the process before the call, and its number there.
    pub new_fd: Option<(BorrowedFd<'a>, i32)>,
}

/// Whether a reply was delivered. The thread may have been killed meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyStatus {
    /// It was delivered.
    Delivered,
    /// The thread is gone.
    Gone,
}

impl Listener {
    /// Installs a filter in a process under injection and takes over its listener.
    ///
    /// `scratch` is an address in the process with space for the program and a header, which are
    /// written there. The listener's descriptor is closed in the process; since the new filter may
    /// trap that `close`, the trap is answered here.
    ///
    /// # Errors
    /// `Refused` if the kernel is older than 5.19. In that case no_new_privs may already be set.
    pub fn install(injection: &mut Injection, scratch: u64, program: &[Instruction]) -> Result<Self> {
        let pid = injection.pid();
        let memory = Memory::open(pid)?;
        let mut bytes = Vec::with_capacity(16 + program.len() * 8);
        bytes.extend_from_slice(&(program.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&(scratch + 16).to_le_bytes());
        for i in program {
            bytes.extend_from_slice(&i.code.to_le_bytes());
            bytes.extend_from_slice(&[i.jt, i.jf]);
            bytes.extend_from_slice(&i.k.to_le_bytes());
        }
        memory.write_forced(scratch, &bytes)?;
        let no_new_privs = [libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0, 0, 0, 0];
        injection.must("set no_new_privs", libc::SYS_prctl, no_new_privs)?;
        let flags = FLAG_NEW_LISTENER | FLAG_WAIT_KILLABLE_RECV;
        let set_filter = [u64::from(libc::SECCOMP_SET_MODE_FILTER), flags, scratch, 0, 0, 0];
        let number = injection.must("install the filter", libc::SYS_seccomp, set_filter)?;
        let fd = Pidfd::open(pid)?.descriptor(number as i32)?;
        let listener = Self { fd, deferred: RefCell::default() };
        // With this flag (Linux 6.6) the kernel wakes the listener on the CPU of the trapped
        // thread, and the thread on the CPU of the listener. Older kernels refuse the flag, which
        // is harmless.
        // SAFETY: an integer argument.
        unsafe { libc::ioctl(listener.fd.as_raw_fd(), SET_FLAGS as _, SYNC_WAKE_UP) };
        listener.call_through(injection, libc::SYS_close, [number, 0, 0, 0, 0, 0], None)?;
        Ok(listener)
    }

    /// Makes a process under injection perform a call that its filter may trap, and allows exactly
    /// that call. `new_fd` is a descriptor to install in the process before the call, with its
    /// number there.
    ///
    /// A guest cannot substitute another call: the trapped call is compared with the one that was
    /// put into the registers, and such calls depend on registers only.
    ///
    /// # Errors
    /// If the process is gone or in an unexpected state.
    pub fn call_through(
        &self,
        injection: &mut Injection,
        nr: i64,
        args: [u64; 6],
        new_fd: Option<(BorrowedFd<'_>, i32)>,
    ) -> Result<i64> {
        let pid = injection.pid();
        let _limited = WaitGuard::begin(pid);
        injection.begin_call(nr, args)?;
        loop {
            if let Some(ret) = injection.try_end_call()? {
                return Ok(ret);
            }
            if self.allow_trapped(pid, (nr, args), new_fd)? {
                return injection.end_call();
            }
        }
    }

    /// Makes a process under injection perform calls as one batch ([`run_calls`]). Its filter traps
    /// each of them, and exactly these calls are allowed, as by
    /// [`call_through`](Self::call_through).
    ///
    /// # Errors
    /// Those of [`run_calls`], and if the process makes any other call.
    pub fn run_calls_through(
        &self,
        injection: &mut Injection,
        area: BatchArea,
        calls: &[TrappedCall<'_>],
    ) -> Result<Vec<i64>> {
        let pid = injection.pid();
        let memory = Memory::open(pid)?;
        let list: Vec<InjectedCall> = calls.iter().map(|call| call.call).collect();
        let mut allowed = 0;
        run_calls(injection, &memory, area, &list, &mut || {
            while let Some(next) = calls.get(allowed) {
                if !self.allow_trapped(pid, next.call, next.new_fd)? {
                    return Ok(());
                }
                allowed += 1;
            }
            wait_briefly()
        })
    }

    /// If an injected call is trapped within a millisecond, installs the descriptor and lets the call
    /// continue. Returns whether it was trapped.
    fn allow_trapped(
        &self,
        pid: i32,
        (nr, args): InjectedCall,
        new_fd: Option<(BorrowedFd<'_>, i32)>,
    ) -> Result<bool> {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd. The timeout only limits how late the end of an untrapped call is
        // noticed.
        unsafe { libc::poll(&raw mut poll, 1, 1) };
        if poll.revents & libc::POLLIN == 0 {
            return if procfs::has_exited(pid) { Err(Error::Gone { pid }) } else { Ok(false) };
        }
        let Some(call) = self.receive_from(pid)? else { return Ok(false) };
        if call.pid != pid {
            self.defer_call(call);
            return Ok(false);
        }
        if i64::from(call.nr) != nr || call.args != args {
            self.reply_error(call.id, libc::EPERM)?;
            return Err(Error::Inconsistent {
                what: format!("it made call {} instead of the injected call {nr}", call.nr),
                pid,
            });
        }
        if let Some((fd, number)) = new_fd {
            self.add_fd(call.id, fd, number).map_err(|e| Error::from_io("pass a descriptor", pid, e))?;
        }
        self.let_continue(call.id)?;
        Ok(true)
    }

    /// Keeps a call of another thread, which [`receive`](Self::receive) returns later.
    pub fn defer_call(&self, call: Notification) {
        self.deferred.borrow_mut().push_back(call);
    }

    /// Removes and returns a deferred call of this thread.
    pub fn take_deferred_call(&self, pid: i32) -> Option<Notification> {
        let mut deferred = self.deferred.borrow_mut();
        let at = deferred.iter().position(|call| call.pid == pid)?;
        deferred.remove(at)
    }

    /// Whether a call is deferred, so that [`receive`](Self::receive) returns one.
    #[must_use]
    pub fn has_deferred_call(&self) -> bool {
        !self.deferred.borrow().is_empty()
    }

    /// Receives the next trapped call from the kernel, not a deferred one.
    ///
    /// # Errors
    /// Those of [`receive`](Self::receive).
    pub fn receive_new(&self) -> Result<Option<Notification>> {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // RECV blocks if there is no call, and on old kernels for ever once all users of the filter
        // are gone.
        // SAFETY: one valid pollfd.
        if unsafe { libc::poll(&raw mut poll, 1, 0) } < 1 || poll.revents & libc::POLLIN == 0 {
            return Ok(None);
        }
        self.receive_from(0)
    }

    /// Receives the next trapped call, if there is one now.
    ///
    /// # Errors
    /// Those of the kernel, except transient ones.
    pub fn receive(&self) -> Result<Option<Notification>> {
        let deferred = self.deferred.borrow_mut().pop_front();
        if deferred.is_some() { Ok(deferred) } else { self.receive_new() }
    }

    fn receive_from(&self, pid: i32) -> Result<Option<Notification>> {
        // SAFETY: all-zero is a valid value of this plain structure, as the kernel requires.
        let mut notif: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: `notif` is the structure that this request fills.
        if unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV as _, &raw mut notif) }
            != 0
        {
            return match std::io::Error::last_os_error().raw_os_error() {
                // The thread was interrupted or killed before its call was received.
                Some(libc::ENOENT | libc::EINTR | libc::EAGAIN) => Ok(None),
                _ => Err(Error::last("receive a call", pid)),
            };
        }
        let data = &notif.data;
        Ok(Some(Notification {
            id: notif.id,
            pid: notif.pid as i32,
            nr: data.nr as u32,
            ip: data.instruction_pointer,
            args: data.args,
        }))
    }

    fn send(&self, id: u64, val: i64, error: i32, flags: u32) -> Result<ReplyStatus> {
        let mut response = libc::seccomp_notif_resp { id, val, error, flags };
        // SAFETY: `response` is the structure that this request reads.
        let sent = unsafe {
            libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND as _, &raw mut response)
        };
        match sent {
            0 => Ok(ReplyStatus::Delivered),
            _ => match Error::last("answer a call", 0) {
                Error::Refused { source, .. } if source.raw_os_error() == Some(libc::ENOENT) => {
                    Ok(ReplyStatus::Gone)
                }
                e => Err(e),
            },
        }
    }

    /// Replies with the call's result: a value, a negative error number, or a restart code.
    ///
    /// # Errors
    /// Those of the kernel, unless the thread is gone.
    pub fn reply(&self, id: u64, ret: i64) -> Result<ReplyStatus> {
        if (-4095..0).contains(&ret) { self.send(id, 0, ret as i32, 0) } else { self.send(id, ret, 0, 0) }
    }

    /// Replies with an error.
    ///
    /// # Errors
    /// Those of [`reply`](Self::reply).
    pub fn reply_error(&self, id: u64, errno: i32) -> Result<ReplyStatus> {
        self.send(id, 0, -errno, 0)
    }

    /// Lets the kernel execute the call. Only for calls that are harmless with any arguments, or
    /// whose registers this process has set.
    ///
    /// # Errors
    /// Those of [`reply`](Self::reply).
    pub fn let_continue(&self, id: u64) -> Result<ReplyStatus> {
        self.send(id, 0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32)
    }

    /// Installs a descriptor under this number in the thread that waits in this call. If the number
    /// is in use, its descriptor is closed.
    ///
    /// # Errors
    /// The kernel's: the thread is gone, or may not have this number.
    pub fn add_fd(&self, id: u64, fd: BorrowedFd<'_>, number: i32) -> std::io::Result<()> {
        let add = libc::seccomp_notif_addfd {
            id,
            flags: libc::SECCOMP_ADDFD_FLAG_SETFD as u32,
            srcfd: fd.as_raw_fd() as u32,
            newfd: number as u32,
            newfd_flags: 0,
        };
        // SAFETY: `add` is the structure that this request reads.
        match unsafe {
            libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ADDFD as _, &raw const add)
        } {
            n if n >= 0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
