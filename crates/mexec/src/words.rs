//! What the three who run a command say to each other.
//!
//! ```text
//!  mexec ══ Unix socket ══▶ home half ══ link between the nodes ══▶ away half
//!        Order ─▶                     Ask ─▶
//!        ◀─ Said                      ◀─ Said
//!        ◀════ streams, credit, signals: passed on as they are ════▶
//! ```
//! A connection between nodes has one command at a time, and is used again when that has ended well. A stream's bytes are
//! sent within a credit ([`CREDIT`]), so that who takes nothing of one stream holds up neither the others nor signals.

use serde::{Deserialize, Serialize};
use tern_control::Refusal;
use tern_control::shared::SharedRoot;
use tern_ids::NodeId;

/// The version of what the two halves say. Both must have the same.
pub const VERSION: u16 = 2;

/// The kinds of pieces, on the socket and on the link.
pub mod kind {
    /// [`Order`](super::Order), from mexec to the home half.
    pub const ORDER: u8 = 1;
    /// [`Ask`](super::Ask), from the home half to the away half.
    pub const ASK: u8 = 2;
    /// [`Said`](super::Said), the other way.
    pub const SAID: u8 = 3;
    /// Bytes of a stream, either way.
    pub const DATA: u8 = 4;
    /// With the stream: no more bytes come, or, against its direction, nobody takes any.
    pub const END: u8 = 5;
    /// With the stream and a `u32`: so many of its bytes are taken, and as many more may be sent.
    pub const TAKEN: u8 = 6;
    /// [`Signal`](super::Signal), to the command.
    pub const SIGNAL: u8 = 7;
    /// [`Window`](super::Window): the terminal has another size.
    pub const WINDOW: u8 = 8;
    /// That the sender is there.
    pub const BEAT: u8 = 9;
}

/// Bytes of one stream that may be under way, and that each side holds at most.
pub const CREDIT: usize = 256 << 10;

/// The most bytes of a stream in one piece.
pub const PIECE: usize = 64 << 10;

/// Standard input; 1 and 2 are output and error.
pub const INPUT: u8 = 0;

/// Text of the system: any bytes but zero.
pub type Bytes = Vec<u8>;

/// What `mexec` wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// What to run.
    pub task: Task,
    /// Where.
    pub r#where: Where,
    /// If the node that it runs on is lost it may be run again elsewhere.
    pub repeatable: bool,
    /// What is known of such commands is kept under this name: how long they took.
    pub class: String,
}

/// The nodes that a command may run on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Where {
    /// The best of all, this one included, which is preferred while it has nothing to do.
    Best,
    /// The best of these, in whatever state they are.
    Among(Vec<NodeId>),
}

/// A command, and all that it inherits of its caller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The program, looked for in `PATH` if there is no slash in it.
    pub program: Bytes,
    /// Its arguments, its own name first.
    pub arguments: Vec<Bytes>,
    /// `NAME=VALUE`.
    pub environment: Vec<Bytes>,
    /// Where it begins.
    pub directory: Bytes,
    /// As umask(2).
    pub umask: u32,
    /// Resource, soft and hard limit, as in setrlimit(2).
    pub limits: Vec<(u32, u64, u64)>,
    /// As getpriority(2): -20 to 19.
    pub nice: i32,
    /// Signals that are ignored and that are blocked, as bits: 1 for signal 1.
    pub signals: (u64, u64),
    /// The number that it gets, if that can be: its caller's; 0 for one that nobody else has where it runs.
    pub pid: i32,
    /// Its terminal's size, if it is to have one.
    pub terminal: Option<Window>,
    /// Something may come from standard input; else that is /dev/null.
    pub input: bool,
    /// Standard output and error are one file.
    pub joined: bool,
    /// Where it runs it has a place of its own for temporary files (`TMPDIR`), which goes with it.
    pub scratch: bool,
}

