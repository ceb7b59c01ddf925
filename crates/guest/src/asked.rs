//! What the node wants of a guest shim, and who connects to it.

use crate::aside::Event;
use crate::family::{Family, Source};
use crate::member::{Member, Process, State};
use crate::thread::Thread;
use std::time::{Duration, Instant};
use tern_control::shim::{ShimReply, ShimRequest};
use tern_control::{ProcessRow, Usage};
use tern_ids::HomePid;
use tern_migrate::message::{Inbox, Message, send};
use tern_syscall::{Route, Special, route};
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
            let word = match self.members.get(&pid).map(|m| &m.process) {
                // It may still begin where it comes from.
                Some(Process { state: State::Arriving(_), epoch, .. }) => {
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

    pub(crate) fn rows(&mut self) -> Vec<ProcessRow> {
        let usage = |m: &mut Member| {
            let demand = m.demand();
            Usage {
                memory: demand.memory,
                waited_seconds: demand.waited as f64 / 1e9,
                near_bytes: demand.near,
                ..Usage::default()
            }
        };
        let (uid, from) = (self.identity.0, Some(self.home_node));
        let row = |m: &mut Member| ProcessRow {
            pid: m.process.pid,
            uid,
            r#where: None,
            from,
            state: match m.process.state {
                State::Arriving(_) | State::Departing(_) | State::Frozen => "migrating",
                State::Running if m.process.held => "suspended",
                State::Running => "running",
            }
            .into(),
            cpu_seconds: procfs::stat(m.process.host).map_or(0.0, |s| s.cpu_seconds()),
            migrations: u32::try_from(m.process.epoch.0).unwrap_or(u32::MAX),
            reason: m.homeward().unwrap_or_default().to_owned(),
            command: m.command(),
            usage: usage(m),
            started: None,
        };
        self.members.values_mut().map(row).collect()
    }

    pub(crate) fn take_events(&mut self) {
        for event in self.aside.events() {
            match event {
                Event::Came(caller, link) => self.connected(caller, *link),
                Event::Reached(pid, life, link) => self.reached(pid, life, link),
                Event::Over(lives) => self.over(&lives),
            }
        }
    }

    pub(crate) fn connected(&mut self, caller: u64, link: Link) {
        if link.peer_fingerprint() != self.accept.first().copied() {
            self.sources.push(Source { link, inbox: Inbox::default(), brings: None });
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

    /// Tells home, on a new link, where the threads of a guest stand, and asks again for what is open.
    pub(crate) fn present(&mut self, pid: HomePid) {
        let (Some(member), Some(home)) = (self.members.get_mut(&pid), self.home.as_mut()) else { return };
        let Member { process, threads } = member;
        if matches!(process.state, State::Arriving(_)) {
            // Home has given this migration up when the link broke.
            self.end(pid);
            return;
        }
        if let Some(dying) = &mut process.dying {
            // It may have been said into a link that was cut.
            dying.told = false;
        }
        if let Some((_, told)) = &mut process.homesick {
            *told = false;
        }
        // By the first thread home knows that it has heard of all, so it comes last, also if it has ended.
        let others = threads.values().filter(|t| t.tid != pid && !t.ending);
        let mut said: Vec<(HomePid, u64)> = others.map(|t| (t.tid, t.talk.signals)).collect();
        said.push((pid, threads.get(&pid).map_or(0, |first| first.talk.signals)));
        // What is asked again about a timer is answered by what has been used until now.
        let mut used = vec![(process.pid, Message::Used(process.meter.used(), process.demand))];
        let asks = |thread: &&mut Thread| {
            let trap = thread.open.as_ref().map(|open| open.trap);
            trap.is_some_and(|trap| route(trap.nr, &trap.args) == Route::Both(Special::CpuTimer))
        };
        let asking = threads.values_mut().filter(asks);
        used.extend(asking.map(|thread| (thread.tid, Message::ThreadUsed(thread.meter.used()))));
        let mut used = used.into_iter().map(|(tag, used)| send(home, tag, &used, &[]));
        let cut = used.any(|sent| sent.is_err());
        let mut told = said
            .into_iter()
            .map(|(tid, signals)| send(home, tid, &Message::Present(process.epoch, signals), &[]));
        let cut = cut
            || told.any(|sent| sent.is_err())
            || threads.values().any(|thread| {
                thread.ask_again(process, Some(home)).is_err()
                    || thread.send_errand_again(Some(home)).is_err()
            });
        if cut {
            self.lose_home();
        }
    }
}
