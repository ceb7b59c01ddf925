//! Processes: family, identity, limits, scheduling and namespaces.

use super::prctl;
use super::vocabulary::*;
use Interrupted::Restarts;

const SAME_PID: &str = "The guest has the same pid in its own pid namespace.";
const FAMILY: &str = "Process ids, parents, groups and sessions are home's.";
const OWN_STATE: &str = "State of the guest's own thread.";
const SCHEDULING: &str =
    "It concerns the deputy, or other processes at home; the guest's node schedules by itself.";
const FORK: &str = "Both halves fork, so that parent and child have the same pids at home and away.";
const EXEC: &str = "The deputy executes at home: the new image is nearly empty and can be placed anew.";
const EXIT: &str = "The deputy ends with the same status, and then the guest.";
const LIMIT: &str = "Limits are the deputy's; those on memory also apply to the guest, and that on CPU time includes time used away.";
const CPU_TIME: &str = "The times are the deputy's plus the guest's; all other values are the deputy's.";
const NAMESPACE: &str = "A guest cannot be moved into other namespaces of its home.";
const RUSAGE: u32 = size::<libc::rusage>();
/// siginfo_t as far as waitid fills it; the rest is left unchanged.
const CHILD_INFO: u32 = 28;
const CHILD: When = When::AtLeast(1);

/// The flags that all threading libraries set.
const THREAD: u64 =
    (libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD) as u64;
const CLONE_FLAGS: u64 = 0xffff_ff00;
const CLONE_VM: u64 = libc::CLONE_VM as u64;
const CLONE_VFORK: u64 = libc::CLONE_VFORK as u64;
const NEW_NAMESPACE: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;
const UNUSUAL: u64 = (libc::CLONE_PIDFD | libc::CLONE_PARENT | libc::CLONE_PTRACE) as u64;
const PIDFD: u64 = libc::CLONE_PIDFD as u64;

const HANDLERS: u64 = libc::CLONE_SIGHAND as u64;

/// At home the kernel writes only the child's pidfd. All other pointers refer to the guest's
/// memory.
fn clone_shapes(args: &[u64; 6]) -> &'static [Shape] {
    if args[0] & PIDFD != 0 { const { &[V, V, output(4), V, V] } } else { const { &[V, V, V, V, V] } }
}

fn clone(args: &[u64; 6]) -> Route {
    let flags = args[0] & CLONE_FLAGS;
    if flags & libc::CLONE_THREAD as u64 != 0 {
        let usual = flags & THREAD == THREAD && flags & (NEW_NAMESPACE | UNUSUAL | CLONE_VFORK) == 0;
        if usual { Route::Both(SplitCall::Thread) } else { Route::Homeward(reason::CLONE_FLAGS) }
    } else if flags & (CLONE_VM | CLONE_VFORK) == CLONE_VM {
        Route::Homeward(reason::SHARED_SPACE)
    } else if flags & NEW_NAMESPACE != 0 {
        Route::Homeward(reason::NAMESPACES)
    } else if flags & libc::CLONE_PTRACE as u64 != 0 || flags & CLONE_VM != 0 && flags & HANDLERS != 0 {
        Route::Homeward(reason::CLONE_FLAGS)
    } else if flags & PIDFD != 0 && flags & libc::CLONE_PARENT_SETTID as u64 != 0 {
        // Both would be written to the same address.
        Route::Refuse(libc::EINVAL)
    } else {
        Route::Both(SplitCall::Fork)
    }
}

/// ARCH_SET_GS, ARCH_SET_FS, ARCH_GET_FS, ARCH_GET_GS: the guest's base registers.
const BASE_REGISTERS: ArgTest = ArgTest::OneOf { arg: 0, values: &[0x1001, 0x1002, 0x1003, 0x1004] };

