//! Waiting for descriptors, and descriptors that report events.

use super::vocabulary::*;
use Interrupted::{Eintr, RestartBlock, Restarts};

const WAIT: &str = "The descriptors are at home, and home's kernel keeps the remaining time.";
const NEW: &str = "New descriptors are the deputy's.";
const BITS: Shape = Shape::Rewritten(Len::Bits(0));
const MASK: Shape = input(SIGSET);
const EVENT: u32 = 12;
/// The kernel refuses a count above RLIMIT_NOFILE before it reads any entry. It writes a part of each
/// entry only, so an unchanged array is not written back.
const DESCRIPTORS: Shape =
    Shape::InOut(counted(1, Width::UInt, 8, limits::MAX_DESCRIPTORS, OverLimit::Refused));
const EVENTS: Shape = filled(counted(2, Width::Int, EVENT, 65536, OverLimit::Cut), EVENT);
const LEFT: Shape = Shape::TimeLeft(PAIR);
const AIO: &str = "Its ring is mapped into the process, where home's kernel writes to it.";
const URING: &str = "Its rings are shared with the kernel at home; programs work without it.";

rows! {
    7 poll HOME [DESCRIPTORS, V, V] {waits(RestartBlock, Timeout::Millis(2))} WAIT;
    23 select HOME [V, BITS, BITS, BITS, LEFT] {waits(Restarts, Timeout::TimeLeft(4))} WAIT;
    206 io_setup (homeward(reason::AIO)) [V, V] {} AIO;
    207 io_destroy (homeward(reason::AIO)) [V] {} AIO;
    208 io_getevents (homeward(reason::AIO)) [V, V, V, V, V] {waits(Eintr, Timeout::Timespec(4))} AIO;
    209 io_submit (homeward(reason::AIO)) [V, V, V] {} AIO;
    210 io_cancel (homeward(reason::AIO)) [V, V, V] {} AIO;
    213 epoll_create HOME [V] {} NEW;
    214 epoll_ctl_old NOSYS [] {} NEVER;
    215 epoll_wait_old NOSYS [] {} NEVER;
    232 epoll_wait HOME [FD, EVENTS, V, V] {waits(Eintr, Timeout::Millis(3))} WAIT;
    233 epoll_ctl HOME [FD, V, FD, input(EVENT)] {} AT_THE_DEPUTY;
    253 inotify_init HOME [] {} NEW;
    254 inotify_add_watch HOME [FD, PATH, V] {} NAMES;
    255 inotify_rm_watch HOME [FD, V] {} AT_THE_DEPUTY;
    270 pselect6 HOME [V, BITS, BITS, BITS, LEFT, Shape::MaskPair]
        {waits(Restarts, Timeout::TimeLeft(4)) mask(5)} WAIT;
    271 ppoll HOME [DESCRIPTORS, V, LEFT, MASK, V] {waits(Restarts, Timeout::TimeLeft(2)) mask(3)} WAIT;
    281 epoll_pwait HOME [FD, EVENTS, V, V, MASK, V] {waits(Eintr, Timeout::Millis(3)) mask(4)} WAIT;
    284 eventfd HOME [V] {} NEW;
    290 eventfd2 HOME [V, V] {} NEW;
    291 epoll_create1 HOME [V] {} NEW;
    294 inotify_init1 HOME [V] {} NEW;
    298 perf_event_open (homeward(reason::PERFORMANCE_EVENTS)) [V, V, V, FD, V] {}
        "The events to count happen where the program runs, and are read through shared memory.";
    300 fanotify_init HOME [V, V] {} NEW;
    301 fanotify_mark HOME [FD, V, V, FD, PATH] {} NAMES;
    333 io_pgetevents (homeward(reason::AIO)) [V, V, V, V, V, V] {waits(Eintr, Timeout::Timespec(4))} AIO;
    425 io_uring_setup NOSYS [V, V] {} URING;
    426 io_uring_enter NOSYS [V, V, V, V, V, V] {waits(Eintr, Timeout::None)} URING;
    427 io_uring_register NOSYS [V, V, V, V] {} URING;
    441 epoll_pwait2 HOME [FD, EVENTS, V, input(PAIR), MASK, V] {waits(Eintr, Timeout::Timespec(3)) mask(4)} WAIT;
}
