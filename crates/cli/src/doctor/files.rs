//! Whether the files of other nodes can be shown here, and what their programs see of ours.

use super::Finding;
use crate::output::reason;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use std::fs::{File, OpenOptions};
use std::io;

pub(super) fn examine() -> Vec<Finding> {
    vec![mfs(OpenOptions::new().read(true).write(true).open("/dev/fuse")), local(tell_of_changes())]
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

fn mfs(fuse: io::Result<File>) -> Finding {
    let name = "/mfs";
    match fuse {
        Ok(_) => Finding::ok(name, "FUSE: the files of other nodes can be mounted"),
        Err(error) => {
            let follows = "no /mfs on this node, which serves its own files all the same; try: modprobe fuse";
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
        assert_eq!(mfs(Err(io::ErrorKind::NotFound.into())).state, State::Limited);
        assert_eq!(mfs(File::open("/dev/null")).state, State::Ok);
    }

    #[test]
    fn without_fanotify_changes_are_seen_later() {
        assert_eq!(local(Err(io::ErrorKind::PermissionDenied.into())).state, State::Limited);
        assert_eq!(local(Ok(())).state, State::Ok);
    }
}
