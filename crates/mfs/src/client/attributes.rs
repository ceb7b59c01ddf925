//! The server's words in fuser's.

use super::inode::Inode;
use crate::message::{Attributes, Moment, SetTime};
use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn time(moment: Moment) -> SystemTime {
    let nanos = Duration::from_nanos(moment.nanos.min(999_999_999).into());
    let seconds = Duration::from_secs(moment.seconds.unsigned_abs());
    let whole =
        if moment.seconds < 0 { UNIX_EPOCH.checked_sub(seconds) } else { UNIX_EPOCH.checked_add(seconds) };
    whole.and_then(|whole| whole.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
}

/// A time that the kernel said, from what fuser 0.18.0 makes of it: before 1970 that is as far before as the seconds and the
/// nanoseconds together, although the kernel counts the nanoseconds forward.
fn moment(time: SystemTime) -> Moment {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Moment { seconds: after.as_secs().cast_signed(), nanos: after.subsec_nanos() },
        Err(before) => {
            let before = before.duration();
            Moment { seconds: -before.as_secs().cast_signed(), nanos: before.subsec_nanos() }
        }
    }
}

/// A time that the kernel wants set.
pub(crate) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::To(moment(time)),
    }
}

/// The kind in `st_mode`.
pub(crate) fn kind(mode: u32) -> Option<FileType> {
    Some(match mode & libc::S_IFMT {
        libc::S_IFREG => FileType::RegularFile,
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        _ => return None,
    })
}

/// What a file is like, for the kernel.
pub(crate) fn file(inode: &Inode, is: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(inode.number),
        size: is.size,
        blocks: is.blocks,
        atime: time(is.read),
        mtime: time(is.written),
        ctime: time(is.changed),
        crtime: time(is.born),
        // A kind that Linux does not have is no file's.
        kind: kind(is.mode).unwrap_or(FileType::RegularFile),
        perm: u16::try_from(is.mode & 0o7777).unwrap_or(0),
        nlink: is.links,
        uid: is.uid,
        gid: is.gid,
        // Devices are not served.
        rdev: 0,
        blksize: is.block_size,
        flags: 0,
    }
}

/// What the root, or a link below it, is like.
pub(crate) fn ours(number: u64, kind: FileType, perm: u16, size: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_are_as_the_server_said_and_as_the_kernel_did() {
        let half_before = time(Moment { seconds: -2, nanos: 500_000_000 });
        assert_eq!(half_before, UNIX_EPOCH - Duration::from_millis(1500));
        // What fuser makes of the kernel's -2 s and 500 ms.
        let from_kernel = UNIX_EPOCH - Duration::new(2, 500_000_000);
        assert_eq!(moment(from_kernel), Moment { seconds: -2, nanos: 500_000_000 });
        assert_eq!(moment(time(Moment { seconds: 5, nanos: 7 })), Moment { seconds: 5, nanos: 7 });
    }
}
