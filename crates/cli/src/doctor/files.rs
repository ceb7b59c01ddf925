//! Whether the files of other nodes can be shown here, and what their programs see of ours.

use super::Finding;
use super::kernel::{self, Release};
use crate::output::reason;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use tern_control::shared::Root;
use tern_node::config::{Config, config_dir};

pub(super) fn examine() -> Vec<Finding> {
    let mut findings = vec![
        mfs(OpenOptions::new().read(true).write(true).open("/dev/fuse"), kernel::release()),
        local(tell_of_changes()),
    ];
    // What is wrong with the configuration is said elsewhere.
    let config = config_dir().and_then(|dir| Config::load(&dir));
    let mut declared = config.ok().and_then(|config| config.file.shared).unwrap_or_default();
    declared.sort();
    declared.dedup();
    findings.extend(declared.iter().map(|path| shared(path, Root::open(path))));
    findings
}

/// File systems that no two machines can have mounted.
const OF_ONE_MACHINE: [&str; 10] =
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "tmpfs", "overlay"];

fn shared(path: &Path, root: io::Result<Root>) -> Finding {
    let name = format!("shared {}", path.display());
    match root {
        Err(error) => Finding::limited(
            &name,
            format!("cannot be opened: {}", reason(&error)),
            "guests read its files through home; mount it, and say its path without symbolic links",
        ),
        Ok(root) if root.loose => Finding::limited(
            &name,
            format!("{}, mounted with nocto", root.kind),
            "guests read its files through home, since an open does not see what others have written",
        ),
        Ok(root) if OF_ONE_MACHINE.contains(&&*root.kind) => Finding::limited(
            &name,
            root.kind,
            "no other machine has that; declare what all nodes mount from the same server",
        ),
        Ok(Root { kind, believes: Some(time), .. }) => Finding::limited(
            &name,
            format!(
                "{kind}: guests read its files where they run; names and attributes are believed for {time}"
            ),
            "placed commands (mexec) use it through their home, since they would not see what others have just made; actimeo=0 (NFS) when it is mounted ends that",
        ),
        Ok(root) if !root.whole => Finding::limited(
            &name,
            format!(
                "{}: guests read its files where they run; something else is mounted below it",
                root.kind
            ),
            "placed commands (mexec) use it through their home, which may have something else there",
        ),
        Ok(root) => Finding::ok(
            &name,
            format!("{}: guests read its files where they run, placed commands use it directly", root.kind),
        ),
    }
}

/// Asks the kernel to tell what is done to the root's directory, as the server of files does.
fn tell_of_changes() -> io::Result<()> {
    let fid = InitFlags::from_bits_retain(libc::FAN_REPORT_FID);
    let how = InitFlags::FAN_CLASS_NOTIF | InitFlags::FAN_CLOEXEC | InitFlags::FAN_UNLIMITED_MARKS | fid;
    let fanotify = Fanotify::init(how, EventFFlags::O_RDONLY)?;
    Ok(fanotify.mark(MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_ATTRIB, rustix::fs::CWD, Some("/"))?)
}

fn local(told: io::Result<()>) -> Finding {
    let name = "local changes";
    match told {
        Ok(()) => Finding::ok(
            name,
            "of files that other nodes have open are told there at once (unless ternd.toml has mfs_notices = false)",
        ),
        Err(error) => {
            let cost = "what programs here change of files that other nodes have open is seen there up to a second later";
            Finding::limited(name, format!("fanotify does not tell: {}", reason(&error)), cost)
        }
    }
}

fn mfs(fuse: io::Result<File>, release: Release) -> Finding {
    let name = "/mfs";
    match fuse {
        Ok(_) if release < Release(6, 9, 0) => Finding::limited(
            name,
            "FUSE: the files of other nodes can be mounted",
            "older than 6.9: there the files of this node itself are read and written by way of tern-mfs too",
        ),
        Ok(_) => Finding::ok(name, "FUSE: the files of other nodes can be mounted"),
        Err(error) => {
            let follows = "no /mfs on this node, whose guests have large files that they map sent whole; it serves its own all the same; try: modprobe fuse";
            Finding::limited(name, format!("cannot open /dev/fuse: {}", reason(&error)), follows)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn without_fuse_there_is_no_tree() {
        let state = |fuse, minor| mfs(fuse, Release(6, minor, 0)).state;
        assert_eq!(state(Err(io::ErrorKind::NotFound.into()), 9), State::Limited);
        assert_eq!(state(File::open("/dev/null"), 9), State::Ok);
        assert_eq!(state(File::open("/dev/null"), 8), State::Limited);
    }

    #[test]
    fn what_is_declared_as_shared_is_there_and_can_be() {
        let root = |path: &str| shared(path.as_ref(), Root::open(path.as_ref()));
        assert_eq!(root("/nonexistent").state, State::Limited);
        assert_eq!(root("/proc/tty").state, State::Ok, "of a kind that more than one machine may have");
        let local = Root { kind: "ext4".into(), ..Root::open("/".as_ref()).unwrap() };
        assert!(shared("/".as_ref(), Ok(local)).found.contains("ext4"));
        let (kind, believes) = ("nfs4".into(), Some("up to 60 s".into()));
        let old = Root { kind, believes, ..Root::open("/".as_ref()).unwrap() };
        assert!(shared("/".as_ref(), Ok(old)).found.contains("up to 60 s"));
        let loose = Root { loose: true, ..Root::open("/".as_ref()).unwrap() };
        assert_eq!(shared("/".as_ref(), Ok(loose)).state, State::Limited);
    }

    #[test]
    fn without_fanotify_changes_are_seen_later() {
        assert_eq!(local(Err(io::ErrorKind::PermissionDenied.into())).state, State::Limited);
        assert_eq!(local(Ok(())).state, State::Ok);
    }
}
