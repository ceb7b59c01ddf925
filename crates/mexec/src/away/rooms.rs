//! The rooms of this node, one for each home whose commands run here, and one for this node's own ([`room::OWN`]).

use crate::lock;
use crate::room;
use crate::words::{Task, Who};
use anyhow::{Context, Result, anyhow};
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_node::Config;

/// How long a room without commands is kept, and up to a minute more.
const IDLE: Duration = Duration::from_secs(300);

/// All rooms.
#[derive(Debug)]
pub(crate) struct Rooms {
    config: Config,
    rooms: Mutex<HashMap<NodeId, Arc<Room>>>,
    /// Of each home one is made at a time: the second who wants it finds it made. Others need not wait for a home whose files are not to be had.
    making: Mutex<HashMap<NodeId, Arc<Mutex<()>>>>,
}

/// A room: it ends, with all commands in it, when this is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    orders: Mutex<UnixStream>,
    /// Its tree of files, if they are another node's.
    tree: Option<OwnedFd>,
    process: Mutex<Child>,
    /// When a command was seen in it last.
    used: Mutex<Instant>,
}

impl Rooms {
    pub(crate) fn new(config: Config) -> Self {
        Self { config, rooms: Mutex::default(), making: Mutex::default() }
    }

    /// The room of this home's commands. If there is none yet it gets these directories from this node, and all others from home.
    ///
    /// # Errors
    /// If it cannot be made: its home's files are not to be had.
    pub(crate) fn of(&self, home: NodeId, shared: impl FnOnce() -> Vec<PathBuf>) -> Result<Arc<Room>> {
        if let Some(room) = self.known(home) {
            return Ok(room);
        }
        let making = lock(&self.making).entry(home).or_default().clone();
        let _one_at_a_time = lock(&making);
        if let Some(room) = self.known(home) {
            return Ok(room);
        }
        let room = Arc::new(Room::make(&self.config, home, &shared())?);
        lock(&self.rooms).insert(home, room.clone());
        Ok(room)
    }

    fn known(&self, home: NodeId) -> Option<Arc<Room>> {
        lock(&self.rooms).get(&home).filter(|room| room.lives()).cloned()
    }

    /// Ends those that nobody has used for long, and what is left of those that were killed. To be called now and then.
    pub(crate) fn tidy(&self) {
        let is_over = |room: &Arc<Room>| {
            let mut used = lock(&room.used);
            if Arc::strong_count(room) > 1 {
                *used = Instant::now();
            }
            !room.lives() || used.elapsed() >= IDLE
        };
        let gone: Vec<_> = lock(&self.rooms).extract_if(|_, room| is_over(room)).collect();
        // Each is waited for, which is not to hold up who wants another.
        drop(gone);
    }
}

impl Room {
    fn make(config: &Config, home: NodeId, shared: &[PathBuf]) -> Result<Self> {
        let (orders, theirs) = UnixStream::pair()?;
        let own = std::env::current_exe().context("no path of our own")?;
        let mut command = Command::new(own);
        command.arg("--config").arg(&config.config_dir).arg("room").arg(home.to_string()).args(shared);
        command.env("TERN_RUN_DIR", &config.run_dir);
        let mut process = command
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::piped())
            .spawn()
            .context("no room can be started")?;
        drop(command);
        let mut line = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let tree = match line.trim_end() {
            "ready" => room::take(&orders),
            "" => Err(anyhow!("the room of node {home}'s commands has ended at once")),
            said => Err(anyhow!("{}", said.strip_prefix("failed ").unwrap_or(said).to_owned())),
        };
        if tree.is_err() {
            let _gone = process.kill();
            let _status = process.wait();
            tern_cgroup::guests::tidy();
        }
        Ok(Self::of(orders, tree?, process))
    }

    /// The room at the other end of this socket.
    pub(crate) fn of(orders: UnixStream, tree: Option<OwnedFd>, process: Child) -> Self {
        Self {
            orders: Mutex::new(orders),
            tree,
            process: Mutex::new(process),
            used: Mutex::new(Instant::now()),
        }
    }

    /// Has its commands see all that was done at their home before this is called.
    ///
    /// # Errors
    /// If that node does not answer.
    pub(super) fn catch_up(&self) -> Result<()> {
        let caught_up = self.tree.as_ref().map_or(Ok(()), rustix::fs::fsync);
        caught_up.context("home's files are not to be had")
    }

    fn lives(&self) -> bool {
        matches!(lock(&self.process).try_wait(), Ok(None))
    }

    /// Has a command begun in it.
    ///
    /// # Errors
    /// If the room is gone.
    pub(super) fn begin(
        &self,
        task: &Task,
        who: &Who,
        descriptors: [BorrowedFd<'_>; room::DESCRIPTORS],
    ) -> Result<()> {
        *lock(&self.used) = Instant::now();
        room::order(&mut lock(&self.orders), task, who, descriptors).context("the room is gone")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut process = lock(&self.process);
        let _ended = process.kill();
        let _status = process.wait();
        tern_cgroup::guests::tidy();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(program: &str, used: Option<Instant>) -> Arc<Room> {
        let (orders, _theirs) = UnixStream::pair().unwrap();
        let process = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let room = Room::of(orders, None, process);
        *lock(&room.used) = used.unwrap();
        Arc::new(room)
    }

    #[test]
    fn rooms_that_nobody_has_used_for_long_end() {
        let rooms = Rooms::new(Config::load(std::path::Path::new("/nonexistent")).unwrap());
        let (now, long_ago) = (Some(Instant::now()), Instant::now().checked_sub(IDLE));
        let busy = room("cat", long_ago);
        let killed = room("true", now);
        lock(&killed.process).wait().unwrap();
        let all = [(1, busy.clone()), (2, room("cat", long_ago)), (3, room("cat", now)), (4, killed)];
        *lock(&rooms.rooms) = all.into_iter().map(|(node, room)| (NodeId(node), room)).collect();
        assert!(rooms.known(NodeId(2)).is_some() && rooms.known(NodeId(4)).is_none());
        rooms.tidy();
        let left = || lock(&rooms.rooms).keys().map(|node| node.0).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(left(), [1, 3].into());
        // It had a command just now.
        drop(busy);
        rooms.tidy();
        assert_eq!(left(), [1, 3].into());
        let again = rooms.known(NodeId(1)).unwrap();
        *lock(&again.used) = long_ago.unwrap();
        drop(again);
        rooms.tidy();
        assert_eq!(left(), [3].into());
    }
}
