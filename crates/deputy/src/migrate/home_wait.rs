//! Waits with a time limit that a process makes at home when it is to leave.
//!
//! The kernel ends a wait such as epoll_wait with EINTR when the shim stops the thread, and keeps no
//! record of the time that is left. It has one for poll, but only this kernel can use it, and only
//! with the memory that is about to leave. It writes what is left of a ppoll or select, which then does
//! not count the time of the stop. So the deputy takes such a wait over for the rest of its
//! time before anything of the process leaves. The thread is draining from then on
//! ([`super::draining`]), as if it had come home in this call, also if the process stays.
//!
//! A wait on a futex stays with its thread, since it concerns the memory. The end of its time is recorded
//! ([`tern_image::futex_wait`]).
//!
//! A call on a socket with SO_RCVTIMEO or SO_SNDTIMEO is such a wait too. The shim ends it in time
//! ([`crate::time::socket_limit`]).
//!
//! Since when the thread waits is measured before the first stop ([`SleepMeter`]).

use crate::migrate::syscall_restart::has_time_left;
use crate::process::Process;
use crate::process::mailbox::Mailbox;
use crate::process::state::State;
use crate::process::thread::{Draining, Thread};
use crate::shim::{Shim, ShimEvent};
use crate::time::socket_limit::may_have_socket_timeout;
use crate::waker::Waker;
use std::time::{Duration, Instant};
use tern_ids::{HomePid, MigrationId};
use tern_image::futex_wait::{is_interrupted, is_timed_wait, restarted, time_limit, undo_rewind};
use tern_image::thread::{capture, clear_kernel_pointers};
use tern_image::{Reserve, ThreadImage};
use tern_migrate::message::CallRequest;
use tern_syscall::{Timeout, row, waits_here};
use tern_tracee::inject::{Injection, Site};
use tern_tracee::procfs::{self, Sleep, SleepMeter};
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::{EXIT_KILL, FOLLOW};
use tern_tracee::{Error, Memory, Result};

/// The number of a call that a thread was making when its process left home for the first time since
/// it began to be traced: the guest counts its calls from there.
const FIRST_CALL: u64 = 1;

/// How long a freeze waits until it is known since when threads wait.
const MEASUREMENT_TIMEOUT: Duration = Duration::from_millis(200);

/// Whether an interruption loses the time limit of this call. A wait in the guest's own kernel is
/// not made by a deputy.
fn loses_timeout(nr: u32, args: &[u64; 6]) -> bool {
    let Some(wait) = row(nr).and_then(|row| row.wait).filter(|_| !waits_here(nr, args)) else { return false };
    match wait.timeout {
        Timeout::Millis(arg) => args[usize::from(arg)] as i32 > 0,
        Timeout::Timespec(arg) | Timeout::TimeLeft(arg) => args[usize::from(arg)] != 0,
        _ => may_have_socket_timeout(nr),
    }
}

/// Measures since when the threads of these processes, which run at home, wait in calls that lose
/// their time limits. For a helper thread ([`SleepMeter`]).
pub(super) fn measure_sleeps(group: &[HomePid]) -> Vec<(HomePid, Sleep)> {
    let mut meter = SleepMeter::default();
    let threads = group.iter().flat_map(|pid| procfs::threads(pid.0).unwrap_or_default());
    let is_wanted = |nr, args: &_| loses_timeout(nr, args) || is_timed_wait(nr, args);
    threads.filter_map(|tid| Some((HomePid(tid), meter.sleep_of(tid, is_wanted)?))).collect()
}

/// Whether this kernel shows when a thread last slept.
pub(super) fn can_measure_sleeps(tid: i32) -> bool {
    Sleep::of_resumed(tid, 0, Instant::now()).is_some()
}

/// A thread whose call its deputy is to make, and from when the time limit of the call counts.
pub(super) type TakenOver = (HomePid, CallRequest, Instant);

