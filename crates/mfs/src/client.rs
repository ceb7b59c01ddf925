//! The client: a FUSE file system that shows the files of all nodes as one tree. It runs in a
//! process of its own, and needs ternd only for the names `home`, `selected`, `lastexec` and
//! `magic`.
//!
//! ```text
//!  kernel ─▶ fuse         a thread reads a request from /dev/fuse
//!              └▶ calls   handles it
//!              └▶ tree    finds node and inode; looks the object up again if the server lost it
//!                   └▶ connection   sends the request to the node, waits for the reply
//! ```

mod cache;
mod caller;
mod cluster_map;
mod connection;
mod fuse;
#[doc(hidden)]
pub mod hostile;
mod root_links;
mod traffic;
mod tree;

use crate::message::Purpose;
use anyhow::{Context, Result};
use cache::invalidator::Invalidator;
use connection::peer::MountContext;
use fuse::calls::MountedTree;
use fuser::{MountOption, SessionACL};
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
use tern_node::{Config, follow_map};
use tern_wire::Identity;
use tree::Tree;

/// Threads that read FUSE requests. Each waits for its request's reply, so this also bounds the
/// requests in flight. A build may have 48 calls to a lost node in flight; requests for other nodes
/// must still find a thread then. fuser starts threads on demand (third_party/fuser/TERN.md).
const THREADS: usize = 128;

/// How a tree is mounted.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// Source that `df` and `mount` show.
    pub source: String,
    /// Mount read only.
    pub read_only: bool,
    /// A guest on a file's own node opens that file directly.
    pub dfsa: bool,
    /// How long a call waits for a node that does not respond.
    pub timeout: Duration,
    /// The use of the tree. A container's tree caches under renewable leases until they are
    /// recalled. `fsync` of its root renews them: after that the tree shows all changes that were
    /// made before, on any node.
    pub purpose: Purpose,
}

/// A mounted tree that is not served yet.
pub struct Session(fuser::Session<MountedTree>);

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Session")
    }
}

/// Mounts the tree. Accesses to it block until [`Session::serve`] runs.
///
/// # Errors
/// With a sentence that says why; nothing is mounted then.
pub fn mount(config: &Config, at: &Path, options: &MountOptions) -> Result<Session> {
    let (tree, mut fuser) = prepare(config, options)?;
    let failure = || format!("cannot mount at {}", at.display());
    let session = if rustix::process::geteuid().is_root() {
        // The balancer uses these reports to move processes to the files that they use. ternd
        // ignores reports from a plain user's tree, and without dfsa no process gains by such a
        // move.
        if options.dfsa {
            traffic::start_reporting(&tree);
        }
        let device = mount_as_root(at, options).with_context(failure)?;
        fuser::Session::from_fd(MountedTree(tree.clone()), device, SessionACL::All, fuser)
    } else {
        // A plain user's tree is private, and fusermount3 mounts it.
        fuser.mount_options = vec![
            MountOption::FSName(options.source.clone()),
            MountOption::Subtype("mfs".into()),
            MountOption::DefaultPermissions,
            MountOption::NoDev,
            MountOption::NoSuid,
            if options.read_only { MountOption::RO } else { MountOption::RW },
        ];
        fuser::Session::new(MountedTree(tree.clone()), at, &fuser)
    };
    let root = rustix::fs::open(at, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let session = start_session(&tree, session.with_context(failure)?, &root)?;
    if options.purpose == Purpose::Container {
        crate::raise_descriptor_limit();
        let at = at.to_owned();
        // In a thread of its own, since the open sends requests to the tree, which is not served yet.
        let open_mount = move || tree.pins.set_mount_point(&at);
        std::thread::Builder::new().name("pins".into()).spawn(open_mount).context("cannot start a thread")?;
    }
    Ok(session)
}

/// Creates a tree that is mounted nowhere, and returns its root: only holders of that descriptor
/// can access the tree. It is gone with the last such descriptor, or with the session. Needs root.
///
/// # Errors
/// With a sentence that says why.
pub fn mount_detached(config: &Config, options: &MountOptions) -> Result<(Session, OwnedFd)> {
    let (tree, fuser) = prepare(config, options)?;
    let (device, root) = create_detached(options).context("cannot create a detached mount")?;
    let session = fuser::Session::from_fd(MountedTree(tree.clone()), device, SessionACL::All, fuser)?;
    Ok((start_session(&tree, session, &root)?, root))
}

fn prepare(config: &Config, options: &MountOptions) -> Result<(Arc<Tree>, fuser::Config)> {
    let identity = Identity::load(&config.config_dir)
        .with_context(|| format!("this node has no usable identity in {}", config.config_dir.display()))?;
    follow_map(&config.map, &identity).context("the map is not usable")?;
    let context = MountContext {
        identity,
        map: config.map.clone(),
        session: rand::random(),
        timeout: options.timeout,
        purpose: options.purpose,
        invalidator: Invalidator::default(),
    };
    let mut fuser = fuser::Config::default();
    fuser.n_threads = Some(THREADS);
    fuser.clone_fd = true;
    Ok((Arc::new(Tree::new(context, config, options.dfsa)), fuser))
}

fn start_session(tree: &Tree, session: fuser::Session<MountedTree>, root: &OwnedFd) -> Result<Session> {
    // AT_STATX_DONT_SYNC returns the device without a request to the tree, which is not served yet.
    let flags = AtFlags::EMPTY_PATH | AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC.cast_unsigned());
    if let Ok(stat) = rustix::fs::statx(root, "", flags, StatxFlags::INO) {
        tree.device.set(stat.stx_dev_major, stat.stx_dev_minor);
    }
    let device = session.as_fd().try_clone_to_owned().context("cannot duplicate the FUSE device")?;
    tree.invalidator.attach(session.notifier(), device);
    Ok(Session(session))
}

/// The FUSE device and the root of a tree that is mounted nowhere.
fn create_detached(options: &MountOptions) -> Result<(OwnedFd, OwnedFd)> {
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

/// Mounts a tree with the type `fuse.mfs`, which identifies it; fuser would mount it as `fuse`.
fn mount_as_root(at: &Path, options: &MountOptions) -> Result<OwnedFd> {
    let device = open_device()?;
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let mut flags = MountFlags::NODEV | MountFlags::NOSUID;
    flags.set(MountFlags::RDONLY, options.read_only);
    rustix::mount::mount(&*options.source, at, "fuse.mfs", flags, &*CString::new(data)?)?;
    Ok(device)
}

impl Session {
    /// Serves the tree until it is unmounted.
    ///
    /// # Errors
    /// If reading from the FUSE device fails.
    pub fn serve(self) -> Result<()> {
        self.0.run().context("the FUSE session has failed")
    }
}
