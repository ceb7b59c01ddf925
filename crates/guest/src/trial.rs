//! Real guests with several threads, of a few instructions each, without a home: the test is its home.

use crate::arrive::filter;
use crate::crew::{Crew, Place};
use crate::empty::empty;
use crate::foreign::Foreign;
use crate::member::{Member, State};
use crate::sandbox::Sandbox;
use crate::thread::Thread;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_ids::{Epoch, HomePid};
use tern_image::{Backing, Layout, Region, Reserve, ThreadImage};
use tern_migrate::message::{CallResult, Talk};
use tern_syscall::Outcome;
use tern_tracee::inject::{Injection, own_site};
use tern_tracee::listener::{Listener, Notification};
use tern_tracee::registers::restart;
use tern_tracee::stop::{self, Change, Stop};
use tern_tracee::{Memory, PAGE, procfs, siginfo};

/// Where its program lies.
const CODE: u64 = 0x1000_0000;
/// Computes for ever.
const SPIN: (u64, &[u8]) = (0, &[0xeb, 0xfe]);
/// Calls getppid for ever.
const ASK: (u64, &[u8]) = (16, &[0xb8, 110, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7]);
/// exit(0).
const END: (u64, &[u8]) = (32, &[0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05]);
/// clone(rdi, ...), then for ever.
const BEAR: (u64, &[u8]) = (48, &[0xb8, 56, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xfe]);

const FIRST: HomePid = HomePid(9000);

struct Trial {
    // Before the sandbox, which waits for its end.
    member: Member,
    sandbox: Sandbox,
    mustered: Duration,
}

impl Trial {
    /// A guest of as many threads as there are programs; their numbers are 4000 here and 9000 at home, and count up. They
    /// stand before their first instruction.
    fn begin(programs: &[(u64, &[u8])]) -> Result<Self, crate::forward::Failed> {
        let numbers: Vec<i32> = (0..).take(programs.len()).map(|n| 4000 + n).collect();
        Self::with_numbers(programs, &numbers)
    }

    fn with_numbers(programs: &[(u64, &[u8])], numbers: &[i32]) -> Result<Self, crate::forward::Failed> {
        Self::with_foreign(programs, numbers, None)
    }

