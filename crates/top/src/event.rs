//! Events, and the effects with which the program reacts.

use crate::request::TopError;
use ratatui::crossterm::event::KeyEvent;
use std::time::Duration;
use tern_control::{Destination, Reply, Request};
use tern_ids::{HomePid, NodeId};

/// An event.
#[derive(Debug, Clone, PartialEq)]
pub enum UiEvent {
    /// A key was pressed.
    Key(KeyEvent),
    /// The terminal has this many columns and rows now.
    Size(u16, u16),
    /// The time since the start. Sent once per round of the event loop; starts due queries.
    Time(Duration),
    /// The daemon has replied.
    Reply(Query, Result<Reply, TopError>),
    /// An effect other than a query has failed, or has succeeded with a message.
    ActionDone(Result<String, TopError>),
    /// The program is asked to stop (`SIGTSTP`).
    Stop,
    /// The program was stopped and has been continued (`SIGCONT`).
    Continue,
    /// A thread has panicked; the terminal has been restored.
    Panicked,
    /// The program is asked to end by this signal.
    Terminate(i32),
}

/// A query to the daemon; it also identifies the reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Query {
    /// The state of the cluster.
    Cluster,
    /// The commands placed from this node; sent after each `Cluster`.
    Placed,
    /// The processes of a node; `None` for this one.
    Processes(Option<NodeId>),
    /// Move a process.
    Move {
        /// A process of this node.
        pid: HomePid,
        /// Its program.
        command: String,
        /// The destination.
        to: Destination,
    },
}

impl Query {
    /// The query as a request to the daemon.
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

/// An action of the event loop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Query the daemon; the reply arrives as an event.
    Query(Query),
    /// Send a signal to a process of this node.
    Signal {
        /// The process.
        pid: HomePid,
        /// Its program.
        command: String,
        /// The signal's number.
        signal: i32,
    },
    /// Stop this program's whole process group, as ^Z does.
    StopAll,
    /// Restore the terminal and stop.
    Stop,
    /// Redraw the whole screen.
    Redraw,
    /// End successfully.
    Quit,
    /// End by this signal.
    EndBySignal(i32),
    /// End after a panic.
    Panicked,
}
