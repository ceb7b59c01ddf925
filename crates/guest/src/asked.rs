//! What the node wants of a guest shim, and who connects to it.

use crate::aside::Event;
use crate::family::Family;
use crate::member::{Member, State};
use std::time::{Duration, Instant};
use tern_control::shim::{ShimReply, ShimRequest};
use tern_control::{ProcessRow, Usage};
use tern_ids::HomePid;
use tern_migrate::message::{Inbox, Message, send};
use tern_tracee::procfs;
use tern_wire::Link;

/// How long home may take to hear that a guest was ended.
const LAST_WORD: Duration = Duration::from_millis(500);

impl Family {
    pub(crate) fn answer_node(&mut self) {
        while let Some(caller) = self.door.next() {
            match caller.request() {
                ShimRequest::Processes => caller.answer(&ShimReply::Processes(self.rows())),
                ShimRequest::End { why } => {
                    self.put_down(why);
                    caller.answer(&ShimReply::Done);
                }
                ShimRequest::Owns { .. } => caller.answer(&tern_control::door::not_here()),
                ShimRequest::Connection => {
                    if let Some(socket) = caller.connection() {
                        self.aside.came(socket);
                    }
                }
                _ => caller.answer(&tern_control::door::not_here()),
            }
        }
    }

    /// This node ends its guests. If home hears of it, it ends them as well; if not, it gives them up in its time.
    fn put_down(&mut self, why: &str) {
        for pid in self.members.keys().copied().collect::<Vec<_>>() {
            tracing::warn!(%pid, why, "a guest is ended");
            let word = match self.members.get(&pid) {
                // It may still begin where it comes from.
                Some(Member { state: State::Arriving(_), epoch, .. }) => {
                    Message::Declined(*epoch, why.to_owned())
                }
                _ => Message::PutDown(why.to_owned()),
            };
            self.tell(pid, &word);
            self.end(pid);
        }
        if let Some(home) = &mut self.home {
            let _best_effort = home.drain(Instant::now() + LAST_WORD);
        }
    }

    pub(crate) fn rows(&self) -> Vec<ProcessRow> {
        let usage = |m: &Member| {
            let demand = m.meter.demand();
            Usage { memory: demand.memory, waited_seconds: demand.waited as f64 / 1e9, ..Usage::default() }
        };
        let row = |m: &Member| ProcessRow {
            pid: m.pid,
            uid: self.identity.0,
            r#where: None,
            from: Some(self.home_node),
            state: match m.state {
                State::Arriving(_) | State::Departing(_) | State::Frozen(_) => "migrating",
                State::Held(_) => "suspended",
                _ => "running",
            }
            .into(),
            cpu_seconds: procfs::stat(m.host).map_or(0.0, |s| s.cpu_seconds()),
            migrations: u32::try_from(m.epoch.0).unwrap_or(u32::MAX),
            reason: m.open.as_ref().and_then(|o| o.homeward.clone()).unwrap_or_default(),
            command: m.command(),
            usage: usage(m),
            started: None,
        };
        self.members.values().map(row).collect()
    }

    pub(crate) fn take_events(&mut self) {
        for event in self.aside.events() {
            match event {
                Event::Came(caller, link) => self.connected(caller, *link),
                Event::Reached(pid, migration, link) => self.reached(pid, migration, link),
                Event::Over(lives) => self.over(&lives),
            }
        }
    }

    pub(crate) fn connected(&mut self, caller: u64, link: Link) {
        if link.peer_fingerprint() != self.accept.first().copied() {
            self.sources.push((link, Inbox::default()));
            return;
        }
        if caller < self.home_came {
            return;
        }
        // What was on its way over the link before is off, as if we had seen that break first.
        self.lose_home();
        self.home_came = caller;
        tracing::debug!("home is connected");
        self.home = Some(link);
        // It waits for this, to know that we are ready.
        self.tell(HomePid(0), &Message::Beat);
        self.inbox = Inbox::default();
        self.heard = Instant::now();
        let pids: Vec<HomePid> = self.members.keys().copied().collect();
        for pid in pids {
            self.present(pid);
        }
    }

    /// Tells home, on a new link, where a guest stands, and asks again for what is open.
    pub(crate) fn present(&mut self, pid: HomePid) {
        let (Some(member), Some(home)) = (self.members.get_mut(&pid), self.home.as_mut()) else { return };
        if matches!(member.state, State::Arriving(_)) {
            // Home has given this migration up when the link broke.
            self.end(pid);
            return;
        }
        if let State::Dying { told, .. } = &mut member.state {
            // It may have been said into a link that was cut.
            *told = false;
        }
        let told = send(home, pid, &Message::Present(member.epoch, member.talk.signals), &[]);
        let asked = member.ask_again(Some(home));
        if told.is_err() || asked.is_err() {
            self.lose_home();
        }
    }
}
