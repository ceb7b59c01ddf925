//! Where a call runs. The rows of the table define it; the filter and the shims only query it.

use crate::table;

/// Where a call runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Natively in the guest; the filter allows it.
    Here,
    /// Natively in the guest too, but the guest's shim records when the time limit of the call ends.
    Timed,
    /// Performed by the deputy.
    Home,
    /// By a local and a home part that must agree. The guest's shim has code for it.
    Both(SplitCall),
    /// Cannot be done away from home: the process is fetched home and makes the call there. The
    /// reason, one of [`reason`], is shown by mps.
    Homeward(&'static str),
    /// Fails with this errno.
    Refuse(i32),
}

/// The calls in which both halves take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SplitCall {
    /// mmap of a file: the guest needs the file's content.
    Mmap,
    /// msync that waits for the disk: local, unless the guest has shared memory that is a file of home.
    Msync,
    /// rt_sigaction: the handler is the guest's; home needs to know ignored signals and child
    /// options.
    RtSigaction,
    /// rt_sigprocmask: the mask is the guest's, and also home's, where blocked signals are pending.
    RtSigprocmask,
    /// rt_sigreturn: the guest's own; home gets the mask that it restores.
    RtSigreturn,
    /// fork, vfork and clone of a process: both halves fork.
    Fork,
    /// clone of a thread: the deputy creates a thread, and then the guest does.
    Thread,
    /// execve, execveat: the deputy executes, the guest ends.
    Exec,
    /// exit, exit_group: both halves exit.
    Exit,
    /// Calls that report CPU time: home's plus the guest's.
    CpuTime,
    /// Calls on timers that count CPU time: the timers are at home, which needs the guest's usage.
    CpuTimer,
    /// prctl options with a local part.
    Prctl,
}

/// The reasons to fetch a process home for a call.
pub mod reason {
    /// A child that shares its parent's memory and is no thread.
    pub const SHARED_SPACE: &str = "shared address space";
    /// Memory that other processes can see.
    pub const SHARED_MEMORY: &str = "shared memory";
    /// Memory that may not be swapped.
    pub const LOCKED_MEMORY: &str = "locked memory";
    /// Pages of hugetlb memory.
    pub const HUGE_PAGES: &str = "huge pages";
    /// Memory that can never be unmapped.
    pub const SEALED_MEMORY: &str = "sealed memory";
    /// More threads than a process that moves may have.
    pub const THREADS: &str = "threads";
    /// Placement of pages on memory nodes.
    pub const MEMORY_PLACEMENT: &str = "memory placement";
    /// Reads or writes of another process's memory.
    pub const OTHER_MEMORY: &str = "another process's memory";
    /// Access to its own memory through a file.
    pub const OWN_MEMORY: &str = "own memory through /proc";
    /// Options that change the kernel's record of the address space.
    pub const MEMORY_MAP: &str = "memory map of the process";
    /// User pages spliced into a pipe.
    pub const GIFTED_PAGES: &str = "memory lent to a pipe";
    /// MSG_ZEROCOPY: the kernel sends from the program's own memory, later.
    pub const LENT_BUFFERS: &str = "memory lent to a socket";
    /// ptrace.
    pub const TRACING: &str = "tracing";
    /// I/O privilege.
    pub const IO_PORTS: &str = "I/O ports";
    /// modify_ldt.
    pub const SEGMENTS: &str = "segment descriptors";
    /// arch_prctl and prctl options that set the CPU's own state.
    pub const CPU_MODE: &str = "CPU mode";
    /// unshare, setns and clone into new namespaces.
    pub const NAMESPACES: &str = "namespaces";
    /// A seccomp filter of its own.
    pub const SECCOMP: &str = "seccomp filter";
    /// Linux asynchronous I/O, which maps a ring.
    pub const AIO: &str = "asynchronous I/O context";
    /// perf_event_open.
    pub const PERFORMANCE_EVENTS: &str = "performance events";
    /// bpf.
    pub const BPF: &str = "bpf";
    /// keyctl.
    pub const KEYRINGS: &str = "keyrings";
    /// quotactl.
    pub const QUOTAS: &str = "quota control";
    /// kexec_load.
    pub const KEXEC: &str = "loading a kernel";
    /// personality.
    pub const PERSONALITY: &str = "personality";
    /// Timers that count CPU time.
    pub const CPU_TIMER: &str = "CPU-time timer";
    /// mq_notify.
    pub const QUEUE_NOTIFICATION: &str = "message queue notification";
    /// clone flags that are not supported.
    pub const CLONE_FLAGS: &str = "unusual clone flags";
    /// A socket option with pointers in its value.
    pub const SOCKET_OPTION: &str = "socket option with pointers";
    /// An unknown IPC command, or one with an array of unknown size.
    pub const IPC_COMMAND: &str = "unusual IPC command";
    /// An attribute call with pointers in its struct.
    pub const NESTED_ATTRIBUTES: &str = "nested attribute struct";
    /// sysfs(2), option 2: its output has no known size.
    pub const FILE_SYSTEM_NAMES: &str = "file system names";
    /// An unknown fcntl command.
    pub const UNKNOWN_FCNTL: &str = "unknown fcntl command";
    /// An unknown kcmp type.
    pub const UNKNOWN_KCMP: &str = "unknown kcmp type";
    /// An ioctl with an unknown argument.
    pub const UNKNOWN_IOCTL: &str = "unknown ioctl";
    /// A prctl option with an unknown argument.
    pub const UNKNOWN_PRCTL: &str = "unknown prctl option";
    /// An unknown mount configuration command.
    pub const UNKNOWN_FSCONFIG: &str = "unknown fsconfig command";
    /// An unknown landlock rule.
    pub const UNKNOWN_LANDLOCK: &str = "unknown landlock rule";
}

