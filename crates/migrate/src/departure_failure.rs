//! Why a guest did not depart.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a guest did not depart from its node. It continues to run there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DepartureFailure {
    /// It can depart in a moment: home asks again.
    Busy(Busy),
    /// The move has failed. The text is shown to users.
    Failed(String),
}

/// Why a process cannot depart yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Busy {
    /// It is a new child that does not run yet.
    BeingCreated,
    /// One of its threads is forking.
    Forking,
    /// Its first thread is ending, and others continue.
    FirstThreadEnding,
    /// Its deputy is making a call that no signal interrupts.
    UninterruptibleCall,
}

impl Busy {
    /// The reason as shown to users.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::BeingCreated => "busy: it is being created; try again",
            Self::Forking => "busy: it is forking; try again",
            Self::FirstThreadEnding => "busy: its first thread is ending; try again",
            Self::UninterruptibleCall => {
                "busy: one of its calls at home cannot be interrupted and has not ended; try again"
            }
        }
    }
}

impl fmt::Display for DepartureFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy(busy) => f.write_str(busy.reason()),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl From<Busy> for DepartureFailure {
    fn from(busy: Busy) -> Self {
        Self::Busy(busy)
    }
}

impl From<String> for DepartureFailure {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

impl From<&str> for DepartureFailure {
    fn from(why: &str) -> Self {
        Self::Failed(why.into())
    }
}
