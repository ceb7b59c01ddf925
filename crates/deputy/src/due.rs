//! What a process that is away has used of what its timers and RLIMIT_CPU wait for, and what is done when that is reached.
//!
//! Home knows what the deputy uses, and of the guest what it has last been told. It asks the guest's shim to say so as soon
//! as the rest has been used there (`Watch`), and asks anew with each word of it, since the deputy uses some as well. It
//! also looks when a call of the deputy's ends: a program that mostly calls is due by what it uses here.

use crate::family::Family;
use crate::firing::Firing;
use crate::member::Member;
use crate::timers::{Clock, Timer, Which};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_syscall::{Arg, Call, Outcome};
use tern_tracee::{cpu, timers};

const SECOND: u64 = 1_000_000_000;

/// A timer is looked at no more often than the kernel does it.
const TICK: Duration = Duration::from_millis(4);

/// How long limits that were read hold.
const BEAT: Duration = Duration::from_secs(1);

/// Which clocks are looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Of {
    All,
    Thread(HomePid),
}

impl Of {
    fn has(self, thread: Option<HomePid>) -> bool {
        match self {
            Self::All => true,
            Self::Thread(tid) => thread == Some(tid),
        }
    }
}

impl Member {
    /// What a clock of its shows, as its program sees it, as far as its guest has told what was used away. At home a clock
    /// that is gone shows nothing.
    pub(crate) fn clock(&self, clock: Clock) -> u64 {
        let pid = self.pid.0;
        let away = match clock.thread {
            Some(tid) => self.shares.get(&tid).copied().unwrap_or_default(),
            None => self.used,
        };
        let home = match (clock.thread, clock.user) {
            (Some(tid), user) => cpu::counted_thread(pid, tid.0)
                .map(|counted| if user { counted.user.saturating_mul(SECOND / 100) } else { counted.total }),
            (None, true) => cpu::counted_in_user_mode(pid),
            (None, false) => cpu::counted(pid).map(|counted| counted.total),
        };
        home.unwrap_or_default().saturating_add(if clock.user { away.user } else { away.total() })
    }

    /// The clock that a program of this process means by a number, if it is one of its own that counts CPU time.
    pub(crate) fn own_clock(&self, number: i32, caller: Option<HomePid>) -> Option<Clock> {
        const THREAD: i32 = 4;
        let whole = Clock { thread: None, user: number < 0 && number & 3 == 1 };
        match number {
            libc::CLOCK_PROCESS_CPUTIME_ID => Some(whole),
            libc::CLOCK_THREAD_CPUTIME_ID => caller.map(|tid| Clock { thread: Some(tid), ..whole }),
            _ if !cpu::counts(number) => None,
            // The number of the process or thread, inverted, and three bits.
            _ if number & THREAD == 0 => Some(whole).filter(|_| [0, self.own_pid].contains(&!(number >> 3))),
            _ => {
                let own_tid = !(number >> 3);
                let named = self.threads.values().find(|thread| thread.own_tid == own_tid);
                let thread = if own_tid == 0 { caller } else { named.map(|thread| thread.tid) };
                thread.map(|tid| Clock { thread: Some(tid), ..whole })
            }
        }
    }

    /// The limits on its CPU time. Others may set them too, of which we are not told.
    fn cpu_limits(&mut self) -> [Option<u64>; 2] {
        if self.limits.is_none_or(|(_, read)| read.elapsed() > BEAT) {
            self.limits = Some((timers::limits(self.pid.0).unwrap_or_default(), Instant::now()));
        }
        self.limits.map(|(limits, _)| limits).unwrap_or_default()
    }

    /// What is due now.
    fn due(&mut self, of: Of) -> Vec<Firing> {
        self.looked = Instant::now();
        let mut timers = std::mem::take(&mut self.timers);
        let due = timers.due(|clock| if of.has(clock.thread) { self.clock(clock) } else { 0 });
        self.timers = timers;
        let fires = due.into_iter().map(|which| match which {
            Which::Posix(id) => Firing::Timer(id),
            Which::Prof => Firing::Signal(libc::SIGPROF),
            Which::Virtual => Firing::Signal(libc::SIGVTALRM),
        });
        let again = std::mem::take(&mut self.refire).into_iter().map(Firing::Timer);
        let mut due: Vec<Firing> = again.chain(fires).collect();
        if !of.has(None) {
            return due;
        }
        let used = self.clock(Clock { thread: None, user: false });
        match self.cpu_limits() {
            [_, Some(hard)] if used >= hard.saturating_mul(SECOND) => due.push(Firing::Signal(libc::SIGKILL)),
            [Some(soft), hard] if used >= soft.max(1).saturating_mul(SECOND) => {
                // Once a second from then on: the kernel moves the limit on.
                let next =
                    Rlimit { current: Some(used / SECOND + 1).min(hard.or(Some(u64::MAX))), maximum: hard };
                self.limits = None;
                let moved = Pid::from_raw(self.pid.0).map(|pid| prlimit(Some(pid), Resource::Cpu, next));
                if matches!(moved, Some(Ok(_))) {
                    due.push(Firing::Signal(libc::SIGXCPU));
                }
            }
            _ => {}
        }
        due
    }