    fn with_foreign(
        programs: &[(u64, &[u8])],
        numbers: &[i32],
        mut foreign: Option<Foreign>,
    ) -> Result<Self, crate::forward::Failed> {
        let sandbox = Sandbox::make(1000, 1000, [0, 0]).unwrap();
        let child = sandbox.fork(numbers[0]).unwrap();
        let (host, reserve) = (child.pid(), Reserve { start: Reserve::AREA });
        let mut member = Member::new(FIRST, numbers[0], host, Epoch(1), reserve, State::Running).unwrap();
        let memory = Memory::open(host).unwrap();
        let mut injection = Injection::begin(child, own_site()).unwrap();
        let layout = kernels(host);
        if let Some(foreign) = &mut foreign {
            foreign.locate(&layout, host).unwrap();
        }
        empty(&mut injection, &memory, &layout, (reserve, foreign.as_ref())).unwrap();
        member.process.foreign = foreign;
        let listener = Rc::new(Listener::install(&mut injection, reserve.room(), &filter(reserve)).unwrap());
        let all = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as u64;
        let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        injection.must("map", libc::SYS_mmap, [CODE, PAGE, all, private, u64::MAX, 0]).unwrap();
        for (at, code) in [SPIN, ASK, END, BEAR] {
            memory.write(CODE + at, code).unwrap();
        }
        let xstate = injection.stopped().unwrap().xstate().unwrap();
        let image = |(n, (program, _)): (usize, &(u64, &[u8]))| {
            let mut registers = *injection.before();
            (registers.rip, registers.rsp, registers.orig_rax) = (CODE + program, CODE + PAGE, u64::MAX);
            registers.rdi = (crate::births::SHARED | libc::SIGCHLD) as u64;
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
            }
        };
        let images: Vec<ThreadImage> = programs.iter().enumerate().map(image).collect();
        let place = Place { reserve, memory: &memory, listener: &listener, sandbox: &sandbox };
        let begun = Instant::now();
        let mut crew = Crew::default();
        let _sound = crew.want(numbers[1..].iter().copied(), numbers[0]);
        let injection = crew.muster(place, injection)?;
        let others = crew.dress(place, &images[1..])?;
        let mustered = begun.elapsed();
        let first = injection.finish_with(&images[0].registers, images[0].sigmask).unwrap();
        member.process.listener = Some(listener);
        member.process.halting = true;
        for (image, stopped) in images.into_iter().zip(std::iter::once(first).chain(others)) {
            let names = (image.tid, image.own_tid, stopped.pid());
            let mut thread = Thread::new(&member.process, names, Talk::default(), image.sigmask).unwrap();
            thread.standing = Some(stopped);
            member.threads.insert(image.tid, thread);
        }
        Ok(Self { member, sandbox, mustered })
    }

    fn thread(&mut self, n: i32) -> &mut Thread {
        self.member.threads.get_mut(&HomePid(FIRST.0 + n)).unwrap()
    }

    /// The next call that any of its threads makes.
    fn trap(&self) -> Notification {
        within_reason(|| self.member.process.listener.as_ref().unwrap().receive().unwrap())
    }

    /// Takes that call, as the main loop does.
    fn take_trap(&mut self) -> HomePid {
        let trap = self.trap();
        let Member { process, threads } = &mut self.member;
        let thread = threads.values_mut().find(|t| t.host == trap.pid).unwrap();
        thread.trapped(trap, process, None).unwrap();
        thread.tid
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        tern_tracee::pidfd::kill(self.member.process.host);
    }
}

/// The kernel's own mappings, where they are in a copy of ourselves.
fn kernels(host: i32) -> Layout {
    let maps = procfs::maps(host).unwrap();
    let kernels = maps.iter().filter(|m| m.is_kernels() && m.name != b"[vsyscall]");
    let region = |m: &procfs::Mapping| Region {
        start: m.start,
        end: m.end,
        prot: m.prot,
        shared: false,
        grows_down: false,
        no_reserve: false,
        advice: tern_image::Advice::default(),
        anew: true,
        backing: Backing::Kernel,
    };
    Layout { regions: kernels.map(region).collect(), files: Vec::new() }
}

fn within_reason<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not come to pass");
        std::thread::yield_now();
    }
}

fn result(number: u64, ret: i64, child: Option<HomePid>) -> CallResult {
    CallResult { child, ..CallResult::new(number, Outcome { ret, outs: Vec::new() }) }
}

#[test]
fn threads_arrive_with_their_numbers() {
    let mut trial = Trial::with_numbers(&[SPIN, SPIN, SPIN], &[4711, 4800, 4712]).unwrap();
    let host = trial.member.process.host;
    let mut here = procfs::threads(host).unwrap();
    here.sort_unstable();
    let mut known: Vec<i32> = trial.member.threads.values().map(|t| t.host).collect();
    known.sort_unstable();
    assert_eq!(here, known);
    for (n, own) in [(0, 4711), (1, 4800), (2, 4712)] {
        let thread = trial.thread(n);
        let status = procfs::status(thread.host).unwrap();
        assert_eq!((status.own_pid, status.blocked, status.seccomp), (own, 1 << n, 2));
        assert_eq!(thread.standing.as_ref().unwrap().registers().unwrap().rip, CODE);
    }
}

#[test]
fn a_number_that_is_taken_is_declined_by_name() {
    for taken_or_too_large in [4000, i32::MAX] {
        let declined = Trial::with_numbers(&[SPIN, SPIN], &[4000, taken_or_too_large]).err().unwrap();
        assert!(declined.to_string().starts_with("pid: "), "{declined}");
    }
}