impl Shim {
    /// Has the deputy of a thread that is draining make the call that was taken over.
    pub(super) fn continue_wait(&mut self, (tid, request, since): TakenOver) {
        self.post_remainder(tid, request);
        let thread = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid));
        if let Some(current) = thread.and_then(|thread| thread.current.as_mut()) {
            current.posted_at = since;
        }
    }

    /// Has a helper thread measure since when the threads of a process that is to be frozen wait: these
    /// waits may have begun while it was sent. Without a result it is frozen after a while.
    pub(super) fn measure_waits(&mut self, pid: HomePid) {
        let migration = self.migration_of(pid);
        let measure = move || ShimEvent::Measured(pid, migration, measure_sleeps(&[pid]));
        let timeout = if self.start_helper(measure) { MEASUREMENT_TIMEOUT } else { Duration::ZERO };
        self.set_measured_at(pid, Instant::now() + timeout);
    }

    /// Handles the result of that. One that comes after the end of that move is out of date.
    pub(crate) fn waits_measured(
        &mut self,
        pid: HomePid,
        migration: Option<MigrationId>,
        sleeps: Vec<(HomePid, Sleep)>,
    ) {
        if self.migration_of(pid) == migration {
            self.record_sleeps(sleeps);
            self.set_measured_at(pid, Instant::now());
        }
    }

    fn migration_of(&self, pid: HomePid) -> Option<MigrationId> {
        self.processes.get(&pid)?.task.as_ref().map(|task| task.migration)
    }

    fn set_measured_at(&mut self, pid: HomePid, at: Instant) {
        if let Some(State::Outgoing(outgoing)) = self.processes.get_mut(&pid).map(|one| &mut one.state) {
            outgoing.measured_at = Some(at);
        }
    }

    /// Records the sleeps of threads that are about to be stopped.
    pub(crate) fn record_sleeps(&mut self, sleeps: Vec<(HomePid, Sleep)>) {
        for (tid, sleep) in sleeps {
            let process = self.process_of_thread(tid).filter(|process| !process.is_away());
            let thread = process.and_then(|process| process.threads.get_mut(&tid));
            if let Some(thread) = thread.filter(|thread| thread.stopped.is_none()) {
                // The sleep of a wait that the shim has seen before began with the wait.
                if thread.sleep.is_none_or(|known| !known.is_same(&sleep)) {
                    (thread.sleep, thread.futex_wait_end) = (Some(sleep), None);
                }
            }
        }
    }
}

impl Thread {
    /// The thread has just stopped with these registers. Its recorded sleep is forgotten if it has run
    /// since. If it was in a call that its kernel had continued by restart_syscall, the registers are
    /// changed to those of the call that the program made: another kernel cannot continue it, and a
    /// deputy's kernel would do so with memory that has left.
    fn confirm_sleep(&mut self, registers: &mut Registers, memory: &Memory) {
        let tid = self.tid.0;
        self.stopped_at = Some(Instant::now());
        let is_futex = |sleep: &Sleep| i64::from(sleep.nr) == libc::SYS_futex;
        let continued = self.continued_wait.take();
        let is_same =
            continued.is_some_and(|(stack, args)| (stack, args) == (registers.rsp, registers.arguments()));
        let was_waiting = is_same || self.sleep.is_some_and(|sleep| is_futex(&sleep) && sleep.is_continued);
        let is_rewound = undo_rewind(registers, was_waiting);
        let is_continued = is_rewound || registers.orig_rax == libc::SYS_restart_syscall.cast_unsigned();
        let is_waiting = registers.restart_code() == Some(restart::BLOCK);
        self.sleep.take_if(|sleep| {
            let lasted = sleep.lasted_until_stop(tid) || is_continued && sleep.was_to_come(tid);
            !lasted || is_futex(sleep) && !(is_waiting && sleep.is_continued == is_continued)
        });
        if is_waiting && is_continued && is_same {
            registers.orig_rax = libc::SYS_futex.cast_unsigned();
        }
        if let Some(sleep) = self.sleep
            && registers.restart_code() == Some(restart::BLOCK)
        {
            registers.orig_rax = sleep.nr.into();
        }
        if self.sleep.is_none() {
            // Nothing could tell later in which call the thread is, once its kernel has continued it.
            *registers = restarted(*registers);
        }
        self.note_wait(registers);
        // The program may use the memory of the time limit for something else: it is read once only.
        let first = self.sleep.filter(|_| self.futex_wait_end.is_none() && is_interrupted(registers));
        if let Some(sleep) = first {
            let limit = time_limit(registers.r10, memory);
            self.futex_wait_end = limit.and_then(|limit| sleep.began.checked_add(limit));
        }
    }

