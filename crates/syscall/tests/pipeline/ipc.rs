//! System V queues and semaphores, which need no descriptor.

use super::arena::Arena;
use super::{args, native, same_result};

/// An IPC object that is removed at the end of the test.
struct Object {
    id: u64,
    control: i64,
}

impl Object {
    fn new(get: i64, given: [u64; 3], control: i64) -> Self {
        let id = native(get as u32, &args(&given));
        assert!(id >= 0, "{id}");
        Self { id: id as u64, control }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // IPC_RMID is 0. It is semctl's third argument, and the second of the others.
        native(self.control as u32, &args(&[self.id, 0, 0, 0]));
    }
}

#[test]
fn queues() {
    let queue = Object::new(libc::SYS_msgget, [0, 0o600, 0], libc::SYS_msgctl);
    let message = |a: &mut Arena, text: &[u8]| a.put(&[&7u64.to_le_bytes()[..], text].concat());
    let send = |a: &mut Arena| args(&[queue.id, message(a, b"hello queue"), 11, 0]);
    assert_eq!(same_result(libc::SYS_msgsnd, send), 0);
    let receive = |size: usize| {
        same_result(libc::SYS_msgrcv, |a| {
            args(&[queue.id, a.reserve(8 + size), size as u64, 7, libc::IPC_NOWAIT as u64])
        })
    };
    assert_eq!(receive(4), -i64::from(libc::E2BIG));
    assert_eq!(receive(40), 11);
    assert_eq!(receive(40), -i64::from(libc::ENOMSG));
    let stat = |a: &mut Arena| args(&[queue.id, libc::IPC_STAT as u64, a.reserve(120)]);
    assert_eq!(same_result(libc::SYS_msgctl, stat), 0);
    let huge = |a: &mut Arena| args(&[queue.id, message(a, b""), u64::MAX, 0]);
    assert_eq!(same_result(libc::SYS_msgsnd, huge), -i64::from(libc::EINVAL));
}

#[test]
fn semaphores() {
    let set = Object::new(libc::SYS_semget, [0, 2, 0o600], libc::SYS_semctl);
    let add = |a: &mut Arena| args(&[set.id, a.put(&[0, 0, 3, 0, 0, 0, 1, 0, 5, 0, 0, 0]), 2]);
    assert_eq!(same_result(libc::SYS_semop, add), 0);
    // The direct and the forwarded call each added 3.
    assert_eq!(native(libc::SYS_semctl as u32, &args(&[set.id, 0, 12])), 6);
    let wait = |a: &mut Arena| {
        let operation = a.put(&[0, 0, 0, 0, 0, 0]);
        args(&[set.id, operation, 1, a.words(&[0, 1000])])
    };
    assert_eq!(same_result(libc::SYS_semtimedop, wait), -i64::from(libc::EAGAIN));
    let stat = |a: &mut Arena| args(&[set.id, 0, libc::IPC_STAT as u64, a.reserve(104)]);
    assert_eq!(same_result(libc::SYS_semctl, stat), 0);
    assert_eq!(same_result(libc::SYS_semop, |_| args(&[set.id, 1, 1 << 20])), -i64::from(libc::E2BIG));
}
