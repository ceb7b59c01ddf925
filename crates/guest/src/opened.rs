//! What programs ask of a file right behind its opening, answered here from what came along with it; and its end
//! (`inhand/opened.rs`).

use crate::forward::Failed;
use crate::member::{GuestMemory, Process};
use crate::thread::Thread;
use tern_migrate::opened::KNOWN;
use tern_syscall::Memory;
use tern_tracee::listener::Notification;

/// Where a call on a descriptor is to put what the kernel says of the file, and whether as statx does.
fn asks_about(trap: &Notification, memory: &mut GuestMemory<'_>) -> Option<(u64, bool)> {
    let [_, second, third, fourth, fifth, _] = trap.args;
    let empty = libc::AT_EMPTY_PATH;
    let mut is_unnamed = |at: u64| {
        let mut name = [1];
        memory.read(at, &mut name).is_ok() && name == [0]
    };
    match i64::from(trap.nr) {
        libc::SYS_fstat => Some((second, false)),
        libc::SYS_newfstatat if fourth as i32 == empty && is_unnamed(second) => Some((third, false)),
        libc::SYS_statx if third as i32 == empty && fourth as u32 & !KNOWN == 0 && is_unnamed(second) => {
            Some((fifth, true))
        }
        _ => None,
    }
}

/// Whether this advice for a file is what is done without any.
fn reads_on([_, _, length, advice, ..]: &[u64; 6]) -> bool {
    let usual = [libc::POSIX_FADV_NORMAL, libc::POSIX_FADV_SEQUENTIAL];
    length.cast_signed() >= 0 && usual.contains(&(*advice as i32))
}

impl Thread {
    /// Answers a call on a file in hand of which the answer has come with it, or that closes it; false if it is another call,
    /// or one that home is to make.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn answer_of_opened(
        &mut self,
        trap: &Notification,
        process: &mut Process,
    ) -> std::result::Result<bool, Failed> {
        let fd = trap.args[0] as i32;
        let mut memory = GuestMemory(&process.memory);
        let ret = match i64::from(trap.nr) {
            libc::SYS_close if process.files.close(fd) => 0,
            // Is it a terminal? Regular files are none.
            libc::SYS_ioctl if trap.args[1] as u32 == libc::TCGETS as u32 && process.files.is_local(fd) => {
                -i64::from(libc::ENOTTY)
            }
            // It is read ahead as it is read.
            libc::SYS_fadvise64 if reads_on(&trap.args) && process.files.is_local(fd) => 0,
            _ => {
                let Some(about) = process.files.about(fd) else { return Ok(false) };
                let Some((at, wide)) = asks_about(trap, &mut memory) else { return Ok(false) };
                let said = if wide { about.statx() } else { about.stat() };
                if memory.write(at, &said).is_err() {
                    return Ok(false);
                }
                0
            }
        };
        self.talk.resumes = None;
        process.lend_again()?;
        self.reply(trap.id, ret)?;
        Ok(true)
    }
}
