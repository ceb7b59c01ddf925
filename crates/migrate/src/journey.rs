//! The three journeys, and their phases in order; all sides share these.

use serde::{Deserialize, Serialize};
use std::fmt;

/// From where to where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Journey {
    /// From home to a node.
    Out,
    /// From a node to another.
    Onward,
    /// From a node back home.
    Home,
}

/// How far a migration has come. A failure before `HandOver` leaves the process where it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// The destination is asked.
    Offer,
    /// It has made an empty guest and been told what it will hold.
    Prepare,
    /// Memory is sent while the process runs.
    Precopy,
    /// The process stands still; the rest is sent.
    Freeze,
    /// Home has decided for the destination: the point of no return.
    HandOver,
    /// It is being resumed there.
    Resume,
    /// What is left at the old place is removed.
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
