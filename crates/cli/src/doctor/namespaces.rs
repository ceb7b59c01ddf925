//! Namespaces for guests, and pids of one's own choice in them.
#![expect(unsafe_code, reason = "unshare, fork and prctl have no safe form")]

use super::Finding;
use super::child::{checked, in_child};
use crate::output::reason;
use std::io;

const KINDS: [(&str, i32); 7] = [
    ("user", libc::CLONE_NEWUSER),
    ("pid", libc::CLONE_NEWPID),
    ("time", 0x80), // CLONE_NEWTIME, which libc has for some targets only
    ("net", libc::CLONE_NEWNET),
    ("mount", libc::CLONE_NEWNS),
    ("ipc", libc::CLONE_NEWIPC),
    ("uts", libc::CLONE_NEWUTS),
];

/// A pid that is not likely to be next by chance.
const CHOSEN: i32 = 4_321;

pub(super) fn examine() -> Vec<Finding> {
    vec![kinds(), chosen_pid(), tid_address(), pid_max()]
}

fn unshare(flags: i32) -> io::Result<u64> {
    // SAFETY: called in a probe's child only, which has nothing to share.
    checked(unsafe { libc::unshare(flags) }.into())
}

fn kinds() -> Finding {
    let name = "namespaces";
    let all = KINDS.iter().fold(0, |all, (_, flag)| all | flag);
    if in_child(|| unshare(all)).is_ok() {
        let names: Vec<_> = KINDS.iter().map(|(name, _)| *name).collect();
        return Finding::ok(name, names.join(", "));
    }
    // One by one, each within a user namespace, to say which it is.
    let refused: Vec<String> = KINDS
        .iter()
        .filter_map(|(name, flag)| {
            let error = in_child(|| unshare(libc::CLONE_NEWUSER | flag)).err()?;
            Some(format!("{name}: {}", reason(&error)))
        })
        .collect();
    let found = if refused.is_empty() { "not all at once".into() } else { refused.join("; ") };
    Finding::missing(
        name,
        found,
        "this node hosts no guests; look at user.max_user_namespaces and kernel.unprivileged_userns_clone",
    )
}

/// Guests have the pids that they have at home.
fn chosen_pid() -> Finding {
    let name = "chosen pids";
    let tried = in_child(|| {
        unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID)?;
        // Only the child of this one is in the namespace; it is its init, and tries.
        in_child(|| {
            std::fs::write("/proc/sys/kernel/ns_last_pid", (CHOSEN - 1).to_string())?;
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
        Ok(pid) if pid == CHOSEN as u64 => Finding::ok(name, "ns_last_pid takes effect"),
        Ok(pid) => not_chosen(name, format!("ns_last_pid is ignored (got {pid})")),
        Err(error) => not_chosen(name, format!("ns_last_pid: {}", reason(&error))),
    }
}

fn not_chosen(name: &str, found: String) -> Finding {
    Finding::missing(name, found, "this node hosts no guests; the kernel needs CONFIG_CHECKPOINT_RESTORE")
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
            reason(&error),
            "threads cannot be put on paper: no moves; the kernel needs CONFIG_CHECKPOINT_RESTORE",
        ),
    }
}

/// A guest whose pid is higher than this node's highest cannot come.
fn pid_max() -> Finding {
    let name = "pid_max";
    let text = std::fs::read_to_string("/proc/sys/kernel/pid_max").unwrap_or_default();
    match text.trim().parse::<u32>() {
        Ok(most) if most >= 4_194_304 => Finding::ok(name, most.to_string()),
        Ok(most) => Finding::limited(
            name,
            most.to_string(),
            "processes with a higher pid cannot come here; sysctl kernel.pid_max=4194304 on all nodes",
        ),
        Err(error) => {
            Finding::limited(name, error.to_string(), "it is not known which pids guests can have here")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_was_tried_is_not_kept() {
        let own = || std::fs::read_link("/proc/self/ns/uts").unwrap();
        let before = own();
        kinds();
        assert_eq!(own(), before);
    }
}
