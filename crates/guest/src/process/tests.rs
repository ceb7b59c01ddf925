//! Tests with real guests of several threads and a few instructions, without a home: the test plays
//! home's part.

use crate::arrive::build::guest_filter;
use crate::arrive::threads::{CloneTarget, Threads};
use crate::process::Guest;
use crate::process::outbox::Outbox;
use crate::process::shared::{Process, State};
use crate::process::thread::Thread;
use crate::sandbox::Sandbox;
use crate::sandbox::empty::empty;
use crate::vdso::foreign::ForeignVdso;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_ids::{Epoch, HomePid};
use tern_image::content::ContentCache;
use tern_image::futex_wait::is_interrupted;
use tern_image::{Backing, Layout, Region, Reserve, ThreadImage};
use tern_migrate::message::{CallResult, ThreadSync};
use tern_syscall::Outcome;
use tern_tracee::inject::{Injection, own_site};
use tern_tracee::listener::{Listener, Notification};
use tern_tracee::registers::restart;
use tern_tracee::stop::{self, Stop, WaitEvent};
use tern_tracee::{Memory, PAGE, Registers, procfs, siginfo};

/// The address of the guest's program.
const CODE: u64 = 0x1000_0000;
/// Loops for ever.
const SPIN: (u64, &[u8]) = (0, &[0xeb, 0xfe]);
/// Calls getppid for ever.
const GETPPID: (u64, &[u8]) = (16, &[0xb8, 110, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7]);
/// exit(0).
const EXIT: (u64, &[u8]) = (32, &[0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05]);
/// rt_sigreturn().
const SIGRETURN: (u64, &[u8]) = (64, &[0xb8, 15, 0, 0, 0, 0x0f, 0x05]);
/// clone(rdi, ...), then loops for ever.
const CLONE: (u64, &[u8]) = (48, &[0xb8, 56, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xfe]);

/// futex(rdi, ...), then calls getppid for ever.
const FUTEX: (u64, &[u8]) = (80, &[0xb8, 202, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xb7]);

const FIRST: HomePid = HomePid(9000);

struct TestGuest {
    // Dropped before the sandbox, which waits for the guest's end.
    guest: Guest,
    sandbox: Sandbox,
    creation_time: Duration,
}

impl TestGuest {
    /// A guest with a thread for each program. The tids count up from 4000 here and from 9000 at
    /// home. The threads are stopped before their first instruction.
    fn begin(programs: &[(u64, &[u8])]) -> Result<Self, crate::error::GuestError> {
        let numbers: Vec<i32> = (0..).take(programs.len()).map(|n| 4000 + n).collect();
        Self::with_numbers(programs, &numbers)
    }

    fn with_numbers(programs: &[(u64, &[u8])], numbers: &[i32]) -> Result<Self, crate::error::GuestError> {
        Self::with_foreign(programs, numbers, None)
    }

