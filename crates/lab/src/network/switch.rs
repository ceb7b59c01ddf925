//! The switch: a process that holds the network namespace with the lab's bridges and ports, and the
//! mount namespace with the nodes' writable layers.

use crate::error::{Result, WithContext};
use crate::lab::options::LabName;
use crate::node::root_fs::layers_directory;
use crate::process::cgroup::Hierarchies;
use crate::process::namespaces;
use crate::process::signals::SignalMask;
use crate::roles::report_ready;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::UnshareFlags;

/// Holds the namespaces until killed.
pub(crate) fn main(lab: &LabName) -> Result<u8> {
    Hierarchies::find()?.switch_group(lab).join()?;
    namespaces::unshare(UnshareFlags::NEWNS | UnshareFlags::NEWNET)
        .with_context(|| "make the switch's namespaces".to_owned())?;
    mount_layers(lab)?;
    let signals = SignalMask::all();
    signals.set();
    report_ready()?;
    loop {
        signals.wait();
    }
}

/// Gives the switch a mount namespace with the tmpfs for all layers.
fn mount_layers(lab: &LabName) -> Result<()> {
    let at = layers_directory(lab);
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .and_then(|()| mount("tern-lab", &at, "tmpfs", MountFlags::empty(), c"mode=755"))
        .with_context(|| format!("mount {}", at.display()))
}
