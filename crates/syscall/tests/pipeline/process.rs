//! Calls about the process itself: identity, limits, names, children, and execve.

use super::arena::Arena;
use super::{alone, args, native, same, same_result};
use tern_syscall::{filter, gather};

#[test]
fn identity() {
    assert_eq!(same_result(libc::SYS_getresuid, |a| args(&[a.reserve(4), a.reserve(4), a.reserve(4)])), 0);
    assert_eq!(
        same_result(libc::SYS_getresuid, |a| args(&[a.reserve(4), 1, a.reserve(4)])),
        -i64::from(libc::EFAULT)
    );
    assert!(same_result(libc::SYS_getgroups, |a| args(&[100, a.reserve(400)])) >= 0);
    assert!(same_result(libc::SYS_getgroups, |_| args(&[0, 0])) >= 0);
    assert_eq!(same_result(libc::SYS_getgroups, |_| args(&[-1i64 as u64, 0])), -i64::from(libc::EINVAL));
    let capabilities = |a: &mut Arena| args(&[a.ints(&[0x2008_0522, 0]), a.reserve(24)]);
    assert_eq!(same_result(libc::SYS_capget, capabilities), 0);
    // With an unknown version the kernel writes the one that it prefers.
    let unknown = |a: &mut Arena| args(&[a.ints(&[1, 0]), 0]);
    assert_eq!(same_result(libc::SYS_capget, unknown), 0);
    assert_eq!(same_result(libc::SYS_getppid, |_| args(&[])), i64::from(std::os::unix::process::parent_id()));
}

#[test]
fn the_machine_and_its_limits() {
    let (ret, mut arena) = same(libc::SYS_uname, |a| args(&[a.reserve(390)]), |_, _| {});
    assert_eq!(ret, 0);
    assert!(arena.snapshot().windows(6).any(|word| word == b"Linux\0"));
    assert_eq!(same_result(libc::SYS_getrlimit, |a| args(&[7, a.reserve(16)])), 0);
    assert_eq!(same_result(libc::SYS_prlimit64, |a| args(&[0, 7, 0, a.reserve(16)])), 0);
    assert!(same_result(libc::SYS_sched_getaffinity, |a| args(&[0, 128, a.reserve(128)])) > 0);
    assert_eq!(
        same_result(libc::SYS_sched_getaffinity, |a| args(&[0, 3, a.reserve(128)])),
        -i64::from(libc::EINVAL)
    );
    assert_eq!(same_result(libc::SYS_sched_getparam, |a| args(&[0, a.reserve(4)])), 0);
    assert_eq!(same_result(libc::SYS_sched_getattr, |a| args(&[0, a.put(&[1; 64]), 64, 0])), 0);
    let bad = |a: &mut Arena| args(&[0, a.ints(&[9000, 0]), 0]);
    let (ret, mut arena) = same(libc::SYS_sched_setattr, bad, |_, _| {});
    assert_eq!(ret, -i64::from(libc::E2BIG));
    let first = arena.first();
    assert_ne!(arena.int(first), 9000, "the kernel writes the size that it knows");
}

#[test]
fn a_thread_has_a_name() {
    let set = |a: &mut Arena| args(&[libc::PR_SET_NAME as u64, a.text("a-name-of-more-than-15")]);
    assert_eq!(same_result(libc::SYS_prctl, set), 0);
    let (ret, mut arena) =
        same(libc::SYS_prctl, |a| args(&[libc::PR_GET_NAME as u64, a.reserve(16)]), |_, _| {});
    assert_eq!(ret, 0);
    assert!(arena.snapshot().windows(16).any(|word| word == b"a-name-of-more-\0"));
    assert_eq!(same_result(libc::SYS_prctl, |a| args(&[libc::PR_GET_PDEATHSIG as u64, a.reserve(4)])), 0);
}

/// A child process that runs `body` only.
fn child(body: impl FnOnce() -> i32) -> u64 {
    // SAFETY: the child makes only system calls on memory that is already laid out, and ends with
    // _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let status = body();
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(status) };
    }
    pid as u64
}

#[test]
fn children() {
    let _alone = alone();
    // Each way of waiting has its own child, with the same exit status. Only the pids differ.
    let mut statuses = Vec::new();
    for forwarded in [false, true] {
        let pid = child(|| 7);
        let mut arena = Arena::new();
        let status = arena.ints(&[-1]);
        let call = args(&[pid, status, 0, 0]);
        let nr = libc::SYS_wait4;
        let ret = if forwarded { super::forwarded(nr, &call, &mut arena) } else { native(nr as u32, &call) };
        assert_eq!(ret, pid as i64);
        statuses.push(arena.int(status));
    }
    assert_eq!(statuses, [7 << 8, 7 << 8]);

    let pid = child(|| 9);
    // WNOWAIT does not reap the child, so that both ways see the same one.
    let wait = |a: &mut Arena| args(&[1, pid, a.reserve(128), (libc::WEXITED | libc::WNOWAIT) as u64, 0]);
    assert_eq!(same_result(libc::SYS_waitid, wait), 0);
    let mut arena = Arena::new();
    let info = arena.reserve(128);
    let call = args(&[1, pid, info, libc::WEXITED as u64, arena.reserve(144)]);
    assert_eq!(super::forwarded(libc::SYS_waitid, &call, &mut arena), 0);
    assert_eq!(arena.int(info), libc::SIGCHLD);
    assert_eq!(arena.int(info + 24), 9, "the status");
    let none = |a: &mut Arena| args(&[pid, a.reserve(4), 0, a.reserve(144)]);
    assert_eq!(same_result(libc::SYS_wait4, none), -i64::from(libc::ECHILD));
}