    fn with_foreign(
        programs: &[(u64, &[u8])],
        numbers: &[i32],
        mut foreign_vdso: Option<ForeignVdso>,
    ) -> Result<Self, crate::error::GuestError> {
        let sandbox = Sandbox::create(1000, 1000, [0, 0]).unwrap();
        let child = sandbox.fork(numbers[0]).unwrap();
        let (host, reserve) = (child.pid(), Reserve { start: Reserve::HINT });
        let process = Process::new(FIRST, numbers[0], host, Epoch(1), reserve, State::Running).unwrap();
        let mut guest = Guest::new(process);
        let memory = Memory::open(host).unwrap();
        let mut injection = Injection::begin(child, own_site()).unwrap();
        let layout = kernel_layout(host);
        if let Some(foreign_vdso) = &mut foreign_vdso {
            foreign_vdso.locate(&layout, host).unwrap();
        }
        empty(&mut injection, &memory, &layout, (reserve, foreign_vdso.as_ref())).unwrap();
        guest.process.foreign_vdso = foreign_vdso;
        let listener =
            Rc::new(Listener::install(&mut injection, reserve.data_start(), &guest_filter(reserve)).unwrap());
        let all = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as u64;
        let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        injection.must("map", libc::SYS_mmap, [CODE, PAGE, all, private, u64::MAX, 0]).unwrap();
        for (at, code) in [SPIN, GETPPID, EXIT, SIGRETURN, CLONE, FUTEX] {
            memory.write(CODE + at, code).unwrap();
        }
        let xstate = injection.stopped().unwrap().xstate().unwrap();
        let image = |(n, (program, _)): (usize, &(u64, &[u8]))| {
            let mut registers = *injection.saved_registers();
            (registers.rip, registers.rsp, registers.orig_rax) = (CODE + program, CODE + PAGE, u64::MAX);
            registers.rdi = (crate::sandbox::clone::THREAD_FLAGS | libc::SIGCHLD) as u64;
            (registers.rsi, registers.rdx, registers.r10, registers.r8) = (CODE + PAGE - 64, 0, 0, 0);
            ThreadImage {
                tid: HomePid(FIRST.0 + n as i32),
                own_tid: numbers[n],
                registers,
                xstate: xstate.clone(),
                sigmask: 1 << (n % 8),
                alternate_stack: [0, libc::SS_DISABLE as u64, 0],
                rseq: (0, 0, 0),
                robust_list: (0, 24),
                clear_child_tid: 0,
                futex_wait_until: None,
            }
        };
        let images: Vec<ThreadImage> = programs.iter().enumerate().map(image).collect();
        let target = CloneTarget { reserve, memory: &memory, listener: &listener, sandbox: &sandbox };
        let begun = Instant::now();
        let mut threads = Threads::default();
        let _valid = threads.set_wanted(numbers[1..].iter().copied(), numbers[0]);
        let injection = threads.create_missing(target, injection)?;
        let others = threads.restore(target, &images[1..])?;
        let creation_time = begun.elapsed();
        let first = injection.finish_with(&images[0].registers, images[0].sigmask).unwrap();
        guest.process.listener = Some(listener);
        guest.process.stop_reasons.set_quiescing(true);
        let others = others.into_iter().map(|(stopped, _)| stopped);
        for (image, stopped) in images.into_iter().zip(std::iter::once(first).chain(others)) {
            let names = (image.tid, image.own_tid, stopped.pid());
            let mut thread =
                Thread::new(&guest.process, names, ThreadSync::default(), image.sigmask).unwrap();
            thread.stopped = Some(stopped);
            guest.threads.insert(image.tid, thread);
        }
        Ok(Self { guest, sandbox, creation_time })
    }

    fn thread(&mut self, n: i32) -> &mut Thread {
        self.guest.threads.get_mut(&HomePid(FIRST.0 + n)).unwrap()
    }

    /// The next trap of any of its threads.
    fn trap(&self) -> Notification {
        poll_until(|| self.guest.process.listener.as_ref().unwrap().receive().unwrap())
    }

    /// Handles the next trap, of this call, as the main loop does.
    fn take_call(&mut self, nr: i64) {
        let trap = self.trap();
        assert_eq!(i64::from(trap.nr), nr);
        assert!(self.guest.handle_trap(FIRST, trap, &mut Outbox::default()).unwrap());
    }

    /// A guest that makes this call of futex, with this time in seconds, on a word that is 0.
    fn with_futex(operation: i32, seconds: u64) -> Self {
        let mut test = Self::begin(&[FUTEX]).unwrap();
        let (word, limit) = (CODE + PAGE - 128, CODE + PAGE - 96);
        test.guest.process.memory.write(limit, &seconds.to_le_bytes()).unwrap();
        let stopped = test.thread(0).stopped.take().unwrap();
        let registers = stopped.registers().unwrap();
        let (rsi, r9) = (operation as u64, u64::from(u32::MAX));
        let registers = Registers { rdi: word, rsi, rdx: 0, r10: limit, r9, ..registers };
        stopped.set_registers(&registers).unwrap();
        test.thread(0).stopped = Some(stopped);
        test.guest.resume().unwrap();
        test
    }

