//! What guest shims say.

use crate::family::Family;
use crate::member::State;
use crate::peer::Peer;
use std::fs::File;
use std::time::{Duration, Instant};
use tern_ids::{Epoch, HomePid};
use tern_image::FileRef;
use tern_image::content::read_piece;
use tern_image::object::Objects;
use tern_migrate::message::{Arrived, Message};
use tern_wire::Link;

/// No more of a file's content is queued while a link holds this many unsent bytes.
const AHEAD: usize = 512 << 10;
/// Bytes of it in one message.
const PIECE: usize = 256 << 10;

/// The content of a file on its way to a guest that has mapped it.
#[derive(Debug)]
pub(crate) struct Content {
    /// The thread that waits for it, and who holds that.
    tid: HomePid,
    to: usize,
    file: File,
    reference: FileRef,
    offset: u64,
}

impl Content {
    /// The next piece.
    fn read(&self) -> std::io::Result<Vec<u8>> {
        let FileRef { size, place, .. } = &self.reference;
        read_piece(&self.file, self.offset, PIECE, (*size, place.is_some()))
    }

    /// Sends it; whether there is more.
    fn send(&mut self, peer: &mut Peer, piece: &[u8]) -> anyhow::Result<bool> {
        let (hash, offset) = (self.reference.hash, self.offset);
        peer.tell(self.tid, &Message::Content { hash, offset }, piece)?;
        self.offset += piece.len() as u64;
        Ok(self.offset < self.reference.size)
    }
}

