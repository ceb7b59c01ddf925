//! What a room has: its home's files, and of this node what only a node can have.
//!
//! The root is a small file system of its own, in which each directory of home's root is mounted, and not home's root itself with
//! mounts in it: a mount goes away, for everybody, when the FUSE client finds that the directory below it is another one. Directories that nodes
//! share are mounted in home's nevertheless: where they go, home's own way leads to the same files.

use super::place;
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
use tern_control::shared::Root;
use tern_ids::NodeId;
use tern_node::Config;

/// What of the node's own a room has. A command's /proc is its own.
const OWN: [&str; 3] = ["dev", "sys", "run"];

/// Furnishes the room of this process, and makes it its root. What is given back is the tree of files: whoever has it saved (`fsync`) has
/// the room see all that was done at its home before that.
///
/// # Errors
/// If home's files are not there, or something cannot be mounted. The namespace, and all in it, goes with this process.
pub(super) fn furnish(config: &Config, home: NodeId, shared: &[PathBuf]) -> Result<OwnedFd> {
    new_mounts()?;
    let at = place(config, home);
    fs::create_dir_all(&at)?;
    fs::create_dir_all(super::scratch(config))?;
    mount("tern", &at, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755,size=1m")
        .context("cannot mount the room")?;
    let (files, root) = (at.join("mfs"), at.join("root"));
    fs::create_dir(&files)?;
    fs::create_dir(&root)?;
    mount("tern", &root, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755,size=1m")
        .context("cannot mount the room's root")?;
    let mut tree = start_tree(config, &files)?;
    if let Err(error) = fill(&files, home, &root) {
        let _ended = tree.kill();
        return Err(error);
    }
    for path in shared {
        // Home's own way there leads to the same.
        if let Err(error) = share(path, &root) {
            tracing::warn!("{} is used through node {home}: {error:#}", path.display());
        }
    }
    // And so all commands, which are born here. Not the tree: whoever waits for it may be more than they.
    if let Err(error) = tern_cgroup::guests::enter(std::process::id().cast_signed(), config.guest_cpus) {
        tracing::warn!(%error, "commands of node {home} are in no control group of their own; see tern doctor");
    }
    let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let tree_of_files = rustix::fs::open(&files, how, Mode::empty())?;
    // Its own mounts only: each command has a copy of them. And those of the tree's program stay where it looks for its things.
    new_mounts()?;
    mount_remount(&root, MountFlags::BIND | MountFlags::RDONLY, c"")
        .context("cannot close the room's root")?;
    rustix::process::chdir(&root)?;
    rustix::process::pivot_root(".", ".").context("cannot enter the room")?;
    unmount(".", UnmountFlags::DETACH).context("cannot leave the node's own files")?;
    rustix::process::chdir("/")?;
    Ok(tree_of_files)
}

/// Shows a directory of this node's where home has the same one. A link on the way there would lead out of the room; those who have declared
/// it have none.
fn share(path: &Path, root: &Path) -> Result<()> {
    let here = Root::open(path)?;
    let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let how = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, how, Mode::empty())?;
    let there = || openat2(&root, path.strip_prefix("/").unwrap_or(path), how, Mode::empty(), inside);
    let by_number = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
    mount_bind(by_number(&here.directory), by_number(&there()?))?;
    // As all of home's files: no devices, and no rights by set-user-ID. What the node's own mount forbids stays forbidden.
    let forbids = fstatvfs(&here.directory)?.f_flag;
    let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
    for (is, flag) in [
        (StatVfsMountFlags::RDONLY, MountFlags::RDONLY),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
    ] {
        flags.set(flag, flags.contains(flag) || forbids.contains(is));
    }
    let mounted = by_number(&there()?);
    if let Err(error) = mount_remount(&mounted, flags, c"") {
        unmount(&mounted, UnmountFlags::DETACH)?;
        return Err(error.into());
    }
    Ok(())
}

fn new_mounts() -> Result<()> {
    super::birth::leave(UnshareFlags::NEWNS)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    Ok(())
}

/// The room of this process is the node as it is: what is mounted there later is seen here, and no command's /proc is seen there.
///
/// # Errors
/// If it can have no namespace.
pub(super) fn as_it_is() -> Result<()> {
    super::birth::leave(UnshareFlags::NEWNS)?;
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    Ok(())
}

/// Mounts the files of all nodes for this room alone; they go with it.
fn start_tree(config: &Config, at: &Path) -> Result<Child> {
    let mut command = Command::new(&config.mfs);
    command.arg("--config").arg(&config.config_dir).arg("mount").arg("--lasting").arg(at);
    command.env("TERN_RUN_DIR", &config.run_dir).stdin(Stdio::null()).stdout(Stdio::piped());
    super::birth::ends_with_us(&mut command);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", config.mfs.display()))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    match line.trim_end() {
        "ready" => Ok(child),
        "" => bail!("the tree of files has ended at once"),
        said => bail!("{}", said.strip_prefix("failed ").unwrap_or(said)),
    }
}

fn fill(files: &Path, home: NodeId, root: &Path) -> Result<()> {
    let theirs = files.join(home.to_string());
    let entries = fs::read_dir(&theirs).with_context(|| format!("node {home}'s files are not there"))?;
    for entry in entries {
        let entry = entry?;
        let (name, from) = (entry.file_name(), entry.path());
        let to = root.join(&name);
        let own = OWN.iter().any(|own| name == *own);
        if entry.file_type()?.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
            continue;
        }
        if !entry.file_type()?.is_dir() {
            // What else is in a root is links to kernels and such; a file alone is shown, sockets and pipes do not cross.
            if entry.file_type()?.is_file() {
                rustix::fs::mknodat(CWD, &to, FileType::RegularFile, Mode::from_raw_mode(0o644), 0)?;
                let _not_readable = mount_bind(&from, &to);
            }
            continue;
        }
        fs::create_dir(&to)?;
        match name.as_bytes() {
            b"proc" => {}
            _ if own => {
                let from = Path::new("/").join(&name);
                mount_bind_recursive(&from, &to)
                    .with_context(|| format!("cannot show {}", from.display()))?;
            }
            // There its own tree would be in it; this room's has the same.
            b"mfs" => mount_bind_recursive(files, &to).context("cannot show /mfs")?,
            // Some directories are for nobody, as lost+found.
            _ => drop(mount_bind(&from, &to)),
        }
    }
    if let Some(needed) = OWN.iter().chain(&["proc"]).find(|needed| !root.join(needed).exists()) {
        bail!("node {home} has no /{needed}");
    }
    Ok(())
}
