//! seccomp user notification, which intercepts the system calls of guests.
#![expect(unsafe_code, reason = "prctl, seccomp and ioctl have no safe form")]

use super::Finding;
use super::child::{checked, in_child};
use crate::output::error_text;
use std::io;

/// `_IOW('!', 4, __u64)` from linux/seccomp.h (6.6); libc does not have it yet.
const SECCOMP_IOCTL_NOTIF_SET_FLAGS: u64 = 0x4008_2104;
/// The supervisor and its guest run alternately on one CPU.
const SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP: u64 = 1;

pub(super) fn probe() -> Vec<Finding> {
    vec![listener(), sync_wake_up()]
}

/// Installs a filter that allows all calls, and returns its listener. Called only in a child,
/// because a filter cannot be removed.
fn install(flags: u64) -> io::Result<u64> {
    let pass = [libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_ALLOW,
    }];
    let program = libc::sock_fprog { len: 1, filter: pass.as_ptr().cast_mut() };
    // SAFETY: PR_SET_NO_NEW_PRIVS takes no pointers.
    checked(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
    // SAFETY: `program` and the instruction that it points to live across the call; the kernel only
    // reads them.
    checked(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    })
}

fn listener() -> Finding {
    let name = "seccomp user notification";
    let new_listener = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    let killable = libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    match in_child(|| install(new_listener | killable)) {
        Ok(_) => Finding::ok(name, "with NEW_LISTENER and WAIT_KILLABLE_RECV"),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Finding::missing(
            name,
            "this process already has a seccomp listener (EBUSY)",
            "this node hosts no guests; run ternd outside this container or sandbox",
        ),
        Err(error) => Finding::missing(
            name,
            match in_child(|| install(new_listener)) {
                Ok(_) => format!("without WAIT_KILLABLE_RECV ({})", error_text(&error)),
                Err(_) => error_text(&error),
            },
            "this node hosts no guests: a signal could make a call run twice; it needs kernel 5.19",
        ),
    }
}

fn sync_wake_up() -> Finding {
    let name = "seccomp SYNC_WAKE_UP";
    let tried = in_child(|| {
        let listener = install(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER)?;
        // SAFETY: this request takes its flags by value, and the descriptor is the listener created
        // above.
        checked(
            unsafe {
                libc::ioctl(
                    listener as libc::c_int,
                    SECCOMP_IOCTL_NOTIF_SET_FLAGS,
                    SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP,
                )
            }
            .into(),
        )
    });
    match tried {
        Ok(_) => Finding::ok(name, "accepted"),
        Err(error) => Finding::limited(
            name,
            error_text(&error),
            "intercepting a call of a guest takes about four times as long; update to kernel 6.6",
        ),
    }
}
