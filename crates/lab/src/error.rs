//! The errors of this crate.

use crate::lab::options::LabName;
use std::io;

/// Why an operation on a lab failed. Unless a variant says otherwise, a failed [`crate::Lab::up`]
/// leaves nothing.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The caller is not root.
    #[error(
        "the lab needs root, for control groups, network links and pid namespaces that a user namespace \
         does not give; try sudo"
    )]
    NotRoot,
    /// An option or argument is invalid; the text says which.
    #[error("{0}")]
    BadOption(String),
    /// A program that the lab runs is not installed.
    #[error("the program {program} is missing; Debian has it in the package {package}")]
    MissingProgram {
        /// The program's name.
        program: &'static str,
        /// The Debian package that contains it.
        package: &'static str,
    },
    /// No binary was found that can be started as init.
    #[error("no program tern beside {beside}; build it with cargo build, or name it in TERN_LAB_HELPER")]
    NoHelper {
        /// The path beside which the lab searched.
        beside: String,
    },
    /// No lab of that name exists.
    #[error("no lab named {0} is up; start it with: tern lab up --lab {0}")]
    NotUp(LabName),
    /// A lab of that name exists already.
    #[error("a lab named {0} is up already; take it down with: tern lab down --lab {0}")]
    AlreadyUp(LabName),
    /// The node's number is not in this lab.
    #[error("there is no node {node} in this lab of {nodes}")]
    NoNode {
        /// The requested node.
        node: u16,
        /// Number of nodes in the lab.
        nodes: u16,
    },
    /// The node is down.
    #[error("node {0} is down; bring it back with: tern lab restart {0}")]
    NodeDown(u16),
    /// The kernel or the machine's configuration lacks a feature.
    #[error("{0}")]
    Unsupported(String),
    /// One of the lab's helper processes failed.
    #[error("{what} failed: {message}")]
    Failed {
        /// The process.
        what: String,
        /// Its error message.
        message: String,
    },
    /// A signal interrupted the operation.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
    /// Some processes did not die in time. They, and their control group, still exist.
    #[error("these processes of lab {lab} do not die: {pids:?}; try tern lab down again")]
    Unkillable {
        /// The lab.
        lab: LabName,
        /// Their pids on the machine.
        pids: Vec<i32>,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// The attempted operation.
        what: String,
        /// The error from the kernel.
        source: io::Error,
    },
}

/// A result with this crate's error.
pub(crate) type Result<T> = std::result::Result<T, LabError>;

/// Adds the attempted operation to an I/O error.
pub(crate) trait WithContext<T> {
    /// `what` follows the word "cannot" in the message.
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> WithContext<T> for std::result::Result<T, E> {
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| LabError::Io { what: what(), source: e.into() })
    }
}
