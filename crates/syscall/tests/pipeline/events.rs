//! Waiting: poll, select, epoll, sleeps, timers.

use super::arena::Arena;
use super::{alone, args, close, native, same, same_result};

/// A pipe with data to read.
struct Pipe {
    read: u64,
    write: u64,
}

impl Pipe {
    fn full() -> Self {
        let mut arena = Arena::new();
        let fds = arena.reserve(8);
        assert_eq!(native(libc::SYS_pipe2 as u32, &args(&[fds, 0])), 0);
        let pipe = Self { read: arena.int(fds) as u64, write: arena.int(fds + 4) as u64 };
        let text = arena.put(b"ready");
        assert_eq!(native(libc::SYS_write as u32, &args(&[pipe.write, text, 5])), 5);
        pipe
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        close(self.read as i64);
        close(self.write as i64);
    }
}

#[test]
fn pipes() {
    let _alone = alone();
    let fds = std::cell::Cell::new(0);
    let (ret, _) = same(
        libc::SYS_pipe2,
        |a| {
            fds.set(a.reserve(8));
            args(&[fds.get(), libc::O_CLOEXEC as u64])
        },
        |_, a| {
            close(a.int(fds.get()).into());
            close(a.int(fds.get() + 4).into());
        },
    );
    assert_eq!(ret, 0);
    assert_eq!(same_result(libc::SYS_pipe, |_| args(&[1])), -i64::from(libc::EFAULT));
}

#[test]
fn polling() {
    let _alone = alone();
    let pipe = Pipe::full();
    let fds = |a: &mut Arena| {
        a.ints(&[
            pipe.read as i32,
            i32::from(libc::POLLIN),
            pipe.write as i32,
            i32::from(libc::POLLOUT),
            -1,
            1,
        ])
    };
    assert_eq!(same_result(libc::SYS_poll, |a| args(&[fds(a), 3, 1000])), 2);
    assert_eq!(same_result(libc::SYS_poll, |a| args(&[fds(a) + 16, 1, 1])), 0);
    assert_eq!(same_result(libc::SYS_poll, |_| args(&[0, 0, 1])), 0);
    assert_eq!(same_result(libc::SYS_poll, |_| args(&[1, 1, 1])), -i64::from(libc::EFAULT));
    assert_eq!(same_result(libc::SYS_poll, |_| args(&[1, 0x7fff_ffff, 1])), -i64::from(libc::EINVAL));
    // If a descriptor is ready and the timeout is zero, no time passes.
    let ppoll = |a: &mut Arena| args(&[fds(a), 3, a.words(&[0, 0]), a.words(&[0]), 8]);
    assert_eq!(same_result(libc::SYS_ppoll, ppoll), 2);
    assert_eq!(same_result(libc::SYS_ppoll, |a| args(&[fds(a), 3, 0, 0, 0])), 2);
}

#[test]
fn selecting() {
    let _alone = alone();
    let pipe = Pipe::full();
    let set = |fd: u64| {
        let mut words = [0; 4];
        words[(fd / 64) as usize] = 1 << (fd % 64);
        words
    };
    let select = |a: &mut Arena, last: u64| {
        let (read, write) = (a.words(&set(pipe.read)), a.words(&set(pipe.write)));
        let zero = a.words(&[0, 0]);
        [200, read, write, 0, zero, last]
    };
    assert_eq!(same_result(libc::SYS_select, |a| select(a, 0)), 2);
    let pselect = |a: &mut Arena| {
        let mask = a.words(&[0]);
        let pair = a.words(&[mask, 8]);
        select(a, pair)
    };
    assert_eq!(same_result(libc::SYS_pselect6, pselect), 2);
    let no_mask = |a: &mut Arena| {
        let pair = a.words(&[0, 8]);
        select(a, pair)
    };
    assert_eq!(same_result(libc::SYS_pselect6, no_mask), 2);
    assert_eq!(same_result(libc::SYS_select, |_| args(&[-1i64 as u64])), -i64::from(libc::EINVAL));
    assert_eq!(same_result(libc::SYS_select, |_| args(&[8, 1])), -i64::from(libc::EFAULT));
}

