//! Symbolic node names below `/mfs`. Their meaning depends on the process that uses them.

use serde::{Deserialize, Serialize};

/// A symbolic node name. Names and meanings are those of MFS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SymbolicNode {
    /// `here`: the node where the process runs.
    Here,
    /// `selected`: the node last written to its `selected` file, by it or by an ancestor before the
    /// fork.
    Selected,
    /// `magic`: the node where it, or an ancestor before the fork, last created a file below
    /// `magic`.
    Magic,
    /// `lastexec`: the node where it ran when it last executed a program.
    LastExec,
}
