//! Messages between mexec, the home half and the away half.
//!
//! ```text
//!  mexec ══ Unix socket ══▶ home half ══ link between the nodes ══▶ away half
//!        JobRequest ─▶                ExecRequest ─▶
//!        ◀─ ExecReply                 ◀─ ExecReply
//!        ◀════ streams, credit, signals: relayed unchanged ════▶
//! ```
//! A link between nodes carries one command at a time, and is reused if the command's end was
//! reported. A stream's bytes are sent within a credit ([`STREAM_CREDIT`]), so that a slow reader
//! of one stream blocks neither the other streams nor signals.

use serde::{Deserialize, Serialize};
use tern_control::Refusal;
use tern_control::shared::SharedDirId;
use tern_ids::{Credentials, NodeId};

/// The protocol version of the two halves, which must be equal.
pub const VERSION: u16 = 2;

/// The kinds of frames, on the socket and on the link.
pub mod kind {
    /// [`JobRequest`](super::JobRequest), from mexec to the home half.
    pub const JOB_REQUEST: u8 = 1;
    /// [`ExecRequest`](super::ExecRequest), from the home half to the away half.
    pub const EXEC_REQUEST: u8 = 2;
    /// [`ExecReply`](super::ExecReply), in the opposite direction.
    pub const EXEC_REPLY: u8 = 3;
    /// Bytes of a stream, in either direction.
    pub const DATA: u8 = 4;
    /// The stream has ended; or, sent against its direction, its reader has closed it.
    pub const END: u8 = 5;
    /// Returns credit: this number (`u32`) of the stream's bytes was consumed, and as many more may
    /// be sent.
    pub const CREDIT: u8 = 6;
    /// [`Signal`](super::Signal) for the command.
    pub const SIGNAL: u8 = 7;
    /// [`WindowSize`](super::WindowSize): the terminal was resized.
    pub const WINDOW: u8 = 8;
    /// A heartbeat.
    pub const HEARTBEAT: u8 = 9;
}

/// Credit of a stream: the maximum number of its bytes in flight, and the maximum that each side
/// buffers.
pub const STREAM_CREDIT: usize = 256 << 10;

/// The maximum number of a stream's bytes in one frame.
pub const MAX_DATA_LEN: usize = 64 << 10;

/// The stream number of standard input; 1 and 2 are standard output and error.
pub const STDIN: u8 = 0;

/// An argument, a variable or a path: any bytes but zero.
pub type Bytes = Vec<u8>;

/// A request of `mexec` to place a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRequest {
    /// The command.
    pub task: Task,
    /// The nodes that it may run on.
    pub nodes: NodeChoice,
    /// If its node is lost, it may be run again on another one.
    pub repeatable: bool,
    /// The name under which statistics of such commands are kept, such as their run time.
    pub class: String,
}

/// The nodes that a command may run on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeChoice {
    /// The best node of all, this one included. This node is preferred while it is idle.
    Best,
    /// The best of these nodes. Nodes that are blocked or have sent no load are included, dead
    /// nodes are not.
    Among(Vec<NodeId>),
}

/// A command, and everything that it inherits from its caller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The program, searched in `PATH` if it contains no slash.
    pub program: Bytes,
    /// Its arguments, the first of which is its own name.
    pub arguments: Vec<Bytes>,
    /// `NAME=VALUE`.
    pub environment: Vec<Bytes>,
    /// Its working directory.
    pub directory: Bytes,
    /// As umask(2).
    pub umask: u32,
    /// Resource, soft and hard limit, as for setrlimit(2).
    pub limits: Vec<(u32, u64, u64)>,
    /// As for setpriority(2): -20 to 19.
    pub nice: i32,
    /// The ignored signals, as a bit mask: bit 0 is signal 1.
    pub ignored_signals: u64,
    /// The blocked signals, as a bit mask.
    pub blocked_signals: u64,
    /// The pid that it gets if the kernel allows that: its caller's pid. 0 stands for the pid that
    /// its init has outside the pid namespace, which is unique on the node.
    pub pid: i32,
    /// The size of its terminal, if it gets one.
    pub terminal: Option<WindowSize>,
    /// Whether standard input is forwarded; else it is /dev/null.
    pub forwards_stdin: bool,
    /// Whether standard output and error are the same file.
    pub merges_stderr: bool,
    /// Whether it gets a private directory for temporary files (`TMPDIR`) on its node, which is
    /// removed with it.
    pub private_tmp: bool,
}