    /// Waits until the first thread waits in this call.
    fn await_wait(&mut self, nr: i64) {
        let tid = self.thread(0).host_tid;
        poll_until(|| procfs::syscall_stack_pointer(tid).ok());
        let number = || std::fs::read_to_string(format!("/proc/{tid}/syscall")).unwrap_or_default();
        poll_until(|| number().starts_with(&format!("{nr} ")).then_some(()));
        poll_until(|| (procfs::status(tid).unwrap().state == b'S').then_some(()));
    }

    /// Quiesces the guest. Returns the registers of the first thread.
    fn quiesced_registers(&mut self) -> Registers {
        poll_until(|| self.guest.quiesce().unwrap().then_some(()));
        self.thread(0).stopped.as_ref().unwrap().registers().unwrap()
    }

    /// Handles the next trap, as the main loop does.
    fn take_trap(&mut self) -> HomePid {
        let trap = self.trap();
        let Guest { process, threads } = &mut self.guest;
        let thread = threads.values_mut().find(|t| t.host_tid == trap.pid).unwrap();
        thread.handle_trap(trap, process, &mut Outbox::default()).unwrap();
        thread.tid
    }
}

impl Drop for TestGuest {
    fn drop(&mut self) {
        tern_tracee::pidfd::kill(self.guest.process.host_pid);
    }
}

/// The kernel's own mappings, where they are in a copy of this process.
fn kernel_layout(host: i32) -> Layout {
    let maps = procfs::maps(host).unwrap();
    let kernels = maps.iter().filter(|m| m.is_kernel_mapping() && m.name != b"[vsyscall]");
    let region = |m: &procfs::Mapping| Region {
        start: m.start,
        end: m.end,
        prot: m.prot,
        shared: false,
        grows_down: false,
        no_reserve: false,
        advice: tern_image::MemoryAdvice::default(),
        remap: true,
        backing: Backing::Kernel,
    };
    Layout { regions: kernels.map(region).collect(), files: Vec::new() }
}

fn poll_until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "timeout");
        std::thread::yield_now();
    }
}

fn result(number: u64, ret: i64, child: Option<HomePid>) -> CallResult {
    CallResult { child, ..CallResult::new(number, Outcome { ret, outs: Vec::new() }) }
}

#[test]
fn threads_arrive_with_their_tids() {
    let mut test = TestGuest::with_numbers(&[SPIN, SPIN, SPIN], &[4711, 4800, 4712]).unwrap();
    let host = test.guest.process.host_pid;
    let mut here = procfs::threads(host).unwrap();
    here.sort_unstable();
    let mut known: Vec<i32> = test.guest.threads.values().map(|t| t.host_tid).collect();
    known.sort_unstable();
    assert_eq!(here, known);
    for (n, own) in [(0, 4711), (1, 4800), (2, 4712)] {
        let thread = test.thread(n);
        let status = procfs::status(thread.host_tid).unwrap();
        assert_eq!((status.own_pid, status.blocked, status.seccomp), (own, 1 << n, 2));
        assert_eq!(thread.stopped.as_ref().unwrap().registers().unwrap().rip, CODE);
    }
}

#[test]
fn tid_in_use_is_declined_with_a_reason() {
    for taken_or_too_large in [4000, i32::MAX] {
        let declined = TestGuest::with_numbers(&[SPIN, SPIN], &[4000, taken_or_too_large]).err().unwrap();
        assert!(declined.to_string().starts_with("pid: "), "{declined}");
    }
}

#[test]
fn all_threads_stop_and_resume() {
    let mut test = TestGuest::begin(&[GETPPID, SPIN, SPIN]).unwrap();
    assert!(test.guest.are_all_stopped());
    test.guest.resume().unwrap();
    assert_eq!(test.take_trap(), FIRST);
    assert!(test.thread(0).pending.is_some() && !test.guest.are_all_stopped());
    assert!(test.guest.quiesce().unwrap());
    let first = test.thread(0);
    let registers = first.stopped.as_ref().unwrap().registers().unwrap();
    assert!(first.sync.call_pending && first.pending.is_none());
    assert_eq!(registers.restart_code(), Some(restart::NOINTR), "its call is restarted");
    // A result that arrives now is dropped; the repeated call has its number.
    assert!(test.guest.take_result(FIRST, result(1, 77, None)).unwrap().is_none());
    test.guest.resume().unwrap();
    test.take_trap();
    assert_eq!((test.thread(0).sync.call, test.thread(0).sync.call_pending), (1, false));
}

