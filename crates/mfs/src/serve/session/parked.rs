//! Parks the objects that a client has not used for some seconds: closes their descriptors, and
//! keeps their file handles.
//!
//! A descriptor keeps its file system mounted, and a client's kernel may keep an inode for hours
//! after its last use. So an object on another mount than the root is parked soon after its last
//! use, unless it is open. It keeps its number and its lookups, and is opened again by its handle
//! when the client uses it. This fails if the file has been removed or its file system unmounted;
//! then the object is forgotten.
//!
//! An object of a file system without handles, or on which other machines act, is forgotten, and
//! its client looks it up by name. But a client with renewable leases may use an object's name and
//! attributes without a request, so the objects of its session stay.

use super::{HeldObject, ObjectState, Objects, Session};
use crate::lock;
use crate::message::{FileKey, Object};
use crate::serve::export::ExportPosition;
use crate::serve::impersonate::with_search_right;
use crate::serve::stat;
use rustix::fs::{Mode, OFlags, open};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tern_control::handle::{handle_to_open, open_by_handle};
use tern_control::procfs;

/// Interval of the checks for idle objects.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// An object that was not used between this many checks is parked. A lease lasts for a second: a
/// client that still uses cached names and attributes of the object has renewed them meanwhile.
const IDLE_CHECKS: u8 = 3;

/// A removed directory is forgotten if it was not used between this many checks: it cannot be opened
/// again, and may be the working directory of a process of the client.
const REMOVED_IDLE_CHECKS: u8 = 30;

/// A mount of this process's namespace.
#[derive(Debug)]
struct Mount {
    id: u64,
    /// Its mount point.
    at: PathBuf,
    /// A file of it has been opened by its handle, so others can be too.
    has_handles: AtomicBool,
}

/// The mounts at one check, by id.
#[derive(Debug)]
pub(crate) struct Mounts(HashMap<u64, Arc<Mount>>);

impl Mounts {
    /// Reads the mount table. Mount points whose names the kernel escapes are omitted.
    pub(crate) fn read() -> Self {
        let table = procfs::read_text("/proc/self/mountinfo").unwrap_or_default();
        Self(table.lines().filter_map(parse_mount).map(|mount| (mount.id, Arc::new(mount))).collect())
    }
}

/// A mount in a line of /proc/PID/mountinfo.
fn parse_mount(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ');
    let (id, at) = (fields.next()?.parse().ok()?, fields.nth(3)?);
    (!at.contains('\\')).then(|| Mount {
        id,
        at: Path::new(at).to_owned(),
        has_handles: AtomicBool::new(false),
    })
}

impl Mount {
    /// Opens its root, if that is a directory and no other file system is mounted there. The kernel
    /// takes no `O_PATH` descriptor for a mount.
    fn open(&self) -> Option<OwnedFd> {
        let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let found = open(&self.at, how, Mode::empty()).ok()?;
        (stat::mount_id(&found) == self.id).then_some(found)
    }
}

/// A parked object: its handle, and its place.
#[derive(Debug)]
pub(super) struct ParkedObject {
    mount: Arc<Mount>,
    kind: i32,
    handle: Vec<u8>,
    pub(super) key: FileKey,
    position: ExportPosition,
}

impl ParkedObject {
    /// `None` if objects of this mount cannot be opened again.
    fn of(held: &HeldObject, mount: &Arc<Mount>) -> Option<Self> {
        let (kind, handle) = handle_to_open(&held.fd).ok()?;
        let (key, position) = (held.key, held.position.clone());
        let parked = Self { mount: mount.clone(), kind, handle, key, position };
        if !mount.has_handles.load(Ordering::Relaxed) {
            parked.open()?;
            mount.has_handles.store(true, Ordering::Relaxed);
        }
        Some(parked)
    }

    /// Opens the object again, whatever rights the caller has: the same session held it before. `None`
    /// also if there is no descriptor left.
    pub(super) fn open(&self) -> Option<HeldObject> {
        let fd = with_search_right(|| open_by_handle(self.mount.open()?, self.kind, &self.handle).ok())?;
        let key = stat::attributes(&fd).ok()?.key;
        (key == self.key).then(|| HeldObject { fd, key, position: self.position.clone() })
    }

    /// Whether this is the same file. Its device and inode numbers are equal, but an inode number
    /// can be reused.
    pub(super) fn is(&self, fd: impl AsFd) -> bool {
        handle_to_open(fd).is_ok_and(|(kind, handle)| kind == self.kind && handle == self.handle)
    }
}

impl Session {
    /// Whether it holds objects that keep a file system mounted.
    pub(crate) fn may_keep_mounts(&self) -> bool {
        !lock(&self.objects).elsewhere.is_empty()
    }

    /// Parks the objects that were not used for some checks. Returns those whose descriptors are
    /// to be closed, which can take long.
    #[must_use]
    pub(crate) fn park_idle(&self, mounts: &Mounts) -> Vec<Arc<HeldObject>> {
        let idle = lock(&self.objects).idle();
        let park = |(number, held, checks, is_local): (u64, Arc<HeldObject>, u8, bool)| {
            let (mount, is_removed_directory) = stat::mount_and_removal(&held.fd);
            if is_removed_directory && checks < REMOVED_IDLE_CHECKS {
                return None;
            }
            let mount = mounts.0.get(&mount).filter(|_| is_local);
            let parked = mount.and_then(|mount| ParkedObject::of(&held, mount));
            (parked.is_some() || !self.uses_renewable_leases()).then_some((number, parked))
        };
        let parked: Vec<_> = idle.into_iter().filter_map(park).collect();
        let mut objects = lock(&self.objects);
        parked.into_iter().filter_map(|(number, parked)| objects.park(number, parked)).collect()
    }