impl Family {
    pub(crate) fn take_messages(&mut self) {
        for at in 0..self.peers.len() {
            // A few at a time, so that one guest does not starve the others.
            for _ in 0..64 {
                let peer = &mut self.peers[at];
                let Some(link) = &mut peer.link else { break };
                let taken = match link.receive() {
                    Ok(Some(frame)) => {
                        let taken = peer.inbox.take(frame).map_err(|e| e.to_string());
                        link.recycle(peer.inbox.spare());
                        taken
                    }
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
        let tag = arrived.pid;
        let pid = match arrived.message.is_of_a_thread() {
            true => self.of_thread(tag).map_or(tag, |member| member.pid),
            false => tag,
        };
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
            Message::Accepted(epoch, shows) if will && epoch == member.offered => {
                self.peers[from].shows_files = shows;
                self.accepted(pid);
            }
            Message::Declined(epoch, why) if will && epoch == member.offered => self.declined(pid, &why),
            Message::Want(epoch, ref indices) if will && epoch == member.offered => self.wanted(pid, indices),
            Message::Ready(epoch, bytes) if will && epoch == member.offered => {
                if let (State::Onward(_), Some(task)) = (&member.state, &mut member.task) {
                    task.bytes = bytes;
                }
                self.hand_over(pid);
            }
            Message::Running(epoch, us) if (will || holds) && epoch == member.epoch => {
                if let Some(task) = &mut member.task {
                    task.frozen = Instant::now().checked_sub(Duration::from_micros(us));
                }
                member.revived = false;
                self.running(pid);
            }
            Message::Call(request) if holds => {
                if matches!(member.state, State::Going(_) | State::Crossing(_)) {
                    self.running(pid);
                }
                self.called(tag, *request);
            }
            // All its threads are here.
            Message::Crew(_) => {}
            Message::Space(_)
            | Message::Pages(_)
            | Message::Forget(_)
            | Message::Object { .. }
            | Message::Hole { .. }
            | Message::Image(..)
                if holds =>
            {
                self.inbound(pid, arrived);
            }
            Message::Departing(migration) if holds => {
                let this = member.task.as_ref().is_some_and(|task| task.migration == migration);
                if let State::Inbound(inbound) = &mut member.state {
                    inbound.begun = this;
                }
            }
            Message::Stayed(why) if holds => {
                self.stayed(pid, &why);
                // If it had sent everything it stands still, and cannot know whether home had decided.
                if self.members.get(&pid).is_some_and(|m| matches!(m.state, State::Away) && !m.job_stopped) {
                    self.tell(pid, &Message::Thaw);
                }
            }
            Message::Died(signal) if holds => self.died(pid, tag, signal),
            Message::PutDown(why) if holds => self.put_down(pid, &why),
            Message::FetchHome(why) if holds => self.fetch(pid, &why),
            Message::WantContent(hash) if holds => self.send_content(tag, from, hash),
            Message::Present(epoch, signals) => self.present(pid, tag, from, epoch, signals),
            Message::Used(used, demand) if holds => {
                (member.used, member.demand) = (used, demand);
                self.has_used(pid, None);
            }
            Message::ThreadUsed(used) if holds && member.threads.contains_key(&tag) => {
                member.shares.insert(tag, used);
                self.has_used(pid, Some(tag));
            }
            Message::Heard(signals) if holds => {
                if let Ok(thread) = member.thread(tag) {
                    thread.heard(signals);
                }
            }
            Message::Mask(mask) if holds => {
                if let Ok(thread) = member.thread(tag) {
                    thread.set_mask(mask);
                }
            }
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
                self.stay_home(pid, why);
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
    pub(crate) fn died(&mut self, pid: HomePid, tid: HomePid, signal: i32) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        if matches!(member.state, State::Away)
            && crate::coredump::raised_again(signal)
            && crate::coredump::wanted(pid.0)
            && !std::mem::replace(&mut member.faulted, true)
        {
            return self
                .fetch(pid, &format!("core: it dies by signal {signal}, and leaves a core at home only"));
        }
        if std::mem::replace(&mut member.dies, true) {
            return;
        }
        crate::coredump::prevent(pid.0);
        tracing::info!(%pid, signal, "the program was killed where it ran");
        // Said of the whole process it bears the number of the first thread, which may have ended.
        let lives = member.living().any(|thread| thread.tid == tid);
        let tid = if lives { tid } else { member.any().unwrap_or(tid) };
        if let Err(error) = self.with_deputy(tid, |member, stopped| member.die(stopped, signal)) {
            self.lost(tid, &error);
        }
    }

    /// Its node has ended the program, without a fault of its own.
    fn put_down(&mut self, pid: HomePid, why: &str) {
        tracing::warn!(%pid, why, "the program was ended where it ran");
        self.refuse(pid, why);
        crate::coredump::prevent(pid.0);
        if let Err(error) = self.with_process(pid, |member, stopped| member.die(stopped, libc::SIGKILL)) {
            self.lost(pid, &error);
        }
    }

    pub(crate) fn send_content(&mut self, tid: HomePid, to: usize, hash: tern_ids::ContentHash) {
        let Some(member) = self.of_thread(tid) else { return };
        let Some(reference) = member.files.by_hash(hash).next().cloned() else { return };
        let opened = crate::leaving::open_mapped(member, &reference);
        match opened {
            Ok(file) => self.contents.push(Content { tid, to, file, reference, offset: 0 }),
            Err(error) => tracing::warn!(%tid, %error, "a mapped file cannot be opened any more"),
        }
    }

    /// Sends what its links will take of the contents that guests wait for.
    pub(crate) fn go_on_with_contents(&mut self) {
        let mut contents = std::mem::take(&mut self.contents);
        contents.retain_mut(|content| {
            // It is asked for again on the next link.
            while let Some(unsent) = self.peers[content.to].link.as_ref().map(Link::unsent) {
                if unsent > AHEAD {
                    return true;
                }
                let Ok(piece) = content.read() else { return false };
                // It may show what comes after another change.
                self.hear_of_names();
                if !matches!(content.send(&mut self.peers[content.to], &piece), Ok(true)) {
                    return false;
                }
            }
            false
        });
        self.contents.append(&mut contents);
    }

    /// A part of the memory that a process shares comes home with it.
    fn take_object(
        &self,
        pid: HomePid,
        file: u32,
        take: impl FnOnce(&Objects, &FileRef) -> std::io::Result<()>,
    ) -> tern_tracee::Result<()> {
        let Some(member) = self.members.get(&pid) else { return Ok(()) };
        let State::Inbound(inbound) = &member.state else { return Ok(()) };
        let file = inbound.layout.files.get(file as usize);
        // Only what it shares: its node could name anything that another process of this family has.
        let own = file.filter(|file| member.files.objects.contains(&(file.device, file.inode)));
        let taken = own.map(|file| take(&self.objects, file));
        let astray = |what: String| tern_tracee::Error::Astray { what, pid: pid.0 };
        match taken {
            Some(taken) => taken.map_err(|error| astray(format!("shared memory: {error}"))),
            None => Err(astray("its node sent what is no part of its shared memory".into())),
        }
    }

    pub(crate) fn inbound(&mut self, pid: HomePid, arrived: Arrived) {
        let bytes = arrived.bytes();
        match self.members.get_mut(&pid).map(|m| &mut m.state) {
            // Of a departure that has been called off it comes too late: its guest ran on.
            Some(State::Inbound(inbound)) if inbound.begun => inbound.bytes += bytes.len() as u64,
            _ => return,
        }
        let done = match &arrived.message {
            Message::Space(layout) => self.with_process(pid, |member, stopped| {
                if let State::Inbound(inbound) = &mut member.state {
                    inbound.layout = (**layout).clone();
                }
                member.take_space(stopped, layout)
            }),
            Message::Forget(runs) => self.with_process(pid, |member, stopped| member.forget(stopped, runs)),
            Message::Pages(runs) => self.members.get_mut(&pid).map_or(Ok(()), |m| m.take_pages(runs, bytes)),
            Message::Object { file, offset } => {
                self.take_object(pid, *file, |objects, file| objects.put(file, *offset, bytes))
            }
            Message::Hole { file, offset, length } => {
                self.take_object(pid, *file, |objects, file| objects.clear(file, *offset, *length))
            }
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
