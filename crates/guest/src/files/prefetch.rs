//! Replies to calls that programs make right after opening a file, from the data that came with the
//! delegation. Also closes files here (`cache/open_close.rs`).

use crate::files::cache::FileCache;
use crate::process::memory::GuestMemory;
use tern_migrate::prefetch::SUPPORTED_STATX;
use tern_syscall::UserMemory;
use tern_tracee::Memory;
use tern_tracee::listener::Notification;

/// The buffer to which a call writes a descriptor's attributes, and whether in statx format.
fn attributes_buffer(trap: &Notification, memory: &mut GuestMemory<'_>) -> Option<(u64, bool)> {
    let [_, second, third, fourth, fifth, _] = trap.args;
    let empty = libc::AT_EMPTY_PATH;
    let mut is_unnamed = |at: u64| {
        let mut name = [1];
        memory.read(at, &mut name).is_ok() && name == [0]
    };
    match i64::from(trap.nr) {
        libc::SYS_fstat => Some((second, false)),
        libc::SYS_newfstatat if fourth as i32 == empty && is_unnamed(second) => Some((third, false)),
        libc::SYS_statx
            if third as i32 == empty && fourth as u32 & !SUPPORTED_STATX == 0 && is_unnamed(second) =>
        {
            Some((fifth, true))
        }
        _ => None,
    }
}

/// Whether this advice has no effect, because files are read ahead anyway.
fn is_default_advice([_, _, length, advice, ..]: &[u64; 6]) -> bool {
    let usual = [libc::POSIX_FADV_NORMAL, libc::POSIX_FADV_SEQUENTIAL];
    length.cast_signed() >= 0 && usual.contains(&(*advice as i32))
}

impl FileCache {
    /// Replies to a call on a delegated file from data that came with the delegation, or closes the
    /// file; returns none if it is another call, or home is to make it.
    pub(super) fn reply_from_prefetch(&mut self, trap: &Notification, memory: &Memory) -> Option<i64> {
        let fd = trap.args[0] as i32;
        let mut memory = GuestMemory(memory);
        match i64::from(trap.nr) {
            libc::SYS_close if self.close(fd) => Some(0),
            // The call tests for a terminal, which a regular file is not.
            libc::SYS_ioctl if trap.args[1] as u32 == libc::TCGETS as u32 && self.is_home_local(fd) => {
                Some(-i64::from(libc::ENOTTY))
            }
            // Files are read ahead anyway.
            libc::SYS_fadvise64 if is_default_advice(&trap.args) && self.is_home_local(fd) => Some(0),
            _ => {
                let attributes = self.attributes(fd)?;
                let (at, wide) = attributes_buffer(trap, &mut memory)?;
                let bytes = if wide { attributes.statx() } else { attributes.stat() };
                memory.write(at, &bytes).is_ok().then_some(0)
            }
        }
    }
}
