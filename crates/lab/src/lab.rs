//! A lab and its life cycle: creation, faults, removal.

mod boot;
mod cluster;
mod create;
pub(crate) mod options;
pub(crate) mod state;
mod teardown;
pub(crate) mod watchdog;

pub use teardown::down;

use crate::error::{LabError, Result};
use crate::lab::options::LabName;
use crate::lab::state::LabState;
use crate::lab::watchdog::Watchdog;
use crate::network::cuts::{self, Cable};
use crate::network::layout::NetworkLayout;
use crate::node::Node;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

/// Time for another process to release the lab's lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A running lab. One created by [`Lab::up`] is taken down when it is dropped, or when this process
/// dies for any reason; see [`Lab::keep`].
#[derive(Debug)]
pub struct Lab {
    name: LabName,
    helper: PathBuf,
    layout: NetworkLayout,
    nodes: u16,
    owned: bool,
    watchdog: Option<Watchdog>,
    children: Vec<Child>,
}

impl Lab {
    /// Opens a lab that already exists. Dropping the value does not take the lab down.
    ///
    /// # Errors
    /// No lab has that name.
    pub fn open(name: &LabName) -> Result<Self> {
        require_root()?;
        let state = LabState::load(name)?;
        Ok(Self {
            name: name.clone(),
            layout: state.layout(),
            nodes: state.node_count(),
            helper: state.helper,
            owned: false,
            watchdog: None,
            children: Vec::new(),
        })
    }

    /// The lab's name.
    pub fn name(&self) -> &LabName {
        &self.name
    }

    /// The node with this number, counted from 1. The number is checked only when the node is used.
    pub fn node(&self, number: u16) -> Node {
        Node {
            lab: self.name.clone(),
            number,
            helper: self.helper.clone(),
            address: self.layout.address(number),
        }
    }

    /// All nodes, including those that are down.
    pub fn nodes(&self) -> impl Iterator<Item = Node> {
        (1..=self.nodes).map(|n| self.node(n))
    }

    /// The speed of a node in CPUs, after scaling.
    ///
    /// # Errors
    /// No such node, or the lab is down.
    pub fn speed(&self, node: u16) -> Result<f64> {
        Ok(LabState::load(&self.name)?.node(node)?.speed)
    }

    fn update_state<T>(&self, change: impl FnOnce(&mut LabState) -> Result<T>) -> Result<T> {
        let lock = state::lock(&self.name, LOCK_TIMEOUT)?;
        if lock.is_none() {
            let message = "another process has held its lock for 10 s".to_owned();
            return Err(LabError::Failed { what: format!("locking lab {}", self.name), message });
        }
        let mut state = LabState::load(&self.name)?;
        let result = change(&mut state);
        // Saved even after a failure: some changes may have been made.
        state.save()?;
        result
    }

    /// Cuts a cable without notifying either end. Does nothing if it is cut already.
    ///
    /// # Errors
    /// No such node, or the lab is down. A pair may then be cut in one direction only.
    pub fn cut(&self, cable: Cable) -> Result<()> {
        self.update_state(|state| {
            cable.check(state)?;
            let mut cuts = state.cuts.clone();
            cuts.insert(cable);
            cuts::apply(state, cuts)
        })
    }

    /// Restores a cable. For a node, this includes its cables to single other nodes.
    ///
    /// # Errors
    /// As with [`Lab::cut`].
    pub fn heal(&self, cable: Cable) -> Result<()> {
        self.update_state(|state| {
            cable.check(state)?;
            let mut cuts = state.cuts.clone();
            cuts.retain(|&cut| match cable {
                Cable::Node(node) => !cut.touches(node),
                Cable::Pair(..) | Cable::OneWay(..) => cut != cable,
            });
            cuts::apply(state, cuts)
        })
    }

    /// Restores everything that was cut.
    ///
    /// # Errors
    /// The lab is down.
    pub fn heal_all(&self) -> Result<()> {
        self.update_state(|state| cuts::apply(state, BTreeSet::new()))
    }

    /// Kills a node as a power failure does: first its links, so that no last packet reaches the
    /// others, then every process. Its writable layer stays. Does nothing if the node is down
    /// already.
    ///
    /// # Errors
    /// No such node, or some of its processes do not die.
    pub fn kill(&self, node: u16) -> Result<()> {
        self.update_state(|state| teardown::kill_node(state, node))
    }

    /// Boots a node with its existing writable layer, killing it first if it is up. Cut cables stay
    /// cut. If the lab is a Tern cluster, the node's ternd is started.
    ///
    /// # Errors
    /// No such node, or it does not start; the node is then down.
    pub fn restart(&self, node: u16) -> Result<()> {
        let daemon = self.update_state(|state| {
            teardown::kill_node(state, node)?;
            let booted = boot::start_nodes(state, &[node])
                .and_then(|()| cuts::connect_node(state, node))
                .and_then(|()| boot::wait_for_emulator(state, node));
            if booted.is_err() {
                teardown::kill_node(state, node)?;
            }
            booted.map(|()| state.daemon)
        })?;
        if daemon { cluster::start_daemon(&self.node(node)) } else { Ok(()) }
    }

    /// Kills ternd (SIGKILL) on a node, nothing else, and starts it again.
    ///
    /// # Errors
    /// No ternd runs there, or it does not start.
    pub fn restart_daemon(&self, node: u16) -> Result<()> {
        LabState::load(&self.name)?.running_init(node)?;
        cluster::restart_daemon(&self.node(node))
    }

    /// Leaves the lab up when this process ends; `tern lab down` or [`down`] ends it.
    pub fn keep(mut self) {
        self.owned = false;
        if let Some(mut watchdog) = self.watchdog.take() {
            watchdog.stop();
        }
    }

    /// Takes the lab down and reports failures, unlike dropping it.
    ///
    /// # Errors
    /// Some of its processes do not die.
    pub fn down(mut self) -> Result<()> {
        self.owned = false;
        self.take_down()
    }

    fn take_down(&mut self) -> Result<()> {
        let result = down(&self.name);
        for child in &mut self.children {
            // Reaped, as it would otherwise remain a zombie. After a failure it may still be
            // running.
            let _ = if result.is_ok() { child.wait().map(Some) } else { child.try_wait() };
        }
        if let Some(mut watchdog) = self.watchdog.take() {
            watchdog.stop();
        }
        result
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.owned
            && let Err(error) = self.take_down()
        {
            let _ = writeln!(std::io::stderr(), "tern lab: {error}");
        }
    }
}

fn require_root() -> Result<()> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(LabError::NotRoot) }
}
