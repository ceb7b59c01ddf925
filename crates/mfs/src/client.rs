//! The half that shows all nodes' files as one tree: a FUSE file system in a process of its own, which needs no ternd.
//!
//! ```text
//!  kernel ─▶ fuse   one of its threads hears the ask
//!              └▶ calls  what is to be done for it
//!              └▶ tree   whose files, which inode, again if the server has forgotten it
//!                   └▶ peer   takes a lane, asks, waits for the answer
//! ```

mod attributes;
mod belief;
mod calls;
mod change;
mod content;
mod extended;
mod fuse;
mod handle;
#[doc(hidden)]
pub mod hostile;
mod inode;
mod interrupts;
mod lasting;
mod listing;
mod locks;
mod magic;
mod maker;
mod map;
mod names;
mod opening;
mod owed;
mod passthrough;
mod peer;
mod people;
mod pins;
mod sound;
mod told;
mod traffic;
mod tree;
mod unsaved;
mod ways;

use crate::message::Purpose;
use anyhow::{Context, Result};
use belief::Forgetting;
use calls::Mounted;
use fuser::{MountOption, SessionACL};
use peer::Common;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tern_node::Config;
use tern_wire::Identity;
use tree::Tree;

/// Threads that hear the kernel. Each waits for its call's answer, so this is also how many calls can be under way: more than a build has on one
/// node that does not answer any more, so that files of others are there meanwhile. They begin when they are needed (third_party/fuser/TERN.md).
const THREADS: usize = 128;

/// How a tree is mounted.
#[derive(Debug, Clone)]
pub struct Options {
    /// What `df` and `mount` show as its source.
    pub source: String,
    /// Nothing can be changed through it.
    pub read_only: bool,
    /// A guest on a file's own node has that open itself.
    pub dfsa: bool,
    /// How long a call waits for a node that does not answer.
    pub patience: Duration,
    /// What it is for. In that of a room what is believed is believed until it is asked back, and `fsync` of the root has all seen that was done
    /// before it.
    pub purpose: Purpose,
}

/// A mounted tree that nobody serves yet.
pub struct Session(fuser::Session<Mounted>);

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Session")
    }
}

/// Mounts the tree. Who looks into it now waits for [`Session::serve`].
///
/// # Errors
/// With a sentence why not; nothing is mounted then.
pub fn mount(config: &Config, at: &Path, options: &Options) -> Result<Session> {
    let (tree, mut fuser) = prepare(config, options)?;
    let cannot = || format!("cannot mount at {}", at.display());
    let session = if rustix::process::geteuid().is_root() {
        // What a plain user's tree says of others is not believed. And without dfsa no process gains by going to its files.
        if options.dfsa {
            traffic::tell(&tree);
        }
        let device = mount_as_root(at, options).with_context(cannot)?;
        fuser::Session::from_fd(Mounted(tree.clone()), device, SessionACL::All, fuser)
    } else {
        // A plain user's tree is his own, and fusermount3 mounts it for him.
        fuser.mount_options = vec![
            MountOption::FSName(options.source.clone()),
            MountOption::Subtype("mfs".into()),
            MountOption::DefaultPermissions,
            MountOption::NoDev,
            MountOption::NoSuid,
            if options.read_only { MountOption::RO } else { MountOption::RW },
        ];
        fuser::Session::new(Mounted(tree.clone()), at, &fuser)
    };
    let root = rustix::fs::open(at, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let session = begin(&tree, session.with_context(cannot)?, &root)?;
    if options.purpose == Purpose::Room {
        crate::descriptors();
        let at = at.to_owned();
        let looks = move || tree.pins.are_in(&at);
        std::thread::Builder::new().name("pins".into()).spawn(looks).context("no thread")?;
    }
    Ok(session)
}

/// Makes a tree that is mounted nowhere: who has its root sees it, and nobody else. It is gone with the last who has that, or with the session. Of root
/// only.
///
/// # Errors
/// With a sentence why not.
pub fn detached(config: &Config, options: &Options) -> Result<(Session, OwnedFd)> {
    let (tree, fuser) = prepare(config, options)?;
    let (device, root) = mount_nowhere(options).context("cannot make a tree that is mounted nowhere")?;
    let session = fuser::Session::from_fd(Mounted(tree.clone()), device, SessionACL::All, fuser)?;
    Ok((begin(&tree, session, &root)?, root))
}

fn prepare(config: &Config, options: &Options) -> Result<(Arc<Tree>, fuser::Config)> {
    let identity = Identity::load(&config.config_dir)
        .with_context(|| format!("this node has no usable identity in {}", config.config_dir.display()))?;
    let common = Common {
        identity,
        map: config.map.clone(),
        session: rand::random(),
        patience: options.patience,
        purpose: options.purpose,
        forgetting: Forgetting::default(),
    };
    let mut fuser = fuser::Config::default();
    fuser.n_threads = Some(THREADS);
    fuser.clone_fd = true;
    Ok((Arc::new(Tree::new(common, config, options.dfsa)), fuser))
}

fn begin(tree: &Tree, session: fuser::Session<Mounted>, root: &OwnedFd) -> Result<Session> {
    // What nobody serves yet says which device it is without being asked anything.
    let how = AtFlags::EMPTY_PATH | AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC.cast_unsigned());
    if let Ok(is) = rustix::fs::statx(root, "", how, StatxFlags::INO) {
        tree.device.is(is.stx_dev_major, is.stx_dev_minor);
    }
    let device = session.as_fd().try_clone_to_owned().context("cannot keep the connection to the kernel")?;
    tree.forgetting.through(session.notifier(), device);
    Ok(Session(session))
}

/// The device of a tree that is mounted nowhere, and its root.
fn mount_nowhere(options: &Options) -> Result<(OwnedFd, OwnedFd)> {
    let device = open_device()?;
    let tree = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let tree = tree.as_fd();
    fsconfig_set_string(tree, "source", &*options.source)?;
    fsconfig_set_string(tree, "fd", device.as_raw_fd().to_string())?;
    for (key, value) in [("rootmode", "40000"), ("user_id", "0"), ("group_id", "0")] {
        fsconfig_set_string(tree, key, value)?;
    }
    fsconfig_set_flag(tree, "default_permissions")?;
    fsconfig_set_flag(tree, "allow_other")?;
    fsconfig_create(tree)?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, options.read_only);
    Ok((device, fsmount(tree, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?))
}

fn open_device() -> Result<OwnedFd> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .context("cannot open /dev/fuse; try: modprobe fuse")
}

/// Mounts a tree of the kind `fuse.mfs`, by which it is known: fuser itself would make it `fuse`.
fn mount_as_root(at: &Path, options: &Options) -> Result<OwnedFd> {
    let device = open_device()?;
    let said = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let mut flags = MountFlags::NODEV | MountFlags::NOSUID;
    flags.set(MountFlags::RDONLY, options.read_only);
    rustix::mount::mount(&*options.source, at, "fuse.mfs", flags, &*CString::new(said)?)?;
    Ok(device)
}

impl Session {
    /// Serves it until it is unmounted.
    ///
    /// # Errors
    /// If the kernel speaks no more with us.
    pub fn serve(self) -> Result<()> {
        self.0.run().context("the kernel has ended it")
    }
}
