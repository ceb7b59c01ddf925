//! Where a call runs. The rows of the table say it; the filter and the shims only ask.

use crate::table;

/// Where a call runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Natively in the guest; the filter lets it pass.
    Here,
    /// Performed by the deputy.
    Home,
    /// Has a local and a home part that must agree: the guest's shim has code for it.
    Both(Special),
    /// Cannot be done away yet: the process is brought home and makes the call there. The reason is shown
    /// by mps; it is one of [`reason`].
    Homeward(&'static str),
    /// Answered with this errno.
    Refuse(i32),
}

/// The calls with a local part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    /// mmap of a file: the guest needs its content.
    Mmap,
    /// rt_sigaction: the handler is the guest's, ignoring and child options are also home's.
    RtSigaction,
    /// rt_sigprocmask: the mask is the guest's, and home's, where blocked signals wait.
    RtSigprocmask,
    /// rt_sigreturn: the guest's own; home follows the mask that it restores.
    RtSigreturn,
    /// fork, vfork and clone of a process: both halves fork.
    Fork,
    /// clone of a thread: the deputy gets one, and then the guest.
    Thread,
    /// execve, execveat: the deputy executes, the guest ends.
    Exec,
    /// exit, exit_group: both halves end.
    Exit,
    /// Calls that report CPU time: home's, plus the guest's own.
    CpuTime,
    /// Calls about timers that count CPU time: home's, which must know what the guest has used until then.
    CpuTimer,
    /// Limits on memory and CPU time: home's to keep, the guest's to feel.
    Setrlimit,
    /// prctl options with a local part.
    Prctl,
}

/// The reasons for which a call brings its process home.
pub mod reason {
    /// A child that shares its parent's memory and is no thread.
    pub const SHARED_SPACE: &str = "shared address space";
    /// Memory that others see.
    pub const SHARED_MEMORY: &str = "shared memory";
    /// Memory that may not be swapped.
    pub const LOCKED_MEMORY: &str = "locked memory";
    /// Which memory node pages come from.
    pub const MEMORY_PLACEMENT: &str = "memory placement";
    /// Reads or writes of another process's memory.
    pub const OTHER_MEMORY: &str = "another process's memory";
    /// Its own memory, read or written through a file.
    pub const OWN_MEMORY: &str = "own memory through /proc";
    /// Options that rearrange the address space as the kernel knows it.
    pub const MEMORY_MAP: &str = "memory map of the process";
    /// User pages given to a pipe.
    pub const GIFTED_PAGES: &str = "memory lent to a pipe";
    /// ptrace.
    pub const TRACING: &str = "tracing";
    /// I/O privilege.
    pub const IO_PORTS: &str = "I/O ports";
    /// modify_ldt.
    pub const SEGMENTS: &str = "segment descriptors";
    /// arch_prctl and prctl options that set the CPU's own state.
    pub const CPU_MODE: &str = "CPU mode";
    /// unshare, setns and clone into new ones.
    pub const NAMESPACES: &str = "namespaces";
    /// A filter of its own.
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
    /// clone flags without code for them.
    pub const CLONE_FLAGS: &str = "unusual clone flags";
    /// A socket option with pointers in its value.
    pub const SOCKET_OPTION: &str = "socket option with pointers";
    /// An IPC command that is not known, or has an array of unknown size.
    pub const IPC_COMMAND: &str = "unusual IPC command";
    /// An attribute call with pointers in its struct.
    pub const NESTED_ATTRIBUTES: &str = "nested attribute struct";
    /// sysfs(2), option 2, whose output has no stated size.
    pub const FILE_SYSTEM_NAMES: &str = "file system names";
    /// An fcntl command that is not known.
    pub const UNKNOWN_FCNTL: &str = "unknown fcntl command";
    /// A kcmp type that is not known.
    pub const UNKNOWN_KCMP: &str = "unknown kcmp type";
    /// An ioctl whose argument is not known.
    pub const UNKNOWN_IOCTL: &str = "unknown ioctl";
    /// A prctl option whose argument is not known.
    pub const UNKNOWN_PRCTL: &str = "unknown prctl option";
    /// A mount configuration command that is not known.
    pub const UNKNOWN_FSCONFIG: &str = "unknown fsconfig command";
    /// A landlock rule that is not known.
    pub const UNKNOWN_LANDLOCK: &str = "unknown landlock rule";
}

/// What a row says about its route.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// Whatever the arguments.
    Always(Route),
    /// [`Route::Here`] when the test holds, which the filter decides by itself; else as the function says,
    /// which never says Here.
    HereIf(Test, fn(&[u64; 6]) -> Route, &'static str),
    /// As the function says, which never says Here. The words are for people.
    By(fn(&[u64; 6]) -> Route, &'static str),
}

/// What the filter can test: the low 32 bits of one argument.
#[derive(Debug, Clone, Copy)]
pub enum Test {
    /// Under the mask they are the value.
    Masked {
        /// The argument.
        arg: u8,
        /// Bits that count.
        mask: u32,
        /// What they must be.
        value: u32,
    },
    /// They are one of these.
    OneOf {
        /// The argument.
        arg: u8,
        /// The values.
        values: &'static [u32],
    },
}

impl Test {
    /// Does it hold?
    #[must_use]
    pub fn holds(&self, args: &[u64; 6]) -> bool {
        match *self {
            Self::Masked { arg, mask, value } => args[usize::from(arg)] as u32 & mask == value,
            Self::OneOf { arg, values } => values.contains(&(args[usize::from(arg)] as u32)),
        }
    }
}

/// Where this call runs. A number without a row does not exist: ENOSYS.
#[must_use]
pub fn route(nr: u32, args: &[u64; 6]) -> Route {
    let Some(row) = table::row(nr) else { return Route::Refuse(libc::ENOSYS) };
    match row.rule {
        Rule::Always(route) => route,
        Rule::HereIf(test, _, _) if test.holds(args) => Route::Here,
        Rule::HereIf(_, by, _) | Rule::By(by, _) => by(args),
    }
}

/// Whether this call waits, and does so on the node that the program is on: its kernel alone knows of an interruption.
#[must_use]
pub fn waits_here(nr: u32, args: &[u64; 6]) -> bool {
    route(nr, args) == Route::Here && table::row(nr).is_some_and(|row| row.wait.is_some())
}
