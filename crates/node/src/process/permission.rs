//! Permissions: a user may move a process that the user could ptrace, and only root or the owner of
//! the node may change the node.
//!
//! The kernel decides whether a user could ptrace a process: a short-lived child of ternd takes the
//! identity of the user and tries to open `/proc/PID/environ`, which needs the right to read
//! another process (`PTRACE_MODE_READ`). Yama, which restricts attaching further, is not consulted.

use crate::config::Config;
use crate::os::spawn::wait_exit;
use crate::process::procfs;
use rustix::process::{Gid, Pid, PidfdFlags, Uid, getegid, geteuid, pidfd_open};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tern_control::{ReadError, Refusal, RefusalKind};
use tern_ids::HomePid;

/// The sender of a request, from the credentials of its socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caller {
    /// In the pid namespace of this daemon; 0 if the process is in a namespace that is not visible
    /// here.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Caller {
    pub(crate) fn is_root(self) -> bool {
        self.uid == 0
    }

    /// Whether the caller is root or the user that runs this node.
    pub(crate) fn owns_node(self) -> bool {
        self.is_root() || self.uid == geteuid().as_raw()
    }

    /// The caller that has the rights of this user, for a request on the user's behalf. Only root
    /// may make such a request. Root has all rights anyway, so it gains none, whatever user it
    /// names. (If root's process took the user's identity to make the request, the user could
    /// signal and trace that process meanwhile.)
    ///
    /// The result has no pid, so requests about the calling process are refused.
    pub(crate) fn on_behalf_of(self, uid: u32, gid: u32) -> Result<Self, Refusal> {
        if !self.is_root() {
            return Err(Refusal::new(RefusalKind::NotAllowed, "only root may make requests for other users"));
        }
        Ok(Self { pid: 0, uid, gid })
    }

    /// Checks that the caller owns the node.
    pub(crate) fn check_owns_node(self, what: &str) -> Result<(), Refusal> {
        if self.owns_node() {
            return Ok(());
        }
        Err(Refusal::new(RefusalKind::NotAllowed, format!("only root may {what}")))
    }
}

/// Exit codes of the child that checks access.
const ALLOWED: u8 = 0;
const DENIED: u8 = 1;
const GONE: u8 = 2;
const FAILED: u8 = 3;

/// How long the child may take. It waits while the process executes a program, which may wait for a
/// file server; and the user can stop the child.
const ACCESS_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether a process is this daemon, or runs the program of the shims, of the file server, of the
/// administration tree or of the executor.
pub(crate) fn is_part_of_tern(config: &Config, pid: i32) -> bool {
    let program = procfs::program_id(pid).ok();
    let ours = [&config.shim, &config.mfs, &config.admin, &config.exec];
    pid.cast_unsigned() == std::process::id()
        || program.is_some() && ours.into_iter().any(|known| program == procfs::file_id(known))
}

/// Checks that this caller may move this process.
pub(crate) fn check_may_move(config: &Config, caller: Caller, pid: i32) -> Result<(), Refusal> {
    let (_, effective) = procfs::uids(pid).map_err(|e| procfs::refusal(HomePid(pid), e))?;
    if is_part_of_tern(config, pid) {
        let what = format!("ternd: process {pid} is part of Tern, which is never moved");
        return Err(Refusal::new(RefusalKind::CannotMove, what));
    }
    if caller.is_root() {
        return Ok(());
    }
    let denied = |why: &str| Refusal::new(RefusalKind::NotAllowed, format!("process {pid} {why}"));
    if effective == 0 && !config.move_root {
        return Err(denied("is root's, and only root may move it"));
    }
    if !geteuid().is_root() && caller.uid != geteuid().as_raw() {
        return Err(denied("cannot be moved by you: this node's ternd runs for another user"));
    }
    let [pid_word, uid, gid] = [pid.to_string(), caller.uid.to_string(), caller.gid.to_string()];
    let child = Command::new(&config.ternd)
        .args(["--check-access", &pid_word, &uid, &gid])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    match child.and_then(wait_or_kill) {
        Ok(Some(ALLOWED)) => Ok(()),
        Ok(Some(DENIED)) => Err(denied("is not yours to move")),
        Ok(Some(GONE)) => Err(procfs::refusal(HomePid(pid), ReadError::Gone)),
        Ok(None) => {
            let what = format!("busy: process {pid} is executing a program; try again");
            Err(Refusal::new(RefusalKind::CannotMove, what))
        }
        failed => {
            tracing::error!(?failed, "the check of a caller's rights failed");
            Err(Refusal::new(RefusalKind::Internal, "the check of your rights failed; ternd's log says why"))
        }
    }
}

/// Waits for the child's exit code. None if it has taken longer than [`ACCESS_TIMEOUT`]; it is then
/// killed.
fn wait_or_kill(mut child: Child) -> io::Result<Option<u8>> {
    let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    if !pidfd.is_ok_and(|pidfd| wait_exit(&pidfd, Some(ACCESS_TIMEOUT))) {
        child.kill()?;
        child.wait()?;
        return Ok(None);
    }
    let code = child.wait()?.code().and_then(|code| u8::try_from(code).ok());
    Ok(Some(code.unwrap_or(FAILED)))
}

/// Runs in the child: takes the identity of the user for good, and tries to open the `environ` of
/// the process. Returns the exit code.
pub fn check_access(pid: i32, uid: u32, gid: u32) -> u8 {
    if (geteuid().as_raw(), getegid().as_raw()) != (uid, gid)
        && let Err(error) = become_user(Uid::from_raw(uid), Gid::from_raw(gid))
    {
        tracing::error!(%error, uid, gid, "cannot become that user");
        return FAILED;
    }
    let code = |environ: &Path| match File::open(environ) {
        Ok(_) => ALLOWED,
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(3) => GONE,
        Err(_) => DENIED,
    };
    let look = || {
        let first = code(Path::new(&format!("/proc/{pid}/environ")));
        if first != GONE {
            return first;
        }
        // After its first thread has ended, a process with other threads shows no environ itself,
        // but each thread does.
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let codes: Vec<u8> = threads.map(|thread| code(&thread.path().join("environ"))).collect();
        [DENIED, ALLOWED].into_iter().find(|found| codes.contains(found)).unwrap_or(GONE)
    };
    // A thread that calls exec takes over the pid of the first thread; the second attempt finds it
    // there.
    Some(look()).filter(|found| *found != GONE).unwrap_or_else(look)
}

/// Takes the identity of a user in the calling thread, which must be the only one of the process.
/// The supplementary groups do not matter to ptrace, so they are dropped.
fn become_user(uid: Uid, gid: Gid) -> rustix::io::Result<()> {
    if geteuid().is_root() {
        set_thread_groups(&[])?;
    }
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}