impl Task {
    /// The command as people read it, in so many characters: of a shell's the line that it was given.
    #[must_use]
    pub fn shown(&self, most: usize) -> String {
        let words: Vec<_> = self.arguments.iter().map(|word| String::from_utf8_lossy(word)).collect();
        let is_shell = words.first().is_some_and(|name| name.ends_with("sh"));
        let line = match &words[..] {
            [_, option, line, ..] if is_shell && option.starts_with('-') && option.ends_with('c') => {
                line.to_string()
            }
            words => words.join(" "),
        };
        let plain = line.chars().map(|c| if c.is_control() { ' ' } else { c });
        plain.take(most).collect::<String>().trim().to_owned()
    }
}

/// Who runs it: user, group, other groups. The caller's home has it from its kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// The others.
    pub groups: Vec<u32>,
}

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Lines.
    pub rows: u16,
    /// Characters in each.
    pub columns: u16,
}

/// A signal for the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal {
    /// Its number.
    pub number: i32,
    /// For its whole process group, as from a terminal.
    pub group: bool,
}

/// What the home half asks of the away half.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// First on each connection.
    Begin {
        /// [`VERSION`].
        version: u16,
        /// What its home shares with others: commands use that directly where it is there too.
        shared: Vec<SharedRoot>,
    },
    /// Run this now, if there is room.
    Run(Box<Task>, Who),
    /// Say when there is room for this user, who has so much elsewhere.
    Wait {
        /// The user.
        uid: u32,
        /// What he has.
        has: Share,
    },
    /// The user who waits has so much elsewhere by now. It may come when he waits no more.
    Has(Share),
}

/// What a user has of the nodes, as his home counts it. Who has least is given room first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Share {
    /// So many of his commands run.
    pub running: u32,
    /// Millionths of a standard CPU that his commands had, on average of the last ten minutes.
    pub lately: u32,
}

/// What is said of a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Said {
    /// To [`Ask::Begin`].
    Begun,
    /// To [`Ask::Run`]: not now, as many commands run as are to run here.
    Full,
    /// To [`Ask::Wait`]: now, if it is asked for soon.
    Room,
    /// It cannot be run. Nothing was.
    Refused(Refusal),
    /// mexec is to become the command itself: it is best run here.
    Here,
    /// It runs on this node.
    Started(NodeId),
    /// It could not be begun.
    NotStarted(Failed, i32),
    /// It has ended, and all that it had started as well; all its output has been sent before.
    Ended(Ended),
    /// Its node is lost, and whatever it has done until then is done.
    Lost(NodeId),
    /// Only to who is [`TOLD`], and before all else: it will run on this node, and why there.
    Chosen(NodeId, Why),
    /// Only to who is [`TOLD`]: it does not run yet.
    Waits(Wait),
}

/// As the stream of [`kind::ORDER`]: the caller wants to hear of [`Said::Chosen`] and [`Said::Waits`].
pub const TOLD: u8 = 1;

/// Why a command runs where it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Why {
    /// This node had nothing to do.
    Idle,
    /// Such commands are too short to be sent anywhere.
    Short,
    /// Its caller named the node, alone or among others.
    Named,
    /// A command got most of a CPU there.
    Best,
    /// All had as much as they take; this one had room first.
    Room,
    /// It ran on this node before, which was lost.
    Again(NodeId),
}

/// What a command waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wait {
    /// Others of its user, for which nodes are looked for first.
    Turn,
    /// This node's answer.
    Node(NodeId),
    /// Room on one of these.
    Room(Vec<NodeId>),
}

/// What failed, with an error number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failed {
    /// Its directory cannot be entered.
    Directory,
    /// Its program cannot be executed.
    Program,
    /// Something of what it is to inherit.
    Setting,
}

/// How a command has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// As wait(2) has it.
    pub status: i32,
    /// Microseconds of CPU time, of it and what it has waited for.
    pub cpu: u64,
    /// Microseconds from its start to its end.
    pub wall: u64,
}

#[cfg(test)]
mod tests {
    use crate::hostile::task;

    #[test]
    fn a_command_is_shown_as_it_was_written() {
        assert_eq!(task(&["/bin/sh", "-c", "gcc -c x.c\n"]).shown(99), "gcc -c x.c");
        assert_eq!(task(&["bash", "-ec", "a\u{1b}[2J", "b"]).shown(99), "a [2J");
        assert_eq!(task(&["gcc", "-c", "x.c"]).shown(6), "gcc -c");
    }
}
