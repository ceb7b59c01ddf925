//! Injecting clone(2) into a guest: for its forks, for its new threads, and for the threads with
//! which it arrives.
//!
//! The arguments are in registers, so no other thread can change them between the shim's check and
//! the kernel's use. Other threads of the guest could change the code from which the call is made.
//! The call that traps then differs from the expected one, and is refused.

use std::time::Duration;
use tern_image::Reserve;
use tern_tracee::allowance::Allowance;
use tern_tracee::inject::MAX_STOPS;
use tern_tracee::listener::Listener;
use tern_tracee::registers::Registers;
use tern_tracee::stop::{self, Stop, Stopped, WaitEvent};
use tern_tracee::{Error, Memory, Result};

/// The flags that share the state of a process among its threads.
pub(crate) const THREAD_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM;

/// The time that a thread has for a clone ([`Allowance`]).
const CLONE_TIMEOUT: Duration = Duration::from_secs(10);

/// The process that is to make a clone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cloner<'a> {
    /// Its reserved range.
    pub(crate) reserve: Reserve,
    /// The notification fd of its filter.
    pub(crate) listener: &'a Listener,
}

/// The outcome of an injected clone.
#[derive(Debug)]
pub(crate) enum CloneOutcome {
    /// The new process or thread, stopped before its first instruction with all its signals
    /// blocked. The caller is still inside its clone.
    Created(Stopped),
    /// The kernel has refused the clone. Contains the caller, stopped at the end of its call.
    Refused(Stopped),
}

impl Cloner<'_> {
    /// Has a stopped thread make a clone with these arguments. The child gets the pid that was set
    /// last ([`set_next_pid`](crate::sandbox::Sandbox::set_next_pid)): only the shim creates
    /// processes in that namespace. The thread is left with the injected registers, and with all
    /// its signals blocked.
    ///
    /// # Errors
    /// If it is gone or behaves unexpectedly.
    pub(crate) fn inject(
        &self,
        stopped: Stopped,
        before: &Registers,
        args: &[u64; 6],
    ) -> Result<CloneOutcome> {
        let host = stopped.pid();
        // As an injected call, but the clone's own ptrace events are handled here.
        stopped.set_sigmask(u64::MAX)?;
        stopped.set_registers(&before.calling(self.reserve.start, libc::SYS_clone as u64, args))?;
        stopped.run_to_syscall()?;
        self.let_through(host, args)
    }

    /// Lets the clone through the filter and waits for its event.
    fn let_through(&self, host: i32, args: &[u64; 6]) -> Result<CloneOutcome> {
        let mut allowance = Allowance::new(host, CLONE_TIMEOUT);
        let mut has_begun = false;
        loop {
            if let Some(call) = self.listener.receive_new()? {
                if call.pid != host {
                    self.listener.defer_call(call);
                } else if i64::from(call.nr) == libc::SYS_clone && call.args == *args {
                    self.listener.let_continue(call.id)?;
                } else {
                    self.listener.reply_error(call.id, libc::EPERM)?;
                }
            }
            match stop::wait(host, false)? {
                Some((_, WaitEvent::Stopped(stopped))) => match stopped.stop {
                    Stop::Fork | Stop::Vfork | Stop::Clone => {
                        let child = stopped.message()? as i32;
                        stopped.run_to_syscall()?;
                        return stop::wait_stop(child).map(CloneOutcome::Created);
                    }
                    // SIGSTOP, which cannot be blocked, makes the kernel restart the clone.
                    Stop::Syscall if has_begun && stopped.registers()?.restart_code().is_none() => {
                        return Ok(CloneOutcome::Refused(stopped));
                    }
                    Stop::Syscall if has_begun => {
                        has_begun = false;
                        stopped.run_to_syscall()?;
                    }
                    Stop::Syscall => {
                        has_begun = true;
                        stopped.run_to_syscall()?;
                    }
                    _ => stopped.run_to_syscall()?,
                },
                Some(_) => return Err(Error::Gone { pid: host }),
                None => std::thread::yield_now(),
            }
            if allowance.is_exceeded() {
                return Err(Error::Inconsistent { what: "its clone timed out".into(), pid: host });
            }
        }
    }
}

