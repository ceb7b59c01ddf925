//! Requests from this node's daemon, and incoming connections.

use super::Shim;
use super::onward::SourceLink;
use crate::files::connections::Moved;
use crate::files::local::LocalFile;
use crate::process::Guest;
use crate::process::shared::{Process, State};
use crate::workers::WorkerEvent;
use std::io;
use std::time::Duration;
use tern_control::shim::{ShimReply, ShimRequest};
use tern_control::{ConnectionRow, ProcessRow, Usage};
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_tracee::cpu::cpu_total_ns;
use tern_wire::Link;

/// How long to wait for home to receive the notice that a guest was killed.
const KILL_NOTICE_TIMEOUT: Duration = Duration::from_millis(500);

impl Shim {
    pub(super) fn serve_daemon_requests(&mut self) {
        while let Some(caller) = self.control_socket.accept() {
            match caller.request() {
                ShimRequest::Processes => caller.reply(&ShimReply::Processes(self.process_rows())),
                ShimRequest::Connections => caller.reply(&ShimReply::Connections(self.connection_rows())),
                ShimRequest::End { why } => {
                    self.kill_all(why);
                    caller.reply(&ShimReply::Done);
                }
                ShimRequest::NodeRemoved { node } => {
                    if *node == self.home.node() {
                        self.kill_all("its home was removed from the cluster");
                        self.is_home_removed = true;
                    }
                    caller.reply(&ShimReply::Done);
                }
                ShimRequest::Owns { .. } => caller.reply(&tern_control::control_socket::not_held()),
                ShimRequest::Connection => {
                    if let Some(socket) = caller.receive_connection() {
                        self.workers.accept(socket);
                    }
                }
                _ => caller.reply(&tern_control::control_socket::not_held()),
            }
        }
    }

    /// Kills all guests on behalf of this node. Home ends the deputies when it receives the notice,
    /// or else when its timeout expires.
    fn kill_all(&mut self, why: &str) {
        for pid in self.members.pids() {
            tracing::warn!(%pid, why, "a guest is killed by this node");
            let message = match self.members.get(pid).map(|guest| &guest.process) {
                // The process can still be resumed at its source.
                Some(Process { state: State::Arriving(_), epoch, .. }) => {
                    Message::Declined(*epoch, why.to_owned())
                }
                _ => Message::KilledByNode(why.to_owned()),
            };
            self.send_home(pid, &message);
            self.kill(pid);
        }
        self.home.drain(KILL_NOTICE_TIMEOUT);
    }

    /// The connections of guests that are on this node, as `mps -n` shows them.
    fn connection_rows(&mut self) -> Vec<ConnectionRow> {
        let (uid, from) = (self.sandbox.uid(), Some(self.home.node()));
        let rows = |guest: &mut Guest| {
            let row = |(fd, local, peer)| ConnectionRow {
                pid: guest.process.pid,
                uid,
                from,
                r#where: None,
                fd,
                local,
                peer: Some(peer),
                reason: String::new(),
                command: guest.command().chars().take(ConnectionRow::MAX_COMMAND).collect(),
            };
            guest.process.connections.here().map(row).collect::<Vec<_>>()
        };
        self.members.iter_mut().flat_map(rows).take(ConnectionRow::MAX_ROWS).collect()
    }

    pub(super) fn process_rows(&mut self) -> Vec<ProcessRow> {
        let usage = |guest: &mut Guest| {
            let demand = guest.measure_demand();
            Usage {
                memory: demand.memory,
                waited_seconds: demand.cpu_wait_ns as f64 / 1e9,
                local_bytes: demand.local_io,
                ..Usage::default()
            }
        };
        let (uid, from) = (self.sandbox.uid(), Some(self.home.node()));
        let row = |guest: &mut Guest| ProcessRow {
            pid: guest.process.pid,
            uid,
            r#where: None,
            from,
            state: match guest.process.state {
                State::Arriving(_) | State::Departing(_) | State::Frozen(_) => "migrating",
                State::Running if guest.process.stop_reasons.is_suspended() => "suspended",
                State::Running => "running",
            }
            .into(),
            cpu_seconds: cpu_total_ns(guest.process.host_pid).map_or(0.0, |ns| ns as f64 / 1e9),
            migrations: u32::try_from(guest.process.epoch.0).unwrap_or(u32::MAX),
            reason: guest.homeward_reason().unwrap_or_default().to_owned(),
            command: guest.command(),
            usage: usage(guest),
            started: None,
        };
        self.members.iter_mut().map(row).collect()
    }

