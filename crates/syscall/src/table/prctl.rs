//! prctl: where each option runs, and the shape of its arguments.

use super::vocabulary::*;
use linux_raw_sys::prctl::*;

/// The shape of an option's first argument.
#[derive(Clone, Copy)]
enum Payload {
    Numbers,
    /// The kernel writes an int.
    Int,
    /// A thread's name that the kernel reads.
    Name,
    /// A thread's name that the kernel writes.
    NameOut,
    /// PR_GET_AUXV: a buffer with its length.
    Buffer,
}

/// The supported options.
const OPTIONS: &[(u32, Route, Payload)] = {
    use Payload::{Buffer, Int, Name, NameOut, Numbers};
    use Route::{Home, Homeward, Refuse};
    const LOCAL: Route = Route::Both(SplitCall::Prctl);
    &[
        (PR_SET_PDEATHSIG, Home, Numbers),
        (PR_GET_PDEATHSIG, Home, Int),
        (PR_GET_DUMPABLE, Home, Numbers),
        (PR_SET_DUMPABLE, Home, Numbers),
        (PR_GET_KEEPCAPS, Home, Numbers),
        (PR_SET_KEEPCAPS, Home, Numbers),
        (PR_GET_TIMING, Home, Numbers),
        (PR_SET_TIMING, Home, Numbers),
        // The kernel cuts names to 15 characters.
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
        // Sleeps happen at home, so the slack applies there.
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
        // Answered as by kernels without anonymous memory names and page merging: both are only
        // hints.
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

/// PR_GET_TID_ADDRESS, which only the guest's kernel can answer.
pub(super) const OWN: ArgTest = ArgTest::OneOf { arg: 0, values: &[PR_GET_TID_ADDRESS] };

fn option(args: &[u64; 6]) -> Option<&'static (u32, Route, Payload)> {
    OPTIONS.iter().find(|(option, _, _)| *option == args[0] as u32)
}

/// Where an option runs.
pub(super) fn route(args: &[u64; 6]) -> Route {
    option(args).map_or(Route::Homeward(reason::UNKNOWN_PRCTL), |(_, route, _)| *route)
}

/// The shapes of an option's arguments.
pub(super) fn shapes(args: &[u64; 6]) -> &'static [Shape] {
    match option(args).map(|(_, _, payload)| *payload) {
        Some(Payload::Int) => const { &[V, output(4), V, V, V] },
        Some(Payload::Name) => const { &[V, Shape::Text(16), V, V, V] },
        Some(Payload::NameOut) => const { &[V, output(16), V, V, V] },
        Some(Payload::Buffer) => {
            const { &[V, filled(counted(2, Width::Size, 1, 4096, OverLimit::Cut), 1), V, V, V] }
        }
        Some(Payload::Numbers) | None => const { &[V, V, V, V, V] },
    }
}