/// Shadow stacks are refused as on a CPU without them. ARCH_CET_STATUS was never in the kernel.
fn arch_prctl(args: &[u64; 6]) -> Route {
    match args[0] as u32 {
        0x3001 | 0x5001..=0x5005 => Route::Refuse(libc::EINVAL),
        _ => Route::Homeward(reason::CPU_MODE),
    }
}

fn personality(args: &[u64; 6]) -> Route {
    if args[0] as u32 == u32::MAX { Route::Home } else { Route::Homeward(reason::PERSONALITY) }
}

/// KCMP_EPOLL_TFD has a struct kcmp_epoll_slot.
fn kcmp(args: &[u64; 6]) -> &'static [Shape] {
    match args[2] as i32 {
        7 => const { &[V, V, V, V, input(12)] },
        _ => const { &[V, V, V, V, V] },
    }
}

fn kcmp_route(args: &[u64; 6]) -> Route {
    if args[2] <= 7 { Route::Home } else { Route::Homeward(reason::UNKNOWN_KCMP) }
}

/// The kernel reads no more than its own cpumask.
const AFFINITY: Len = counted(1, Width::UInt, 1, 8192, OverLimit::Cut);
/// struct sched_attr begins with its size, where zero stands for the size of the first version. If
/// the kernel does not support the size, it writes the size that it supports there.
const SCHED_ATTR: Len = Len::Embedded(EmbeddedLen { at: 0, unit: 1, add: 0, zero: 48, max: 4096, beyond: 4 });

