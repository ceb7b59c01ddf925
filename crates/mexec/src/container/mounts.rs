//! The mounts of a container: its home's files, and the directories that must be the node's own.
//!
//! The root is a small tmpfs in which each directory of home's root is mounted. Home's root itself,
//! with mounts in it, would not do: the kernel removes a mount, for all processes, when the FUSE
//! client finds that the directory which the mount covers was replaced. Shared directories are
//! nevertheless mounted inside home's directories: if such a mount is removed, the path leads to
//! the same files through home.

use super::setup_dir;
use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstatvfs, openat2};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_bind_recursive, mount_change,
    mount_remount, unmount,
};
use rustix::thread::UnshareFlags;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tern_control::shared::SharedDir;
use tern_ids::NodeId;
use tern_node::Config;

/// The directories of the node itself that a container has. /proc is mounted for each command.
const NODE_DIRS: [&str; 3] = ["dev", "sys", "run"];

/// Sets up the container's mounts, and makes the container's root this process's root. Returns the
/// root of the MFS tree: an fsync of it makes later accesses see everything that was done at home
/// before.
///
/// # Errors
/// If home's files are not available, or a mount fails. The namespace, with all mounts, ends with
/// this process.
pub(super) fn set_up(config: &Config, home: NodeId, shared: &[PathBuf]) -> Result<OwnedFd> {
    new_mount_namespace()?;
    let dir = setup_dir(config, home);
    fs::create_dir_all(&dir)?;
    fs::create_dir_all(super::private_tmp_dir(config))?;
    mount("tern", &dir, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755,size=1m")
        .context("cannot mount the container")?;
    let (files, root) = (dir.join("mfs"), dir.join("root"));
    fs::create_dir(&files)?;
    fs::create_dir(&root)?;
    mount("tern", &root, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755,size=1m")
        .context("cannot mount the container's root")?;
    let mut mfs_client = start_mfs_client(config, &files)?;
    if let Err(error) = mount_home(&files, home, &root) {
        let _ended = mfs_client.kill();
        return Err(error);
    }
    for path in shared {
        // On failure the directory stays home's, which has the same files.
        if let Err(error) = mount_shared(path, &root) {
            tracing::warn!("{} is used through node {home}: {error:#}", path.display());
        }
    }
    // All commands inherit this control group. The MFS client stays outside, since limiting it
    // would delay other processes that wait for it.
    if let Err(error) = tern_cgroup::guests::enter(std::process::id().cast_signed(), config.guest_cpus) {
        tracing::warn!(%error, "commands of node {home} are in no control group of their own; see tern doctor");
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let tree = rustix::fs::open(&files, flags, Mode::empty())?;
    // A further namespace, which is to have the container's own mounts only: each command gets a
    // copy of it. The MFS client stays in the first one, with the mounts that it needs.
    new_mount_namespace()?;
    mount_remount(&root, MountFlags::BIND | MountFlags::RDONLY, c"")
        .context("cannot make the container's root read-only")?;
    rustix::process::chdir(&root)?;
    rustix::process::pivot_root(".", ".").context("cannot enter the container")?;
    unmount(".", UnmountFlags::DETACH).context("cannot detach the node's own files")?;
    rustix::process::chdir("/")?;
    Ok(tree)
}

/// Mounts a shared directory of this node over home's, which has the same files. Symbolic links
/// could lead out of the container; a declared path has none.
fn mount_shared(path: &Path, root: &Path) -> Result<()> {
    let node_dir = SharedDir::open(path)?;
    let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty())?;
    let open_home_dir =
        || openat2(&root, path.strip_prefix("/").unwrap_or(path), flags, Mode::empty(), inside);
    let fd_path = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
    mount_bind(fd_path(&node_dir.directory), fd_path(&open_home_dir()?))?;
    // The rules for all of home's files: no devices, no set-user-ID. Restrictions of the node's own
    // mount are kept.
    let node_flags = fstatvfs(&node_dir.directory)?.f_flag;
    let mut mount_flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
    for (is_set, flag) in [
        (StatVfsMountFlags::RDONLY, MountFlags::RDONLY),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
    ] {
        mount_flags.set(flag, mount_flags.contains(flag) || node_flags.contains(is_set));
    }
    let mounted = fd_path(&open_home_dir()?);
    if let Err(error) = mount_remount(&mounted, mount_flags, c"") {
        unmount(&mounted, UnmountFlags::DETACH)?;
        return Err(error.into());
    }
    Ok(())
}

fn new_mount_namespace() -> Result<()> {
    super::init::unshare(UnshareFlags::NEWNS)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    Ok(())
}

/// Gives the container the node's own files: later mounts of the node appear in the container, but
/// the commands' /proc mounts do not appear on the node.
///
/// # Errors
/// If no namespace can be created.
pub(super) fn keep_node_mounts() -> Result<()> {
    super::init::unshare(UnshareFlags::NEWNS)?;
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    Ok(())
}

/// Mounts the files of all nodes for this container alone. The mount ends with it.
fn start_mfs_client(config: &Config, at: &Path) -> Result<Child> {
    let mut command = Command::new(&config.mfs);
    command.arg("--config").arg(&config.config_dir).arg("mount").arg("--renewable").arg(at);
    command.env("TERN_RUN_DIR", &config.run_dir).stdin(Stdio::null()).stdout(Stdio::piped());
    super::init::kill_with_parent(&mut command);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", config.mfs.display()))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    match line.trim_end() {
        "ready" => Ok(child),
        "" => bail!("the MFS client has ended at once"),
        line => bail!("{}", line.strip_prefix("failed ").unwrap_or(line)),
    }
}

fn mount_home(files: &Path, home: NodeId, root: &Path) -> Result<()> {
    let home_root = files.join(home.to_string());
    let entries =
        fs::read_dir(&home_root).with_context(|| format!("node {home}'s files are not available"))?;
    for entry in entries {
        let entry = entry?;
        let (name, from) = (entry.file_name(), entry.path());
        let to = root.join(&name);
        let is_node_dir = NODE_DIRS.iter().any(|dir| name == *dir);
        if entry.file_type()?.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
            continue;
        }
        if !entry.file_type()?.is_dir() {
            // A root directory has few other entries: links to kernels, and the like. Regular files
            // are mounted one by one; sockets and FIFOs do not work across nodes.
            if entry.file_type()?.is_file() {
                rustix::fs::mknodat(CWD, &to, FileType::RegularFile, Mode::from_raw_mode(0o644), 0)?;
                let _not_readable = mount_bind(&from, &to);
            }
            continue;
        }
        fs::create_dir(&to)?;
        match name.as_bytes() {
            b"proc" => {}
            _ if is_node_dir => {
                let from = Path::new("/").join(&name);
                mount_bind_recursive(&from, &to)
                    .with_context(|| format!("cannot show {}", from.display()))?;
            }
            // Home's /mfs is home's own MFS tree. The container's own tree, mounted here instead,
            // has the same files.
            b"mfs" => mount_bind_recursive(files, &to).context("cannot show /mfs")?,
            // Some directories, such as lost+found, have no access rights for anyone.
            _ => drop(mount_bind(&from, &to)),
        }
    }
    if let Some(missing) = NODE_DIRS.iter().chain(&["proc"]).find(|dir| !root.join(dir).exists()) {
        bail!("node {home} has no /{missing}");
    }
    Ok(())
}