#[test]
fn execve_sends_its_strings() {
    let _alone = alone();
    let mut arena = Arena::new();
    let fds = arena.reserve(8);
    assert_eq!(native(libc::SYS_pipe2 as u32, &args(&[fds, 0])), 0);
    let (read, write) = (arena.int(fds), arena.int(fds + 4));
    let script = format!("printf '%s|' \"$@\" \"$TERN\" >&{write}");
    let texts = ["sh", "-c", &script, "zero", "first", "", "third"].map(|text| arena.text(text));
    let argv = arena.words(&[&texts[..], &[0]].concat());
    let variable = arena.text("TERN=away");
    let envp = arena.words(&[variable, 0]);
    let call = args(&[arena.text("/bin/sh"), argv, envp]);
    let layout = gather(libc::SYS_execve as u32, &call, &mut arena)
        .expect("execve has a home part")
        .call
        .lay_out()
        .expect("a gathered call is well formed");
    let mut mailbox = super::arena::Pages::new(layout.size());
    let base = mailbox.bytes().as_ptr() as u64;
    layout.fill(base, mailbox.bytes()).expect("the mailbox is large enough");
    let (nr, call) = (layout.nr(), layout.args(base));
    let pid = child(|| native(nr, &call) as i32);
    super::close(write.into());
    let mut output = Vec::new();
    loop {
        let buffer = arena.reserve(64);
        match native(libc::SYS_read as u32, &args(&[read as u64, buffer, 64])) {
            0 => break,
            got => output.extend(arena.get(buffer, usize::try_from(got).expect("bytes to read"))),
        }
    }
    super::close(read.into());
    let status = arena.reserve(4);
    assert_eq!(native(libc::SYS_wait4 as u32, &args(&[pid, status, 0, 0])), pid as i64);
    assert_eq!(String::from_utf8_lossy(&output), "first||third|away|");
}

#[test]
fn kernel_accepts_the_filter() {
    let _alone = alone();
    let program: Vec<libc::sock_filter> = filter(0x3100_0000_0202)
        .iter()
        .map(|op| libc::sock_filter { code: op.code, jt: op.jt, jf: op.jf, k: op.k })
        .collect();
    let mut arena = Arena::new();
    let fprog = arena.words(&[program.len() as u64, program.as_ptr() as u64]);
    let (page, clock) = (arena.reserve(4096), arena.reserve(16));
    // There is no listener, so calls to be notified fail with ENOSYS, and the child cannot even
    // exit.
    let pid = child(|| {
        let call = |nr: i64, given: &[u64]| native(nr as u32, &args(given));
        let installed = call(libc::SYS_prctl, &[libc::PR_SET_NO_NEW_PRIVS as u64, 1]) == 0
            && call(libc::SYS_seccomp, &[libc::SECCOMP_SET_MODE_FILTER.into(), 0, fprog]) == 0;
        let notified = -i64::from(libc::ENOSYS);
        let right = installed
            && call(libc::SYS_getpid, &[]) > 1
            && call(libc::SYS_mmap, &[0, 4096, 3, 0x22, u64::MAX, 0]) > 0
            && call(libc::SYS_mmap, &[0, 4096, 3, 0x21, u64::MAX, 0]) == notified
            && call(libc::SYS_clock_gettime, &[1, clock]) == 0
            && call(libc::SYS_clock_gettime, &[2, clock]) == notified
            && call(libc::SYS_getrandom, &[page, 16, 0]) == 16
            && call(libc::SYS_getppid, &[]) == notified
            && call(libc::SYS_read, &[0, page, 1]) == notified
            && call(0x4000_0027, &[]) == notified;
        // SAFETY: both instructions end the child by a signal and access no memory.
        unsafe {
            if right {
                std::arch::asm!("ud2", options(noreturn));
            }
            std::arch::asm!("int3", "ud2", options(noreturn));
        }
    });
    let status = arena.reserve(4);
    assert_eq!(native(libc::SYS_wait4 as u32, &args(&[pid, status, 0, 0])), pid as i64);
    assert_eq!(arena.int(status) & 0x7f, libc::SIGILL);
}