/// A relative wait on a futex is trapped, so that its end is known, and is continued by this kernel.
#[test]
fn futex_wait_keeps_its_end_over_stops() {
    let mut test = TestGuest::with_futex(libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, 1000);
    let begun = Instant::now();
    test.take_call(libc::SYS_futex);
    let end = test.thread(0).futex_wait_end.expect("an end");
    assert!(end >= begun + Duration::from_secs(1000) && end <= Instant::now() + Duration::from_secs(1000));
    test.await_wait(libc::SYS_futex);
    for round in 0..20 {
        let registers = test.quiesced_registers();
        assert!(is_interrupted(&registers), "round {round}");
        assert_eq!(test.thread(0).futex_wait_end, Some(end));
        test.guest.resume().unwrap();
        match round % 3 {
            // It is quiesced before its trap is received, or in its trap, or while it waits.
            0 => continue,
            1 => {
                let trap = test.trap();
                test.guest.process.stop_reasons.set_quiescing(true);
                assert!(test.guest.handle_trap(FIRST, trap, &mut Outbox::default()).unwrap());
            }
            _ => {
                test.take_call(libc::SYS_restart_syscall);
                test.await_wait(libc::SYS_restart_syscall);
            }
        }
    }
    assert_eq!(test.thread(0).sync.call, 0, "nothing was sent home");
}

#[test]
fn wait_is_forgotten_when_its_thread_makes_another_call() {
    let mut test = TestGuest::with_futex(libc::FUTEX_WAIT, 1000);
    // The wait ends at once.
    test.guest.process.memory.write(CODE + PAGE - 128, &[1]).unwrap();
    test.take_call(libc::SYS_futex);
    assert!(test.thread(0).futex_wait_end.is_some());
    test.take_call(libc::SYS_getppid);
    assert!(test.thread(0).futex_wait_end.is_none() && test.thread(0).pending.is_some());
}

/// A stop that is no reason to quiesce must not make a wait go home as restart_syscall.
#[test]
fn absolute_futex_wait_is_made_again_after_any_stop() {
    let mut test = TestGuest::with_futex(libc::FUTEX_WAIT_BITSET, 1 << 33);
    test.await_wait(libc::SYS_futex);
    let tid = test.thread(0).host_tid;
    for _ in 0..20 {
        stop::interrupt(tid).unwrap();
        let stopped = stop::wait_stop(tid).unwrap();
        test.thread(0).settle_futex_wait(&stopped).unwrap();
        assert_eq!(stopped.registers().unwrap().restart_code(), Some(restart::NOHAND));
        stopped.resume(0).unwrap();
        test.await_wait(libc::SYS_futex);
    }
    assert!(test.guest.process.listener.as_ref().unwrap().receive().unwrap().is_none(), "no trap");
}

/// Home rejects a call that crosses a signal on its way. A handler's return that was rejected must
/// set home's mask when it is repeated. Otherwise home would block the program's signals for good.
#[test]
fn rejected_sigreturn_is_sent_again() {
    let mut test = TestGuest::begin(&[SIGRETURN]).unwrap();
    let stopped = test.thread(0).stopped.take().unwrap();
    let registers = stopped.registers().unwrap();
    // The mask in the frame is zero, and home's is not.
    stopped.set_registers(&tern_tracee::Registers { rsp: CODE + PAGE / 2, ..registers }).unwrap();
    test.thread(0).stopped = Some(stopped);
    assert_ne!(test.thread(0).deputy_sigmask, 0);
    test.guest.resume().unwrap();
    for number in 1..3 {
        test.take_trap();
        assert!(test.thread(0).pending.is_some(), "call {number} is sent");
        assert_eq!(test.thread(0).sync.call, number);
        assert!(test.guest.take_result(FIRST, result(number, restart::NOINTR, None)).unwrap().is_none());
        stop::wait_stop(test.thread(0).host_tid).unwrap().resume(0).unwrap();
    }
    test.take_trap();
    let (pending, done) = test.guest.take_result(FIRST, result(3, 0, None)).unwrap().unwrap();
    let mut unused = ContentCache::new(Path::new("/nonexistent"));
    test.guest.do_local_part(FIRST, pending, done, &mut unused, &mut Outbox::default()).unwrap();
    assert_eq!(test.thread(0).deputy_sigmask, 0);
}

