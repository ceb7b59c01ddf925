//! Signals: they arrive at home, where the pid is, and are handled by the guest.

use super::vocabulary::*;
use Interrupted::{Eintr, Restarts};

const PIDS: &str = "Process ids and the right to signal them are home's.";
const SIGNALFD: &str =
    "The descriptor is the deputy's; home keeps its signals blocked there so that they stay pending for it.";
const MASK: Shape = input(SIGSET);
const SIGNALFD_MASK: Shape = struct_in(2, Width::Size, 8);

rows! {
    13 rt_sigaction (both(SplitCall::RtSigaction)) [V, input(32), output(32), V] {}
        "The handler is the guest's; home needs to know ignored signals and child options.";
    14 rt_sigprocmask (both(SplitCall::RtSigprocmask)) [V, MASK, output(SIGSET), V] {}
        "Blocked signals are pending at home; the guest's mask also blocks signals while handlers run.";
    15 rt_sigreturn (both(SplitCall::RtSigreturn)) [] {} "It restores the guest's own registers and mask; home gets the mask.";
    34 pause HOME [] {waits(Restarts, Timeout::None)} "Signals arrive at home and end the wait there.";
    62 kill HOME [V, V] {} PIDS;
    127 rt_sigpending HOME [filled_set(), V] {} "Blocked signals are pending at home.";
    128 rt_sigtimedwait HOME [MASK, siginfo_out(), input(PAIR), V]
        {waits(Eintr, Timeout::Timespec(2)) consumes()}
        "Blocked signals are pending at home.";
    129 rt_sigqueueinfo HOME [V, V, input(SIGINFO)] {} PIDS;
    130 rt_sigsuspend HOME [MASK, V] {waits(Restarts, Timeout::None) mask(0)}
        "Signals arrive at home and end the wait there; the shim delivers under the mask that it carries.";
    131 sigaltstack HERE [V, V] {} "The stack is the guest's memory.";
    200 tkill HOME [V, V] {} PIDS;
    234 tgkill HOME [V, V, V] {} PIDS;
    282 signalfd HOME [FD, SIGNALFD_MASK, V] {} SIGNALFD;
    289 signalfd4 HOME [FD, SIGNALFD_MASK, V, V] {} SIGNALFD;
    297 rt_tgsigqueueinfo HOME [V, V, V, input(SIGINFO)] {} PIDS;
    424 pidfd_send_signal HOME [FD, V, input(SIGINFO), V] {} PIDS;
}

const fn filled_set() -> Shape {
    Shape::Out(counted(1, Width::Size, 1, 8, OverLimit::Refused), Amount::Whole, When::AtLeast(0))
}

const fn siginfo_out() -> Shape {
    Shape::Out(Len::Fixed(SIGINFO), Amount::Whole, When::AtLeast(1))
}
