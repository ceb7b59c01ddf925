//! A lab's persistent state, in `/run/tern-lab/NAME/state.json`, so that `tern lab exec` and the
//! other commands can find the lab from any process.

use crate::error::{LabError, Result, WithContext};
use crate::lab::options::LabName;
use crate::network::cuts::Cable;
use crate::network::layout::NetworkLayout;
use crate::network::link_spec::LinkSpec;
use crate::process::Process;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

const LABS_DIRECTORY: &str = "/run/tern-lab";

/// The state of a lab.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LabState {
    pub(crate) name: LabName,
    pub(crate) link: LinkSpec,
    pub(crate) seed: Option<u64>,
    /// Whether ternd runs in each node.
    pub(crate) daemon: bool,
    /// Directories of the machine that all nodes share.
    #[serde(default)]
    pub(crate) shared: Vec<PathBuf>,
    /// The binary from which init and the other helpers are started.
    pub(crate) helper: PathBuf,
    /// Whether the kernel's netem provides delay and loss.
    pub(crate) netem: bool,
    pub(crate) switch: Option<Process>,
    #[serde(rename = "wire")]
    pub(crate) emulator: Option<Process>,
    /// The nodes, node 1 first.
    pub(crate) nodes: Vec<NodeState>,
    pub(crate) cuts: BTreeSet<Cable>,
}

/// The state of one node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct NodeState {
    /// In CPUs.
    pub(crate) speed: f64,
    /// The node's pid 1; `None` while the node is down.
    pub(crate) init: Option<Process>,
}

impl LabState {
    /// Reads the lab's state file.
    pub(crate) fn load(name: &LabName) -> Result<Self> {
        let at = directory(name).join("state.json");
        match fs::read(&at) {
            Ok(text) => serde_json::from_slice(&text).with_context(|| format!("understand {}", at.display())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(LabError::NotUp(name.clone())),
            Err(e) => Err(e).with_context(|| format!("read {}", at.display())),
        }
    }

    /// Replaces the state file atomically.
    pub(crate) fn save(&self) -> Result<()> {
        let at = directory(&self.name).join("state.json");
        let new = at.with_extension("new");
        let text = serde_json::to_vec(self).with_context(|| "write the lab's state".to_owned())?;
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &at))
            .with_context(|| format!("write {}", at.display()))
    }

    /// The lab's network topology.
    pub(crate) fn layout(&self) -> NetworkLayout {
        NetworkLayout::new(&self.name, &self.link, self.node_count())
    }

    /// Whether the link emulator forwards the frames, rather than the kernel's bridges.
    pub(crate) fn uses_emulator(&self) -> bool {
        self.link.needs_emulator() && !self.netem
    }

    /// Number of nodes.
    pub(crate) fn node_count(&self) -> u16 {
        u16::try_from(self.nodes.len()).unwrap_or(u16::MAX)
    }

    /// The node with this number, counted from 1.
    pub(crate) fn node(&self, number: u16) -> Result<&NodeState> {
        let found = usize::from(number).checked_sub(1).and_then(|at| self.nodes.get(at));
        found.ok_or(LabError::NoNode { node: number, nodes: self.node_count() })
    }

    /// The node with this number, mutable.
    pub(crate) fn node_mut(&mut self, number: u16) -> Result<&mut NodeState> {
        let nodes = self.node_count();
        let found = usize::from(number).checked_sub(1).and_then(|at| self.nodes.get_mut(at));
        found.ok_or(LabError::NoNode { node: number, nodes })
    }

    /// Pid 1 of that node; an error if the node is down.
    pub(crate) fn running_init(&self, number: u16) -> Result<Process> {
        self.node(number)?.init.filter(|p| p.is_alive()).ok_or(LabError::NodeDown(number))
    }

    /// The process that holds the switch.
    pub(crate) fn switch_process(&self) -> Result<Process> {
        self.switch.ok_or_else(|| LabError::NotUp(self.name.clone()))
    }

    /// The directory of the tools and ternd: that of the helper.
    pub(crate) fn program_directory(&self) -> PathBuf {
        self.helper.parent().map_or_else(|| PathBuf::from("/"), Path::to_path_buf)
    }
}

/// The directory of a lab.
pub(crate) fn directory(name: &LabName) -> PathBuf {
    Path::new(LABS_DIRECTORY).join(name.as_str())
}

/// The directory of one node on the machine, for logs.
pub(crate) fn node_directory(name: &LabName, node: u16) -> PathBuf {
    directory(name).join(format!("node{node}"))
}

/// Creates the directory of a lab; returns false if it exists already.
pub(crate) fn create_directory(name: &LabName) -> Result<bool> {
    let at = directory(name);
    for _ in 0..10 {
        fs::create_dir_all(LABS_DIRECTORY).with_context(|| format!("make {LABS_DIRECTORY}"))?;
        match fs::create_dir(&at) {
            Ok(()) => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            // Another lab that went down has just removed the empty parent.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| format!("make {}", at.display())),
        }
    }
    Err(io::Error::from(io::ErrorKind::NotFound)).with_context(|| format!("make {}", at.display()))
}

/// Removes the directory of a lab, if it exists.
pub(crate) fn remove_directory(name: &LabName) -> Result<()> {
    let at = directory(name);
    match fs::remove_dir_all(&at) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("remove {}", at.display()));
        }
        _ => {}
    }
    // Fails while it holds other labs' directories.
    let _ = fs::remove_dir(LABS_DIRECTORY);
    Ok(())
}

/// The lock that a process holds while it changes a lab.
#[derive(Debug)]
pub(crate) struct LabLock(#[expect(dead_code, reason = "held, not read")] File);

/// Waits for the lock of a lab for at most `timeout`; `None` if another process still holds it
/// then.
pub(crate) fn lock(name: &LabName, timeout: Duration) -> Result<Option<LabLock>> {
    let at = directory(name);
    let end = Instant::now() + timeout;
    loop {
        let file = match File::open(&at) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(LabError::NotUp(name.clone())),
            Err(e) => return Err(e).with_context(|| format!("open {}", at.display())),
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(LabLock(file))),
            Err(_) if Instant::now() < end => thread::sleep(Duration::from_millis(5)),
            Err(_) => return Ok(None),
        }
    }
}