#[test]
fn quiesce_waits_for_an_exiting_thread() {
    let mut test = TestGuest::begin(&[SPIN, EXIT, GETPPID]).unwrap();
    test.guest.resume().unwrap();
    while test.thread(1).pending.is_none() {
        let trap = test.trap();
        let Guest { process, threads } = &mut test.guest;
        let thread = threads.values_mut().find(|t| t.host_tid == trap.pid).unwrap();
        if thread.own_tid == 4002 {
            thread.reply(trap.id, 1).unwrap();
        } else {
            thread.handle_trap(trap, process, &mut Outbox::default()).unwrap();
        }
    }
    // Its exit has been forwarded: it is made on both sides, or on neither.
    assert!(!test.guest.quiesce().unwrap(), "a thread is exiting");
    assert!(test.thread(0).stopped.is_some() && test.thread(2).stopped.is_some());
    assert!(!test.guest.quiesce().unwrap(), "it is still exiting");
    assert!(!test.guest.let_exit(HomePid(9001)).unwrap(), "it is not the first one");
    let host = test.thread(1).host_tid;
    let end = stop::wait(host, true).unwrap().unwrap().1;
    assert!(matches!(end, WaitEvent::Exited(0)), "{end:?}");
    assert!(test.guest.take_exited(HomePid(9001)) && !test.guest.take_exited(FIRST));
    assert!(test.guest.quiesce().unwrap());
}

#[test]
fn call_made_while_quiescing_is_not_forwarded() {
    let mut test = TestGuest::begin(&[EXIT, GETPPID]).unwrap();
    test.guest.resume().unwrap();
    while test.thread(0).pending.is_none() || test.thread(1).pending.is_none() {
        test.take_trap();
    }
    let asked = test.thread(1).pending.take().unwrap();
    test.guest.process.stop_reasons.set_quiescing(true);
    test.thread(1).reply(asked.trap.id, 1).unwrap();
    assert_eq!(test.take_trap(), HomePid(9001));
    let thread = test.thread(1);
    assert!(thread.stopped.is_some() && !thread.sync.call_pending);
    assert_eq!(thread.sync.call, 1, "the second one was not sent");
}

#[test]
fn process_outlives_its_first_thread() {
    let mut test = TestGuest::begin(&[EXIT, GETPPID]).unwrap();
    test.guest.resume().unwrap();
    while test.thread(0).pending.is_none() || test.thread(1).pending.is_none() {
        test.take_trap();
    }
    assert!(test.guest.let_exit(FIRST).unwrap(), "it is the first one");
    let host = test.guest.process.host_pid;
    poll_until(|| (procfs::status(host).unwrap().state == b'Z').then_some(()));
    let mut byte = [0; 2];
    test.guest.process.memory.read(CODE, &mut byte).unwrap();
    assert_eq!(byte, SPIN.1, "its memory is still readable");
    assert!(test.guest.check_movable().is_ok());
    assert!(test.guest.quiesce().unwrap(), "the other thread is stopped");
    assert!(stop::wait(host, false).unwrap().is_none(), "reported only after the others have ended");
}