#[test]
fn all_come_to_a_stand_and_go_on() {
    let mut trial = Trial::begin(&[ASK, SPIN, SPIN]).unwrap();
    assert!(trial.member.stands());
    trial.member.go_on().unwrap();
    assert_eq!(trial.take_trap(), FIRST);
    assert!(trial.thread(0).open.is_some() && !trial.member.stands());
    assert!(trial.member.halt().unwrap());
    let first = trial.thread(0);
    let registers = first.standing.as_ref().unwrap().registers().unwrap();
    assert!(first.talk.call_open && first.open.is_none());
    assert_eq!(registers.restart_code(), Some(restart::NOINTR), "its call is made again");
    // A result that comes now is dropped; asked again it has its number.
    assert!(trial.member.answered(FIRST, result(1, 77, None)).unwrap().is_none());
    trial.member.go_on().unwrap();
    trial.take_trap();
    assert_eq!((trial.thread(0).talk.call, trial.thread(0).talk.call_open), (1, false));
}

#[test]
fn who_cannot_stand_yet_is_waited_for() {
    let mut trial = Trial::begin(&[SPIN, END, ASK]).unwrap();
    trial.member.go_on().unwrap();
    while trial.thread(1).open.is_none() {
        let asks = trial.trap();
        let Member { process, threads } = &mut trial.member;
        let thread = threads.values_mut().find(|t| t.host == asks.pid).unwrap();
        if thread.own_tid == 4002 {
            thread.reply(asks.id, 1).unwrap();
        } else {
            thread.trapped(asks, process, None).unwrap();
        }
    }
    // Its exit has been asked for: it is made on both sides, or on neither.
    assert!(!trial.member.halt().unwrap(), "a thread is ending");
    assert!(trial.thread(0).standing.is_some() && trial.thread(2).standing.is_some());
    assert!(!trial.member.halt().unwrap(), "and still is");
    assert!(!trial.member.let_end(HomePid(9001)).unwrap(), "it is not the first one");
    let host = trial.thread(1).host;
    let end = stop::wait(host, true).unwrap().unwrap().1;
    assert!(matches!(end, Change::Exited(0)), "{end:?}");
    assert!(trial.member.ended(HomePid(9001)) && !trial.member.ended(FIRST));
    assert!(trial.member.halt().unwrap());
}

#[test]
fn a_call_made_meanwhile_is_not_asked_for() {
    let mut trial = Trial::begin(&[END, ASK]).unwrap();
    trial.member.go_on().unwrap();
    while trial.thread(0).open.is_none() || trial.thread(1).open.is_none() {
        trial.take_trap();
    }
    let asked = trial.thread(1).open.take().unwrap();
    trial.member.process.halting = true;
    trial.thread(1).reply(asked.trap.id, 1).unwrap();
    assert_eq!(trial.take_trap(), HomePid(9001));
    let thread = trial.thread(1);
    assert!(thread.standing.is_some() && !thread.talk.call_open);
    assert_eq!(thread.talk.call, 1, "the second one was not sent");
}

#[test]
fn a_process_outlives_its_first_thread() {
    let mut trial = Trial::begin(&[END, ASK]).unwrap();
    trial.member.go_on().unwrap();
    while trial.thread(0).open.is_none() || trial.thread(1).open.is_none() {
        trial.take_trap();
    }
    assert!(trial.member.let_end(FIRST).unwrap(), "it is the first one");
    let host = trial.member.process.host;
    within_reason(|| (procfs::status(host).unwrap().state == b'Z').then_some(()));
    let mut byte = [0; 2];
    trial.member.process.memory.read(CODE, &mut byte).unwrap();
    assert_eq!(byte, SPIN.1, "its memory is still seen");
    assert!(trial.member.movable().is_ok());
    assert!(trial.member.halt().unwrap(), "the other comes to a stand");
    assert!(stop::wait(host, false).unwrap().is_none(), "not before the others have ended");
}

