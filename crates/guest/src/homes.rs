//! Large files of its home that a guest maps: from a tree of those files that this node has for home's guests (`tern-mfs homes`), so that it goes on at
//! once, and its kernel gets the pages that it looks at, as other guests of that home have got them.
//!
//! Whether it may is home's to say, as for whoever opens the file from here; what is opened is the very file that home has mapped. A guest waits for
//! a page for as long as its home may be out of reach. What cannot be opened is sent whole, as smaller files are. Nobody else can use that (it has no hash
//! of its content); so if it was not about that file alone, home is told for a while that this node shows nothing.

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat2};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tern_control::Request;
use tern_control::door;
use tern_control::shim::{ShimRequest, homes_door};
use tern_ids::NodeId;
use tern_image::place::Place;

/// How long home's server may take to open a file: all guests of the family wait for it.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same if the tree may have to be made first.
const FIRST: Duration = Duration::from_secs(3);
/// After one that took longer no other is tried for so long.
const REST: Duration = Duration::from_secs(10);
/// How long home is told that nothing is shown here, after a file could not be.
const DARK: Duration = Duration::from_secs(600);

/// Whether the node with this run directory can show files of a home to guests, as far as is known: only root can make a tree, and become who
/// opens it.
pub(crate) fn can(run_dir: &Path, home: NodeId) -> bool {
    let is_there = || rustix::fs::access("/dev/fuse", rustix::fs::Access::WRITE_OK).is_ok();
    let failed = || mark(run_dir, home).metadata().and_then(|is| is.modified());
    let is_dark = || failed().is_ok_and(|when| when.elapsed().is_ok_and(|since| since < DARK));
    geteuid().is_root() && is_there() && !is_dark()
}

/// Says by its time when a file could not be shown.
fn mark(run_dir: &Path, home: NodeId) -> PathBuf {
    run_dir.join(format!("home{home}.failed"))
}

/// The tree of one home, once it has been needed.
#[derive(Debug)]
pub(crate) struct Homes {
    run_dir: Arc<Path>,
    tree: RefCell<Option<Arc<Tree>>>,
    /// When one took too long.
    late: Cell<Option<Instant>>,
}

/// Its root, and who has it, who sees by his end that we need it.
#[derive(Debug)]
struct Tree {
    root: OwnedFd,
    door: UnixStream,
}

impl Homes {
    /// On the node with this run directory.
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { run_dir: run_dir.into(), tree: RefCell::default(), late: Cell::default() }
    }

    /// Opens a file of home for reading, as whom home names; with who shows it, as long as he is there.
    pub(crate) fn open(&self, place: &Place) -> io::Result<(OwnedFd, UnixStream)> {
        if self.late.get().is_some_and(|late| late.elapsed() < REST) {
            return Err(ErrorKind::TimedOut.into());
        }
        let opened = self.try_to_open(place);
        if let Err(error) = &opened {
            if error.kind() == ErrorKind::TimedOut {
                self.late.set(Some(Instant::now()));
            }
            // What is about this file alone says nothing of others.
            let of_the_file = [ErrorKind::PermissionDenied, ErrorKind::NotFound, ErrorKind::InvalidInput];
            if !of_the_file.contains(&error.kind()) {
                // Without it others find out for themselves.
                let _unwritable = File::create(mark(&self.run_dir, place.node));
            }
        }
        opened
    }

    fn try_to_open(&self, place: &Place) -> io::Result<(OwnedFd, UnixStream)> {
        let (run_dir, known, place) = (self.run_dir.clone(), self.tree.borrow().clone(), place.clone());
        let known = known.filter(|tree| !door::has_closed(&tree.door));
        let patience = if known.is_some() { PATIENCE } else { FIRST };
        let (say, hear) = mpsc::sync_channel(1);
        // A thread of its own, that becomes somebody else for good, and that may have to be left waiting.
        let work = move || {
            let tree = known.map_or_else(|| Tree::get(&run_dir, place.node).map(Arc::new), Ok);
            let opened = tree.and_then(|tree| Ok((become_and_open(&tree.root, &place)?, tree)));
            let _nobody_waits = say.send(opened);
        };
        std::thread::Builder::new().name("homes".into()).stack_size(256 << 10).spawn(work)?;
        let (file, tree) = hear.recv_timeout(patience).map_err(|_late| ErrorKind::TimedOut)??;
        let shows = tree.door.try_clone()?;
        self.tree.replace(Some(tree));
        Ok((file, shows))
    }
}

impl Tree {
    /// Asks for it, and has it made if it is not there.
    fn get(run_dir: &Path, home: NodeId) -> io::Result<Self> {
        let ask = || door::ask_for(&homes_door(run_dir, home), &ShimRequest::Tree, PATIENCE);
        let (root, door) = match ask() {
            // There is none, or it ends just now.
            Err(error) if !matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
                crate::aside::ask(run_dir, &Request::Homes { home })?;
                ask()
            }
            asked => asked,
        }?;
        Ok(Self { root, door })
    }
}

/// Makes this thread who is to open the file, and opens it.
fn become_and_open(root: &OwnedFd, place: &Place) -> io::Result<OwnedFd> {
    let (uid, gid, groups) = &place.who;
    let is_anybody = groups.iter().chain([uid, gid]).all(|number| *number != u32::MAX);
    // Of that node, and nobody else's.
    if !is_anybody || place.path.split(|byte| *byte == b'/').any(|name| name == b"..") {
        return Err(ErrorKind::InvalidInput.into());
    }
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    set_thread_groups(&groups)?;
    set_thread_res_gid(None, Some(Gid::from_raw(*gid)), None)?;
    set_thread_res_uid(None, Some(Uid::from_raw(*uid)), None)?;
    let path = [place.node.to_string().as_bytes(), b"/", &place.path].concat();
    let how = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let file = openat2(root, path, how, Mode::empty(), resolve)?;
    let is = fstat(&file)?;
    if is.st_ino != place.number || FileType::from_raw_mode(is.st_mode) != FileType::RegularFile {
        return Err(ErrorKind::NotFound.into());
    }
    Ok(file)
}
