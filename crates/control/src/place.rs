//! The nodes that a process means by the names below `/mfs` which go by who asks.

use serde::{Deserialize, Serialize};

/// Such a name. Names and meanings are MFS's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// `here`: where it runs.
    Here,
    /// `selected`: what was written to its `selected`, or to that of an ancestor before this forked.
    Selected,
    /// `magic`: where it, or an ancestor before this forked, has last made a file below that name.
    Magic,
    /// `lastexec`: where it ran when it last executed a program.
    LastExec,
}
