//! A node's file tree: the machine's files under the node's writable layer, with a private /proc,
//! /sys, /run and /dev/shm. Built by the node's init before it does anything else.

use crate::error::{Result, WithContext};
use crate::lab::options::LabName;
use crate::lab::state::{self, LabState};
use crate::process::cgroup::Hierarchies;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::mount::{mount, mount_bind, mount_bind_recursive, mount_change, unmount};
use rustix::process::{fchdir, pivot_root};
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tern_cgroup::mounts::{self, Mount};

/// The mount point, in the switch's mount namespace, of the lab's tmpfs with the writable layers of
/// all nodes. The layers survive the nodes, and are lost when the switch ends.
pub(crate) fn layers_directory(lab: &LabName) -> PathBuf {
    state::directory(lab).join("layers")
}

/// The machine's own Tern state. It is removed from a node's layer at the node's first boot.
const REMOVED_AT_FIRST_BOOT: [&str; 4] = ["/etc/tern", "/etc/mosix.map", "/var/lib/tern", "/var/cache/tern"];
/// Directories below which every node has private mounts.
const PRIVATE_MOUNTS: [&str; 4] = ["/proc", "/sys", "/dev", "/run"];

/// Mounts the node's file tree and makes it this process's root.
pub(crate) fn build(state: &LabState, node: u16) -> Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .with_context(|| "make the mounts private".to_owned())?;
    let layer = layers_directory(&state.name).join(format!("node{node}"));
    let first_boot = !layer.exists();
    let root = layer.join("root");
    fs::create_dir_all(&root).with_context(|| format!("make {}", root.display()))?;
    let table = mounts::table().with_context(|| "read /proc/self/mountinfo".to_owned())?;
    mount_overlay(Path::new("/"), &layer.join("rootfs"), &root)?;
    for (at, mount) in table.iter().filter(|m| is_inherited(m, &layer)).enumerate() {
        inherit_mount(mount, &layer.join(format!("mount{at}")), &root);
    }
    for shared in &state.shared {
        bind_shared_directory(shared, &root)?;
    }
    switch_root(&root)?;
    Hierarchies::find()?.hide_unused(&state.name, node)?;
    let own = NodeIdentity { state, node, boot_id: random_uuid() };
    own.write(first_boot)
}

/// Opens a directory such as `/`, so that it can be entered after it is no longer the root.
fn open_directory(path: &Path) -> Result<std::os::fd::OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| format!("open {}", path.display()))
}

/// Mounts the private file systems, and changes the root.
fn switch_root(root: &Path) -> Result<()> {
    let old = open_directory(Path::new("/"))?;
    let new = open_directory(root)?;
    fchdir(&new).with_context(|| "enter the node's root".to_owned())?;
    pivot_root(".", ".").with_context(|| "make the node's root the root".to_owned())?;
    // Mount sources are resolved from the old root, which is the current directory; targets from
    // the new root, so that no symbolic link leads out of it.
    fchdir(&old).with_context(|| "return to the old root".to_owned())?;
    let context = |at: &str| format!("mount {at} in the node");
    let safe = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", safe, None).with_context(|| context("/proc"))?;
    // A new mount, because sysfs shows the devices of the mounting process's network namespace.
    mount("sysfs", "/sys", "sysfs", safe, None).with_context(|| context("/sys"))?;
    if Path::new("sys/fs/cgroup").exists() {
        mount_bind_recursive("./sys/fs/cgroup", "/sys/fs/cgroup")
            .with_context(|| context("/sys/fs/cgroup"))?;
    }
    mount_bind_recursive("./dev", "/dev").with_context(|| context("/dev"))?;
    let tmpfs = |at: &str, mode: &str| {
        let options = CString::new(format!("mode={mode}")).map_err(std::io::Error::from);
        options.and_then(|o| {
            Ok(mount("tmpfs", at, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, o.as_c_str())?)
        })
    };
    tmpfs("/run", "755").with_context(|| context("/run"))?;
    if Path::new("/dev/shm").is_dir() {
        tmpfs("/dev/shm", "1777").with_context(|| context("/dev/shm"))?;
    }
    if Path::new("/dev/mqueue").is_dir() {
        // Not every kernel supports mqueue.
        let _ = mount("mqueue", "/dev/mqueue", "mqueue", safe, None);
    }
    unmount(".", UnmountFlags::DETACH).with_context(|| "leave the old root".to_owned())?;
    rustix::process::chdir("/").with_context(|| "go to the root".to_owned())
}

/// Mounts an overlay of `lower` at `at`, with `layer` as the upper layer.
///
/// `xino` gives a directory the same inode number again after the kernel has dropped its inode, as
/// other file systems do (Documentation/filesystems/overlayfs.rst, "Inode properties").
fn mount_overlay(lower: &Path, layer: &Path, at: &Path) -> Result<()> {
    let (upper, work) = (layer.join("upper"), layer.join("work"));
    for directory in [&upper, &work] {
        fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    }
    let mut options = b"xino=on".to_vec();
    for (key, path) in [(",lowerdir", lower), (",upperdir", upper.as_path()), (",workdir", work.as_path())] {
        options.extend_from_slice(key.as_bytes());
        options.push(b'=');
        // Colons separate layers and commas separate options, so these are escaped.
        for &byte in path.as_os_str().as_bytes() {
            if matches!(byte, b':' | b',' | b'\\') {
                options.push(b'\\');
            }
            options.push(byte);
        }
    }
    let options =
        CString::new(options).map_err(std::io::Error::from).with_context(|| "name the layers".to_owned())?;
    mount("overlay", at, "overlay", MountFlags::empty(), options.as_c_str())
        .with_context(|| format!("mount an overlay over {}", lower.display()))
}

