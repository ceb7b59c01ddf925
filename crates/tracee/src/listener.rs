//! Trapped system calls: the listening end of a seccomp filter (seccomp_unotify(2)).
//!
//! Always installed with WAIT_KILLABLE_RECV: once a call has been received here, only SIGKILL interrupts
//! it, so that a call that was performed elsewhere is never performed twice. A reply may be one of the
//! kernel's own restart codes, *provided that a signal or a ptrace stop is pending on the thread*; the
//! guest's kernel then restarts or fails the call exactly as it would have done natively.

use crate::error::{Error, Result};
use crate::inject::Injection;
use crate::memory::Memory;
use crate::patience::Wait;
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

/// One instruction of a classic BPF program.
pub type Instruction = libc::sock_filter;

/// The listening end of one guest's filter, and of its children's.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    /// Calls of other members of the family, received while one was waited for.
    aside: RefCell<VecDeque<Notification>>,
}

/// One trapped call. It waits until it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notification {
    /// Names this call to the kernel.
    pub id: u64,
    /// The thread that makes it, in our numbering.
    pub pid: i32,
    /// The number of the system call.
    pub nr: u32,
    /// The address behind its `syscall` instruction.
    pub ip: u64,
    /// Its arguments.
    pub args: [u64; 6],
}

/// Whether an answer arrived; the thread may have been killed meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered {
    /// It did.
    Yes,
    /// The thread is gone.
    Gone,
}

