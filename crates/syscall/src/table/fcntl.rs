//! fcntl: the shape of its third argument. An unknown command may have a pointer, so the process is
//! fetched home for it.

use super::vocabulary::*;

const LOCK: u32 = size::<libc::flock>();

/// Home for all commands of the kernel.
pub(super) fn route(args: &[u64; 6]) -> Route {
    match args[1] as i32 {
        0..=17 | 36..=38 | 1024..=1028 | 1030..=1040 => Route::Home,
        _ => Route::Homeward(reason::UNKNOWN_FCNTL),
    }
}

/// The shapes of a command's arguments. Commands that are not listed take a number.
pub(super) fn shapes(args: &[u64; 6]) -> &'static [Shape] {
    match args[1] as i32 {
        libc::F_GETLK | libc::F_OFD_GETLK => const { &[FD, V, inout(LOCK)] },
        libc::F_SETLK | libc::F_SETLKW | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => {
            const { &[FD, V, input(LOCK)] }
        }
        // F_SETOWN_EX, F_GETOWN_EX, F_GETOWNER_UIDS
        15 => const { &[FD, V, input(8)] },
        16 | 17 => const { &[FD, V, output(8)] },
        // F_GET_RW_HINT, F_SET_RW_HINT, F_GET_FILE_RW_HINT, F_SET_FILE_RW_HINT
        1035 | 1037 => const { &[FD, V, output(8)] },
        1036 | 1038 => const { &[FD, V, input(8)] },
        // F_GETDELEG, F_SETDELEG
        1039 => const { &[FD, V, inout(8)] },
        1040 => const { &[FD, V, input(8)] },
        _ => const { &[FD, V, V] },
    }
}
