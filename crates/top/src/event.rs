//! What happens to the program, and what it does about it.

use crate::ask::Trouble;
use ratatui::crossterm::event::KeyEvent;
use std::time::Duration;
use tern_control::{Destination, Reply, Request};
use tern_ids::{HomePid, NodeId};

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A key was pressed.
    Key(KeyEvent),
    /// The terminal has this many columns and rows now.
    Size(u16, u16),
    /// So much time has passed since the start; comes before every other event that depends on it.
    Time(Duration),
    /// The daemon has answered.
    Answer(Question, Result<Reply, Trouble>),
    /// An effect other than a question went wrong, or went well and has something to tell.
    Outcome(Result<String, Trouble>),
    /// Somebody asks the program to stop (`SIGTSTP`).
    Stop,
    /// It was stopped, and goes on (`SIGCONT`).
    Continue,
    /// A thread has panicked; the terminal has been given back.
    Panicked,
    /// Somebody asks it to end, by this signal.
    End(i32),
}

/// What is asked of the daemon; it tells answers apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// How the cluster is.
    Cluster,
    /// The commands that are placed from this node; asked with `Cluster`.
    Placed,
    /// The processes of that node, or of this one.
    Processes(Option<NodeId>),
    /// To move this process.
    Move {
        /// A process of this node.
        pid: HomePid,
        /// What it is called.
        command: String,
        /// Where to.
        to: Destination,
    },
}

impl Question {
    /// The same for the daemon.
    #[must_use]
    pub fn request(&self) -> Request {
        match self {
            Self::Cluster => Request::Cluster,
            Self::Placed => Request::Placed,
            Self::Processes(None) => Request::Processes,
            Self::Processes(Some(node)) => Request::ProcessesOf { node: *node },
            Self::Move { pid, to, .. } => Request::Migrate { pid: *pid, to: *to },
        }
    }
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Ask the daemon; the answer comes as an event.
    Ask(Question),
    /// Send a signal to a process of this node.
    Signal {
        /// The process.
        pid: HomePid,
        /// What it is called.
        command: String,
        /// The signal's number.
        signal: i32,
    },
    /// Stop this program and those started with it, as ^Z does.
    StopAll,
    /// Give the terminal back, and stop.
    Stop,
    /// Draw everything anew.
    Redraw,
    /// End well.
    Quit,
    /// End by this signal.
    End(i32),
    /// End, for what is a bug.
    Panicked,
}
