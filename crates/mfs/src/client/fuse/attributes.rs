//! Conversion between the protocol's attributes and fuser's.

use crate::client::fuse::inode::Inode;
use crate::message::{Attributes, SetTime, Timespec};
use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn to_system_time(moment: Timespec) -> SystemTime {
    let nanos = Duration::from_nanos(moment.nanos.min(999_999_999).into());
    let seconds = Duration::from_secs(moment.seconds.unsigned_abs());
    let whole =
        if moment.seconds < 0 { UNIX_EPOCH.checked_sub(seconds) } else { UNIX_EPOCH.checked_add(seconds) };
    whole.and_then(|whole| whole.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
}

/// Reverses fuser 0.18.0's conversion of a kernel timestamp. Before 1970 fuser subtracts seconds
/// and nanoseconds from the epoch, although the kernel counts nanoseconds forward.
fn from_system_time(time: SystemTime) -> Timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Timespec { seconds: after.as_secs().cast_signed(), nanos: after.subsec_nanos() },
        Err(before) => {
            let before = before.duration();
            Timespec { seconds: -before.as_secs().cast_signed(), nanos: before.subsec_nanos() }
        }
    }
}

/// A time to set, from the kernel.
pub(crate) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::To(from_system_time(time)),
    }
}

/// The file type in `st_mode`.
pub(crate) fn file_type(mode: u32) -> Option<FileType> {
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

/// A file's attributes, for the kernel.
pub(crate) fn file_attr(inode: &Inode, attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(inode.number),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: to_system_time(attributes.atime),
        mtime: to_system_time(attributes.mtime),
        ctime: to_system_time(attributes.ctime),
        crtime: to_system_time(attributes.btime),
        // A type that Linux does not have is reported as a regular file.
        kind: file_type(attributes.mode).unwrap_or(FileType::RegularFile),
        perm: u16::try_from(attributes.mode & 0o7777).unwrap_or(0),
        nlink: attributes.nlink,
        uid: attributes.uid,
        gid: attributes.gid,
        // Device numbers are not transferred.
        rdev: 0,
        blksize: attributes.block_size,
        flags: 0,
    }
}

/// Attributes of the root or of a link in it.
pub(crate) fn synthetic_attr(number: u64, kind: FileType, perm: u16, size: u64) -> FileAttr {
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
    fn times_before_1970_survive_both_conversions() {
        let half_before = to_system_time(Timespec { seconds: -2, nanos: 500_000_000 });
        assert_eq!(half_before, UNIX_EPOCH - Duration::from_millis(1500));
        // fuser's result for the kernel's -2 s and 500 ms.
        let from_kernel = UNIX_EPOCH - Duration::new(2, 500_000_000);
        assert_eq!(from_system_time(from_kernel), Timespec { seconds: -2, nanos: 500_000_000 });
        assert_eq!(
            from_system_time(to_system_time(Timespec { seconds: 5, nanos: 7 })),
            Timespec { seconds: 5, nanos: 7 }
        );
    }
}
