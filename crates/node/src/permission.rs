//! Who may do what: a user may move what he could ptrace, and only root or the owner of the node changes it.
//!
//! Whether he could ptrace a process, the kernel says: a short-lived child of ours becomes that user and tries
//! to open `/proc/PID/environ`, which takes the right to read another process (`PTRACE_MODE_READ`; Yama, which
//! restricts attaching further, is not asked).

use crate::config::Config;
use crate::procfs;
use rustix::process::{Gid, Uid, getegid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use tern_control::{Refusal, RefusalKind};

/// Who asks, from the socket's credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caller {
    /// In this daemon's pid namespace; 0 if it is in none of ours.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Caller {
    pub(crate) fn is_root(self) -> bool {
        self.uid == 0
    }

    /// Root, or the user whose node this is.
    pub(crate) fn owns_node(self) -> bool {
        self.is_root() || self.uid == geteuid().as_raw()
    }

    /// Who this caller speaks for. Only root may, who could do all of it himself: so whatever it says of the user, nobody gets
    /// more than he has. The other way, that it becomes the user to ask, would make of a process of root's one that the user
    /// may signal and look into for as long as that lasts.
    ///
    /// It has no process then: what goes by the calling one is refused.
    pub(crate) fn speaks_for(self, uid: u32, gid: u32) -> Result<Self, Refusal> {
        if !self.is_root() {
            return Err(Refusal::new(RefusalKind::NotAllowed, "only root may speak for others"));
        }
        Ok(Self { pid: 0, uid, gid })
    }

    /// Passes if the caller owns the node.
    pub(crate) fn must_own_node(self, what: &str) -> Result<(), Refusal> {
        if self.owns_node() {
            return Ok(());
        }
        Err(Refusal::new(RefusalKind::NotAllowed, format!("only root may {what}")))
    }
}

/// Exit codes of the child.
const YES: u8 = 0;
const NO: u8 = 1;
const GONE: u8 = 2;
const BROKEN: u8 = 3;

/// Whether a process is this daemon, a shim, or serves files.
pub(crate) fn is_ours(config: &Config, pid: i32) -> bool {
    let file = |path: &Path| path.metadata().map(|file| (file.dev(), file.ino())).ok();
    let program = file(Path::new(&format!("/proc/{pid}/exe")));
    let ours = [&config.shim, &config.mfs, &config.admin];
    pid.cast_unsigned() == std::process::id()
        || program.is_some() && ours.into_iter().any(|known| program == file(known))
}

/// Passes if this caller may move this process.
pub(crate) fn may_move(config: &Config, caller: Caller, pid: i32) -> Result<(), Refusal> {
    let gone = || Refusal::new(RefusalKind::NotFound, format!("there is no process {pid}"));
    let (_, effective) = Some(pid).filter(|pid| *pid > 0).and_then(procfs::users).ok_or_else(gone)?;
    if is_ours(config, pid) {
        let what = format!("ternd: process {pid} is a part of Tern, and stays where it is");
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
    let status = Command::new(&config.ternd)
        .args(["--check-access", &pid_word, &uid, &gid])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    let code = status.as_ref().ok().and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok());
    match code {
        Some(YES) => Ok(()),
        Some(NO) => Err(denied("is not yours to move")),
        Some(GONE) => Err(gone()),
        _ => {
            tracing::error!(?status, "the check of a caller's rights failed");
            Err(Refusal::new(RefusalKind::Internal, "the check of your rights failed; ternd's log says why"))
        }
    }
}

/// The child: becomes the user for good and tries. Returns the exit code.
pub fn check_access(pid: i32, uid: u32, gid: u32) -> u8 {
    if (geteuid().as_raw(), getegid().as_raw()) != (uid, gid)
        && let Err(error) = become_user(Uid::from_raw(uid), Gid::from_raw(gid))
    {
        tracing::error!(%error, uid, gid, "cannot become that user");
        return BROKEN;
    }
    let code = |environ: &Path| match File::open(environ) {
        Ok(_) => YES,
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(3) => GONE,
        Err(_) => NO,
    };
    let look = || {
        let first = code(Path::new(&format!("/proc/{pid}/environ")));
        if first != GONE {
            return first;
        }
        // A first thread that has ended before others shows none; then it is for all of these.
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let codes: Vec<u8> = threads.map(|thread| code(&thread.path().join("environ"))).collect();
        [NO, YES].into_iter().find(|found| codes.contains(found)).unwrap_or(GONE)
    };
    // One of these that executes a program has the first one's number by the second look.
    Some(look()).filter(|found| *found != GONE).unwrap_or_else(look)
}

/// This process has one thread, so that what is said for the thread holds for all of it. The groups beyond
/// the first do not matter to ptrace, and are none.
fn become_user(uid: Uid, gid: Gid) -> rustix::io::Result<()> {
    if geteuid().is_root() {
        set_thread_groups(&[])?;
    }
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}
