//! Signals that a guest's call has sent to processes of its own family.
//!
//! The kernel makes a signal pending before the call that sends it returns, so that whoever is told of the call by its
//! sender, in whatever way, has handled the signal first. So home does not tell the sender before it has sent these
//! signals on: what it tells a guest's node comes there in that order. And a process leaves home when it has handled those
//! that wait for it there.

use crate::family::Family;
use crate::member::Member;
use crate::stops::NAP;
use crate::thread::Thread;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_syscall::{Arg, Call};
use tern_tracee::stop::Stop;
use tern_tracee::{Result, procfs};

/// How long a signal is waited for that the kernel should hand out at once. It does not in a frozen control group.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often a process that is to leave is let take signals. One that gets some all the time leaves with some on the way.
const TURNS: u32 = 4;

/// Whom a call sends signals to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    /// One thread, if it has this number here.
    Thread(HomePid),
    /// Whom else.
    Any,
}

fn sends_to(call: &Call) -> Option<To> {
    let thread = |arg: usize| match call.args[arg] {
        Arg::Value(tid) => To::Thread(HomePid(tid as i32)),
        _ => To::Any,
    };
    match i64::from(call.nr) {
        libc::SYS_tkill => Some(thread(0)),
        libc::SYS_tgkill | libc::SYS_rt_tgsigqueueinfo => Some(thread(1)),
        libc::SYS_kill | libc::SYS_rt_sigqueueinfo | libc::SYS_pidfd_send_signal => Some(To::Any),
        _ => None,
    }
}

impl Family {
    /// Takes the signals that this call has sent to deputies, which sends them on.
    ///
    /// The kernel takes a signal from what is pending and stops the thread for us in one step. So if none is pending, its
    /// stop is there to be taken, or has been; and if one was taken just now, there may be another behind it.
    pub(crate) fn take_what_it_sent(&mut self, call: &Call) {
        if let Some(to) = sends_to(call) {
            self.take_until(|family| !family.awaits_signal(to));
        }
    }

    /// Brings a process that is about to leave home to a stand, as [`halt_at_home`](Self::halt_at_home) does, but lets it
    /// take the signals first that wait for it: the deputy would send them on when the guest runs already, who may have
    /// been told of them.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub(crate) fn halt_to_leave(&mut self, pid: HomePid) -> Result<bool> {
        let execs = self.members.get(&pid).map(|member| member.execs);
        for _ in 0..TURNS {
            if !self.halt_at_home(pid)? {
                return Ok(false);
            }
            let Some(member) = self.members.get_mut(&pid) else { return Ok(false) };
            if !member.is_let_take_signals()? {
                return Ok(true);
            }
            self.take_until(|family| {
                !family.members.get(&pid).is_some_and(|member| is_to_take_one(&member.numbers()))
            });
            // The move begins anew with another program.
            if self.members.get(&pid).map(|member| member.execs) != execs {
                return Ok(false);
            }
        }
        self.halt_at_home(pid)
    }

    /// Takes stops until this is so before there are none.
    fn take_until(&mut self, done: impl Fn(&mut Self) -> bool) {
        let give_up = Instant::now() + PATIENCE;
        loop {
            let awaited = !done(self) && Instant::now() < give_up;
            match (awaited, self.take_all_stops()) {
                (false, false) => return,
                (true, false) => std::thread::sleep(NAP),
                (_, true) => {}
            }
        }
    }

    fn awaits_signal(&mut self, to: To) -> bool {
        if let To::Thread(tid) = to
            && let Some(member) = self.of_thread(tid)
        {
            return member.is_away() && is_to_take_one(&[tid]);
        }
        self.members.values().any(|member| member.is_away() && is_to_take_one(&member.numbers()))
    }
}

impl Member {
    fn numbers(&self) -> Vec<HomePid> {
        self.living().map(|thread| thread.tid).collect()
    }

    /// Lets a standing process go on if signals wait for it. Not one that is stopped by job control, which takes none, or
    /// is in a transfer that we have cut short, of which only we know what was done.
    fn is_let_take_signals(&mut self) -> Result<bool> {
        let stays = |thread: &Thread| {
            let group = thread.standing.as_ref().is_some_and(|s| matches!(s.stop, Stop::Group(_)));
            group || thread.partial.is_some()
        };
        if self.living().any(stays) || !self.living().any(|thread| waits_for(thread.tid)) {
            return Ok(false);
        }
        for thread in self.threads.values_mut() {
            if let Some(stopped) = thread.standing.take() {
                thread.wanted = false;
                stopped.resume(0)?;
            }
        }
        Ok(true)
    }
}

/// Whether a signal waits that this thread would take.
fn waits_for(tid: HomePid) -> bool {
    procfs::status(tid.0).is_ok_and(|status| status.pending & !status.blocked != 0)
}

/// Whether one of these threads is about to take a signal. One that stands, for job control or for us, takes none
/// now, nor does one in a vfork; and as the kernel may have chosen that one for a signal which others could take as well, none
/// of its process is waited for then.
fn is_to_take_one(threads: &[HomePid]) -> bool {
    let mut takes = false;
    for tid in threads {
        let Ok(status) = procfs::status(tid.0) else { continue };
        if !matches!(status.state, b'R' | b'S') {
            return false;
        }
        takes |= status.pending & !status.blocked != 0;
    }
    takes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whom_calls_send_to() {
        let call =
            |nr: i64| Call { nr: nr as u32, args: std::array::from_fn(|at| Arg::Value(at as u64 + 7)) };
        assert_eq!(sends_to(&call(libc::SYS_tgkill)), Some(To::Thread(HomePid(8))));
        assert_eq!(sends_to(&call(libc::SYS_tkill)), Some(To::Thread(HomePid(7))));
        assert_eq!(sends_to(&call(libc::SYS_kill)), Some(To::Any));
        assert_eq!(sends_to(&call(libc::SYS_write)), None);
    }
}