#[test]
fn new_thread_has_home_s_tid() {
    for is_quiescing in [false, true] {
        let mut test = TestGuest::begin(&[CLONE]).unwrap();
        test.guest.resume().unwrap();
        test.take_trap();
        if is_quiescing {
            assert!(!test.guest.quiesce().unwrap(), "home has created the thread already");
        }
        let (pending, _) = test.guest.take_result(FIRST, result(1, 4321, None)).unwrap().unwrap();
        let TestGuest { guest, sandbox, .. } = &mut test;
        let host = guest.create_thread(FIRST, &pending, (HomePid(9500), 4321), sandbox).unwrap().unwrap();
        let status = procfs::status(host).unwrap();
        assert_eq!((status.own_pid, status.group, status.blocked), (4321, guest.process.host_pid, 1));
        assert_eq!(guest.are_all_stopped(), is_quiescing, "it is stopped before it runs if it must be");
        assert!(guest.quiesce().unwrap());
        let seen = |tid| {
            let thread = &guest.threads[&tid];
            let now = thread.stopped.as_ref().unwrap().registers().unwrap();
            (now.rip, now.rax, now.rsp)
        };
        assert_eq!(seen(FIRST), (CODE + CLONE.0 + 7, 4321, CODE + PAGE));
        assert_eq!(seen(HomePid(9500)), (CODE + CLONE.0 + 7, 0, CODE + PAGE - 64));
    }
}

#[test]
fn fault_keeps_the_guest_stopped() {
    let mut test = TestGuest::begin(&[SPIN, SPIN]).unwrap();
    let stopped = test.thread(1).stopped.take().unwrap();
    let registers = stopped.registers().unwrap();
    stopped.set_registers(&tern_tracee::Registers { rip: 8, ..registers }).unwrap();
    test.thread(1).stopped = Some(stopped);
    test.guest.resume().unwrap();
    let host = test.thread(1).host_tid;
    let stopped = stop::wait_stop(host).unwrap();
    assert_eq!(stopped.stop, Stop::Signal(libc::SIGSEGV));
    let Guest { process, threads } = &mut test.guest;
    threads.get_mut(&HomePid(9001)).unwrap().deliver(stopped, libc::SIGSEGV, process).unwrap();
    let reasons = &mut test.guest.process.stop_reasons;
    assert!(reasons.has_unreported_signal());
    assert_eq!(reasons.report_signal(), Some((HomePid(9001), libc::SIGSEGV)));
    assert!(test.guest.quiesce().unwrap());
    test.guest.resume().unwrap();
    assert!(test.guest.are_all_stopped(), "no thread resumes");
}

#[test]
fn many_threads_arrive() {
    let test = TestGuest::begin(&[SPIN; 101]).unwrap();
    println!("100 threads were made in {:?}", test.creation_time);
    assert_eq!(test.guest.threads.len(), 101);
}

/// A guest with one thread that calls a function of a foreign vDSO for ever.
fn with_another_vdso(name: &[u8]) -> (TestGuest, u64) {
    let me = std::process::id() as i32;
    let maps = procfs::maps(me).unwrap();
    let ours = tern_migrate::machine::describe(&Memory::open(me).unwrap(), &maps).unwrap().vdso;
    let mut theirs = ours.clone();
    *theirs.code.last_mut().unwrap() ^= 1;
    let foreign_vdso = ForeignVdso::check(&theirs, &ours).unwrap();
    let mut test = TestGuest::with_foreign(&[SPIN], &[4000], foreign_vdso).unwrap();
    let functions = crate::vdso::trampoline::functions(&ours.code).unwrap();
    let offset = functions.iter().find(|(known, _)| *known == name).unwrap().1 as u64;
    let entry = maps.iter().find(|m| m.name == b"[vdso]").unwrap().start + offset;
    // mov $1,%edi; mov $TIMESPEC,%rsi; mov $entry,%rax; call *%rax; and again
    let mut code = vec![0xbf, 1, 0, 0, 0, 0x48, 0xbe];
    code.extend(TIMESPEC.to_le_bytes());
    code.extend([0x48, 0xb8]);
    code.extend(entry.to_le_bytes());
    code.extend([0xff, 0xd0, 0xeb, 0xe3]);
    test.guest.process.memory.write(CODE + 64, &code).unwrap();
    test.resume_at(CODE + 64);
    (test, entry)
}

