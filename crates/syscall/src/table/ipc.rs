//! System V and POSIX queues, semaphores and shared memory; keys.

use super::vocabulary::*;
use Interrupted::{Eintr, Restarts};

const OBJECT: &str = "The object belongs to home's IPC namespace.";
const ATTACH: &str = "Shared memory must be on the same node as all processes that use it.";
const QUEUE: &str = "The queue's descriptor is the deputy's.";
const KEYS: &str = "The keyrings are the deputy's.";
const MESSAGE: u64 = 16 << 20;

/// struct msgbuf: the type, followed by the text.
const fn text(over_limit: OverLimit) -> Len {
    Len::Arg(Count { arg: 2, width: Width::Size, size: 1, add: 8, max: MESSAGE, over_limit })
}

/// Sizes of the kernel's msginfo, shminfo, shm_info and seminfo.
const MSG_INFO: u32 = 32;
const SHM_LIMITS: u32 = 72;
const SHM_INFO: u32 = 48;
const SEM_INFO: u32 = 40;

fn msgctl(args: &[u64; 6]) -> &'static [Shape] {
    const LEN: u32 = size::<libc::msqid_ds>();
    match args[1] as i32 {
        // IPC_SET
        1 => const { &[V, V, input(LEN)] },
        // IPC_STAT, MSG_STAT, MSG_STAT_ANY
        2 | 11 | 13 => const { &[V, V, output(LEN)] },
        // IPC_INFO, MSG_INFO
        3 | 12 => const { &[V, V, output(MSG_INFO)] },
        _ => const { &[V, V, V] },
    }
}

fn shmctl(args: &[u64; 6]) -> &'static [Shape] {
    const LEN: u32 = size::<libc::shmid_ds>();
    match args[1] as i32 {
        // IPC_SET
        1 => const { &[V, V, input(LEN)] },
        // IPC_STAT, SHM_STAT, SHM_STAT_ANY
        2 | 13 | 15 => const { &[V, V, output(LEN)] },
        // IPC_INFO
        3 => const { &[V, V, output(SHM_LIMITS)] },
        // SHM_INFO
        14 => const { &[V, V, output(SHM_INFO)] },
        _ => const { &[V, V, V] },
    }
}

fn semctl(args: &[u64; 6]) -> &'static [Shape] {
    const LEN: u32 = size::<libc::semid_ds>();
    match args[2] as i32 {
        // IPC_SET
        1 => const { &[V, V, V, input(LEN)] },
        // IPC_STAT, SEM_STAT, SEM_STAT_ANY
        2 | 18 | 20 => const { &[V, V, V, output(LEN)] },
        // IPC_INFO, SEM_INFO
        3 | 19 => const { &[V, V, V, output(SEM_INFO)] },
        _ => const { &[V, V, V, V] },
    }
}

/// GETALL and SETALL, 13 and 17, are Homeward: they transfer as many numbers as the set has
/// semaphores.
fn semctl_route(args: &[u64; 6]) -> Route {
    home_if(matches!(args[2] as i32, 0..=3 | 11 | 12 | 14..=16 | 18..=20))
}

fn msgctl_route(args: &[u64; 6]) -> Route {
    home_if(matches!(args[1] as i32, 0..=3 | 11..=13))
}

fn shmctl_route(args: &[u64; 6]) -> Route {
    home_if(matches!(args[1] as i32, 0..=3 | 11..=15))
}

fn home_if(is_known: bool) -> Route {
    if is_known { Route::Home } else { Route::Homeward(reason::IPC_COMMAND) }
}

const KNOWN_COMMANDS: &str = "Home; Homeward for an unknown command";

fn notify(args: &[u64; 6]) -> Route {
    if args[1] == 0 { Route::Home } else { Route::Homeward(reason::QUEUE_NOTIFICATION) }
}

/// The kernel allows SEMOPM operations (500, or the administrator's setting), and checks their
/// number before it reads the array.
const OPERATIONS: Shape = Shape::In(counted(2, Width::Size, 6, 32768, OverLimit::Refused));
const ATTRIBUTES: u32 = 64;

rows! {
    29 shmget HOME [V, V, V] {} OBJECT;
    30 shmat (homeward(reason::SHARED_MEMORY)) [V, V, V] {} ATTACH;
    31 shmctl (Rule::By(shmctl_route, KNOWN_COMMANDS)) (by shmctl, "by the command") {} OBJECT;
    64 semget HOME [V, V, V] {} OBJECT;
    65 semop HOME [V, OPERATIONS, V] {waits(Eintr, Timeout::None)} OBJECT;
    66 semctl (Rule::By(semctl_route, "Home; Homeward for GETALL, SETALL and unknown commands")) (by semctl, "by the command") {}
        "The object belongs to home's IPC namespace; only the kernel knows how long its arrays are.";
    67 shmdt (homeward(reason::SHARED_MEMORY)) [V] {} ATTACH;
    68 msgget HOME [V, V] {} OBJECT;
    69 msgsnd HOME [V, Shape::In(text(OverLimit::Refused)), V, V] {waits(Restarts, Timeout::None)} OBJECT;
    70 msgrcv HOME [V, Shape::Out(text(OverLimit::Cut), Amount::Result { size: 1, add: 8 }, When::AtLeast(0)), V, V, V]
        {waits(Restarts, Timeout::None) consumes()} OBJECT;
    71 msgctl (Rule::By(msgctl_route, KNOWN_COMMANDS)) (by msgctl, "by the command") {} OBJECT;
    220 semtimedop HOME [V, OPERATIONS, V, input(PAIR)] {waits(Eintr, Timeout::Timespec(3))} OBJECT;
    240 mq_open HOME [PATH, V, V, input(ATTRIBUTES)] {} QUEUE;
    241 mq_unlink HOME [PATH] {} OBJECT;
    242 mq_timedsend HOME [FD, struct_in(2, Width::Size, MESSAGE), V, V, input(PAIR)]
        {waits(Restarts, Timeout::Absolute(4))} QUEUE;
    243 mq_timedreceive HOME
        [FD, filled(counted(2, Width::Size, 1, MESSAGE, OverLimit::Cut), 1), V, output(4), input(PAIR)]
        {waits(Restarts, Timeout::Absolute(4)) consumes()} QUEUE;
    244 mq_notify (Rule::By(notify, "Home to remove a notification; else Homeward")) [FD, V] {}
        "A notification by thread points to a cookie that the kernel copies.";
    245 mq_getsetattr HOME [FD, input(ATTRIBUTES), output(ATTRIBUTES)] {} QUEUE;
    248 add_key HOME [Shape::Text(32), PATH, struct_in(3, Width::Size, 1 << 20), V, V] {} KEYS;
    249 request_key HOME [Shape::Text(32), PATH, PATH, V] {waits(Restarts, Timeout::None)} KEYS;
    250 keyctl (homeward(reason::KEYRINGS)) [V, V, V, V, V] {}
        "Each of its many commands has arguments of its own.";
}
