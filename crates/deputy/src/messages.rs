//! What guest shims say.

use crate::family::Family;
use crate::member::State;
use std::time::{Duration, Instant};
use tern_ids::{Epoch, HomePid};
use tern_image::content::read_piece;
use tern_migrate::message::{Arrived, Message};

impl Family {
    pub(crate) fn take_messages(&mut self) {
        for at in 0..self.peers.len() {
            // A few at a time, so that one guest does not starve the others.
            for _ in 0..64 {
                let peer = &mut self.peers[at];
                let Some(link) = &mut peer.link else { break };
                let taken = match link.receive() {
                    Ok(Some(frame)) => peer.inbox.take(frame).map_err(|e| e.to_string()),
                    Ok(None) => break,
                    Err(error) => Err(error.to_string()),
                };
                peer.heard = Instant::now();
                match taken {
                    Ok(Some(arrived)) => self.take_message(at, arrived),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::warn!(error, "a guest's link failed");
                        self.lose(at);
                    }
                }
            }
        }
    }

    pub(crate) fn take_message(&mut self, from: usize, arrived: Arrived) {
        let pid = arrived.pid;
        let Some(member) = self.members.get_mut(&pid) else {
            // A guest whose process has ended here, and which has not heard of it.
            if matches!(arrived.message, Message::Present(..) | Message::Call(_)) {
                self.tell_peer(from, pid, &Message::Drop);
            }
            return;
        };
        // What another shim says of it than the one that holds it, or is to hold it, does not count.
        let next = match &member.state {
            State::Outbound(o) | State::Going(o) => o.peer,
            State::Onward(next) => *next,
            _ => member.peer,
        };
        let (holds, will) = (member.is_away() && from == member.peer, from == next);
        match arrived.message {
            Message::Accepted(epoch) if will && epoch == member.offered => self.accepted(pid),
            Message::Declined(epoch, why) if will && epoch == member.offered => self.declined(pid, &why),
            Message::Want(epoch, ref indices) if will && epoch == member.offered => self.wanted(pid, indices),
            Message::Ready(epoch, us, bytes) if will && epoch == member.offered => {
                if let (State::Onward(_), Some(task)) = (&member.state, &mut member.task) {
                    task.bytes = bytes;
                    task.frozen = Instant::now().checked_sub(Duration::from_micros(us));
                }
                self.hand_over(pid);
            }
            Message::Running(epoch) if (will || holds) && epoch == member.epoch => {
                member.revived = false;
                self.running(pid);
            }
            Message::Call(request) if holds => {
                if matches!(member.state, State::Going(_) | State::Crossing(_)) {
                    self.running(pid);
                }
                self.called(pid, *request);
            }
            Message::Space(_) | Message::Pages(_) | Message::Forget(_) | Message::Image(..) if holds => {
                self.inbound(pid, arrived);
            }
            Message::Stayed(why) if holds => {
                self.stayed(pid, &why);
                // If it had sent everything it stands still, and cannot know whether home had decided.
                if self.members.get(&pid).is_some_and(|m| matches!(m.state, State::Away) && !m.job_stopped) {
                    self.tell(pid, &Message::Thaw);
                }
            }
            Message::Died(signal) if holds => self.died(pid, signal),
            Message::PutDown(why) if holds => self.put_down(pid, &why),
            Message::FetchHome(why) if holds => self.fetch(pid, &why),
            Message::WantContent(hash) if holds => self.send_content(pid, from, hash),
            Message::Present(epoch, signals) => self.present(pid, from, epoch, signals),
            Message::Used(used, demand) if holds => (member.used, member.demand) = (used, demand),
            Message::Mask(mask) if holds => member.set_mask(mask),
            _ => {}
        }
    }

    pub(crate) fn declined(&mut self, pid: HomePid, why: &str) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        match std::mem::replace(&mut member.state, State::Away) {
            State::Onward(_) => {
                // The old life has not been told, or is told to go on.
                self.tell(pid, &Message::Thaw);
                self.refuse(pid, why);
            }
            State::Outbound(outbound) => {
                member.state = State::Outbound(outbound);
                self.stay_home(pid, None, why);
            }
            State::Going(outbound) => {
                member.state = State::Going(outbound);
                self.revoke(pid, why);
            }
            State::Crossing(old) => {
                member.state = State::Crossing(old);
                self.cross_back(pid);
            }
            other => member.state = other,
        }
    }

    /// The program was killed at the guest by a fault of its own: so is the deputy, by the same signal. If it is to
    /// leave a core it comes home first, and dies there. That is tried once: if it says so again it has not come.
    pub(crate) fn died(&mut self, pid: HomePid, signal: i32) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        if matches!(member.state, State::Away)
            && crate::coredump::raised_again(signal)
            && crate::coredump::wanted(pid.0)
            && !std::mem::replace(&mut member.faulted, true)
        {
            return self
                .fetch(pid, &format!("core: it dies by signal {signal}, and leaves a core at home only"));
        }
        crate::coredump::prevent(pid.0);
        tracing::info!(%pid, signal, "the program was killed where it ran");
        if let Err(error) = self.with_deputy(pid, |member, stopped| member.die(stopped, signal)) {
            self.lost(pid, &error);
        }
    }

    /// Its node has ended the program, without a fault of its own.
    fn put_down(&mut self, pid: HomePid, why: &str) {
        tracing::warn!(%pid, why, "the program was ended where it ran");
        self.refuse(pid, why);
        crate::coredump::prevent(pid.0);
        if let Err(error) = self.with_deputy(pid, |member, stopped| member.die(stopped, libc::SIGKILL)) {
            self.lost(pid, &error);
        }
    }

    pub(crate) fn send_content(&mut self, pid: HomePid, to: usize, hash: tern_ids::ContentHash) {
        let Some(member) = self.members.get(&pid) else { return };
        let Some(reference) = member.files.by_hash(&hash).cloned() else { return };
        let Ok(file) = crate::out::open_mapped(member, &reference) else { return };
        let mut offset = 0;
        loop {
            let Ok(piece) = read_piece(&file, offset, 256 << 10, reference.size) else { return };
            if self.peers[to].tell(pid, &Message::Content { hash, offset }, &piece).is_err() {
                return self.lose(to);
            }
            offset += piece.len() as u64;
            if offset >= reference.size {
                return;
            }
        }
    }

    pub(crate) fn inbound(&mut self, pid: HomePid, arrived: Arrived) {
        let bytes = arrived.bytes();
        match self.members.get_mut(&pid).map(|m| &mut m.state) {
            Some(State::Inbound(inbound)) => inbound.bytes += bytes.len() as u64,
            _ => return,
        }
        let done = match &arrived.message {
            Message::Space(layout) => self.with_deputy(pid, |member, stopped| {
                if let State::Inbound(inbound) = &mut member.state {
                    inbound.layout = (**layout).clone();
                }
                member.take_space(stopped, layout)
            }),
            Message::Forget(runs) => self.with_deputy(pid, |member, stopped| member.forget(stopped, runs)),
            Message::Pages(runs) => self.members.get(&pid).map_or(Ok(()), |m| m.take_pages(runs, bytes)),
            Message::Image(image, talk) => return self.arrived_home(pid, image, talk),
            _ => Ok(()),
        };
        match done {
            Ok(()) if matches!(arrived.message, Message::Space(_)) => {
                self.tell(pid, &Message::Want(Epoch(0), Vec::new()));
            }
            Ok(()) => {}
            Err(error) if error.is_gone() => self.lost(pid, &error),
            Err(error) => {
                // It cannot be taken in here; its guest is as it was.
                tracing::warn!(%pid, %error, "it could not come home");
                self.stayed(pid, &error.to_string());
                self.tell(pid, &Message::Thaw);
            }
        }
    }
}