#[test]
fn epoll() {
    let _alone = alone();
    let pipe = Pipe::full();
    let (epoll, _) = same(libc::SYS_epoll_create1, |_| args(&[0]), |ret, _| close(ret));
    let opened = native(libc::SYS_epoll_create1 as u32, &args(&[0])) as u64;
    assert_eq!(opened as i64, epoll);
    let event = |a: &mut Arena| {
        let event = [&1u32.to_le_bytes()[..], &0x1234_5678_9abc_def0u64.to_le_bytes()].concat();
        args(&[opened, 1, pipe.read, a.put(&event)])
    };
    let delete = |_, _: &mut _| {
        native(libc::SYS_epoll_ctl as u32, &args(&[opened, 2, pipe.read, 0]));
    };
    assert_eq!(same(libc::SYS_epoll_ctl, event, delete).0, 0);
    let mut arena = Arena::new();
    let add = event(&mut arena);
    assert_eq!(native(libc::SYS_epoll_ctl as u32, &add), 0);
    let (ret, mut arena) =
        same(libc::SYS_epoll_wait, |a| args(&[opened, a.reserve(120), 10, 1000]), |_, _| {});
    assert_eq!(ret, 1);
    assert!(arena.snapshot().windows(8).any(|word| word == 0x1234_5678_9abc_def0u64.to_le_bytes()));
    let masked = |a: &mut Arena| args(&[opened, a.reserve(120), 10, 1000, a.words(&[0]), 8]);
    assert_eq!(same_result(libc::SYS_epoll_pwait, masked), 1);
    let timed = |a: &mut Arena| args(&[opened, a.reserve(120), 10, a.words(&[1, 0]), 0, 0]);
    assert_eq!(same_result(libc::SYS_epoll_pwait2, timed), 1);
    assert_eq!(same_result(libc::SYS_epoll_wait, |_| args(&[opened, 1, 10, 0])), -i64::from(libc::EFAULT));
    assert_eq!(
        same_result(libc::SYS_epoll_wait, |a| args(&[opened, a.reserve(12), 0, 0])),
        -i64::from(libc::EINVAL)
    );
    close(opened as i64);
}

#[test]
fn sleeping() {
    let before = std::time::Instant::now();
    assert_eq!(same_result(libc::SYS_nanosleep, |a| args(&[a.words(&[0, 2_000_000]), a.reserve(16)])), 0);
    assert_eq!(same_result(libc::SYS_clock_nanosleep, |a| args(&[1, 0, a.words(&[0, 1_000_000]), 0])), 0);
    assert!(before.elapsed() >= std::time::Duration::from_millis(6));
    assert_eq!(
        same_result(libc::SYS_nanosleep, |a| args(&[a.words(&[0, 2_000_000_000]), 0])),
        -i64::from(libc::EINVAL)
    );
}

#[test]
fn timers() {
    let _alone = alone();
    let opened = native(libc::SYS_timerfd_create as u32, &args(&[1, 0])) as u64;
    let set = |a: &mut Arena| args(&[opened, 0, a.words(&[5, 6, 7000, 8]), 0]);
    assert_eq!(same_result(libc::SYS_timerfd_settime, set), 0);
    let stop = |a: &mut Arena| args(&[opened, 0, a.words(&[0, 0, 0, 0])]);
    assert_eq!(same_result(libc::SYS_timerfd_settime, stop), 0);
    let (_, mut arena) = same(libc::SYS_timerfd_gettime, |a| args(&[opened, a.reserve(32)]), |_, _| {});
    assert!(arena.snapshot().windows(32).any(|words| words == [0; 32]), "a stopped timer is all zeroes");
    close(opened as i64);
    assert_eq!(same_result(libc::SYS_getitimer, |a| args(&[0, a.reserve(32)])), 0);
    // The clock of an alarm device, which may not exist.
    let ret = same_result(libc::SYS_clock_getres, |a| args(&[8, a.reserve(16)]));
    assert!([0, -i64::from(libc::EINVAL)].contains(&ret), "{ret}");
}
