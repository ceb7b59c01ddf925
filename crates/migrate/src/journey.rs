//! The three journeys, and the phases of a migration in order. All parties share these.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a migration leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Journey {
    /// From home to a node.
    Out,
    /// From a node to another.
    Onward,
    /// From a node back home.
    Home,
}

/// Progress of a migration. A failure before `HandOver` leaves the process where it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// The destination is asked to accept the process.
    Offer,
    /// The destination makes an empty guest and builds the address space in it.
    Prepare,
    /// Memory is sent while the process runs.
    Precopy,
    /// The process is stopped, and the rest is sent.
    Freeze,
    /// Home commits to the destination: the point of no return.
    HandOver,
    /// The destination resumes the process.
    Resume,
    /// The source's copy is removed.
    CleanUp,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Offer => "offer",
            Self::Prepare => "prepare",
            Self::Precopy => "pre-copy",
            Self::Freeze => "freeze",
            Self::HandOver => "hand-over",
            Self::Resume => "resume",
            Self::CleanUp => "clean-up",
        })
    }
}
