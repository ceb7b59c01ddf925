//! Removal of a lab, and killing of nodes.

use crate::error::{LabError, Result, WithContext};
use crate::lab::options::LabName;
use crate::lab::require_root;
use crate::lab::state::{self, LabState};
use crate::network::cuts;
use crate::network::iproute2::{self, Program};
use crate::process::cgroup::Hierarchies;
use std::time::{Duration, Instant};

/// Time for processes to die, for groups to become empty, and for another process to release the
/// lab's lock.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a group to become empty after its processes were killed, before it is scanned for new
/// ones.
const GROUP_REMOVAL_TIMEOUT: Duration = Duration::from_millis(100);

/// Takes a lab down: all its processes, control groups, networks, layers and files. A lab that is
/// not up, or only partly up, is no error.
///
/// # Errors
/// The caller is not root, or some processes do not die within 10 s.
pub fn down(name: &LabName) -> Result<()> {
    require_root()?;
    // A process that holds the lock for longer is stuck, and must not prevent the removal.
    let lock = state::lock(name, EXIT_TIMEOUT);
    if let Ok(hierarchies) = Hierarchies::find() {
        let group = hierarchies.lab_group(name);
        let end = Instant::now() + EXIT_TIMEOUT;
        loop {
            group.kill(EXIT_TIMEOUT).map_err(|pids| LabError::Unkillable { lab: name.clone(), pids })?;
            // A helper of the lab that was started just before the kill may still move itself into
            // the group before the group is removed. The next round kills the helper. A helper that
            // finds no group exits.
            match group.remove(GROUP_REMOVAL_TIMEOUT) {
                Err(_) if Instant::now() < end => {}
                removed => {
                    break removed.with_context(|| format!("remove the control groups of lab {name}"))?;
                }
            }
        }
    }
    let removed = state::remove_directory(name);
    drop(lock);
    removed
}

/// Kills a node: takes its ports down, then kills its processes. Does nothing if the node is down.
pub(super) fn kill_node(state: &mut LabState, node: u16) -> Result<()> {
    let Some(init) = state.node(node)?.init else { return Ok(()) };
    // If another process killed the node's init, the kernel removes the node's ports.
    if init.is_alive() {
        cuts::disable_ports(state, node)?;
        init.kill();
    }
    let group = Hierarchies::find()?.node_group(&state.name, node);
    group.kill(EXIT_TIMEOUT).map_err(|pids| LabError::Unkillable { lab: state.name.clone(), pids })?;
    state.node_mut(node)?.init = None;
    let layout = state.layout();
    for port in layout.ports_of(node) {
        // The kernel removes them with the node's namespace, possibly only after a restart needs
        // their names.
        let _ =
            iproute2::run_batch(state.switch_process()?, Program::Ip, &[format!("link del {}", port.port)]);
    }
    Ok(())
}