    /// What its guest is to watch for: of the process (under its own number) and of threads, when so much has been used
    /// away that something is due.
    fn watches(&mut self, of: Of) -> BTreeMap<Option<HomePid>, u64> {
        let mut watches = BTreeMap::new();
        let limit = self.cpu_limits().into_iter().flatten().min();
        let limit = limit
            .map(|limit| (Clock { thread: None, user: false }, Some(limit.max(1).saturating_mul(SECOND))));
        let timers = self.timers.all.values().map(|timer| match timer.later {
            Some(_) => (timer.clock, Some(0)),
            None => (timer.clock, timer.expires),
        });
        for (clock, expires) in timers.chain(limit).filter(|(clock, _)| of.has(clock.thread)) {
            let used = match clock.thread {
                Some(tid) => self.shares.get(&tid).copied().unwrap_or_default(),
                None => self.used,
            };
            let left = expires.map(|at| at.saturating_sub(self.clock(clock)));
            let at = left.map_or(u64::MAX, |left| used.total().saturating_add(left));
            if at < u64::MAX {
                let watch = watches.entry(clock.thread).or_insert(at);
                *watch = at.min(*watch);
            }
        }
        watches
    }
}

impl Family {
    /// Answers a call about timers that home's kernel has not got. It has come right behind what its thread, and the
    /// process, have used.
    pub(crate) fn timer_call(&mut self, pid: HomePid, tid: HomePid, call: &Call) -> Option<Outcome> {
        let member = self.members.get_mut(&pid)?;
        let mut timers = std::mem::take(&mut member.timers);
        let answer =
            timers.answer(call, |clock| (member.clock(clock), clock.thread.is_none_or(|of| of == tid)));
        member.timers = timers;
        answer
    }

    /// A call of the deputy's has ended: whether that may have changed what is due, or to be watched for. So does each, by
    /// what it has used at home.
    pub(crate) fn timer_called(
        &mut self,
        pid: HomePid,
        tid: HomePid,
        call: &Call,
        outcome: &Outcome,
    ) -> bool {
        let Some(member) = self.members.get_mut(&pid) else { return false };
        let long_ago = !member.timers.all.is_empty() && member.looked.elapsed() > TICK;
        match (i64::from(call.nr), &call.args[0]) {
            (libc::SYS_timer_create, Arg::Value(clock)) if outcome.ret == 0 => {
                let Some(clock) = member.own_clock(*clock as i32, Some(tid)) else { return false };
                let number =
                    |bytes: &[u8], at: usize| Some(i32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
                let (notify, signal) = match &call.args[1] {
                    Arg::Bytes(event) => (number(event, 12), number(event, 8).unwrap_or_default()),
                    _ => (None, libc::SIGALRM),
                };
                let signal = Some(signal).filter(|_| notify != Some(libc::SIGEV_NONE));
                if let Some(id) = outcome.outs.first().and_then(|out| number(out, 0)) {
                    member.timers.all.insert(Which::Posix(id), Timer::new(clock, signal));
                }
            }
            (libc::SYS_timer_delete, Arg::Value(id)) if outcome.ret == 0 => {
                member.timers.all.remove(&Which::Posix(*id as i32));
            }
            (libc::SYS_setrlimit | libc::SYS_prlimit64, _) => member.limits = None,
            _ => return long_ago,
        }
        true
    }

    /// Has raised what is due, and watched for what is next. Not while job control has stopped it: it uses nothing then.
    pub(crate) fn look_at_timers(&mut self, pid: HomePid, of: Of) {
        let Some(member) = self.members.get_mut(&pid).filter(|m| m.is_away() && !m.job_stopped) else {
            return;
        };
        let untimed = member.timers.all.is_empty() && member.watched.is_empty();
        if untimed && member.cpu_limits() == [None; 2] {
            return;
        }
        let due = member.due(of);
        if !due.is_empty() {
            let first = member.living().any(|thread| thread.tid == pid);
            let Ok(tid) = (if first { Ok(pid) } else { member.any() }) else { return };
            if let Err(error) = self.with_deputy(tid, |member, stopped| member.fire(stopped, &due)) {
                return self.lost(tid, &error);
            }
        }
        self.watch(pid, of);
    }

    /// Another guest holds a process, or the same one after its link was cut: it has heard of nothing to watch for.
    pub(crate) fn watch_anew(&mut self, pid: HomePid) {
        if let Some(member) = self.members.get_mut(&pid) {
            member.watched.clear();
        }
        self.look_at_timers(pid, Of::All);
    }

    /// Tells the guest of a process what to watch for, as far as it does not know.
    fn watch(&mut self, pid: HomePid, of: Of) {
        let Some(member) = self.members.get_mut(&pid).filter(|member| member.is_away()) else { return };
        let now = member.watches(of);
        let mut before = member.watched.clone();
        before.retain(|thread, _| of.has(*thread));
        member.watched.retain(|thread, _| !of.has(*thread));
        member.watched.extend(&now);
        let over = before.keys().filter(|who| !now.contains_key(who)).map(|who| (*who, None));
        let new =
            now.iter().filter(|(who, at)| before.get(who) != Some(at)).map(|(who, at)| (*who, Some(*at)));
        let said: Vec<_> = over.chain(new).collect();
        for (who, at) in said {
            match who {
                Some(tid) => self.tell(tid, &Message::WatchThread(at)),
                None => self.tell(pid, &Message::Watch(at)),
            }
        }
    }

    /// The guest of a process has said what it, or a thread, has used by now: it watches for nothing there any more that
    /// has been reached.
    pub(crate) fn has_used(&mut self, pid: HomePid, thread: Option<HomePid>) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let used = thread.map_or(member.used, |tid| member.shares.get(&tid).copied().unwrap_or_default());
        if member.watched.get(&thread).is_some_and(|at| used.total() >= *at) {
            member.watched.remove(&thread);
        }
        let mut timers = std::mem::take(&mut member.timers);
        timers.read(thread, |clock| member.clock(clock));
        member.timers = timers;
        self.look_at_timers(pid, thread.map_or(Of::All, Of::Thread));
    }
}
