//! One node of a lab, and the ways to run programs in it.

pub(crate) mod enter;
pub(crate) mod init;
pub(crate) mod root_fs;

use crate::error::{LabError, Result, WithContext};
use crate::lab::options::LabName;
use crate::lab::state::{self, LabState};
use crate::process::cgroup::Hierarchies;
use crate::roles;
use std::ffi::OsStr;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A reference to a node. The node may be up or down, and may change state at any time.
#[derive(Debug, Clone)]
pub struct Node {
    pub(crate) lab: LabName,
    pub(crate) number: u16,
    pub(crate) helper: PathBuf,
    pub(crate) address: Ipv4Addr,
}

impl Node {
    /// 1 for the first.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Its address in the lab.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Returns a command that runs this program in the node: in its pid, mount, net, uts and ipc
    /// namespaces and in its control groups. The program is searched for in the node, first in the
    /// lab's own directory of programs. Working directory, environment and standard files are
    /// passed on. So are the exit status, a death by signal, and signals sent to the child,
    /// including SIGKILL. The child's pid is that of a proxy process outside the node. The proxy's
    /// own exit codes: 127 no such program, 126 it cannot be run, 125 no such node.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = roles::command(&self.helper, "enter", &self.lab);
        command.arg(self.number.to_string()).arg(program);
        command
    }

    /// Starts a daemon: a child of the node's init, in a new session, with its output appended to
    /// `LOG.log` in the node's directory on the machine ([`Node::directory`]). Returns when the
    /// daemon is running.
    ///
    /// # Errors
    /// The program cannot be started, or the node is down.
    pub fn start_daemon(&self, program: impl AsRef<OsStr>, arguments: &[&str], log: &str) -> Result<()> {
        let program = program.as_ref();
        let at = self.directory().join(format!("{log}.log"));
        let open = fs::create_dir_all(self.directory())
            .and_then(|()| fs::OpenOptions::new().create(true).append(true).open(&at))
            .and_then(|file| Ok((file.try_clone()?, file)));
        let (out, err) = open.with_context(|| format!("open {}", at.display()))?;
        let mut command = roles::command(&self.helper, "daemon", &self.lab);
        command.arg(self.number.to_string()).arg(program).args(arguments).current_dir("/");
        let status = command.stdin(Stdio::null()).stdout(out).stderr(err).status();
        if status.with_context(|| format!("start {}", self.helper.display()))?.success() {
            return Ok(());
        }
        let text = fs::read_to_string(&at).unwrap_or_default();
        let message = text.lines().last().unwrap_or("no message").to_owned();
        Err(LabError::Failed {
            what: format!("{} on node {}", Path::new(program).display(), self.number),
            message,
        })
    }

    /// The node's directory on the machine, for logs.
    pub fn directory(&self) -> PathBuf {
        state::node_directory(&self.lab, self.number)
    }

    /// The path on the machine of a file in the node.
    ///
    /// # Errors
    /// The node is down.
    pub fn path(&self, inside: impl AsRef<Path>) -> Result<PathBuf> {
        let inside = inside.as_ref();
        Ok(PathBuf::from(format!("/proc/{}/root", self.init_pid()?))
            .join(inside.strip_prefix("/").unwrap_or(inside)))
    }

    /// The pid of the node's init on the machine.
    ///
    /// # Errors
    /// The node is down.
    pub fn init_pid(&self) -> Result<i32> {
        Ok(LabState::load(&self.lab)?.running_init(self.number)?.pid)
    }

    /// The pids on the machine of all processes of the node.
    ///
    /// # Errors
    /// The machine has no control groups.
    pub fn processes(&self) -> Result<Vec<i32>> {
        Ok(Hierarchies::find()?.node_group(&self.lab, self.number).processes())
    }

    /// CPU time used in the node since the lab was created, including that of ended processes.
    ///
    /// # Errors
    /// The lab is down.
    pub fn cpu_time(&self) -> Result<Duration> {
        Hierarchies::find()?.node_group(&self.lab, self.number).cpu_time()
    }
}