    fn note_wait(&mut self, registers: &Registers) {
        let call = (registers.rsp, registers.arguments());
        self.continued_wait = Some(call).filter(|_| is_interrupted(registers));
    }
}

impl Thread {
    /// When the wait on a futex ends in which the thread, with these registers, has stopped. `None` if it
    /// is in no such wait, or that is unknown.
    pub(super) fn end_of_futex_wait(&self, registers: &Registers) -> Option<Instant> {
        self.sleep.filter(|_| is_interrupted(registers)).and(self.futex_wait_end)
    }

    /// The thread is home, stopped, and continues a wait on a futex that ends then.
    pub(super) fn set_futex_wait(&mut self, until: Option<Instant>, registers: &Registers) {
        let nr = libc::SYS_futex as u32;
        self.sleep = until.and_then(|_| Sleep::of_resumed(self.tid.0, nr, Instant::now()));
        self.futex_wait_end = until;
        self.note_wait(registers);
    }

    /// The thread is about to be resumed from a stop with these registers: its kernel continues its wait on
    /// a futex, if it is in one. The sleep that begins then is recorded. The registers become those of a
    /// continued call: if the thread stops again before it runs, it is not taken for one that makes another
    /// wait.
    pub(crate) fn continue_sleep(&mut self, registers: &mut Registers) {
        let is_futex = |sleep: &Sleep| i64::from(sleep.nr) == libc::SYS_futex;
        let wait = self.sleep.take().filter(|sleep| self.continued_wait.is_some() && is_futex(sleep));
        self.sleep = wait.and_then(|wait| Sleep::of_resumed(self.tid.0, wait.nr, wait.began));
        if self.sleep.is_some() {
            registers.orig_rax = libc::SYS_restart_syscall.cast_unsigned();
        }
    }

    /// As [`Self::continue_sleep`], if the thread is stopped, and sets its registers. The sleep of a thread
    /// that is not stopped goes on.
    pub(crate) fn continue_sleep_if_stopped(&mut self) {
        let Some(before) = self.stopped.as_ref().and_then(|stopped| stopped.registers().ok()) else { return };
        let mut registers = before;
        self.continue_sleep(&mut registers);
        if let Some(stopped) = self.stopped.as_ref().filter(|_| registers != before) {
            let _gone = stopped.set_registers(&registers);
        }
    }

    /// The thread is about to be detached. Returns its wait on a futex, if it is in one whose end is known.
    pub(crate) fn detached_wait(&mut self) -> Option<DetachedWait> {
        self.continue_sleep_if_stopped();
        Some(DetachedWait { tid: self.tid, sleep: self.sleep?, until: self.futex_wait_end? })
    }
}

/// A wait on a futex with a relative time limit, of a thread at home that is not traced.
#[derive(Debug, Clone)]
pub(crate) struct DetachedWait {
    tid: HomePid,
    sleep: Sleep,
    until: Instant,
}

impl DetachedWait {
    /// Whether the thread of this process may still be in it.
    pub(crate) fn lasts(&self, pid: HomePid) -> bool {
        Instant::now() < self.until && self.sleep.lasts(pid.0, self.tid.0)
    }
}

