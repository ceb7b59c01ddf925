//! What is being typed in the last line.

use tern_ids::HomePid;

/// A question to the user, and the answer so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// What is asked.
    pub about: About,
    /// What has been typed.
    pub typed: String,
}

/// What a prompt asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum About {
    /// Which node's processes.
    Node,
    /// Where this process of this node is to go.
    Move {
        /// The process.
        pid: HomePid,
        /// What it is called.
        command: String,
    },
    /// Which signal this process of this node is to get.
    Signal {
        /// The process.
        pid: HomePid,
        /// What it is called.
        command: String,
    },
}

/// The longest answer: a host name.
pub const MOST: usize = 255;

impl Prompt {
    /// A question without an answer.
    #[must_use]
    pub fn new(about: About) -> Self {
        Self { about, typed: String::new() }
    }

    /// What is asked, for the screen.
    #[must_use]
    pub fn question(&self) -> String {
        match &self.about {
            About::Node => "processes of node: ".into(),
            About::Move { pid, command } => format!("move {pid} {command} to node, or home: "),
            About::Signal { pid, command } => format!("signal for {pid} {command} (Enter for TERM): "),
        }
    }
}
