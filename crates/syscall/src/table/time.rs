//! Clocks, sleeps and timers.

use super::vocabulary::*;
use Interrupted::RestartBlock;

const CLOCK: &str = "The guest's clocks continue home's by their offsets, so that no round trip is needed.";
const SLEEP: &str = "Home's kernel keeps the remaining time, and restart_syscall continues it exactly, however often the guest moves.";
const TIMER: &str = "It fires at home, as a signal or on a descriptor of the deputy's; CPU-time timers count time used at home and away.";
const SET: &str = "Home's clock, if the process may set it.";
const TIMERSPEC: u32 = 2 * PAIR;

/// Realtime, monotonic, raw, both coarse ones, boottime, TAI.
const NATIVE_CLOCK: ArgTest = ArgTest::OneOf { arg: 0, values: &[0, 1, 4, 5, 6, 7, 11] };
/// The clocks of `NATIVE_CLOCK`, and the CPU clocks: their resolution is the same on all nodes.
const NATIVE_RESOLUTION: ArgTest = ArgTest::OneOf { arg: 0, values: &[0, 1, 2, 3, 4, 5, 6, 7, 11] };

/// CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID, or the CPU clock of a process or thread.
/// Negative ids whose lowest three bits have the value 3 are descriptors of clock devices.
fn counts_cpu_time(clock: u64) -> bool {
    let clock = clock as i32;
    clock == 2 || clock == 3 || (clock < 0 && clock & 7 != 3)
}

fn clock_gettime(args: &[u64; 6]) -> Route {
    if counts_cpu_time(args[0]) { Route::Both(SplitCall::CpuTime) } else { Route::Home }
}

fn home(_: &[u64; 6]) -> Route {
    Route::Home
}

fn timer_create(args: &[u64; 6]) -> Route {
    if counts_cpu_time(args[0]) { Route::Both(SplitCall::CpuTimer) } else { Route::Home }
}

fn unless_cpu_clock(args: &[u64; 6]) -> Route {
    if counts_cpu_time(args[0]) { Route::Homeward(reason::CPU_TIMER) } else { Route::Home }
}

/// ITIMER_REAL counts real time; ITIMER_VIRTUAL and ITIMER_PROF count CPU time. The kernel refuses
/// all other timers.
fn interval_timer(args: &[u64; 6]) -> Route {
    match args[0] as i32 {
        1 | 2 => Route::Both(SplitCall::CpuTimer),
        _ => Route::Home,
    }
}

const TIMER_ROUTE: &str = "Home; Both (CpuTimer) for timers that count CPU time";
const LEFT: Shape = Shape::Out(Len::Fixed(PAIR), Amount::Whole, When::Interrupted);

rows! {
    35 nanosleep HOME [input(PAIR), LEFT] {waits(RestartBlock, Timeout::None)} SLEEP;
    36 getitimer (Rule::By(interval_timer, TIMER_ROUTE)) [V, output(TIMERSPEC)] {} TIMER;
    37 alarm HOME [V] {} TIMER;
    38 setitimer (Rule::By(interval_timer, TIMER_ROUTE)) [V, input(TIMERSPEC), output(TIMERSPEC)] {} TIMER;
    96 gettimeofday HERE [V, V] {} CLOCK;
    100 times (both(SplitCall::CpuTime)) [output(32)] {} "The times are the deputy's plus the guest's.";
    159 adjtimex HOME [inout(size::<libc::timex>())] {} SET;
    164 settimeofday HOME [input(PAIR), input(8)] {} SET;
    201 time HERE [V] {} CLOCK;
    219 restart_syscall HOME [] {waits(RestartBlock, Timeout::None)}
        "It continues an interrupted sleep or poll, whose remaining time the kernel at home has kept. A wait on \
         a futex is continued on the guest's node.";
    222 timer_create (Rule::By(timer_create,
            "Home; Both (CpuTimer) for CPU clocks of its own; Homeward for those of other processes"))
        [V, input(size::<libc::sigevent>()), output(4)] {} TIMER;
    223 timer_settime (both(SplitCall::CpuTimer)) [V, V, input(TIMERSPEC), output(TIMERSPEC)] {} TIMER;
    224 timer_gettime (both(SplitCall::CpuTimer)) [V, output(TIMERSPEC)] {} TIMER;
    225 timer_getoverrun HOME [V] {} TIMER;
    226 timer_delete HOME [V] {} TIMER;
    227 clock_settime HOME [V, input(PAIR)] {} SET;
    228 clock_gettime (Rule::HereIf(NATIVE_CLOCK, clock_gettime,
            "Here for clocks of time; Both (CpuTime) for CPU clocks; else Home")) [V, output(PAIR)] {} CLOCK;
    229 clock_getres (Rule::HereIf(NATIVE_RESOLUTION, home, "Here for the usual clocks; else Home"))
        [V, output(PAIR)] {} CLOCK;
    230 clock_nanosleep (Rule::By(unless_cpu_clock, "Home; Homeward for CPU clocks")) [V, V, input(PAIR), LEFT]
        {waits(RestartBlock, Timeout::None)} SLEEP;
    283 timerfd_create HOME [V, V] {} TIMER;
    286 timerfd_settime HOME [FD, V, input(TIMERSPEC), output(TIMERSPEC)] {} TIMER;
    287 timerfd_gettime HOME [FD, output(TIMERSPEC)] {} TIMER;
    305 clock_adjtime HOME [V, inout(size::<libc::timex>())] {} SET;
}
