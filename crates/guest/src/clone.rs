//! clone, made in a guest's place: for its forks, for its new threads, and for the threads with which it arrives.
//!
//! Its arguments are in registers, where nobody else can change them between our look and the kernel's. The stub from
//! which it is made the guest's other threads could change meanwhile; then what comes is not this call, and nothing of
//! it is let through.

use std::time::{Duration, Instant};
use tern_image::Reserve;
use tern_tracee::inject::MOST_STOPS;
use tern_tracee::listener::Listener;
use tern_tracee::registers::Registers;
use tern_tracee::stop::{self, Change, Stop, Stopped};
use tern_tracee::{Error, Memory, Result};

/// How long a clone may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who is to make a clone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cloner<'a> {
    /// Our range in its process.
    pub(crate) reserve: Reserve,
    /// The listening end of its filter.
    pub(crate) listener: &'a Listener,
}

/// What became of a clone.
#[derive(Debug)]
pub(crate) enum Cloned {
    /// What was made, stopped at its birth, with all its signals blocked. Its maker is still within its call.
    Made(Stopped),
    /// The kernel has refused; the caller, at the end of its call.
    Refused(Stopped),
}

impl Cloner<'_> {
    /// Has a thread that stands make a clone with these arguments. What it makes gets the number that was chosen last
    /// ([`next_pid`](crate::sandbox::Sandbox::next_pid)): nobody else in that namespace can make anything without us.
    /// The thread is left with our registers and all its signals blocked.
    ///
    /// # Errors
    /// If it is gone or strays.
    pub(crate) fn make(&self, stopped: Stopped, before: &Registers, args: &[u64; 6]) -> Result<Cloned> {
        let host = stopped.pid();
        // As an injected call, but the clone's own events are ours to see.
        stopped.set_sigmask(u64::MAX)?;
        stopped.set_registers(&before.calling(self.reserve.start, libc::SYS_clone as u64, args))?;
        stopped.to_call()?;
        self.let_through(host, args)
    }

    /// Lets the clone through the filter and waits for its event.
    fn let_through(&self, host: i32, args: &[u64; 6]) -> Result<Cloned> {
        let give_up = Instant::now() + PATIENCE;
        let mut begun = false;
        loop {
            if let Some(call) = self.listener.receive_new()? {
                if call.pid != host {
                    self.listener.put_aside(call);
                } else if i64::from(call.nr) == libc::SYS_clone && call.args == *args {
                    self.listener.pass(call.id)?;
                } else {
                    self.listener.fail(call.id, libc::EPERM)?;
                }
            }
            match stop::wait(host, false)? {
                Some((_, Change::Stopped(stopped))) => match stopped.stop {
                    Stop::Fork | Stop::Vfork | Stop::Clone => {
                        let made = stopped.message()? as i32;
                        stopped.to_call()?;
                        return stop::wait_stop(made).map(Cloned::Made);
                    }
                    Stop::Call if begun => return Ok(Cloned::Refused(stopped)),
                    Stop::Call => {
                        begun = true;
                        stopped.to_call()?;
                    }
                    _ => stopped.to_call()?,
                },
                Some(_) => return Err(Error::Gone { pid: host }),
                None => std::thread::yield_now(),
            }
            if Instant::now() > give_up {
                return Err(Error::Astray { what: "nothing came of its clone".into(), pid: host });
            }
        }
    }
}

