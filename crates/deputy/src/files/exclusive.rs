//! Shows that no other process has an open file, by a scan of the descriptors of all processes.

use crate::files::delegation::{Delegations, TRANSFERS_BEFORE_CHECK};
use crate::scanner::Scanner;
use std::sync::mpsc::{Receiver, TryRecvError};
use tern_image::process::is_open_elsewhere;

/// A scan of all processes for the file behind this descriptor. The answer is none if it took too
/// long.
#[derive(Debug)]
pub(super) struct ExclusiveScan {
    fd: i32,
    is_open_elsewhere: Receiver<Option<bool>>,
}

impl Delegations {
    /// Forgets a scan for other processes that have a file, if this call may have passed the file on
    /// since the scan looked.
    pub(super) fn discard_exclusive_scan(&mut self, nr: i64) {
        const PASSING: [i64; 10] = [
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_sendmsg,
            libc::SYS_sendmmsg,
            libc::SYS_dup,
            libc::SYS_dup2,
            libc::SYS_dup3,
            libc::SYS_fcntl,
        ];
        if PASSING.contains(&nr) {
            self.exclusive_scan = None;
        }
    }

    /// Whether a scan has shown that no other process has this open file. If there was none yet it
    /// is started, and its answer is used by a later transfer.
    pub(super) fn is_exclusive(&mut self, pid: i32, fd: i32, scanner: &Scanner) -> bool {
        // Only root can examine the descriptors of all processes.
        if !rustix::process::geteuid().is_root() {
            return false;
        }
        if let Some(scan) = &self.exclusive_scan {
            let answer = scan.is_open_elsewhere.try_recv();
            let scanned = scan.fd;
            if answer != Err(TryRecvError::Empty) {
                self.exclusive_scan = None;
            }
            match answer {
                Ok(Some(false)) if scanned == fd => return true,
                Ok(_) if scanned == fd => {
                    self.not_exclusive.insert(fd);
                    return false;
                }
                _ => {}
            }
        }
        if self.exclusive_scan.is_none() {
            let scan = scanner.start(move |deadline| is_open_elsewhere(pid, fd, deadline));
            self.exclusive_scan = scan.map(|is_open_elsewhere| ExclusiveScan { fd, is_open_elsewhere });
        }
        // The next transfer looks again.
        self.transfers.insert(fd, TRANSFERS_BEFORE_CHECK - 1);
        false
    }
}
