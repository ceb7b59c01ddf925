//! What the program's calls are to its files in hand.

use tern_syscall::Shape;

/// What a call is to the files in hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Touch {
    /// Nothing.
    None,
    /// This one may become somebody else's, or none.
    Takes(i32),
    /// All may.
    TakesAll,
}

impl Touch {
    /// Where nothing better is known of a call whose first argument is a descriptor, that may be taken.
    pub(super) fn of(nr: u32, args: &[u64; 6]) -> Self {
        let [first, second, ..] = args.map(|arg| arg as i32);
        match i64::from(nr) {
            // Who is born has them as well, and who executes or ends has no use for them here; several are named, or they are
            // where we do not look; or limits may bind that were not there.
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
            | libc::SYS_setrlimit => Self::TakesAll,
            libc::SYS_prlimit64 if args[2] != 0 => Self::TakesAll,
            // They move its offset by themselves, or are about the file, or about the descriptor and not what is behind it.
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
            // Who writes a file through memory has none in hand.
            libc::SYS_mmap if args[2] as i32 & libc::PROT_WRITE != 0 && args[4] as i32 >= 0 => Self::TakesAll,
            libc::SYS_mmap => Self::Takes(args[4] as i32),
            _ if tern_syscall::row(nr).is_some_and(|row| matches!(row.shapes(args), [Shape::Fd, ..])) => {
                Self::Takes(first)
            }
            _ => Self::None,
        }
    }
}

/// Whether somebody may wait for the end of the file that this call is about: it takes a lock, or the like.
pub(super) fn holds(nr: u32, args: &[u64; 6]) -> bool {
    const HOLDING: [i32; 6] = [
        libc::F_SETLK,
        libc::F_SETLKW,
        libc::F_OFD_SETLK,
        libc::F_OFD_SETLKW,
        libc::F_SETLEASE,
        libc::F_NOTIFY,
    ];
    match i64::from(nr) {
        libc::SYS_flock => true,
        libc::SYS_fcntl => HOLDING.contains(&(args[1] as i32)),
        _ => false,
    }
}