#[test]
fn a_thread_is_born_with_the_number_that_home_gave() {
    for halting in [false, true] {
        let mut trial = Trial::begin(&[BEAR]).unwrap();
        trial.member.go_on().unwrap();
        trial.take_trap();
        if halting {
            assert!(!trial.member.halt().unwrap(), "home has made it already");
        }
        let (open, _) = trial.member.answered(FIRST, result(1, 4321, None)).unwrap().unwrap();
        let Trial { member, sandbox, .. } = &mut trial;
        let host = member.bear(FIRST, &open, (HomePid(9500), 4321), sandbox).unwrap();
        let status = procfs::status(host).unwrap();
        assert_eq!((status.own_pid, status.group, status.blocked), (4321, member.process.host, 1));
        assert_eq!(member.stands(), halting, "it stands at its birth if it is to stand");
        assert!(member.halt().unwrap());
        let seen = |tid| {
            let thread = &member.threads[&tid];
            let now = thread.standing.as_ref().unwrap().registers().unwrap();
            (now.rip, now.rax, now.rsp)
        };
        assert_eq!(seen(FIRST), (CODE + BEAR.0 + 7, 4321, CODE + PAGE));
        assert_eq!(seen(HomePid(9500)), (CODE + BEAR.0 + 7, 0, CODE + PAGE - 64));
    }
}

#[test]
fn a_fault_stands_until_home_has_decided() {
    let mut trial = Trial::begin(&[SPIN, SPIN]).unwrap();
    let stopped = trial.thread(1).standing.take().unwrap();
    let registers = stopped.registers().unwrap();
    stopped.set_registers(&tern_tracee::Registers { rip: 8, ..registers }).unwrap();
    trial.thread(1).standing = Some(stopped);
    trial.member.go_on().unwrap();
    let host = trial.thread(1).host;
    let stopped = stop::wait_stop(host).unwrap();
    assert_eq!(stopped.stop, Stop::Signal(libc::SIGSEGV));
    let Member { process, threads } = &mut trial.member;
    threads.get_mut(&HomePid(9001)).unwrap().deliver(stopped, libc::SIGSEGV, process).unwrap();
    let dying = trial.member.process.dying.unwrap();
    assert_eq!((dying.signal, dying.by, dying.told), (libc::SIGSEGV, HomePid(9001), false));
    assert!(trial.member.halt().unwrap());
    trial.member.go_on().unwrap();
    assert!(trial.member.stands(), "nothing of it goes on");
}

#[test]
fn many_threads_arrive() {
    let trial = Trial::begin(&[SPIN; 101]).unwrap();
    println!("100 threads were made in {:?}", trial.mustered);
    assert_eq!(trial.member.threads.len(), 101);
}

/// A guest of one thread that calls a function of its home's vDSO for ever, which is as if it were not this node's.
fn of_another_kernel(name: &[u8]) -> (Trial, u64) {
    let me = std::process::id() as i32;
    let maps = procfs::maps(me).unwrap();
    let ours = tern_migrate::machine::machine(&Memory::open(me).unwrap(), &maps).unwrap().vdso;
    let mut theirs = ours.clone();
    *theirs.code.last_mut().unwrap() ^= 1;
    let foreign = Foreign::judge(&theirs, &ours).unwrap();
    let mut trial = Trial::with_foreign(&[SPIN], &[4000], foreign).unwrap();
    let functions = crate::stubs::functions(&ours.code).unwrap();
    let offset = functions.iter().find(|(known, _)| *known == name).unwrap().1 as u64;
    let entry = maps.iter().find(|m| m.name == b"[vdso]").unwrap().start + offset;
    // mov $1,%edi; mov $TOLD,%rsi; mov $entry,%rax; call *%rax; and again
    let mut code = vec![0xbf, 1, 0, 0, 0, 0x48, 0xbe];
    code.extend(TOLD.to_le_bytes());
    code.extend([0x48, 0xb8]);
    code.extend(entry.to_le_bytes());
    code.extend([0xff, 0xd0, 0xeb, 0xe3]);
    trial.member.process.memory.write(CODE + 64, &code).unwrap();
    trial.go_from(CODE + 64);
    (trial, entry)
}

