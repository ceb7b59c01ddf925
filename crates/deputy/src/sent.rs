//! Signals that a guest's call has sent to processes of its own family.
//!
//! The kernel makes a signal pending before the call that sends it returns, so that whoever is told of the call by its
//! sender, in whatever way, has handled the signal first. So home does not tell the sender before it has sent these
//! signals on: what it tells a guest's node comes there in that order. And those that wait for a process when it leaves home
//! are at its guest before that runs.

use crate::family::Family;
use crate::member::{Member, State};
use crate::out::raise_natively;
use crate::signal::{Verdict, judge, runs_once};
use crate::stops::NAP;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::Reserve;
use tern_image::process::Action;
use tern_migrate::message::Message;
use tern_syscall::{Arg, Call};
use tern_tracee::inject::{self, Injection};
use tern_tracee::siginfo::{Siginfo, signal_of, timer_of};
use tern_tracee::stop::Stopped;
use tern_tracee::{Memory, Result, procfs};

/// How long a signal is waited for that the kernel should hand out at once. It does not in a frozen control group.
const PATIENCE: Duration = Duration::from_secs(1);

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

    /// Takes the signals from the kernel that wait for the threads of a captured process, which stands, and that its
    /// handlers are to see; what its guest is to be told of them before it goes. The deputy would send them on when the guest
    /// runs already, who may have been told of them by who sent them. If it stays they are raised again
    /// ([`Self::raise_unheard`]).
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn take_waiting(&mut self) -> Result<Vec<(HomePid, Message)>> {
        let (State::Outbound(outbound), Some(reserve)) = (&self.state, self.reserve) else {
            return Ok(Vec::new());
        };
        let Some(actions) = outbound.image.as_ref().map(|image| image.actions.clone()) else {
            return Ok(Vec::new());
        };
        let mut told = Vec::new();
        for tid in self.numbers() {
            let thread = self.thread(tid)?;
            // What interrupts a transfer that we have cut short must end it, which only its deputy can.
            let Some(stopped) = thread.standing.as_ref().filter(|_| thread.partial.is_none()) else {
                continue;
            };
            let signals = for_handlers(stopped, &actions)?;
            if signals == 0 {
                continue;
            }
            let (mut injection, _, memory) = inject::through_vdso(self.take_standing(tid)?)?;
            let taken = take(&mut injection, &memory, reserve, signals, &actions);
            self.stands_at(injection.finish()?)?;
            let thread = self.thread(tid)?;
            for info in taken? {
                thread.signals += 1;
                thread.unheard.push_back((thread.signals, info));
                told.push((tid, Message::Signal(thread.signals, info.to_vec())));
            }
        }
        Ok(told)
    }

    /// Has a thread under injection raise what its guest has not heard of, which never ran, in this thread.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn raise_unheard(
        &mut self,
        (injection, memory): (&mut Injection, &Memory),
        reserve: Reserve,
        tid: HomePid,
    ) -> Result<()> {
        let (own_pid, thread) = (self.own_pid, self.thread(tid)?);
        let unheard: Vec<Siginfo> = thread.unheard.drain(..).map(|(_, info)| info).collect();
        raise_natively(injection, memory, reserve, (own_pid, thread.own_tid), &unheard)
    }
}

/// The signals that wait for a standing thread and that handlers are to see, as a set. Not those of timers, of which the
/// kernel must know that they wait when its timers are taken; nobody sends them.
fn for_handlers(stopped: &Stopped, actions: &[Action]) -> Result<u64> {
    let (own, shared) = stopped.pending()?;
    let (mut wanted, mut left) = (0, stopped.sigmask()?);
    for info in own.iter().chain(&shared) {
        let signal = signal_of(info);
        let Some(action) = usize::try_from(signal - 1).ok().and_then(|at| actions.get(at)) else { continue };
        let bit = 1 << (signal - 1);
        if timer_of(info).is_some() || judge(action[0], signal) != Verdict::Forward {
            left |= bit;
        }
        wanted |= bit;
    }
    Ok(wanted & !left)
}

/// Takes waiting signals of a set in a thread under injection, in the kernel's order: all, but of those whose handler runs
/// once one each.
fn take(
    injection: &mut Injection,
    memory: &Memory,
    reserve: Reserve,
    mut signals: u64,
    actions: &[Action],
) -> Result<Vec<Siginfo>> {
    let (set, now, at) = (reserve.scratch(), reserve.scratch() + 64, reserve.scratch() + 128);
    memory.write(now, &[0; 16])?;
    let mut taken = Vec::new();
    while signals != 0 {
        memory.write(set, &signals.to_le_bytes())?;
        let signal = injection.call(libc::SYS_rt_sigtimedwait, [set, at, now, 8, 0, 0])?;
        if !(1..=64).contains(&signal) {
            break;
        }
        let mut info = [0; 128];
        memory.read(at, &mut info)?;
        taken.push(info);
        if runs_once(&actions[signal as usize - 1]) {
            signals &= !(1 << (signal - 1));
        }
    }
    Ok(taken)
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
