//! Namespaces for guests, and whether a pid can be chosen in them.
#![expect(unsafe_code, reason = "unshare, fork and prctl have no safe form")]

use super::Finding;
use super::child::{checked, in_child};
use crate::output::error_text;
use std::io;

/// The namespaces that no guest can do without (guest/sandbox.rs).
const KINDS: [(&str, i32); 7] = [
    ("user", libc::CLONE_NEWUSER),
    ("pid", libc::CLONE_NEWPID),
    ("cgroup", libc::CLONE_NEWCGROUP),
    ("net", libc::CLONE_NEWNET),
    ("mount", libc::CLONE_NEWNS),
    ("ipc", libc::CLONE_NEWIPC),
    ("uts", libc::CLONE_NEWUTS),
];

/// CLONE_NEWTIME, which libc has for some targets only.
const CLONE_NEWTIME: i32 = 0x80;

/// A pid that the kernel is unlikely to assign next.
const TEST_PID: i32 = 4_321;

pub(super) fn probe() -> Vec<Finding> {
    vec![kinds(), time(), selectable_pid(), tid_address(), pid_max()]
}

fn unshare(flags: i32) -> io::Result<u64> {
    // SAFETY: called only in a probe's child, which shares nothing that this could affect.
    checked(unsafe { libc::unshare(flags) }.into())
}

fn kinds() -> Finding {
    let name = "namespaces";
    let all = KINDS.iter().fold(0, |all, (_, flag)| all | flag);
    if in_child(|| unshare(all)).is_ok() {
        let names: Vec<_> = KINDS.iter().map(|(name, _)| *name).collect();
        return Finding::ok(name, names.join(", "));
    }
    // Each one alone in a user namespace, to report which one is refused.
    let refused: Vec<String> = KINDS
        .iter()
        .filter_map(|(name, flag)| {
            let error = in_child(|| unshare(libc::CLONE_NEWUSER | flag)).err()?;
            Some(format!("{name}: {}", error_text(&error)))
        })
        .collect();
    let found = if refused.is_empty() { "not all at once".into() } else { refused.join("; ") };
    Finding::missing(
        name,
        found,
        "this node hosts no guests; check sysctl user.max_user_namespaces and kernel.unprivileged_userns_clone",
    )
}

/// The monotonic and boot clocks continue in a time namespace after a move.
fn time() -> Finding {
    let name = "time namespaces";
    match in_child(|| unshare(libc::CLONE_NEWUSER | CLONE_NEWTIME)) {
        Ok(_) => Finding::ok(name, "yes"),
        Err(error) => Finding::limited(
            name,
            error_text(&error),
            "the monotonic clock of a program jumps when it moves to this node; the kernel needs CONFIG_TIME_NS",
        ),
    }
}

/// A guest has the same pid as at home, so pids must be selectable.
fn selectable_pid() -> Finding {
    let name = "selectable pids";
    let tried = in_child(|| {
        unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID)?;
        // Only the next child is in the new pid namespace; it is the namespace's init and runs the
        // probe.
        in_child(|| {
            std::fs::write("/proc/sys/kernel/ns_last_pid", (TEST_PID - 1).to_string())?;
            // SAFETY: as in `in_child`; the new process ends at once.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: ends the child, running none of this process's exit handlers.
                unsafe { libc::_exit(0) }
            }
            checked(pid.into())
        })
    });
    match tried {
        Ok(pid) if pid == TEST_PID as u64 => Finding::ok(name, "ns_last_pid takes effect"),
        Ok(pid) => pid_not_selectable(name, format!("ns_last_pid is ignored (got {pid})")),
        Err(error) => pid_not_selectable(name, format!("ns_last_pid: {}", error_text(&error))),
    }
}

fn pid_not_selectable(name: &str, found: String) -> Finding {
    Finding::missing(name, found, "this node hosts no guests; use a kernel with CONFIG_CHECKPOINT_RESTORE")
}

fn tid_address() -> Finding {
    let name = "PR_GET_TID_ADDRESS";
    let mut address = 0usize;
    // SAFETY: the kernel writes one pointer-sized value to `address`.
    let tried = checked(unsafe { libc::prctl(libc::PR_GET_TID_ADDRESS, &raw mut address) }.into());
    match tried {
        Ok(_) => Finding::ok(name, "works"),
        Err(error) => Finding::missing(
            name,
            error_text(&error),
            "no process can be moved, because threads cannot be saved; use a kernel with CONFIG_CHECKPOINT_RESTORE",
        ),
    }
}

/// A guest's pid must not exceed this node's pid_max.
fn pid_max() -> Finding {
    let name = "pid_max";
    let text = std::fs::read_to_string("/proc/sys/kernel/pid_max").unwrap_or_default();
    match text.trim().parse::<u32>() {
        Ok(max) if max >= 4_194_304 => Finding::ok(name, max.to_string()),
        Ok(max) => Finding::limited(
            name,
            max.to_string(),
            "processes with a higher pid cannot move here; set sysctl kernel.pid_max=4194304 on all nodes",
        ),
        Err(error) => Finding::limited(
            name,
            error.to_string(),
            "the pids that guests can have here are unknown; mount /proc",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_leaves_own_namespaces_unchanged() {
        let own = || std::fs::read_link("/proc/self/ns/uts").unwrap();
        let before = own();
        kinds();
        assert_eq!(own(), before);
    }
}