rows! {
    24 sched_yield HERE [] {} "The guest's node schedules it.";
    39 getpid HERE [] {} SAME_PID;
    56 clone (Rule::By(clone,
            "Both (Fork) for a process, Both (Thread) for a thread; Homeward for new namespaces and unusual flags"))
        (by clone_shapes, "by the flags") {} FORK;
    57 fork (both(SplitCall::Fork)) [] {} FORK;
    58 vfork (both(SplitCall::Fork)) [] {} FORK;
    59 execve (both(SplitCall::Exec)) [PATH, Shape::Strings, Shape::Strings] {} EXEC;
    60 exit (both(SplitCall::Exit)) [V] {} EXIT;
    61 wait4 HOME [V, Shape::Out(Len::Fixed(4), Amount::Whole, CHILD), V,
            Shape::Out(Len::Fixed(RUSAGE), Amount::Whole, CHILD)]
        {waits(Restarts, Timeout::None) consumes()} FAMILY;
    97 getrlimit HOME [V, output(PAIR)] {} "Limits are the deputy's.";
    98 getrusage (both(SplitCall::CpuTime)) [V, output(RUSAGE)] {} CPU_TIME;
    101 ptrace (homeward(reason::TRACING)) [V, V, V, V] {}
        "The other process is at home, and the deputy already has a tracer.";
    109 setpgid HOME [V, V] {} FAMILY;
    110 getppid HOME [] {} FAMILY;
    111 getpgrp HOME [] {} FAMILY;
    112 setsid HOME [] {} FAMILY;
    121 getpgid HOME [V] {} FAMILY;
    124 getsid HOME [V] {} FAMILY;
    135 personality (Rule::By(personality, "Home to ask; Homeward to change")) [V] {}
        "It changes how memory is laid out, which cannot be changed for a guest.";
    140 getpriority HOME [V, V] {} SCHEDULING;
    141 setpriority HOME [V, V, V] {} SCHEDULING;
    142 sched_setparam HOME [V, input(4)] {} SCHEDULING;
    143 sched_getparam HOME [V, output(4)] {} SCHEDULING;
    144 sched_setscheduler HOME [V, V, input(4)] {} SCHEDULING;
    145 sched_getscheduler HOME [V] {} SCHEDULING;
    146 sched_get_priority_max HOME [V] {} SCHEDULING;
    147 sched_get_priority_min HOME [V] {} SCHEDULING;
    148 sched_rr_get_interval HOME [V, output(PAIR)] {} SCHEDULING;
    154 modify_ldt (homeward(reason::SEGMENTS)) [V, V, V] {} "Segment descriptors do not migrate.";
    157 prctl (Rule::HereIf(prctl::OWN, prctl::route, "Here to ask for the tid address; else by the option")) (by prctl::shapes, "by the option") {}
        "Most options are the deputy's state; those of memory and CPU are the guest's.";
    158 arch_prctl (Rule::HereIf(BASE_REGISTERS, arch_prctl,
            "Here for the FS and GS base; EINVAL for shadow stacks; else Homeward")) [V, V] {}
        "The base registers are the guest's; other options set what its node may not have.";
    160 setrlimit HOME [V, input(PAIR)] {} LIMIT;
    172 iopl (homeward(reason::IO_PORTS)) [V] {} "The ports are home's.";
    173 ioperm (homeward(reason::IO_PORTS)) [V, V, V] {} "The ports are home's.";
    186 gettid HERE [] {} SAME_PID;
    203 sched_setaffinity HOME [V, V, Shape::In(AFFINITY)] {} SCHEDULING;
    204 sched_getaffinity HOME [V, V, filled(AFFINITY, 1)] {} SCHEDULING;
    218 set_tid_address HERE [V] {} OWN_STATE;
    231 exit_group (both(SplitCall::Exit)) [V] {} EXIT;
    247 waitid HOME [V, V, inout(CHILD_INFO), V, inout(RUSAGE)]
        {waits(Restarts, Timeout::None) consumes()} FAMILY;
    251 ioprio_set HOME [V, V, V] {} "Input and output happen at home.";
    252 ioprio_get HOME [V, V] {} "Input and output happen at home.";
    272 unshare (homeward(reason::NAMESPACES)) [V] {} NAMESPACE;
    273 set_robust_list HERE [V, V] {} OWN_STATE;
    274 get_robust_list HERE [V, V, V] {} OWN_STATE;
    302 prlimit64 HOME [V, V, input(PAIR), output(PAIR)] {} LIMIT;
    308 setns (homeward(reason::NAMESPACES)) [FD, V] {} NAMESPACE;
    309 getcpu HERE [V, V, V] {} "The guest runs on its node's CPUs.";
    312 kcmp (Rule::By(kcmp_route, "Home; Homeward for an unknown type")) (by kcmp, "by the type") {}
        "It compares system contexts, which are at home.";
    314 sched_setattr HOME [V, Shape::InOut(SCHED_ATTR), V] {} SCHEDULING;
    315 sched_getattr HOME [V, struct_inout(2, Width::UInt, 4096), V, V] {} SCHEDULING;
    317 seccomp (homeward(reason::SECCOMP)) [V, V, V] {}
        "Its filter would have to check the calls of both the guest and the deputy.";
    322 execveat (both(SplitCall::Exec)) [FD, PATH, Shape::Strings, Shape::Strings, V] {} EXEC;
    334 rseq HERE [V, V, V, V] {} OWN_STATE;
    434 pidfd_open HOME [V, V] {} FAMILY;
    435 clone3 (both(SplitCall::Fork)) [V, V] {}
        "Read once and made as the equivalent clone; ENOSYS if there is none, and libraries fall back.";
    438 pidfd_getfd HOME [FD, V, V] {} AT_THE_DEPUTY;
    448 process_mrelease HOME [FD, V] {} FAMILY;
    470 listns HOME [Shape::In(NAMESPACE_REQUEST), NAMESPACE_IDS, V, V] {} "The namespaces are home's.";
}

/// struct ns_id_req begins with its size.
const NAMESPACE_REQUEST: Len =
    Len::Embedded(EmbeddedLen { at: 0, unit: 1, add: 0, zero: 4, max: 4096, beyond: 4 });
const NAMESPACE_IDS: Shape = filled(counted(2, Width::Size, 8, 1 << 20, OverLimit::Cut), 8);
