//! The time limits that sockets set for calls (SO_RCVTIMEO, SO_SNDTIMEO).
//!
//! An interruption ends such a call with EINTR, and the kernel gives the call that is made again the
//! whole time. So the shim records when an interrupted call must end, and interrupts the deputy then.

use crate::process::Process;
use crate::process::thread::Thread;
use crate::shim::Shim;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_migrate::partial::remainder;
use tern_syscall::{Interrupted, row};
use tern_tracee::Result;
use tern_tracee::registers::Registers;
use tern_tracee::stop::{self, Stopped};

/// The option with the time limit of a call on a socket.
fn timeout_option(nr: u32) -> Option<i32> {
    const SENDS: [i64; 7] = [
        libc::SYS_write,
        libc::SYS_writev,
        libc::SYS_pwritev2,
        libc::SYS_sendto,
        libc::SYS_sendmsg,
        libc::SYS_sendmmsg,
        libc::SYS_connect,
    ];
    row(nr)?.wait.filter(|wait| wait.interrupted == Interrupted::EintrIfSocketTimeout)?;
    Some(if SENDS.contains(&i64::from(nr)) { libc::SO_SNDTIMEO } else { libc::SO_RCVTIMEO })
}

/// Whether a call may have a time limit that its socket sets.
pub(crate) fn may_have_socket_timeout(nr: u32) -> bool {
    timeout_option(nr).is_some()
}

/// A struct timeval; none if it is zero, which means no limit.
fn duration(timeval: [u64; 2]) -> Option<Duration> {
    let [seconds, micros] = timeval;
    let time = Duration::from_secs(seconds).checked_add(Duration::from_micros(micros))?;
    (!time.is_zero()).then_some(time)
}

impl Process {
    /// A deputy has stopped in a call. If that is a call on a socket that the stop has interrupted,
    /// records when it must end. If this time is over, returns true, with the registers changed to
    /// those of a call that ends for this reason.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn check_socket_limit(
        &mut self,
        mut stopped: Stopped,
        registers: &mut Registers,
    ) -> Result<(Stopped, bool)> {
        let tid = HomePid(stopped.pid());
        let Some(current) = &self.thread(tid)?.current else { return Ok((stopped, false)) };
        let has_failed = registers.rax.cast_signed() == -i64::from(libc::EINTR);
        let is_cut_short = || remainder(&mut registers.clone(), current.partial).is_some();
        let option = timeout_option(current.layout.nr()).filter(|_| has_failed || is_cut_short());
        let Some(option) = option else { return Ok((stopped, false)) };
        let (mut must_end_at, posted_at) = (current.must_end_at, current.posted_at);
        if must_end_at.is_none() {
            let (again, value) = self.socket_option(stopped, registers.rdi, option)?;
            stopped = again;
            must_end_at = value.and_then(duration).and_then(|limit| posted_at.checked_add(limit));
            if let Some(current) = &mut self.thread(tid)?.current {
                current.must_end_at = must_end_at;
            }
        }
        if must_end_at.is_none_or(|at| Instant::now() < at) {
            return Ok((stopped, false));
        }
        if has_failed {
            let mut error = libc::EAGAIN;
            if registers.call() == Some(libc::SYS_connect as u64) {
                let (again, domain) = self.socket_option(stopped, registers.rdi, libc::SO_DOMAIN)?;
                stopped = again;
                let is_local = domain.is_some_and(|[domain, _]| domain as i32 == libc::AF_UNIX);
                error = if is_local { libc::EAGAIN } else { libc::EINPROGRESS };
            }
            (registers.rax, registers.orig_rax) = ((-i64::from(error)).cast_unsigned(), u64::MAX);
        }
        Ok((stopped, true))
    }

    /// Has a stopped deputy read an option of a socket; none if that fails.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn socket_option(
        &mut self,
        stopped: Stopped,
        socket: u64,
        option: i32,
    ) -> Result<(Stopped, Option<[u64; 2]>)> {
        // The blob has a stack and does not use it.
        let value = stopped.registers()?.rsp - 128;
        let length = value + 16;
        let mut words = [0; 24];
        words[16] = 16;
        self.memory.write(value, &words)?;
        let mut injection = self.injection(stopped)?.0;
        let args = [socket, libc::SOL_SOCKET as u64, option as u64, value, length, 0];
        let done = injection.call(libc::SYS_getsockopt, args)?;
        let stopped = injection.finish()?;
        let mut words = [[0; 8]; 2];
        self.memory.read(value, words.as_flattened_mut())?;
        Ok((stopped, (done == 0).then(|| words.map(u64::from_le_bytes))))
    }
}

impl Shim {
    /// Interrupts the deputies whose calls on sockets must end now.
    pub(crate) fn end_socket_calls(&mut self) {
        let now = Instant::now();
        // The stop of a deputy that job control has stopped would count as its continuation.
        let running = self.processes.values().filter(|process| !process.job_stopped);
        let threads = running.flat_map(|process| process.threads.values());
        for thread in threads.filter(|thread| thread.must_end_call_at().is_some_and(|at| at <= now)) {
            let _gone = stop::interrupt(thread.tid.0);
        }
    }
}

impl Thread {
    /// When the deputy's call must end, if the shim has to see to that.
    pub(crate) fn must_end_call_at(&self) -> Option<Instant> {
        let runs = self.stopped.is_none() && !self.stop_wanted && !self.has_finished_call();
        self.current.as_ref().filter(|_| runs)?.must_end_at
    }
}
