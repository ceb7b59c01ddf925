//! Whether this node can mount the files of other nodes, and which files placed commands and guests
//! read directly.

use super::Finding;
use crate::output::error_text;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use tern_control::shared::SharedDir;
use tern_node::config::{Config, config_dir};

pub(super) fn probe() -> Vec<Finding> {
    let mut findings =
        vec![mfs(OpenOptions::new().read(true).write(true).open("/dev/fuse")), local_changes(mark_root())];
    // If the configuration cannot be read, `node::probe` reports that.
    let config = config_dir().and_then(|dir| Config::load(&dir));
    let mut declared = config.ok().and_then(|config| config.file.shared).unwrap_or_default();
    declared.sort();
    declared.dedup();
    findings.extend(declared.iter().map(|path| shared(path, SharedDir::open(path))));
    findings
}

/// File systems that two machines cannot mount at once.
const LOCAL_FILE_SYSTEMS: [&str; 10] =
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "tmpfs", "overlay"];

fn shared(path: &Path, root: io::Result<SharedDir>) -> Finding {
    let name = format!("shared {}", path.display());
    match root {
        Err(error) => Finding::limited(
            &name,
            format!("cannot be opened: {}", error_text(&error)),
            "guests read its files through home; mount it, and configure its path without symbolic links",
        ),
        Ok(root) if root.is_nocto => Finding::limited(
            &name,
            format!("{}, mounted with nocto", root.kind),
            "guests read its files through home, because an open can miss other nodes' writes; mount it without nocto",
        ),
        Ok(root) if LOCAL_FILE_SYSTEMS.contains(&&*root.kind) => Finding::limited(
            &name,
            root.kind,
            "this is a local file system; declare only file systems that all nodes mount from one server",
        ),
        Ok(SharedDir { kind, cache_time: Some(time), .. }) => Finding::limited(
            &name,
            format!(
                "{kind}: guests read its files where they run; names and attributes are cached for {time}"
            ),
            "placed commands (mexec) use it through their home, because they could miss recent changes; mount NFS with actimeo=0",
        ),
        Ok(root) if !root.has_no_submounts => Finding::limited(
            &name,
            format!(
                "{}: guests read its files where they run; another file system is mounted below it",
                root.kind
            ),
            "placed commands (mexec) use it through their home, where other file systems may be mounted",
        ),
        Ok(root) => Finding::ok(
            &name,
            format!("{}: guests read its files where they run, placed commands use it directly", root.kind),
        ),
    }
}

/// Asks fanotify for changes of the root directory, as the file server does.
fn mark_root() -> io::Result<()> {
    let fid = InitFlags::from_bits_retain(libc::FAN_REPORT_FID);
    let how = InitFlags::FAN_CLASS_NOTIF | InitFlags::FAN_CLOEXEC | InitFlags::FAN_UNLIMITED_MARKS | fid;
    let fanotify = Fanotify::init(how, EventFFlags::O_RDONLY)?;
    Ok(fanotify.mark(MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_ATTRIB, rustix::fs::CWD, Some("/"))?)
}

fn local_changes(marked: io::Result<()>) -> Finding {
    let name = "local changes";
    match marked {
        Ok(()) => Finding::ok(
            name,
            "nodes are notified at once of changes to files they have open (unless ternd.toml has mfs_notices = false)",
        ),
        Err(error) => {
            let follows = "nodes see local programs' changes to files they have open up to 1 s late; fanotify needs root";
            Finding::limited(name, format!("fanotify: {}", error_text(&error)), follows)
        }
    }
}

fn mfs(fuse: io::Result<File>) -> Finding {
    let name = "/mfs";
    match fuse {
        Ok(_) => Finding::ok(name, "FUSE: the files of other nodes can be mounted"),
        Err(error) => {
            let follows = "this node cannot mount /mfs, and large files that its guests map are sent whole; it still serves its own files; modprobe fuse";
            Finding::limited(name, format!("cannot open /dev/fuse: {}", error_text(&error)), follows)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::FindingState;

    #[test]
    fn missing_fuse_limits_mfs() {
        assert_eq!(mfs(Err(io::ErrorKind::NotFound.into())).state, FindingState::Limited);
        assert_eq!(mfs(File::open("/dev/null")).state, FindingState::Ok);
    }

    #[test]
    fn declared_shared_file_systems_are_checked() {
        let root = |path: &str| shared(path.as_ref(), SharedDir::open(path.as_ref()));
        assert_eq!(root("/nonexistent").state, FindingState::Limited);
        assert_eq!(
            root("/proc/tty").state,
            FindingState::Ok,
            "of a kind that more than one machine may have"
        );
        let local = SharedDir { kind: "ext4".into(), ..SharedDir::open("/".as_ref()).unwrap() };
        assert!(shared("/".as_ref(), Ok(local)).found.contains("ext4"));
        let (kind, cache_time) = ("nfs4".into(), Some("up to 60 s".into()));
        let old = SharedDir { kind, cache_time, ..SharedDir::open("/".as_ref()).unwrap() };
        assert!(shared("/".as_ref(), Ok(old)).found.contains("up to 60 s"));
        let loose = SharedDir { is_nocto: true, ..SharedDir::open("/".as_ref()).unwrap() };
        assert_eq!(shared("/".as_ref(), Ok(loose)).state, FindingState::Limited);
    }

    #[test]
    fn missing_fanotify_limits_local_changes() {
        assert_eq!(local_changes(Err(io::ErrorKind::PermissionDenied.into())).state, FindingState::Limited);
        assert_eq!(local_changes(Ok(())).state, FindingState::Ok);
    }
}
