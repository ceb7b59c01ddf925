//! Waits with a time limit that a process makes at home when it is to leave.
//!
//! The kernel ends a wait such as epoll_wait with EINTR when the shim stops the thread, and keeps no
//! record of the time that is left. It has one for poll, but only this kernel can use it, and only
//! with the memory that is about to leave. It writes what is left of a ppoll or select, which then does
//! not count the time of the stop. So the deputy takes such a wait over for the rest of its
//! time before anything of the process leaves. The thread is draining from then on
//! ([`super::draining`]), as if it had come home in this call, also if the process stays.
//!
//! A call on a socket with SO_RCVTIMEO or SO_SNDTIMEO is such a wait too. The shim ends it in time
//! ([`crate::time::socket_limit`]).
//!
//! Since when the thread waits is measured before the first stop ([`SleepMeter`]).

use crate::migrate::syscall_restart::has_time_left;
use crate::process::Process;
use crate::process::mailbox::Mailbox;
use crate::process::thread::{Draining, Thread};
use crate::shim::Shim;
use crate::time::socket_limit::may_have_socket_timeout;
use crate::waker::Waker;
use std::time::Instant;
use tern_ids::HomePid;
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
    threads.filter_map(|tid| Some((HomePid(tid), meter.sleep_of(tid, loses_timeout)?))).collect()
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

    /// Records the sleeps of threads that are about to be stopped.
    pub(crate) fn record_sleeps(&mut self, sleeps: Vec<(HomePid, Sleep)>) {
        for (tid, sleep) in sleeps {
            let process = self.process_of_thread(tid).filter(|process| !process.is_away());
            if let Some(thread) = process.and_then(|process| process.threads.get_mut(&tid)) {
                thread.sleep = Some(sleep);
            }
        }
    }
}

impl Thread {
    /// The thread has just stopped with these registers. Its recorded sleep is forgotten if it has run
    /// since. If it was in a call that its kernel had continued by restart_syscall, the registers are
    /// changed to those of the call that the program made: another kernel cannot continue it, and a
    /// deputy's kernel would do so with memory that has left.
    pub(crate) fn confirm_sleep(&mut self, registers: &mut Registers) {
        let tid = self.tid.0;
        self.stopped_at = Some(Instant::now());
        self.sleep.take_if(|sleep| !sleep.lasted_until_stop(tid));
        if let Some(sleep) = self.sleep
            && registers.restart_code() == Some(restart::BLOCK)
        {
            registers.orig_rax = sleep.nr.into();
        }
    }
}

impl Process {
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
