//! The containers of this node: one for each home whose commands run here; in the gatekeeper, one
//! for its jobs ([`container::LOCAL`]).

use crate::container;
use crate::lock;
use crate::messages::Task;
use anyhow::{Context, Result, anyhow};
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tern_ids::{Credentials, NodeId};
use tern_node::Config;

/// How long a container without commands is kept. It ends up to a minute later, when `reap_idle` is
/// called.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// All containers.
#[derive(Debug)]
pub(crate) struct Containers {
    config: Config,
    running: Mutex<HashMap<NodeId, Arc<Container>>>,
    /// A lock for each home: the first caller makes the container, and a second one waits and finds
    /// it made. A home whose files are not available does not delay other homes.
    creating: Mutex<HashMap<NodeId, Arc<Mutex<()>>>>,
}

/// A container. Dropping it ends it, with all commands in it.
#[derive(Debug)]
pub(crate) struct Container {
    socket: Mutex<UnixStream>,
    /// The root of its MFS tree, if its files are another node's.
    tree: Option<OwnedFd>,
    process: Mutex<Child>,
    /// When a command last ran in it.
    last_used: Mutex<Instant>,
}

impl Containers {
    pub(crate) fn new(config: Config) -> Self {
        Self { config, running: Mutex::default(), creating: Mutex::default() }
    }

    /// The container of this home's commands. If a new one is made, the directories `shared` are
    /// mounted from this node, and all others from home.
    ///
    /// # Errors
    /// If it cannot be made, for example because home's files are not available.
    pub(crate) fn get(&self, home: NodeId, shared: impl FnOnce() -> Vec<PathBuf>) -> Result<Arc<Container>> {
        if let Some(container) = self.find(home) {
            return Ok(container);
        }
        let creating = lock(&self.creating).entry(home).or_default().clone();
        let _one_at_a_time = lock(&creating);
        if let Some(container) = self.find(home) {
            return Ok(container);
        }
        let container = Arc::new(Container::create(&self.config, home, &shared())?);
        lock(&self.running).insert(home, container.clone());
        Ok(container)
    }

    fn find(&self, home: NodeId) -> Option<Arc<Container>> {
        lock(&self.running).get(&home).filter(|container| container.is_alive()).cloned()
    }

    /// Ends containers that were unused for long, and reaps those that were killed. Call this
    /// periodically.
    pub(crate) fn reap_idle(&self) {
        let is_over = |container: &Arc<Container>| {
            let mut last_used = lock(&container.last_used);
            if Arc::strong_count(container) > 1 {
                *last_used = Instant::now();
            }
            !container.is_alive() || last_used.elapsed() >= IDLE_TIMEOUT
        };
        let gone: Vec<_> = lock(&self.running).extract_if(|_, container| is_over(container)).collect();
        // Dropping waits for each process. The lock is not held meanwhile.
        drop(gone);
    }
}

impl Container {
    fn create(config: &Config, home: NodeId, shared: &[PathBuf]) -> Result<Self> {
        let (socket, container_end) = UnixStream::pair()?;
        let executable = std::env::current_exe().context("the path of this program is not known")?;
        let mut command = Command::new(executable);
        command.arg("--config").arg(&config.config_dir).arg("room").arg(home.to_string()).args(shared);
        command.env("TERN_RUN_DIR", &config.run_dir);
        let mut process = command
            .stdin(OwnedFd::from(container_end))
            .stdout(Stdio::piped())
            .spawn()
            .context("the container cannot be started")?;
        drop(command);
        let mut line = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let tree = match line.trim_end() {
            "ready" => container::receive_tree(&socket),
            "" => Err(anyhow!("the container of node {home}'s commands has ended at once")),
            line => Err(anyhow!("{}", line.strip_prefix("failed ").unwrap_or(line).to_owned())),
        };
        if tree.is_err() {
            let _gone = process.kill();
            let _status = process.wait();
            tern_cgroup::guests::remove_if_empty();
        }
        Ok(Self::new(socket, tree?, process))
    }

    /// The container whose process is at the other end of this socket.
    pub(crate) fn new(socket: UnixStream, tree: Option<OwnedFd>, process: Child) -> Self {
        Self {
            socket: Mutex::new(socket),
            tree,
            process: Mutex::new(process),
            last_used: Mutex::new(Instant::now()),
        }
    }

    /// Makes later file accesses of its commands see everything that was done at their home before
    /// this call.
    ///
    /// # Errors
    /// If the home node does not respond.
    pub(super) fn sync_with_home(&self) -> Result<()> {
        let synced = self.tree.as_ref().map_or(Ok(()), rustix::fs::fsync);
        synced.context("home's files are not available")
    }

    fn is_alive(&self) -> bool {
        matches!(lock(&self.process).try_wait(), Ok(None))
    }

    /// Starts a command in it.
    ///
    /// # Errors
    /// If the container is gone.
    pub(super) fn launch(
        &self,
        task: &Task,
        credentials: &Credentials,
        fds: [BorrowedFd<'_>; container::LAUNCH_FDS],
    ) -> Result<()> {
        *lock(&self.last_used) = Instant::now();
        container::send_launch(&mut lock(&self.socket), task, credentials, fds)
            .context("the container is gone")
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let mut process = lock(&self.process);
        let _ended = process.kill();
        let _status = process.wait();
        tern_cgroup::guests::remove_if_empty();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(program: &str, last_used: Option<Instant>) -> Arc<Container> {
        let (socket, _other_end) = UnixStream::pair().unwrap();
        let process = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let container = Container::new(socket, None, process);
        *lock(&container.last_used) = last_used.unwrap();
        Arc::new(container)
    }

    #[test]
    fn idle_and_dead_containers_are_reaped() {
        let containers = Containers::new(Config::load(std::path::Path::new("/nonexistent")).unwrap());
        let (now, long_ago) = (Some(Instant::now()), Instant::now().checked_sub(IDLE_TIMEOUT));
        let busy = container("cat", long_ago);
        let killed = container("true", now);
        lock(&killed.process).wait().unwrap();
        let all =
            [(1, busy.clone()), (2, container("cat", long_ago)), (3, container("cat", now)), (4, killed)];
        *lock(&containers.running) =
            all.into_iter().map(|(node, container)| (NodeId(node), container)).collect();
        assert!(containers.find(NodeId(2)).is_some() && containers.find(NodeId(4)).is_none());
        containers.reap_idle();
        let left =
            || lock(&containers.running).keys().map(|node| node.0).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(left(), [1, 3].into());
        // It had a command until now.
        drop(busy);
        containers.reap_idle();
        assert_eq!(left(), [1, 3].into());
        let again = containers.find(NodeId(1)).unwrap();
        *lock(&again.last_used) = long_ago.unwrap();
        drop(again);
        containers.reap_idle();
        assert_eq!(left(), [3].into());
    }
}
