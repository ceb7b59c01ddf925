//! Which calls of the program conflict with its file delegations.

use tern_syscall::Shape;

/// The delegations with which a call conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Conflict {
    /// None.
    None,
    /// The one of this descriptor, which may become shared or closed.
    File(i32),
    /// All.
    All,
}

impl Conflict {
    /// By default, a call whose first argument is a descriptor conflicts with the delegation of
    /// that descriptor.
    pub(crate) fn of(nr: u32, args: &[u64; 6]) -> Self {
        let [first, second, ..] = args.map(|arg| arg as i32);
        match i64::from(nr) {
            // A forked child shares the files; a process that executes a program or ends returns
            // them; some calls name several descriptors, or pass descriptors in memory; and new
            // limits may apply to writes.
            libc::SYS_fork
            | libc::SYS_vfork
            | libc::SYS_clone
            | libc::SYS_clone3
            | libc::SYS_execve
            | libc::SYS_execveat
            | libc::SYS_exit
            | libc::SYS_exit_group
            | libc::SYS_sendmsg
            | libc::SYS_sendmmsg
            | libc::SYS_close_range
            | libc::SYS_io_submit
            | libc::SYS_pidfd_getfd
            | libc::SYS_unshare
            | libc::SYS_dup2
            | libc::SYS_dup3
            | libc::SYS_sendfile
            | libc::SYS_splice
            | libc::SYS_tee
            | libc::SYS_copy_file_range
            | libc::SYS_setrlimit => Self::All,
            libc::SYS_prlimit64 if args[2] != 0 => Self::All,
            // The end of the file, to which the offset moves, is known at home only.
            libc::SYS_pwritev2 if args[5] as i32 & libc::RWF_APPEND != 0 => Self::File(first),
            // No conflict: the shim keeps the offset up to date for these calls, or they use only
            // the file's inode or the descriptor's flags.
            libc::SYS_read
            | libc::SYS_write
            | libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_lseek
            | libc::SYS_pread64
            | libc::SYS_pwrite64
            | libc::SYS_preadv
            | libc::SYS_pwritev
            | libc::SYS_preadv2
            | libc::SYS_pwritev2
            | libc::SYS_fstat
            | libc::SYS_newfstatat
            | libc::SYS_statx
            | libc::SYS_fstatfs
            | libc::SYS_fsync
            | libc::SYS_fdatasync
            | libc::SYS_syncfs
            | libc::SYS_sync_file_range
            | libc::SYS_ftruncate
            | libc::SYS_fallocate
            | libc::SYS_fadvise64
            | libc::SYS_readahead
            | libc::SYS_fchmod
            | libc::SYS_fchown
            | libc::SYS_flock
            | libc::SYS_utimensat
            | libc::SYS_fgetxattr
            | libc::SYS_fsetxattr => Self::None,
            libc::SYS_fcntl if ![libc::F_DUPFD, libc::F_DUPFD_CLOEXEC, libc::F_SETFL].contains(&second) => {
                Self::None
            }
            libc::SYS_mmap if args[3] as i32 & libc::MAP_TYPE == libc::MAP_PRIVATE => Self::None,
            // A process that writes a file through memory has no delegated files.
            libc::SYS_mmap if args[2] as i32 & libc::PROT_WRITE != 0 && args[4] as i32 >= 0 => Self::All,
            libc::SYS_mmap => Self::File(args[4] as i32),
            _ if tern_syscall::row(nr).is_some_and(|row| matches!(row.shapes(args), [Shape::Fd, ..])) => {
                Self::File(first)
            }
            _ => Self::None,
        }
    }
}

/// Whether others may wait for the close of the file on which this call operates: it requests a
/// lock, a lease, or notices about a directory.
pub(super) fn is_lock_call(nr: u32, args: &[u64; 6]) -> bool {
    const LOCKING: [i32; 6] = [
        libc::F_SETLK,
        libc::F_SETLKW,
        libc::F_OFD_SETLK,
        libc::F_OFD_SETLKW,
        libc::F_SETLEASE,
        libc::F_NOTIFY,
    ];
    match i64::from(nr) {
        libc::SYS_flock => true,
        libc::SYS_fcntl => LOCKING.contains(&(args[1] as i32)),
        _ => false,
    }
}
