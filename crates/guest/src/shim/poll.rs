//! Waiting for events: the links, the guests' seccomp traps and ptrace stops, and requests from the
//! node's daemon.

use super::Shim;
use super::home_link::HEARTBEAT_INTERVAL;
use crate::process::Guest;
use crate::process::shared::State;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_tracee::listener::Listener;
use tern_wire::Link;

/// A link, and the events to poll it for.
fn polled(link: &Link) -> (BorrowedFd<'_>, i16) {
    (link.as_fd(), if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN })
}

impl Shim {
    /// Waits for an event, or until something is due.
    pub(super) fn poll(&mut self) -> anyhow::Result<()> {
        let listeners = self.listeners();
        let must_continue = |guest: &Guest| match guest.process.state {
            State::Departing(_) => true,
            State::Running => guest.process.fastpath.awaits_stop(),
            _ => false,
        };
        let busy = self.members.iter().any(must_continue);
        let links = || self.home.polled().into_iter().chain(self.source_links.iter().map(|s| &s.link));
        // Home's link comes first: whether it is readable is taken from the beginning of `ready`.
        let mut fds: Vec<(BorrowedFd<'_>, i16)> = links().map(polled).collect();
        for guest in self.members.iter() {
            if let State::Departing(departing) = &guest.process.state {
                fds.extend(departing.link.as_ref().map(polled));
            }
        }
        fds.push((self.workers.as_fd(), libc::POLLIN));
        fds.extend(self.departures.unsent_links().map(|link| (link.as_fd(), libc::POLLOUT)));
        let uses = fds.len();
        for guest in self.members.iter() {
            fds.extend(guest.process.connections.uses().map(|in_use| (in_use.as_fd(), libc::POLLRDHUP)));
        }
        // These come last: `is_trap_pending` is read from the end of `ready` below.
        fds.extend(listeners.iter().map(|l| (l.as_fd(), libc::POLLIN)));
        let has_deferred_call = listeners.iter().any(|l| l.has_deferred_call());
        let buffered = has_deferred_call || links().any(Link::has_frame);
        let full = self.home.polled().is_some_and(Link::wants_write);
        let due = self.members.iter().filter_map(Guest::due).min();
        let due = due.map(|due| due.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let timeout =
            if buffered || (busy && !full) { Duration::from_millis(1) } else { HEARTBEAT_INTERVAL / 2 };
        let timeout = due.map_or(timeout, |due| due.min(timeout));
        let ready = self.control_socket.wait(&fds, if buffered { Duration::ZERO } else { timeout })?;
        // Most turns serve either the link to home or the traps. The other one is then not read.
        let is_home_readable =
            buffered || !self.home.is_connected() || ready.first().copied().unwrap_or(true);
        self.is_trap_pending = has_deferred_call || ready.iter().rev().take(listeners.len()).any(|r| *r);
        self.home.set_readable(is_home_readable);
        let others = ready.len().saturating_sub(listeners.len());
        if ready.get(uses..others).is_some_and(|uses| uses.contains(&true)) {
            self.members.iter_mut().for_each(|guest| guest.process.connections.reset_lost());
        }
        Ok(())
    }

    /// The notification fds of all guests, each once.
    pub(super) fn listeners(&self) -> Vec<Rc<Listener>> {
        let mut all: Vec<Rc<Listener>> = Vec::new();
        for listener in self.members.iter().filter_map(|guest| guest.process.listener.as_ref()) {
            if !all.iter().any(|l| Rc::ptr_eq(l, listener)) {
                all.push(Rc::clone(listener));
            }
        }
        all
    }
}