impl Task {
    /// The command line for display, of at most `max_chars` characters. For a shell with `-c` it is
    /// the shell's script.
    #[must_use]
    pub fn summary(&self, max_chars: usize) -> String {
        let words: Vec<_> = self.arguments.iter().map(|word| String::from_utf8_lossy(word)).collect();
        let is_shell = words.first().is_some_and(|name| name.ends_with("sh"));
        let line = match &words[..] {
            [_, option, line, ..] if is_shell && option.starts_with('-') && option.ends_with('c') => {
                line.to_string()
            }
            words => words.join(" "),
        };
        let plain = line.chars().map(|c| if c.is_control() { ' ' } else { c });
        plain.take(max_chars).collect::<String>().trim().to_owned()
    }
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters in each.
    pub columns: u16,
}

/// A signal to the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal {
    /// Its number.
    pub number: i32,
    /// Send it to the command's whole process group, as a terminal does.
    pub group: bool,
}

/// A request of the home half to the away half.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecRequest {
    /// The first request on each connection.
    Hello {
        /// [`VERSION`].
        version: u16,
        /// Home's directories of shared file systems. Those that the away node has too are used
        /// directly by commands.
        shared: Vec<SharedDirId>,
    },
    /// Run this command now, if a slot is free, with the credentials that home's kernel reports for
    /// the caller.
    Run(Box<Task>, Credentials),
    /// Reply when there is a slot for this user.
    WaitForSlot {
        /// The user.
        uid: u32,
        /// The user's usage of other nodes.
        usage: UserUsage,
    },
    /// The usage of the waiting user has changed. May arrive when the user does not wait any more.
    UpdateUsage(UserUsage),
}

/// A user's usage of the nodes, as counted by the user's home node. In a request to a node it
/// excludes that node's commands. Slots are assigned to the user with the least usage first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UserUsage {
    /// Number of running commands.
    pub running: u32,
    /// Average CPU use over the last ten minutes, in millionths of a standard CPU.
    pub recent_cpu: u32,
}

/// A reply about a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ExecReply {
    /// To [`ExecRequest::Hello`].
    HelloOk,
    /// To [`ExecRequest::Run`]: all slots are taken.
    NoSlot,
    /// To [`ExecRequest::WaitForSlot`]: a slot is free, and reserved for a moment.
    SlotOffered,
    /// It cannot be run. Nothing was done.
    Refused(Refusal),
    /// mexec shall execute the command itself, since this node is the best one.
    RunLocally,
    /// It runs on this node.
    Started(NodeId),
    /// It could not be started: the step that failed, and its errno.
    StartFailed(StartFailure, i32),
    /// It has ended, with everything that it has started. All of its output was sent before.
    Exited(ExitReport),
    /// Its node is lost. The command may have had effects until then.
    NodeLost(NodeId),
    /// The node where it will run, and why that node was chosen. Sent before relayed replies, and
    /// only if requested with [`WANTS_PROGRESS`].
    Placed(NodeId, PlacementReason),
    /// It does not run yet. Sent only if requested with [`WANTS_PROGRESS`].
    Pending(PendingReason),
}

/// In the stream field of a [`kind::JOB_REQUEST`] frame: the caller requests [`ExecReply::Placed`]
/// and [`ExecReply::Pending`].
pub const WANTS_PROGRESS: u8 = 1;

/// Why a command runs on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementReason {
    /// This node was idle.
    Idle,
    /// Commands of this class are too short to be worth sending to another node.
    Short,
    /// The caller named the node, alone or among others.
    Named,
    /// The command was expected to end first there.
    Best,
    /// All nodes were full, and this one had the first free slot.
    FirstSlot,
    /// It was run again after this node was lost.
    Requeued(NodeId),
}

/// Why a command does not run yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PendingReason {
    /// The maximum number of placement searches for this user is running.
    SearchLimit,
    /// It waits for this node's reply.
    NodeReply(NodeId),
    /// It waits for a slot on one of these nodes.
    Slot(Vec<NodeId>),
}

/// The step that failed when a command was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartFailure {
    /// Entering its directory.
    Directory,
    /// Executing its program.
    Program,
    /// Setting up its process: limits, signals, identity, …
    Setup,
}

/// How a command has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    /// The wait status, as of wait(2).
    pub status: i32,
    /// CPU time of the command and of the children that it has waited for, in microseconds.
    pub cpu_us: u64,
    /// Microseconds from its start to its end.
    pub wall_us: u64,
}

#[cfg(test)]
mod tests {
    use crate::hostile::task;

    #[test]
    fn summary_is_the_command_line_without_control_characters() {
        assert_eq!(task(&["/bin/sh", "-c", "gcc -c x.c\n"]).summary(99), "gcc -c x.c");
        assert_eq!(task(&["bash", "-ec", "a\u{1b}[2J", "b"]).summary(99), "a [2J");
        assert_eq!(task(&["gcc", "-c", "x.c"]).summary(6), "gcc -c");
    }
}
