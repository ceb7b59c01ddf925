//! Periodic work: heartbeats, reports of usage, and the suspension of guests whose home
//! is unreachable.

use super::Shim;
use crate::process::Guest;
use crate::process::shared::State;
use std::time::Duration;
use tern_ids::{Epoch, HomePid};
use tern_migrate::message::Message;

impl Shim {
    pub(super) fn keep_alive(&mut self) {
        let suspend = Duration::from_secs(u64::from(self.start.suspend_after));
        let mut is_silent = false;
        if self.home.begin_heartbeat() {
            // Restores the nice value of guests that got a higher priority for a departure that did
            // not take place.
            for guest in self.members.iter().filter(|guest| matches!(guest.process.state, State::Running)) {
                guest.set_nice(self.start.guest_nice.into());
            }
            let live = self.members.iter_mut().filter(|guest| guest.is_active());
            let reports: Vec<_> = live.map(|guest| (guest.process.pid, guest.measure_usage())).collect();
            self.send_home(HomePid(0), &Message::Heartbeat);
            is_silent = self.home.measure_silence() > suspend;
            self.repeat_fetch_requests();
            self.find_unmapped();
            for (pid, used) in reports {
                self.send_home(pid, &used);
            }
        }
        if is_silent {
            tracing::warn!("home's machine has acknowledged nothing for {suspend:?}");
            self.drop_home_link();
        }
        if self.home.time_unreachable().is_some_and(|time| time > suspend) {
            let running = |guest: &&mut Guest| matches!(guest.process.state, State::Running);
            for guest in self.members.iter_mut().filter(running) {
                guest.process.stop_reasons.set_cut_off(true);
            }
        }
        self.ask_home_daemon();
    }

    /// Repeats the requests to be fetched home. An earlier journey home may have failed, or the
    /// earlier request may have reached home during another journey, which then failed.
    fn repeat_fetch_requests(&mut self) {
        let waiting = |guest: &&Guest| matches!(guest.process.state, State::Running);
        let waiting = self.members.iter().filter(waiting);
        let requests = waiting.filter_map(|guest| {
            Some((guest.process.pid, Message::FetchHome(guest.homeward_reason()?.to_owned())))
        });
        for (pid, message) in requests.collect::<Vec<_>>() {
            self.send_home(pid, &message);
        }
    }

    /// While the link to home is down, has the node's daemon ask home's daemon whether home still
    /// waits for these guests. So guests that home has taken back or declared lost end as soon as
    /// that is known.
    fn ask_home_daemon(&mut self) {
        let Some(shim) = self.home.begin_question() else { return };
        let epochs: Vec<(HomePid, Epoch)> =
            self.members.iter().map(|guest| (guest.process.pid, guest.process.epoch)).collect();
        if !epochs.is_empty() {
            self.workers.ask_home_daemon(self.start.run_dir.clone(), self.home.node(), shim, epochs);
        }
    }

    /// Reports to home which guests have reached a threshold of CPU usage.
    pub(super) fn report_reached_cpu_thresholds(&mut self) {
        let live = self.members.iter_mut().filter(|guest| guest.is_active());
        let reports: Vec<(HomePid, Message)> = live.flat_map(Guest::take_reached_thresholds).collect();
        for (tag, used) in reports {
            self.send_home(tag, &used);
        }
    }
}
