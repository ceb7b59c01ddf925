//! What the kernel says of a file and of a file system, in the words of the messages.

use crate::message::{Attributes, Extended, FileKey, Moment, Space};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::path::Path;

/// What an object is like; without a lease.
pub(crate) fn attributes(fd: impl AsFd) -> Result<Attributes, Errno> {
    let volume = rustix::fs::fstatvfs(&fd)?.f_fsid;
    attributes_of(fd, volume)
}

/// Whether this is a file of which all names have been removed, as far as this machine knows: no other one is asked.
pub(crate) fn is_removed_file(fd: impl AsFd) -> bool {
    let (flags, wanted) =
        (AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE | StatxFlags::NLINK);
    let stat = rustix::fs::statx(&fd, "", flags, wanted);
    stat.is_ok_and(|is| {
        is.stx_nlink == 0 && FileType::from_raw_mode(is.stx_mode.into()) == FileType::RegularFile
    })
}

/// The device of what was looked at.
pub(crate) fn device(stat: &Statx) -> u64 {
    u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor)
}

/// The same as [`attributes`], of a file on this file system.
pub(crate) fn attributes_of(fd: impl AsFd, volume: u64) -> Result<Attributes, Errno> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(&fd, "", AtFlags::EMPTY_PATH, wanted)?;
    let moment = |time: rustix::fs::StatxTimestamp| Moment { seconds: time.tv_sec, nanos: time.tv_nsec };
    let born = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    Ok(Attributes {
        key: FileKey { volume, device: device(&stat), inode: stat.stx_ino },
        born: if born { moment(stat.stx_btime) } else { Moment { seconds: 0, nanos: 0 } },
        mode: stat.stx_mode.into(),
        links: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        block_size: stat.stx_blksize,
        read: moment(stat.stx_atime),
        written: moment(stat.stx_mtime),
        changed: moment(stat.stx_ctime),
        // Who cannot believe it has no use for it.
        extended: Extended::UNKNOWN,
        lease: 0,
        lasts: false,
        settled: settled(moment(stat.stx_ctime)),
    })
}

/// Whether the clock that stamps files has moved on since then, by several of its ticks (4 ms as a rule, 10 at most).
fn settled(changed: Moment) -> bool {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    let since =
        (now.tv_sec - changed.seconds).saturating_mul(1_000_000_000) + now.tv_nsec - i64::from(changed.nanos);
    since > 50_000_000
}

/// Which extended attributes there are, as far as the calling thread may see them.
pub(crate) fn extended(path: &Path) -> Extended {
    let mut names = [0; 256];
    match rustix::fs::listxattr(path, &mut names[..]) {
        Ok(length) => Extended::of(&names[..length]),
        Err(_many_or_unknown) => Extended::UNKNOWN,
    }
}

pub(crate) fn space(fd: impl AsFd) -> Result<Space, Errno> {
    let stat = rustix::fs::fstatvfs(fd)?;
    let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(Space {
        blocks: stat.f_blocks,
        free: stat.f_bfree,
        available: stat.f_bavail,
        files: stat.f_files,
        files_free: stat.f_ffree,
        block_size: small(stat.f_bsize),
        name_length: small(stat.f_namemax),
        fragment_size: small(stat.f_frsize),
    })
}