/// Where that guest stores the time.
const TIMESPEC: u64 = CODE + 512;

impl TestGuest {
    /// Resumes its first thread, which is stopped, at an address.
    fn resume_at(&mut self, rip: u64) {
        let stopped = self.thread(0).stopped.take().unwrap();
        let registers = stopped.registers().unwrap();
        stopped.set_registers(&tern_tracee::Registers { rip, orig_rax: u64::MAX, ..registers }).unwrap();
        self.thread(0).stopped = Some(stopped);
        self.guest.resume().unwrap();
    }

    fn stored_time(&self) -> u64 {
        self.guest.process.memory.word(TIMESPEC + 8).unwrap()
    }
}

#[test]
fn clocks_work_with_another_vdso_and_stops_are_outside_trampolines() {
    let (mut test, _) = with_another_vdso(b"__vdso_clock_gettime");
    for _ in 0..300 {
        let before = test.stored_time();
        poll_until(|| (test.stored_time() != before).then_some(()));
        assert!(test.guest.quiesce().unwrap());
        let rip = test.thread(0).stopped.as_ref().unwrap().registers().unwrap().rip;
        let foreign_vdso = test.guest.process.foreign_vdso.as_ref().unwrap();
        assert!(!foreign_vdso.in_trampolines(rip), "{rip:#x}");
        test.guest.resume().unwrap();
    }
}

#[test]
fn fault_inside_the_vdso_copy_requests_home() {
    let (mut test, entry) = with_another_vdso(b"__vdso_clock_gettime");
    assert!(test.guest.quiesce().unwrap());
    test.resume_at(entry + 4);
    let host = test.thread(0).host_tid;
    let stopped = stop::wait_stop(host).unwrap();
    let Stop::Signal(signal) = stopped.stop else { panic!("{:?}", stopped.stop) };
    let Guest { process, threads } = &mut test.guest;
    threads.get_mut(&FIRST).unwrap().deliver(stopped, signal, process).unwrap();
    assert_eq!(test.guest.process.stop_reasons.report_need(), Some(FIRST));
    assert!(!test.guest.process.stop_reasons.must_stay_stopped() && test.guest.are_all_stopped());
    let thread = test.thread(0).stopped.as_ref().unwrap();
    assert_eq!(thread.registers().unwrap().rip, entry + 4);
}

#[test]
fn injected_call_that_never_returns_times_out() {
    tern_tracee::call_timeout::kill_after(Duration::from_millis(300), Duration::from_millis(100)).unwrap();
    let mut test = TestGuest::begin(&[SPIN, SPIN]).unwrap();
    let stopped = test.thread(1).stopped.take().unwrap();
    let reserve = test.guest.process.reserve;
    let word = test.guest.process.memory.word(reserve.data_start()).unwrap() & 0xffff_ffff;
    let mut injection = Injection::begin(stopped, tern_tracee::Site(reserve.start)).unwrap();
    let for_ever = [reserve.data_start(), libc::FUTEX_PRIVATE_FLAG as u64, word, 0, 0, 0];
    let why = injection.call(libc::SYS_futex, for_ever).unwrap_err().to_string();
    assert!(why.contains("did not make the injected call"), "{why}");
}

#[test]
fn signals_faster_than_their_handler_are_merged() {
    let mut test = TestGuest::begin(&[SPIN]).unwrap();
    let thread = test.thread(0);
    for (count, signal) in (1..).zip([libc::SIGALRM, 40, libc::SIGALRM, 40, libc::SIGALRM]) {
        thread.accept_signal(count, siginfo::kernel_siginfo(signal)).unwrap();
    }
    // Two signals of a number below 32 wait until a handler runs: one may have been sent to the thread,
    // and one to the process.
    assert_eq!(thread.final_sync().pending_signals.len(), 4, "only signals below 32 are merged");
    assert_eq!(thread.sync.signals, 5, "home need not keep any");
}
