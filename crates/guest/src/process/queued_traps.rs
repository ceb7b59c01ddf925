//! Traps that wait.

use crate::files::local::{LocalFile, OpenRequest, Opening};
use std::collections::VecDeque;
use std::io;
use tern_tracee::listener::Notification;

/// Traps of a process that wait for another thread's change of a signal action, for an internal
/// call, for a connection, for the opening of a local file, or for the program's code to be restored.
#[derive(Debug, Default)]
pub(crate) struct QueuedTraps {
    traps: VecDeque<Notification>,
    /// The opening of a local file that one of them waits for.
    opening: Option<Opening>,
    /// The number of openings so far.
    openings: u64,
}

impl QueuedTraps {
    /// Has a trap wait.
    pub(crate) fn push(&mut self, trap: Notification) {
        self.traps.push_back(trap);
    }

    /// The number of traps that wait.
    pub(crate) fn len(&self) -> usize {
        self.traps.len()
    }

    /// Takes the next trap, unless a file is still being opened.
    pub(crate) fn pop(&mut self) -> Option<Notification> {
        if self.opening.as_ref().is_some_and(Opening::is_waiting) { None } else { self.traps.pop_front() }
    }

    /// Whether a thread, given by its tid on this node, waits.
    pub(crate) fn has_trap_of(&self, host: i32) -> bool {
        self.traps.iter().any(|trap| trap.pid == host)
    }

    /// Removes the trap of a thread, given by its tid on this node.
    pub(crate) fn take_trap_of(&mut self, host: i32) -> Option<Notification> {
        let at = self.traps.iter().position(|trap| trap.pid == host)?;
        // The call traps again, and then its file is opened anew if that is still needed.
        self.opening = None;
        self.traps.remove(at)
    }

    /// Has a trap wait until a local file, which is to be opened under this descriptor, is open.
    pub(crate) fn await_opening(&mut self, trap: Notification, fd: i32, request: OpenRequest) {
        self.openings += 1;
        self.opening = Some(Opening::new(fd, self.openings, request));
        self.push(trap);
    }

    /// The number of the opening, and the request to open the file. Each request is returned only
    /// once.
    pub(crate) fn start_file_open(&mut self) -> Option<(u64, OpenRequest)> {
        let opening = self.opening.as_mut()?;
        Some((opening.number, opening.start()?))
    }

    /// Stores the outcome of the opening with this number. Returns false if no trap waits for it.
    pub(crate) fn finish_file_open(&mut self, number: u64, opened: io::Result<LocalFile>) -> bool {
        let Some(opening) = self.opening.as_mut().filter(|opening| opening.number == number) else {
            return false;
        };
        opening.finish(opened);
        true
    }

    /// Takes the outcome of the opening for this descriptor, if it is over.
    pub(crate) fn take_opened(&mut self, fd: i32) -> Option<io::Result<LocalFile>> {
        self.opening.take_if(|opening| opening.is_done_for(fd)).map(Opening::into_result)
    }
}