/// The arguments of the clone that says the same as this clone3. They are read once: whatever other threads write there
/// meanwhile, what is checked is what is made.
///
/// # Errors
/// Those of the kernel for what is malformed; ENOSYS for what clone cannot say, so that libraries fall back.
pub(crate) fn as_clone(args: &[u64; 6], memory: &Memory) -> std::result::Result<[u64; 6], i32> {
    // struct clone_args: its first version, and what the later ones add.
    const FIRST: u64 = 64;
    const KNOWN: usize = 88;
    if args[1] < FIRST {
        return Err(libc::EINVAL);
    }
    if args[1] > KNOWN as u64 {
        return Err(libc::ENOSYS);
    }
    let mut bytes = [0; KNOWN];
    let said = &mut bytes[..args[1] as usize];
    memory.read(args[0], said).map_err(|_e| libc::EFAULT)?;
    let mut words = [0; KNOWN / 8];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let [flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, ..] = words;
    let has = |flag: i32| flags & u64::from(flag.cast_unsigned()) != 0;
    let (own_pidfd, own_tid) = (has(libc::CLONE_PIDFD), has(libc::CLONE_PARENT_SETTID));
    // Bits that clone has for the signal or for nothing, and numbers that are chosen.
    if flags & 0xff != 0 || flags >> 32 != 0 || own_pidfd && own_tid || set_tid != 0 {
        return Err(libc::ENOSYS);
    }
    let unheard = exit_signal != 0 && (has(libc::CLONE_THREAD) || has(libc::CLONE_PARENT));
    if exit_signal > 64 || unheard || (stack == 0) != (stack_size == 0) || has(libc::CLONE_DETACHED) {
        return Err(libc::EINVAL);
    }
    let told = if own_pidfd { pidfd } else { parent_tid };
    Ok([flags | exit_signal, stack.wrapping_add(stack_size), told, child_tid, tls, 0])
}

/// Waits until the maker of something has come out of its call, and says what that returned: its number.
///
/// # Errors
/// If it is gone or strays.
pub(crate) fn come_out(host: i32) -> Result<(Stopped, i32)> {
    for _ in 0..MOST_STOPS {
        let stopped = stop::wait_stop(host)?;
        if stopped.stop == Stop::Call {
            let number = stopped.registers()?.rax as i32;
            return Ok((stopped, number));
        }
        stopped.to_call()?;
    }
    Err(Error::Astray { what: "it never comes out of its clone".into(), pid: host })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(words: &[u64]) -> std::result::Result<[u64; 6], i32> {
        let memory = Memory::open(std::process::id() as i32).unwrap();
        as_clone(&[words.as_ptr().addr() as u64, size_of_val(words) as u64, 0, 0, 0, 0], &memory)
    }

    #[test]
    fn what_clone_can_say_is_made_and_nothing_else() {
        let (child, parent) = (libc::CLONE_CHILD_SETTID as u64, libc::CLONE_PARENT_SETTID as u64);
        let pidfd = libc::CLONE_PIDFD as u64;
        // flags, pidfd, child's and parent's tid words, exit signal, stack and its size, TLS
        let said = translated(&[child | parent, 9, 5, 6, 17, 0x1000, 0x500, 7]);
        assert_eq!(said, Ok([child | parent | 17, 0x1500, 6, 5, 7, 0]));
        assert_eq!(translated(&[pidfd, 9, 0, 6, 0, 0, 0, 0]), Ok([pidfd, 0, 9, 0, 0, 0]));
        assert_eq!(
            translated(&[pidfd | parent, 9, 0, 6, 17, 0, 0, 0]),
            Err(libc::ENOSYS),
            "one place for both"
        );
        assert_eq!(translated(&[0, 0, 0, 0, 17, 0, 0, 0, 1, 1, 0]), Err(libc::ENOSYS), "a chosen number");
        assert_eq!(translated(&[1 << 32, 0, 0, 0, 17, 0, 0, 0]), Err(libc::ENOSYS), "handlers cleared");
        assert_eq!(translated(&[0, 0, 0, 0, 17, 0x1000, 0, 0]), Err(libc::EINVAL), "a stack of no size");
        assert_eq!(translated(&[0, 0, 0, 0, 65, 0, 0, 0]), Err(libc::EINVAL));
        assert_eq!(translated(&[0; 7]), Err(libc::EINVAL), "shorter than its first version");
        assert_eq!(translated(&[0; 12]), Err(libc::ENOSYS), "longer than is known");
    }
}