/// Where it writes what it was told.
const TOLD: u64 = CODE + 512;

impl Trial {
    /// Sets its first thread, which stands, going at an address.
    fn go_from(&mut self, rip: u64) {
        let stopped = self.thread(0).standing.take().unwrap();
        let registers = stopped.registers().unwrap();
        stopped.set_registers(&tern_tracee::Registers { rip, orig_rax: u64::MAX, ..registers }).unwrap();
        self.thread(0).standing = Some(stopped);
        self.member.go_on().unwrap();
    }

    fn told(&self) -> u64 {
        self.member.process.memory.word(TOLD + 8).unwrap()
    }
}

#[test]
fn clocks_go_on_under_another_kernel_and_nobody_stands_in_a_stub() {
    let (mut trial, _) = of_another_kernel(b"__vdso_clock_gettime");
    for _ in 0..300 {
        let before = trial.told();
        within_reason(|| (trial.told() != before).then_some(()));
        assert!(trial.member.halt().unwrap());
        let rip = trial.thread(0).standing.as_ref().unwrap().registers().unwrap().rip;
        let foreign = trial.member.process.foreign.as_ref().unwrap();
        assert!(!foreign.in_stubs(rip), "{rip:#x}");
        trial.member.go_on().unwrap();
    }
}

#[test]
fn who_is_in_the_middle_of_a_function_asks_to_go_home() {
    let (mut trial, entry) = of_another_kernel(b"__vdso_clock_gettime");
    assert!(trial.member.halt().unwrap());
    trial.go_from(entry + 4);
    let host = trial.thread(0).host;
    let stopped = stop::wait_stop(host).unwrap();
    let Stop::Signal(signal) = stopped.stop else { panic!("{:?}", stopped.stop) };
    let Member { process, threads } = &mut trial.member;
    threads.get_mut(&FIRST).unwrap().deliver(stopped, signal, process).unwrap();
    assert_eq!(trial.member.process.homesick, Some((FIRST, false)));
    assert!(trial.member.process.dying.is_none() && trial.member.stands());
    let thread = trial.thread(0).standing.as_ref().unwrap();
    assert_eq!(thread.registers().unwrap().rip, entry + 4);
}

#[test]
fn who_never_ends_a_call_of_ours_is_killed() {
    tern_tracee::patience::limit(3, Duration::from_millis(100));
    let mut trial = Trial::begin(&[SPIN, SPIN]).unwrap();
    let stopped = trial.thread(1).standing.take().unwrap();
    let reserve = trial.member.process.reserve;
    let word = trial.member.process.memory.word(reserve.room()).unwrap() & 0xffff_ffff;
    let mut injection = Injection::begin(stopped, tern_tracee::Site(reserve.start)).unwrap();
    let for_ever = [reserve.room(), libc::FUTEX_PRIVATE_FLAG as u64, word, 0, 0, 0];
    let why = injection.call(libc::SYS_futex, for_ever).unwrap_err().to_string();
    assert!(why.contains("never makes the call"), "{why}");
}

#[test]
fn signals_that_come_faster_than_their_handler_runs_are_one() {
    let mut trial = Trial::begin(&[SPIN]).unwrap();
    let thread = trial.thread(0);
    for (count, signal) in (1..).zip([libc::SIGALRM, 40, libc::SIGALRM, 40, libc::SIGALRM]) {
        thread.raise(count, siginfo::by_the_kernel(signal)).unwrap();
    }
    assert_eq!((thread.raised[&libc::SIGALRM].len(), thread.raised[&40].len()), (1, 2));
    assert_eq!(thread.talk.signals, 5, "home need keep none of them");
}