impl Process {
    /// [`Thread::confirm_sleep`] of one of its threads.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn confirm_sleep(&mut self, tid: HomePid, registers: &mut Registers) -> Result<()> {
        let thread = self.threads.get_mut(&tid).ok_or(Error::Gone { pid: tid.0 })?;
        thread.confirm_sleep(registers, &self.memory);
        Ok(())
    }

    /// The threads that were detached in waits on futexes are traced again.
    pub(super) fn recall_waits(&mut self) {
        for wait in std::mem::take(&mut self.detached_waits) {
            if let Some(thread) = self.threads.get_mut(&wait.tid) {
                (thread.sleep, thread.futex_wait_end) = (Some(wait.sleep), Some(wait.until));
            }
        }
    }

    /// Makes the stopped threads of a prepared process draining whose calls lose their time limits.
    /// Returns the calls that their deputies are to make, and from when their time counts. If that is
    /// not possible at the moment, the calls are made again with their whole time.
    ///
    /// # Errors
    /// If a thread is gone.
    pub(super) fn take_over_waits(&mut self, waker: &Waker) -> Result<Vec<TakenOver>> {
        let mut requests = Vec::new();
        for thread in self.live_threads().filter(|thread| thread.draining.is_none()) {
            if let Some((request, since)) = self.rest_of_wait(thread)? {
                requests.push((thread.tid, request, since));
            }
        }
        let (Some(reserve), false) = (self.reserve, requests.is_empty()) else { return Ok(Vec::new()) };
        let site = Site::in_vdso(&self.memory)?;
        let mut injections = Vec::with_capacity(requests.len());
        for (tid, ..) in &requests {
            injections.push(Injection::begin(self.take_stopped(*tid)?, site)?);
        }
        let taken_over = match self.set_up_waits(&mut injections, reserve, waker) {
            Ok(taken_over) => taken_over,
            Err(error) => {
                self.finish_injections(injections)?;
                tracing::warn!(pid = %self.pid, %error, "time limits of waits begin anew");
                return if error.is_gone() { Err(error) } else { Ok(Vec::new()) };
            }
        };
        for (injection, (mut image, mailbox)) in injections.into_iter().zip(taken_over) {
            let registers = Self::blob_registers(injection.saved_registers(), reserve, mailbox.area());
            let mask = injection.saved_mask();
            let stopped = injection.finish_with(&registers, mask)?;
            image.registers.rax = restart::NOHAND.cast_unsigned();
            let thread = self.thread(image.tid)?;
            thread.mailbox = Some(mailbox);
            thread.draining = Some(Box::new(Draining { image, pending_signals: Vec::new(), partial: None }));
            thread.stopped = Some(stopped);
        }
        Ok(requests)
    }

    /// Makes mailboxes for threads under injection, and captures their states as the program left
    /// them.
    fn set_up_waits(
        &mut self,
        injections: &mut [Injection],
        reserve: Reserve,
        waker: &Waker,
    ) -> Result<Vec<(ThreadImage, Mailbox)>> {
        let memory = Memory::open(self.memory.pid())?;
        memory.write_forced(reserve.start, crate::process::blob::code())?;
        let count = injections.len();
        let first = injections.first_mut().ok_or(Error::Gone { pid: self.pid.0 })?;
        let mailboxes = self.own_mappings.create_mailboxes(first, reserve, count, waker)?;
        let tids = injections.iter().map(|injection| HomePid(injection.pid()));
        let numbers: Vec<(HomePid, i32)> =
            tids.map(|tid| (tid, self.threads.get(&tid).map_or(0, |thread| thread.own_tid))).collect();
        let area = reserve.small_batch_area();
        let images = capture(injections, &numbers, &memory, area)?;
        clear_kernel_pointers(injections, &memory, area)?;
        for injection in injections.iter() {
            // As for any draining thread: without its shim it could not continue.
            injection.stopped()?.set_options(FOLLOW | EXIT_KILL)?;
        }
        Ok(images.into_iter().zip(mailboxes).collect())
    }

    /// The call that a stopped thread was making, for the rest of its time, and from when that counts,
    /// if the stop has interrupted the call and its time limit is lost.
    fn rest_of_wait(&self, thread: &Thread) -> Result<Option<(CallRequest, Instant)>> {
        let Some(stopped) = &thread.stopped else { return Ok(None) };
        let registers = stopped.registers()?;
        let nr = registers.orig_rax as u32;
        if registers.restart_code() != Some(restart::NOHAND) || !loses_timeout(nr, &registers.arguments()) {
            return Ok(None);
        }
        // A call that cannot be made by the deputy fails when the program makes it again.
        let Ok(mut request) = self.remainder_request(&registers, FIRST_CALL, 0) else { return Ok(None) };
        let now = Instant::now();
        let stopped_at = thread.stopped_at.unwrap_or(now);
        // The kernel has written what was left at the stop.
        let measured = thread.sleep.filter(|_| !has_time_left(&request.call));
        let began = measured.map_or(stopped_at, |sleep| sleep.began).min(now);
        request.call.subtract_elapsed(now - began);
        let since = if may_have_socket_timeout(nr) { began } else { now };
        Ok(request.call.clone().lay_out().is_ok().then_some((request, since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stops::events::repair_thread;
    use std::process::{Child, Command};
    use tern_image::futex_wait::continue_wait;
    use tern_tracee::inject::through_vdso;
    use tern_tracee::stop::{Stopped, interrupt, seize, wait_stop};

    /// A child that continues a wait on a futex with a time limit of 1000 s, of which 500 s are left, when
    /// it is resumed.
    struct Waiting {
        child: Child,
        thread: Thread,
        memory: Memory,
        until: Instant,
        /// The address of its time limit.
        limit: u64,
    }

    impl Waiting {
        fn begin() -> Self {
            let child = Command::new("sleep").arg("1000").spawn().unwrap();
            let tid = HomePid(child.id().cast_signed());
            // Its memory is complete when it has begun its own program.
            let begun = Instant::now();
            while !procfs::command_line(tid.0).starts_with("sleep")
                || procfs::status(tid.0).unwrap().state != b'S'
            {
                assert!(begun.elapsed() < Duration::from_secs(20), "it does not sleep");
                std::thread::yield_now();
            }
            seize(tid.0, FOLLOW).unwrap();
            interrupt(tid.0).unwrap();
            let (mut injection, memory) = through_vdso(wait_stop(tid.0).unwrap()).unwrap();
            let before = *injection.saved_registers();
            let word = (before.rsp - 4096) & !63;
            memory.write(word, &[0; 16]).unwrap();
            memory.write(word + 16, &1000u64.to_le_bytes()).unwrap();
            memory.write(word + 24, &0u64.to_le_bytes()).unwrap();
            let operation = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as u64;
            let args = [word, operation, 0, word + 16, 0, 0];
            let site = Site::in_vdso(&memory).unwrap().0 + 2;
            let futex = libc::SYS_futex.cast_unsigned();
            let registers = Registers {
                rax: restart::BLOCK.cast_unsigned(),
                orig_rax: futex,
                ..before.calling(site, futex, &args)
            };
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            let ends = (now.tv_sec as u64 + 500) * 1_000_000_000;
            let (registers, until) =
                continue_wait(Some(ends), registers, &mut injection, &memory, word + 32).unwrap();
            assert!(is_interrupted(&registers));
            let mut thread = Thread::new_resident(tid).unwrap();
            thread.set_futex_wait(until, &registers);
            thread.stopped = Some(injection.finish_with(&registers, 0).unwrap());
            Self { child, thread, memory, until: until.unwrap(), limit: word + 16 }
        }

        fn tid(&self) -> i32 {
            self.thread.tid.0
        }

        fn continue_wait(&mut self) {
            self.thread.continue_sleep_if_stopped();
            self.resume();
        }

        fn resume(&mut self) {
            self.thread.stopped.take().unwrap().resume(0).unwrap();
        }

        fn stop(&mut self) {
            interrupt(self.tid()).unwrap();
            self.thread.stopped = Some(wait_stop(self.tid()).unwrap());
        }

        /// Handles the stop as the shim does. Returns the registers, and the known end of the wait.
        fn confirm(&mut self) -> (Registers, Option<Instant>) {
            let stopped: &Stopped = self.thread.stopped.as_ref().unwrap();
            let mut registers = stopped.registers().unwrap();
            self.thread.confirm_sleep(&mut registers, &self.memory);
            self.thread.stopped.as_ref().unwrap().set_registers(&registers).unwrap();
            (registers, self.thread.end_of_futex_wait(&registers))
        }

        /// The sleep of the thread, once it waits.
        fn measure(&self) -> Sleep {
            let tid = self.tid();
            let begun = Instant::now();
            loop {
                let measure = move || SleepMeter::default().sleep_of(tid, is_timed_wait);
                if let Some(sleep) = std::thread::spawn(measure).join().unwrap() {
                    return sleep;
                }
                assert!(begun.elapsed() < Duration::from_secs(20), "it does not wait");
            }
        }
    }

    impl Drop for Waiting {
        fn drop(&mut self) {
            drop(self.child.kill());
            self.thread.stopped = None;
            drop(self.child.wait());
        }
    }

    #[test]
    fn futex_wait_keeps_its_end_over_stops() {
        let mut waiting = Waiting::begin();
        let until = waiting.until;
        let is_near = |end: Option<Instant>| {
            let end = end.expect("the end is known");
            end.max(until) - end.min(until) < Duration::from_millis(1)
        };
        waiting.thread.continue_sleep_if_stopped();
        let known = waiting.thread.sleep.expect("the kernel shows sleeps");
        waiting.resume();
        let measured = waiting.measure();
        assert!(measured.is_continued && measured.is_same(&known));
        for round in 0..50 {
            waiting.stop();
            let (registers, end) = waiting.confirm();
            assert!(is_interrupted(&registers) && is_near(end), "round {round}");
            waiting.continue_wait();
            if round % 2 == 0 {
                waiting.measure();
            }
        }
    }

    #[test]
    fn futex_wait_keeps_its_end_if_its_time_limit_is_overwritten() {
        let mut waiting = Waiting::begin();
        let until = waiting.until;
        waiting.continue_wait();
        waiting.measure();
        for overwritten in [1, u64::MAX] {
            waiting.memory.write(waiting.limit, &overwritten.to_le_bytes()).unwrap();
            waiting.stop();
            assert_eq!(waiting.confirm().1, Some(until));
            waiting.continue_wait();
            waiting.measure();
        }
    }

    #[test]
    fn futex_wait_keeps_its_end_if_an_ignored_signal_comes_before_the_stop() {
        let mut waiting = Waiting::begin();
        let (tid, until) = (waiting.thread.tid, waiting.until);
        waiting.continue_wait();
        waiting.measure();
        waiting.stop();
        let first = waiting.thread.stopped.take().unwrap();
        let mut process = Process::new_resident(tid, std::path::Path::new("/nonexistent")).unwrap();
        let thread = std::mem::replace(&mut waiting.thread, Thread::new_resident(tid).unwrap());
        process.threads.insert(tid, thread);
        repair_thread(&mut process, tid, &first, false).unwrap();
        interrupt(tid.0).unwrap();
        first.resume(0).unwrap();
        waiting.thread.stopped = Some(wait_stop(tid.0).unwrap());
        let second = waiting.thread.stopped.as_ref().unwrap();
        repair_thread(&mut process, tid, second, true).unwrap();
        let registers = second.registers().unwrap();
        assert!(is_interrupted(&registers), "the wait is not made again");
        assert_eq!(process.threads[&tid].end_of_futex_wait(&registers), Some(until));
    }

    #[test]
    fn futex_wait_begins_anew_after_an_unknown_sleep() {
        let mut waiting = Waiting::begin();
        waiting.continue_wait();
        waiting.measure();
        // A stop that the shim does not handle, as before it traces the thread.
        waiting.stop();
        let _read = waiting.thread.stopped.as_ref().unwrap().registers().unwrap();
        waiting.resume();
        waiting.measure();
        waiting.stop();
        let (registers, end) = waiting.confirm();
        assert_eq!(end, None);
        assert_eq!(registers.orig_rax, libc::SYS_futex.cast_unsigned());
        assert_eq!(registers.restart_code(), Some(restart::NOHAND), "the wait is made again");
    }

    #[test]
    fn detached_wait_is_kept_until_it_ends() {
        let mut waiting = Waiting::begin();
        let mut wait = waiting.thread.detached_wait().unwrap();
        let pid = waiting.thread.tid;
        assert!(wait.lasts(pid), "it is about to continue");
        waiting.resume();
        waiting.measure();
        assert!(wait.lasts(pid));
        assert!(!wait.lasts(HomePid(std::process::id().cast_signed())), "no thread of that process");
        wait.until = Instant::now();
        assert!(!wait.lasts(pid), "its time is over");
        wait.until += Duration::from_secs(1000);
        waiting.stop();
        waiting.resume();
        waiting.measure();
        assert!(!wait.lasts(pid), "another sleep");
    }
}
