//! Attributes of files and file systems, converted from the kernel's structures to messages.

use crate::message::{Attributes, FileKey, FsStats, Timespec, XattrKinds};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::path::Path;

/// Attributes of an object, without a lease.
pub(crate) fn attributes(fd: impl AsFd) -> Result<Attributes, Errno> {
    let volume = rustix::fs::fstatvfs(&fd)?.f_fsid;
    attributes_on(fd, volume)
}

/// Whether this is a regular file without names, as far as this machine knows: no other machine is
/// asked.
pub(crate) fn is_removed_file(fd: impl AsFd) -> bool {
    let (flags, wanted) =
        (AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE | StatxFlags::NLINK);
    let stat = rustix::fs::statx(&fd, "", flags, wanted);
    stat.is_ok_and(|is| {
        is.stx_nlink == 0 && FileType::from_raw_mode(is.stx_mode.into()) == FileType::RegularFile
    })
}

/// The id of this file's mount, as in /proc/self/mountinfo, and whether the file is a directory
/// without a name. No other machine is asked. The id is 0 if the kernel does not report it (before
/// Linux 5.8).
pub(crate) fn mount_and_removal(fd: impl AsFd) -> (u64, bool) {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let wanted = StatxFlags::MNT_ID | StatxFlags::TYPE | StatxFlags::NLINK;
    rustix::fs::statx(&fd, "", flags, wanted).map_or((0, false), |stat| {
        let is_directory = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory;
        (stat.stx_mnt_id, is_directory && stat.stx_nlink == 0)
    })
}

/// The id of this file's mount ([`mount_and_removal`]).
pub(crate) fn mount_id(fd: impl AsFd) -> u64 {
    mount_and_removal(fd).0
}

/// Device number.
pub(crate) fn device(stat: &Statx) -> u64 {
    u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor)
}

/// The same as [`attributes`], for a file on a known file system.
pub(crate) fn attributes_on(fd: impl AsFd, volume: u64) -> Result<Attributes, Errno> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(&fd, "", AtFlags::EMPTY_PATH, wanted)?;
    let timespec = |time: rustix::fs::StatxTimestamp| Timespec { seconds: time.tv_sec, nanos: time.tv_nsec };
    let has_btime = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    Ok(Attributes {
        key: FileKey { volume, device: device(&stat), inode: stat.stx_ino },
        btime: if has_btime { timespec(stat.stx_btime) } else { Timespec { seconds: 0, nanos: 0 } },
        mode: stat.stx_mode.into(),
        nlink: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        block_size: stat.stx_blksize,
        atime: timespec(stat.stx_atime),
        mtime: timespec(stat.stx_mtime),
        ctime: timespec(stat.stx_ctime),
        // Needed only with a lease.
        xattrs: XattrKinds::UNKNOWN,
        lease: 0,
        is_renewable: false,
        is_settled: is_settled(timespec(stat.stx_ctime)),
    })
}

/// Whether the clock that stamps files has advanced since this ctime by several of its ticks (4 ms
/// as a rule, 10 ms at most).
fn is_settled(ctime: Timespec) -> bool {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    let since =
        (now.tv_sec - ctime.seconds).saturating_mul(1_000_000_000) + now.tv_nsec - i64::from(ctime.nanos);
    since > 50_000_000
}

/// Kinds of extended attributes, as far as the calling thread may see them.
pub(crate) fn xattr_kinds(path: &Path) -> XattrKinds {
    let mut names = [0; 256];
    match rustix::fs::listxattr(path, &mut names[..]) {
        Ok(length) => XattrKinds::of(&names[..length]),
        Err(_many_or_unknown) => XattrKinds::UNKNOWN,
    }
}

pub(crate) fn fs_stats(fd: impl AsFd) -> Result<FsStats, Errno> {
    let stat = rustix::fs::fstatvfs(fd)?;
    let to_u32 = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(FsStats {
        blocks: stat.f_blocks,
        free: stat.f_bfree,
        available: stat.f_bavail,
        files: stat.f_files,
        files_free: stat.f_ffree,
        block_size: to_u32(stat.f_bsize),
        name_length: to_u32(stat.f_namemax),
        fragment_size: to_u32(stat.f_frsize),
    })
}
