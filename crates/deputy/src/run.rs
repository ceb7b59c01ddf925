//! The one loop of a home shim: it waits for guests, deputies, and its node.

use crate::family::{Event, Family, Homed};
use crate::ledger::Ledger;
use crate::mailbox::Bell;
use crate::member::Member;
use crate::names::Names;
use crate::shared::Shares;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tern_control::door::Door;
use tern_control::shim::ShimStart;
use tern_image::object::Objects;
use tern_wire::Ephemeral;

/// How often links are shown to be alive.
const BEAT: Duration = Duration::from_secs(1);

/// A family without members ends after this time, in which its node may still ask it for something.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Runs the shim until its family has no more to do with other nodes.
///
/// # Errors
/// If it cannot begin.
pub fn run(start: ShimStart, key: Ephemeral, door: Door) -> anyhow::Result<()> {
    let ledger = Ledger::new(&start.run_dir);
    let mut family = Family {
        shares: Shares::new(start.shared.clone()),
        start,
        key: Arc::new(key),
        door,
        bell: Bell::new()?,
        rung: true,
        peers: Vec::new(),
        members: HashMap::new(),
        events: channel(),
        newborn: HashMap::new(),
        parked: Vec::new(),
        contents: Vec::new(),
        objects: Objects::default(),
        inodes: HashMap::new(),
        names: Names::default(),
        watch: None,
        gate: None,
        complete: None,
        homed: Vec::new(),
        ledger,
        freeze: tern_migrate::fault::Freeze::wished(),
        empty_since: Instant::now(),
    };
    // The first request comes right after our start.
    family.empty_since += Duration::from_secs(10);
    while !family.is_over() {
        family.turn()?;
    }
    // From now on nobody comes to us; what follows may take a while.
    drop(family.door);
    family.ledger.sweep();
    for peer in &mut family.peers {
        if let Some(link) = &mut peer.link {
            let _best_effort = link.drain(Instant::now() + Duration::from_secs(2));
        }
    }
    tracing::info!("the family is home");
    Ok(())
}

impl Family {
    pub(crate) fn is_over(&mut self) -> bool {
        self.homed.retain(Homed::lives);
        if !self.members.is_empty() || !self.parked.is_empty() || !self.homed.is_empty() {
            self.empty_since = Instant::now();
        }
        Instant::now() > self.empty_since + LAST_WORDS
    }

    pub(crate) fn turn(&mut self) -> anyhow::Result<()> {
        self.wait()?;
        self.answer_node();
        self.take_events();
        self.take_stops();
        self.take_messages();
        self.collect_ended();
        self.take_looked();
        self.see_who_opens();
        self.go_on_sending();
        self.go_on_with_contents();
        self.ask_the_busy();
        // Before a move goes on: who passes is seen then.
        self.open_the_gate();
        self.unpark();
        self.keep_alive();
        Ok(())
    }

    pub(crate) fn wait(&mut self) -> anyhow::Result<()> {
        let mut fds: Vec<(BorrowedFd<'_>, i16)> = vec![(self.bell.fd(), libc::POLLIN)];
        fds.extend(self.names.fd().map(|names| (names, libc::POLLIN)));
        fds.extend(self.watch.iter().map(|watch| (watch.fd(), libc::POLLIN)));
        let mut timeout = BEAT / 2;
        if !self.parked.is_empty() || self.members.values().any(|m| m.ask_again.is_some()) {
            timeout = Duration::from_millis(5);
        }
        if self.members.values().any(Member::waits_for_others) {
            timeout = Duration::from_millis(1);
        }
        for link in self.peers.iter().filter_map(|p| p.link.as_ref()) {
            fds.push((
                link.as_fd(),
                if link.wants_write() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
            ));
            if link.has_frame() {
                timeout = Duration::ZERO;
            }
        }
        let ready = self.door.wait(&fds, timeout)?;
        self.rung = ready.first().copied().unwrap_or(true);
        if self.names.fd().is_some() && ready.get(1).copied().unwrap_or(true) {
            self.hear_of_names();
        }
        Ok(())
    }

    pub(crate) fn take_events(&mut self) {
        while let Ok(event) = self.events.1.try_recv() {
            match event {
                Event::Prepared(pid, migration, prepared) => self.prepared(pid, migration, prepared),
                Event::Sought(peer, found) => self.sought(peer, found),
            }
        }
    }
}