    pub(super) fn handle_worker_events(&mut self) {
        for event in self.workers.events() {
            match event {
                WorkerEvent::Accepted(connection, link) => self.accept_link(connection, *link),
                WorkerEvent::Connected(pid, epoch, link) => self.handle_connected(pid, epoch, link),
                WorkerEvent::Opened(pid, number, opened) => self.handle_opened(pid, number, opened),
                WorkerEvent::ConnectionMoved(pid, number, moved) => self.handle_moved(pid, number, moved),
                WorkerEvent::ReadinessFilesOpened(pid, number, files) => {
                    self.act_on(pid, |guest, home| {
                        let can_continue = guest.process.connections.finish_opening(number, files);
                        if can_continue { guest.handle_queued_traps(home) } else { Ok(()) }
                    });
                }
                WorkerEvent::MappedFilesOpened(user, opened) => self.handle_mapped_files(user, opened),
                WorkerEvent::Unmapped(objects) => self.release_unmapped(&objects),
                WorkerEvent::UnmappedContent(content, guests) => {
                    self.forget_unmapped_content(&content, &guests);
                }
                WorkerEvent::NotAwaited(epochs) => self.end_not_awaited(&epochs),
            }
        }
    }

    /// Has a worker open each file that a guest waits for.
    pub(super) fn start_file_opens(&mut self) {
        for guest in self.members.iter_mut() {
            if let Some((number, request)) = guest.process.queued_traps.start_file_open() {
                self.workers.open_file(guest.process.pid, number, request);
            }
        }
    }

    fn handle_opened(&mut self, pid: HomePid, number: u64, opened: io::Result<LocalFile>) {
        self.act_on(pid, |guest, home| {
            let is_awaited = guest.process.queued_traps.finish_file_open(number, opened);
            if is_awaited { guest.handle_queued_traps(home) } else { Ok(()) }
        });
    }

    /// Has a worker move each connection, and open the readiness files, that a guest waits for.
    pub(super) fn start_connection_moves(&mut self) {
        let awaits = |guest: &Guest| guest.process.connections.must_interrupt();
        let waiting: Vec<HomePid> =
            self.members.iter().filter(|guest| awaits(guest)).map(|guest| guest.process.pid).collect();
        for pid in waiting {
            self.act_on(pid, |guest, home| {
                let is_over = !guest.interrupt_native_calls()?;
                if is_over && guest.process.connections.take_awaited() {
                    guest.handle_queued_traps(home)?;
                }
                Ok(())
            });
        }
        for guest in self.members.iter_mut() {
            if guest.is_in_native_call() && guest.process.connections.must_interrupt() {
                continue;
            }
            if let Some((number, count)) = guest.process.connections.start_opening() {
                let pid = guest.process.pid;
                self.workers.open_readiness_files(pid, number, count, self.start.run_dir.clone());
            }
            if let Some((number, request)) = guest.process.connections.start_move() {
                let place = (self.start.run_dir.clone(), self.home.node());
                self.workers.move_connection(guest.process.pid, number, request, place);
            }
        }
    }

    fn handle_moved(&mut self, pid: HomePid, number: u64, moved: Moved) {
        self.act_on(pid, |guest, home| {
            if let Some(fd) = guest.process.connections.finish_move(number, moved) {
                guest.process.files.add_stale_fd(fd);
            }
            guest.handle_queued_traps(home)
        });
    }

    pub(super) fn accept_link(&mut self, connection: u64, link: Link) {
        if !self.home.is_from_home(&link) {
            self.source_links.push(SourceLink::new(link));
            return;
        }
        if self.home.is_outdated(connection) {
            return;
        }
        // Whatever the previous link had in flight is lost, as if it had broken first.
        self.drop_home_link();
        tracing::debug!("home is connected");
        self.home.connect(connection, link);
        // Home waits for this heartbeat, which shows that the shim is ready.
        self.send_home(HomePid(0), &Message::Heartbeat);
        let pids: Vec<HomePid> = self.members.pids();
        for pid in pids {
            self.announce(pid);
        }
        self.repeat_uncreated();
    }

    /// Reports, on a new link, the state of a guest's threads to home, and repeats pending calls.
    fn announce(&mut self, pid: HomePid) {
        let is_arriving = |guest: &Guest| matches!(guest.process.state, State::Arriving(_));
        if self.members.get(pid).is_some_and(is_arriving) {
            // Home cancelled this migration when the link broke.
            self.kill(pid);
            return;
        }
        self.act_on(pid, |guest, home| {
            guest.announce(home);
            Ok(())
        });
    }
}