/// Whether one of the machine's mounts must also be mounted in the node, so that the node sees the
/// same files.
fn is_inherited(mount: &Mount, layer: &Path) -> bool {
    let virtual_kinds = [
        "proc",
        "sysfs",
        "devtmpfs",
        "devpts",
        "cgroup",
        "cgroup2",
        "mqueue",
        "autofs",
        "rpc_pipefs",
        "binfmt_misc",
    ];
    mount.at != Path::new("/")
        && !virtual_kinds.contains(&mount.kind.as_str())
        && !PRIVATE_MOUNTS.iter().any(|own| mount.at.starts_with(own))
        && !layer.starts_with(&mount.at)
}

/// Mounts one of the machine's mounts in the node: as an overlay with the node's layer if possible,
/// else as a bind mount. If both fail the mount is left out; the node works without it.
fn inherit_mount(mount: &Mount, layer: &Path, root: &Path) {
    let Ok(below) = mount.at.strip_prefix("/") else { return };
    let at = root.join(below);
    if mount.at.is_dir() && mount_overlay(&mount.at, layer, &at).is_ok() {
        return;
    }
    let _ = mount_bind(&mount.at, &at);
}

/// Bind-mounts a directory of the machine in the node.
fn bind_shared_directory(shared: &Path, root: &Path) -> Result<()> {
    let context = || format!("show {} in the node", shared.display());
    let below = shared.strip_prefix("/").map_err(std::io::Error::other).with_context(context)?;
    mount_bind(shared, root.join(below)).with_context(context)
}

/// A random version 4 UUID.
fn random_uuid() -> String {
    let mut b: [u8; 16] = rand::random();
    b[6] = b[6] & 0x0f | 0x40;
    b[8] = b[8] & 0x3f | 0x80;
    let hex: String = b.iter().map(|b| format!("{b:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The identity of a node as a machine: host name, `/etc/hosts`, machine id, boot id.
struct NodeIdentity<'a> {
    state: &'a LabState,
    node: u16,
    boot_id: String,
}

impl NodeIdentity<'_> {
    /// Writes the node's identity. `first_boot`: the node boots for the first time.
    fn write(&self, first_boot: bool) -> Result<()> {
        let write =
            |at: &str, text: String| fs::write(at, text).with_context(|| format!("write {at} in the node"));
        let name = format!("node{}", self.node);
        rustix::system::sethostname(name.as_bytes()).with_context(|| "set the host name".to_owned())?;
        for directory in ["/run/lock", "/run/user"] {
            fs::create_dir_all(directory).with_context(|| format!("make {directory} in the node"))?;
        }
        // Each start of a node is a boot, with a new boot id.
        let boot_id = "/proc/sys/kernel/random/boot_id";
        write("/run/boot-id", format!("{}\n", self.boot_id))?;
        mount_bind("/run/boot-id", boot_id).with_context(|| format!("mount {boot_id} in the node"))?;
        raise_pid_max();
        if !first_boot {
            return Ok(());
        }
        for path in REMOVED_AT_FIRST_BOOT {
            let removed = match fs::symlink_metadata(path) {
                Ok(found) if found.is_dir() => fs::remove_dir_all(path),
                Ok(_) => fs::remove_file(path),
                Err(_) => Ok(()),
            };
            removed.with_context(|| format!("remove {path} in the node"))?;
        }
        write("/etc/hostname", format!("{name}\n"))?;
        write("/etc/machine-id", format!("{}\n", random_uuid().replace('-', "")))?;
        write("/etc/hosts", self.hosts())
    }

    fn hosts(&self) -> String {
        let mut text = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n".to_owned();
        let layout = self.state.layout();
        for node in 1..=self.state.node_count() {
            text += &format!("{} node{node}\n", layout.address(node));
        }
        text
    }
}

/// Raises pid_max. Since Linux 6.14 each pid namespace has its own; on older kernels it is the
/// machine's.
fn raise_pid_max() {
    let at = "/proc/sys/kernel/pid_max";
    let now = fs::read_to_string(at).ok().and_then(|t| t.trim().parse::<u32>().ok());
    if now.is_some_and(|n| n < 4_194_304) {
        // A failure is harmless: a node works with few pids as well.
        let _ = fs::write(at, "4194304");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_with_files_are_inherited() {
        let mount = |at: &str, kind: &str| Mount {
            at: at.into(),
            root: "/".into(),
            kind: kind.into(),
            options: vec![],
        };
        let layer = Path::new("/run/tern-lab/x/layers/node1");
        assert!(is_inherited(&mount("/home", "ext4"), layer));
        assert!(is_inherited(&mount("/tmp", "tmpfs"), layer));
        for (at, kind) in [
            ("/", "ext4"),
            ("/dev/shm", "tmpfs"),
            ("/run", "tmpfs"),
            ("/x", "proc"),
            ("/run/user/0", "tmpfs"),
        ] {
            assert!(!is_inherited(&mount(at, kind), layer), "{at}");
        }
    }

    #[test]
    fn random_uuids_are_version_4() {
        let id = random_uuid();
        assert_eq!(id.len(), 36);
        assert_eq!(&id[14..15], "4");
        assert_ne!(id, random_uuid());
    }
}