impl Listener {
    /// Installs a filter in a process under injection and takes its listening end.
    ///
    /// `scratch` is an address in the process with room for the program and a header; what was there is
    /// overwritten. The descriptor is closed in the process; since `close` may itself be trapped by then,
    /// that trap is answered here.
    ///
    /// # Errors
    /// `Refused` if the kernel is older than 5.19; the process may then have given up new privileges.
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
        injection.must("give up new privileges", libc::SYS_prctl, no_new_privs)?;
        let flags = FLAG_NEW_LISTENER | FLAG_WAIT_KILLABLE_RECV;
        let set_filter = [u64::from(libc::SECCOMP_SET_MODE_FILTER), flags, scratch, 0, 0, 0];
        let number = injection.must("install the filter", libc::SYS_seccomp, set_filter)?;
        let fd = Pidfd::open(pid)?.descriptor(number as i32)?;
        let listener = Self { fd, aside: RefCell::default() };
        // From 6.6 on the waker yields its processor to the waiter at once; older kernels refuse, no harm.
        // SAFETY: an integer argument.
        unsafe { libc::ioctl(listener.fd.as_raw_fd(), SET_FLAGS as _, SYNC_WAKE_UP) };
        listener.call_through(injection, libc::SYS_close, [number, 0, 0, 0, 0, 0], None)?;
        Ok(listener)
    }

    /// Makes a process under injection perform one call that its filter may trap, and lets exactly that
    /// call through. `give` is a descriptor to put at that number in the process first.
    ///
    /// The guest cannot slip another call into this: what is let through is compared with what we put in
    /// its registers, and its registers are all that such a call looks at.
    ///
    /// # Errors
    /// If the process is gone or strays.
    pub fn call_through(
        &self,
        injection: &mut Injection,
        nr: i64,
        args: [u64; 6],
        give: Option<(BorrowedFd<'_>, i32)>,
    ) -> Result<i64> {
        let pid = injection.pid();
        let _limited = Wait::begin(pid);
        injection.begin_call(nr, args)?;
        loop {
            if let Some(ret) = injection.try_end_call()? {
                return Ok(ret);
            }
            let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid pollfd. The time-out only bounds how late the end of an untrapped call is seen.
            unsafe { libc::poll(&raw mut poll, 1, 1) };
            if poll.revents & libc::POLLIN == 0 {
                if procfs::has_ended(pid) {
                    return Err(Error::Gone { pid });
                }
                continue;
            }
            let Some(call) = self.receive_from(pid)? else { continue };
            if call.pid != pid {
                self.put_aside(call);
                continue;
            }
            if i64::from(call.nr) != nr || call.args != args {
                self.fail(call.id, libc::EPERM)?;
                return Err(Error::Astray { what: format!("call {} instead of {nr}", call.nr), pid });
            }
            if let Some((fd, number)) = give {
                self.give(call.id, fd, number).map_err(|e| Error::from_io("pass a descriptor", pid, e))?;
            }
            self.pass(call.id)?;
            return injection.end_call();
        }
    }

    /// Keeps a call of somebody else for [`receive`](Self::receive) to return later.
    pub fn put_aside(&self, call: Notification) {
        self.aside.borrow_mut().push_back(call);
    }

    /// Takes back a call of this thread that was put aside.
    pub fn take_aside(&self, pid: i32) -> Option<Notification> {
        let mut aside = self.aside.borrow_mut();
        let at = aside.iter().position(|call| call.pid == pid)?;
        aside.remove(at)
    }

    /// Whether a call was put aside, so that there is something to receive.
    #[must_use]
    pub fn has_aside(&self) -> bool {
        !self.aside.borrow().is_empty()
    }

    /// Receives the next trapped call from the kernel, whatever was put aside.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_new(&self) -> Result<Option<Notification>> {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // RECV blocks where nothing is there (and for ever on old kernels when all users are gone).
        // SAFETY: one valid pollfd.
        if unsafe { libc::poll(&raw mut poll, 1, 0) } < 1 || poll.revents & libc::POLLIN == 0 {
            return Ok(None);
        }
        self.receive_from(0)
    }

    /// Receives the next trapped call, if there is one now.
    ///
    /// # Errors
    /// Those of the kernel that are not passing.
    pub fn receive(&self) -> Result<Option<Notification>> {
        let aside = self.aside.borrow_mut().pop_front();
        if aside.is_some() { Ok(aside) } else { self.receive_new() }
    }

    fn receive_from(&self, pid: i32) -> Result<Option<Notification>> {
        // SAFETY: all-zero is a valid value of this plain structure, and what the kernel demands.
        let mut notif: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: `notif` is the structure that this request fills.
        if unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV as _, &raw mut notif) }
            != 0
        {
            return match std::io::Error::last_os_error().raw_os_error() {
                // The thread was interrupted or killed before its call was received: nothing has happened.
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

    fn send(&self, id: u64, val: i64, error: i32, flags: u32) -> Result<Answered> {
        let mut response = libc::seccomp_notif_resp { id, val, error, flags };
        // SAFETY: `response` is the structure that this request reads.
        let sent = unsafe {
            libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND as _, &raw mut response)
        };
        match sent {
            0 => Ok(Answered::Yes),
            _ => match Error::last("answer a call", 0) {
                Error::Refused { source, .. } if source.raw_os_error() == Some(libc::ENOENT) => {
                    Ok(Answered::Gone)
                }
                e => Err(e),
            },
        }
    }

    /// Answers with what the call returned: a value, an error as a negative number, or a restart code.
    ///
    /// # Errors
    /// Those of the kernel, except that the thread is gone.
    pub fn reply(&self, id: u64, ret: i64) -> Result<Answered> {
        if (-4095..0).contains(&ret) { self.send(id, 0, ret as i32, 0) } else { self.send(id, ret, 0, 0) }
    }

    /// Answers with an error.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn fail(&self, id: u64, errno: i32) -> Result<Answered> {
        self.send(id, 0, -errno, 0)
    }

    /// Lets the call happen natively. Only for calls that can do no harm whatever their arguments are, or
    /// that we have put into the thread's registers ourselves.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn pass(&self, id: u64) -> Result<Answered> {
        self.send(id, 0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32)
    }

    /// Gives the thread that waits in this call a descriptor under this number; what it has under that is closed.
    ///
    /// # Errors
    /// The kernel's: it is gone, or may have no such number.
    pub fn give(&self, id: u64, fd: BorrowedFd<'_>, number: i32) -> std::io::Result<()> {
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
