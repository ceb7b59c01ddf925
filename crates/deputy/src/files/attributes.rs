//! The status of a file, as it is sent to a guest.

use rustix::fs::{AtFlags, StatxFlags, statx};
use std::os::fd::OwnedFd;
use tern_migrate::prefetch::FileAttributes;

/// The kernel's status of a file.
pub(crate) fn file_attributes(file: &OwnedFd) -> Option<FileAttributes> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let status = statx(file, "", AtFlags::EMPTY_PATH, mask).ok()?;
    let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
    Some(FileAttributes {
        // Fields added by newer kernels are ignored.
        mask: status.stx_mask & (mask | StatxFlags::MNT_ID).bits(),
        blksize: status.stx_blksize,
        attributes: status.stx_attributes.bits(),
        nlink: status.stx_nlink,
        uid: status.stx_uid,
        gid: status.stx_gid,
        mode: status.stx_mode,
        ino: status.stx_ino,
        size: status.stx_size,
        blocks: status.stx_blocks,
        attributes_mask: status.stx_attributes_mask.bits(),
        times: [status.stx_atime, status.stx_btime, status.stx_ctime, status.stx_mtime].map(time),
        rdev: (status.stx_rdev_major, status.stx_rdev_minor),
        dev: (status.stx_dev_major, status.stx_dev_minor),
        mnt_id: status.stx_mnt_id,
    })
}