/// Translates clone3 to the equivalent clone. The arguments are read once, so other threads cannot
/// change them after the check. clone has one argument for a pidfd and for the parent's tid word. If
/// both are wanted, the sixth argument, which clone does not have, is the address of the tid word,
/// and the flag for it is removed.
///
/// # Errors
/// The kernel's errors for invalid arguments; ENOSYS for arguments that clone cannot express, so
/// that libraries fall back to clone.
pub(crate) fn translate_clone3(args: &[u64; 6], memory: &Memory) -> std::result::Result<[u64; 6], i32> {
    // struct clone_args: the size of its first version, and that of the latest one known here.
    const FIRST: u64 = 64;
    const KNOWN: usize = 88;
    if args[1] < FIRST {
        return Err(libc::EINVAL);
    }
    if args[1] > KNOWN as u64 {
        return Err(libc::ENOSYS);
    }
    let mut bytes = [0; KNOWN];
    let used_args = &mut bytes[..args[1] as usize];
    memory.read(args[0], used_args).map_err(|_e| libc::EFAULT)?;
    let mut words = [0; KNOWN / 8];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let [flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, ..] = words;
    let has = |flag: i32| flags & u64::from(flag.cast_unsigned()) != 0;
    let (wants_pidfd, wants_parent_tid) = (has(libc::CLONE_PIDFD), has(libc::CLONE_PARENT_SETTID));
    // clone cannot express bits that it lacks or uses for something else, and chosen tids.
    if flags & 0xff != 0 || flags >> 32 != 0 || set_tid != 0 {
        return Err(libc::ENOSYS);
    }
    let has_ignored_signal = exit_signal != 0 && (has(libc::CLONE_THREAD) || has(libc::CLONE_PARENT));
    if exit_signal > 64
        || has_ignored_signal
        || (stack == 0) != (stack_size == 0)
        || has(libc::CLONE_DETACHED)
        || wants_pidfd && wants_parent_tid && pidfd == parent_tid
    {
        return Err(libc::EINVAL);
    }
    let (flags, result_word, tid_word) = match (wants_pidfd, wants_parent_tid) {
        (true, true) => (flags & !(libc::CLONE_PARENT_SETTID as u64), pidfd, parent_tid),
        (true, false) => (flags, pidfd, 0),
        (false, _) => (flags, parent_tid, 0),
    };
    Ok([flags | exit_signal, stack.wrapping_add(stack_size), result_word, child_tid, tls, tid_word])
}

/// Waits until the thread that made a clone returns from it. Returns the thread and the call's
/// result, the child's number.
///
/// # Errors
/// If it is gone or behaves unexpectedly.
pub(crate) fn await_clone_return(host: i32) -> Result<(Stopped, i32)> {
    for _ in 0..MAX_STOPS {
        let stopped = stop::wait_stop(host)?;
        if stopped.stop == Stop::Syscall {
            let number = stopped.registers()?.rax as i32;
            return Ok((stopped, number));
        }
        stopped.run_to_syscall()?;
    }
    Err(Error::Inconsistent { what: "its clone does not return".into(), pid: host })
}

/// The registers with which the child of a clone begins: those of the thread that made the clone,
/// except for the result, the stack, and the registers that the clone itself sets.
pub(crate) fn child_registers(maker: Registers, child: Registers, stack: u64) -> Registers {
    let rsp = if stack == 0 { maker.rsp } else { stack };
    Registers { fs_base: child.fs_base, rax: 0, orig_rax: u64::MAX, rsp, ..maker }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(words: &[u64]) -> std::result::Result<[u64; 6], i32> {
        let memory = Memory::open(std::process::id() as i32).unwrap();
        translate_clone3(&[words.as_ptr().addr() as u64, size_of_val(words) as u64, 0, 0, 0, 0], &memory)
    }

    #[test]
    fn clone3_is_translated_or_refused() {
        let (child, parent) = (libc::CLONE_CHILD_SETTID as u64, libc::CLONE_PARENT_SETTID as u64);
        let pidfd = libc::CLONE_PIDFD as u64;
        // flags, pidfd, child's and parent's tid words, exit signal, stack and its size, TLS
        let used_args = translated(&[child | parent, 9, 5, 6, 17, 0x1000, 0x500, 7]);
        assert_eq!(used_args, Ok([child | parent | 17, 0x1500, 6, 5, 7, 0]));
        assert_eq!(translated(&[pidfd, 9, 0, 6, 0, 0, 0, 0]), Ok([pidfd, 0, 9, 0, 0, 0]));
        assert_eq!(translated(&[pidfd | parent, 9, 0, 6, 17, 0, 0, 0]), Ok([pidfd | 17, 0, 9, 0, 0, 6]));
        assert_eq!(
            translated(&[pidfd | parent, 9, 0, 9, 17, 0, 0, 0]),
            Err(libc::EINVAL),
            "one word for both"
        );
        assert_eq!(translated(&[0, 0, 0, 0, 17, 0, 0, 0, 1, 1, 0]), Err(libc::ENOSYS), "a chosen tid");
        assert_eq!(translated(&[1 << 32, 0, 0, 0, 17, 0, 0, 0]), Err(libc::ENOSYS), "handlers cleared");
        assert_eq!(translated(&[0, 0, 0, 0, 17, 0x1000, 0, 0]), Err(libc::EINVAL), "a stack without size");
        assert_eq!(translated(&[0, 0, 0, 0, 65, 0, 0, 0]), Err(libc::EINVAL));
        assert_eq!(translated(&[0; 7]), Err(libc::EINVAL), "shorter than its first version");
        assert_eq!(translated(&[0; 12]), Err(libc::ENOSYS), "longer than the latest version");
    }
}