/// The route of a row.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// The same for all arguments.
    Always(Route),
    /// [`Route::Here`] if the test holds, which the filter decides by itself. Otherwise the route
    /// that the function returns, which is never Here. The text describes the rule in the
    /// documentation.
    HereIf(ArgTest, fn(&[u64; 6]) -> Route, &'static str),
    /// The route that the function returns, which is never Here. The text describes the rule in the
    /// documentation.
    By(fn(&[u64; 6]) -> Route, &'static str),
}

impl Rule {
    /// Whether no call of the row is made at home, as far as the rule alone says so.
    pub(crate) fn is_native(&self) -> bool {
        match *self {
            Self::Always(route) => !matches!(route, Route::Home | Route::Both(_)),
            Self::HereIf(_, by, _) => by(&[0; 6]) == Route::Timed,
            Self::By(..) => false,
        }
    }
}

/// A test that the filter can make, mostly on the low 32 bits of one argument.
#[derive(Debug, Clone, Copy)]
pub enum ArgTest {
    /// The bits under the mask equal the value.
    Masked {
        /// The argument.
        arg: u8,
        /// The bits compared.
        mask: u32,
        /// The expected value.
        value: u32,
    },
    /// The 32 bits equal one of these values.
    OneOf {
        /// The argument.
        arg: u8,
        /// The values.
        values: &'static [u32],
    },
    /// The bits under the mask differ from the value, or a pointer, with all its bits, is null.
    DiffersOrNull {
        /// The argument.
        arg: u8,
        /// The bits compared.
        mask: u32,
        /// The value.
        value: u32,
        /// The argument that is a pointer.
        pointer: u8,
    },
}

impl ArgTest {
    /// Whether the test holds.
    #[must_use]
    pub fn holds(&self, args: &[u64; 6]) -> bool {
        match *self {
            Self::Masked { arg, mask, value } => args[usize::from(arg)] as u32 & mask == value,
            Self::OneOf { arg, values } => values.contains(&(args[usize::from(arg)] as u32)),
            Self::DiffersOrNull { arg, mask, value, pointer } => {
                args[usize::from(arg)] as u32 & mask != value || args[usize::from(pointer)] == 0
            }
        }
    }
}

/// Where a call runs. A number without a row does not exist, and fails with ENOSYS.
#[must_use]
pub fn route(nr: u32, args: &[u64; 6]) -> Route {
    let Some(row) = table::row(nr) else { return Route::Refuse(libc::ENOSYS) };
    match row.rule {
        Rule::Always(route) => route,
        Rule::HereIf(test, _, _) if test.holds(args) => Route::Here,
        Rule::HereIf(_, by, _) | Rule::By(by, _) => by(args),
    }
}

/// Whether a call waits on the guest's node, so that only that node's kernel can report an
/// interruption.
#[must_use]
pub fn waits_here(nr: u32, args: &[u64; 6]) -> bool {
    matches!(route(nr, args), Route::Here | Route::Timed)
        && table::row(nr).is_some_and(|row| row.wait.is_some())
}

/// Whether the call transfers data on the one open file whose descriptor is its first argument, at the
/// file's own position.
#[must_use]
pub fn is_transfer(nr: u32) -> bool {
    matches!(
        i64::from(nr),
        libc::SYS_read
            | libc::SYS_write
            | libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_sendto
            | libc::SYS_recvfrom
            | libc::SYS_sendmsg
            | libc::SYS_recvmsg
    )
}
