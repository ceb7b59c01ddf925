//! Large files of its home that a guest maps: from this node's tree of all nodes' files (`tern-mfs homes`), so that it goes on at once, and its
//! kernel gets the pages that it looks at, as other guests of the node have got them.
//!
//! Whether it may is home's to say, as for whoever opens the file from here; what is opened is the very file that home has mapped. A guest waits for
//! a page for as long as its home may be out of reach. What cannot be opened is sent whole, as smaller files are.

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat2};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tern_control::Request;
use tern_control::door;
use tern_control::shim::{ShimRequest, homes_door};
use tern_image::place::Place;

/// How long home's server, and ours if it has to begin first, may take to open a file: all guests of the family wait for it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether this node can show files of a home to its guests: only root may mount a tree, and become who opens it.
pub(crate) fn can() -> bool {
    let is_there = || rustix::fs::access("/dev/fuse", rustix::fs::Access::WRITE_OK).is_ok();
    geteuid().is_root() && is_there()
}

/// The tree, once it has been needed.
#[derive(Debug)]
pub(crate) struct Homes {
    run_dir: Arc<Path>,
    root: RefCell<Option<Arc<OwnedFd>>>,
}

impl Homes {
    /// That of the node with this run directory.
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { run_dir: run_dir.into(), root: RefCell::default() }
    }

    /// Opens a file of another node for reading, as whom its home names.
    pub(crate) fn open(&self, place: &Place) -> io::Result<OwnedFd> {
        let (run_dir, known, place) = (self.run_dir.clone(), self.root.borrow().clone(), place.clone());
        let (say, hear) = mpsc::sync_channel(1);
        // A thread of its own, that becomes somebody else for good, and that may have to be left waiting.
        let work = move || {
            let opened = root(&run_dir, known).and_then(|root| Ok((become_and_open(&root, &place)?, root)));
            let _nobody_waits = say.send(opened);
        };
        std::thread::Builder::new().name("homes".into()).stack_size(256 << 10).spawn(work)?;
        let (file, root) = hear.recv_timeout(PATIENCE).map_err(|_late| ErrorKind::TimedOut)??;
        self.root.replace(Some(root));
        Ok(file)
    }
}

/// The tree's root, which is asked for if we do not have it, or if what has shown it is gone.
fn root(run_dir: &Path, known: Option<Arc<OwnedFd>>) -> io::Result<Arc<OwnedFd>> {
    if let Some(root) = known.filter(|root| fstat(root).is_ok()) {
        return Ok(root);
    }
    let ask = || door::ask_for(&homes_door(run_dir), &ShimRequest::Tree, PATIENCE);
    let (root, _its_end) = match ask() {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            crate::aside::ask(run_dir, &Request::Homes)?;
            ask()
        }
        asked => asked,
    }?;
    Ok(Arc::new(root))
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