    /// Opens a parked object, and holds it from now on. `None` if it has been forgotten.
    pub(super) fn unpark(&self, object: Object, parked: &ParkedObject) -> Option<Arc<HeldObject>> {
        // Without the lock, since it may wait for a disk.
        let opened = parked.open().map(Arc::new);
        lock(&self.objects).unpark(object.0, opened)
    }
}

impl Objects {
    /// The objects that are due to be parked: each with the number of checks since its last use, and
    /// whether its file system is local.
    fn idle(&mut self) -> Vec<(u64, Arc<HeldObject>, u8, bool)> {
        let Self { by_number, open_counts, elsewhere, .. } = self;
        let idle = elsewhere.iter().filter_map(|(number, is_local)| {
            let entry = by_number.get_mut(number)?;
            let ObjectState::Held(held) = &entry.state else { return None };
            if open_counts.contains_key(&held.key) {
                entry.idle_checks = 0;
            }
            entry.idle_checks = entry.idle_checks.saturating_add(1);
            let checks = entry.idle_checks;
            (checks >= IDLE_CHECKS).then(|| (*number, held.clone(), checks, *is_local))
        });
        idle.collect()
    }

    /// Parks an object, or forgets it if `parked` is `None`, unless it has been used meanwhile.
    fn park(&mut self, number: u64, parked: Option<ParkedObject>) -> Option<Arc<HeldObject>> {
        let entry = self.by_number.get_mut(&number)?;
        let ObjectState::Held(held) = &entry.state else { return None };
        if entry.idle_checks < IDLE_CHECKS || self.open_counts.contains_key(&held.key) {
            return None;
        }
        let held = held.clone();
        match parked {
            Some(parked) => {
                entry.state = ObjectState::Parked(Arc::new(parked));
                self.elsewhere.remove(&number);
            }
            None => drop(self.forget(number)),
        }
        Some(held)
    }

    /// Holds a parked object that has been opened again, or forgets it if that failed. Returns what
    /// is held now.
    pub(super) fn unpark(&mut self, number: u64, opened: Option<Arc<HeldObject>>) -> Option<Arc<HeldObject>> {
        let entry = self.by_number.get_mut(&number)?;
        if let ObjectState::Held(held) = &entry.state {
            return Some(held.clone());
        }
        let Some(opened) = opened else {
            drop(self.forget(number));
            return None;
        };
        entry.state = ObjectState::Held(opened.clone());
        entry.idle_checks = 0;
        // Only objects of local file systems are parked.
        self.elsewhere.insert(number, true);
        Some(opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Purpose;
    use crate::serve::budget::FdBudget;
    use crate::serve::export::Export;
    use std::fs;

    #[test]
    fn mount_table_is_parsed() {
        let mount = parse_mount("90 24 0:50 / /mnt/x rw,nosuid shared:1 - tmpfs none rw").unwrap();
        assert_eq!((mount.id, mount.at.as_path()), (90, Path::new("/mnt/x")));
        assert!(parse_mount("90 24 0:50 / /mnt/a\\040b rw - tmpfs none rw").is_none());
        assert!(parse_mount("90").is_none());
    }

    /// An object is found by its handle under its new name, and not after its file was removed,
    /// even if another file has its name.
    #[test]
    fn idle_object_is_parked_and_opened_again() {
        // A tmpfs that is not the root.
        let dir = Path::new("/dev/shm").join(format!("tern-parked-{}", std::process::id()));
        if !rustix::process::geteuid().is_root() || fs::create_dir(&dir).is_err() {
            return;
        }
        let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::All).unwrap();
        let held = |name: &str| {
            let fd = open(dir.join(name), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
            let key = stat::attributes(&fd).unwrap().key;
            HeldObject { fd, key, position: ExportPosition::Exported }
        };
        let park = || {
            let mounts = Mounts::read();
            (0..IDLE_CHECKS).map(|_| session.park_idle(&mounts).len()).sum::<usize>()
        };
        fs::write(dir.join("file"), "").unwrap();
        let object = session.hold(held("file")).unwrap();
        assert_eq!(session.park_idle(&Mounts::read()).len(), 0, "it was just used");
        assert_eq!(park(), 1);
        assert_eq!(session.hold(held("file")).unwrap(), object, "found by name it is the same object");
        assert_eq!(park(), 1);
        fs::rename(dir.join("file"), dir.join("renamed")).unwrap();
        let found = session.object(object).unwrap();
        assert_eq!(found.key, held("renamed").key);
        drop(found);
        assert_eq!(park(), 1);
        fs::remove_file(dir.join("renamed")).unwrap();
        fs::write(dir.join("file"), "").unwrap();
        assert!(session.object(object).is_none());
        fs::create_dir(dir.join("dir")).unwrap();
        let working_directory = session.hold(held("dir")).unwrap();
        fs::remove_dir(dir.join("dir")).unwrap();
        assert_eq!(park(), 0, "a removed directory is kept for a while");
        assert!(session.object(working_directory).is_some());
        assert_eq!((0..REMOVED_IDLE_CHECKS).map(|_| park()).sum::<usize>(), 1);
        assert!(session.object(working_directory).is_none());
        assert_ne!(session.hold(held("file")).unwrap(), object);
        fs::remove_dir_all(&dir).unwrap();
    }
}
