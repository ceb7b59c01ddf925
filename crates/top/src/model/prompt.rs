//! The text that is being typed in the last line.

use tern_ids::HomePid;

/// A question to the user, and the answer so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The subject of the prompt.
    pub kind: PromptKind,
    /// The text typed so far.
    pub typed: String,
}

/// The subject of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptKind {
    /// The node whose processes to show.
    Node,
    /// The destination of a process of this node.
    Move {
        /// The process.
        pid: HomePid,
        /// Its program.
        command: String,
    },
    /// The signal for a process of this node.
    Signal {
        /// The process.
        pid: HomePid,
        /// Its program.
        command: String,
    },
}

/// The maximum length of an answer, in bytes: that of a host name.
pub const MAX_ANSWER_LEN: usize = 255;

impl Prompt {
    /// A prompt without an answer.
    #[must_use]
    pub fn new(kind: PromptKind) -> Self {
        Self { kind, typed: String::new() }
    }

    /// The text of the question.
    #[must_use]
    pub fn text(&self) -> String {
        match &self.kind {
            PromptKind::Node => "processes of node: ".into(),
            PromptKind::Move { pid, command } => format!("move {pid} {command} to node, or home: "),
            PromptKind::Signal { pid, command } => format!("signal for {pid} {command} (Enter for TERM): "),
        }
    }
}
