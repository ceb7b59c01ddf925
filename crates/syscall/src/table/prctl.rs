//! prctl: where each option runs, and what it carries.

use super::vocabulary::*;
use linux_raw_sys::prctl::*;

/// What an option's first argument is.
#[derive(Clone, Copy)]
enum Carries {
    Numbers,
    /// The kernel writes an int.
    Int,
    /// A thread's name, given.
    Name,
    /// A thread's name, asked for.
    NameOut,
    /// PR_GET_AUXV: a buffer with its length.
    Buffer,
}

/// The options that the table knows.
const OPTIONS: &[(u32, Route, Carries)] = {
    use Carries::{Buffer, Int, Name, NameOut, Numbers};
    use Route::{Home, Homeward, Refuse};
    const LOCAL: Route = Route::Both(Special::Prctl);
    &[
        (PR_SET_PDEATHSIG, Home, Numbers),
        (PR_GET_PDEATHSIG, Home, Int),
        (PR_GET_DUMPABLE, Home, Numbers),
        (PR_SET_DUMPABLE, Home, Numbers),
        (PR_GET_KEEPCAPS, Home, Numbers),
        (PR_SET_KEEPCAPS, Home, Numbers),
        (PR_GET_TIMING, Home, Numbers),
        (PR_SET_TIMING, Home, Numbers),
        // The kernel takes 15 characters at most, and cuts longer names.
        (PR_SET_NAME, LOCAL, Name),
        (PR_GET_NAME, LOCAL, NameOut),
        (PR_GET_SECCOMP, Home, Numbers),
        (PR_SET_SECCOMP, Homeward(reason::SECCOMP), Numbers),
        (PR_CAPBSET_READ, Home, Numbers),
        (PR_CAPBSET_DROP, Home, Numbers),
        (PR_GET_TSC, Home, Int),
        (PR_SET_TSC, Homeward(reason::CPU_MODE), Numbers),
        (PR_GET_SECUREBITS, Home, Numbers),
        (PR_SET_SECUREBITS, Home, Numbers),
        // Sleeps are at home, and so is their slack.
        (PR_SET_TIMERSLACK, Home, Numbers),
        (PR_GET_TIMERSLACK, Home, Numbers),
        (PR_MCE_KILL, Home, Numbers),
        (PR_MCE_KILL_GET, Home, Numbers),
        (PR_SET_MM, Homeward(reason::MEMORY_MAP), Numbers),
        (PR_SET_PTRACER, Home, Numbers),
        (PR_SET_CHILD_SUBREAPER, Home, Numbers),
        (PR_GET_CHILD_SUBREAPER, Home, Int),
        (PR_SET_NO_NEW_PRIVS, Home, Numbers),
        (PR_GET_NO_NEW_PRIVS, Home, Numbers),
        (PR_SET_THP_DISABLE, LOCAL, Numbers),
        (PR_GET_THP_DISABLE, LOCAL, Numbers),
        (PR_CAP_AMBIENT, Home, Numbers),
        (PR_GET_SPECULATION_CTRL, Home, Numbers),
        (PR_SET_SPECULATION_CTRL, Homeward(reason::CPU_MODE), Numbers),
        (PR_SET_IO_FLUSHER, Home, Numbers),
        (PR_GET_IO_FLUSHER, Home, Numbers),
        (PR_GET_MDWE, Home, Numbers),
        (PR_GET_MEMORY_MERGE, Home, Numbers),
        (PR_GET_AUXV, Home, Buffer),
        // As kernels without anonymous memory names and without page merging answer: both are only hints.
        (PR_SET_VMA, Refuse(libc::EINVAL), Numbers),
        (PR_SET_MEMORY_MERGE, Refuse(libc::EINVAL), Numbers),
        // Options of other architectures, which x86-64 kernels refuse themselves.
        (PR_GET_UNALIGN, Home, Numbers),
        (PR_SET_UNALIGN, Home, Numbers),
        (PR_GET_FPEMU, Home, Numbers),
        (PR_SET_FPEMU, Home, Numbers),
        (PR_GET_FPEXC, Home, Numbers),
        (PR_SET_FPEXC, Home, Numbers),
        (PR_GET_ENDIAN, Home, Numbers),
        (PR_SET_ENDIAN, Home, Numbers),
        (PR_SVE_GET_VL, Home, Numbers),
        (PR_SVE_SET_VL, Home, Numbers),
        (PR_GET_TAGGED_ADDR_CTRL, Home, Numbers),
        (PR_SET_TAGGED_ADDR_CTRL, Home, Numbers),
    ]
};

/// PR_GET_TID_ADDRESS, of which the guest's kernel knows alone.
pub(super) const OWN: Test = Test::OneOf { arg: 0, values: &[PR_GET_TID_ADDRESS] };

fn option(args: &[u64; 6]) -> Option<&'static (u32, Route, Carries)> {
    OPTIONS.iter().find(|(option, _, _)| *option == args[0] as u32)
}

/// Where an option runs.
pub(super) fn route(args: &[u64; 6]) -> Route {
    option(args).map_or(Route::Homeward(reason::UNKNOWN_PRCTL), |(_, route, _)| *route)
}

/// The shapes of an option's arguments.
pub(super) fn shapes(args: &[u64; 6]) -> &'static [Shape] {
    match option(args).map(|(_, _, carries)| *carries) {
        Some(Carries::Int) => const { &[V, output(4), V, V, V] },
        Some(Carries::Name) => const { &[V, Shape::Text(16), V, V, V] },
        Some(Carries::NameOut) => const { &[V, output(16), V, V, V] },
        Some(Carries::Buffer) => {
            const { &[V, filled(counted(2, Width::Size, 1, 4096, Over::Cut), 1), V, V, V] }
        }
        Some(Carries::Numbers) | None => const { &[V, V, V, V, V] },
    }
}
