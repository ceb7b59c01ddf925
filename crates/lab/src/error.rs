//! What can go wrong with a lab.

use crate::options::Name;
use std::io;

/// Why the lab did not do it. Unless a variant says otherwise, a failed [`crate::Lab::up`] leaves nothing behind.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The caller is not root.
    #[error(
        "the lab needs root, for control groups, network links and pid namespaces that a user namespace \
         does not give; try sudo"
    )]
    NotRoot,
    /// An option or argument makes no sense; the text says which.
    #[error("{0}")]
    BadOption(String),
    /// A program that the lab runs is not installed.
    #[error("the program {program} is missing; Debian has it in the package {package}")]
    MissingProgram {
        /// Its name.
        program: &'static str,
        /// Where Debian has it.
        package: &'static str,
    },
    /// No binary that can be started as init.
    #[error("no program tern beside {beside}; build it with cargo build, or name it in TERN_LAB_HELPER")]
    NoHelper {
        /// Where it was looked for.
        beside: String,
    },
    /// There is no such lab.
    #[error("no lab named {0} is up; start it with: tern lab up --lab {0}")]
    NotUp(Name),
    /// There is one already.
    #[error("a lab named {0} is up already; take it down with: tern lab down --lab {0}")]
    AlreadyUp(Name),
    /// The node's number is not in this lab.
    #[error("there is no node {node} in this lab of {nodes}")]
    NoNode {
        /// What was asked for.
        node: u16,
        /// How many there are.
        nodes: u16,
    },
    /// The node was killed.
    #[error("node {0} is down; bring it back with: tern lab restart {0}")]
    NodeDown(u16),
    /// The kernel or the machine's set-up lacks something.
    #[error("{0}")]
    Unsupported(String),
    /// One of the lab's own processes failed.
    #[error("{what} failed: {message}")]
    Failed {
        /// Which.
        what: String,
        /// What it said.
        message: String,
    },
    /// A signal asked for the end.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
    /// Some processes did not die within the time allowed. They, and their control group, are still there.
    #[error("these processes of lab {lab} do not die: {pids:?}; try tern lab down again")]
    Undying {
        /// The lab.
        lab: Name,
        /// As the machine numbers them.
        pids: Vec<i32>,
    },
    /// The kernel said no.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What it said.
        source: io::Error,
    },
}

/// The crate's results.
pub(crate) type Result<T> = std::result::Result<T, LabError>;

/// Says what was tried when it fails.
pub(crate) trait Tried<T> {
    /// `what` follows the word "cannot".
    fn tried(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Tried<T> for std::result::Result<T, E> {
    fn tried(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| LabError::Io { what: what(), source: e.into() })
    }
}
