//! Waiting for room, here and on other nodes.

use super::caller::Caller;
use super::choice::{self, Wish};
use super::line::Turn;
use super::{AGAIN, Home, Lost, SOON};
use crate::words::{Ask, Said, Wait, kind};
use anyhow::{Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::Instant;
use tern_ids::NodeId;
use tern_wire::Link;

/// How often who waits for room looks whether this node has some.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What who waited for room has got.
pub(super) enum Waited {
    Room(NodeId, Box<Link>),
    /// This node has some, one that was waited for is lost, or another one is there: it is to be looked anew.
    Change,
    /// Nobody of those asked is there.
    Nobody,
}

impl Home {
    /// Waits until one of these has room. Who has been told of room elsewhere gives the other places up by closing their connections. A node
    /// that cannot be asked is lost to this command.
    pub(super) fn wait<'a>(
        &'a self,
        wish: &Wish,
        nodes: &[NodeId],
        (lost, since): (&mut Lost, Instant),
        caller: &mut Caller<'a>,
    ) -> Result<Waited> {
        caller.waits(Wait::Room(nodes.to_vec()))?;
        let uid = caller.who.uid;
        let tell = |link: &mut Link, ask: &Ask| -> Result<()> {
            let bytes = tern_wire::encode(ask)?;
            Ok(link.send(kind::ASK, 0, &[&bytes], Instant::now() + SOON)?)
        };
        let mut waiting = Vec::new();
        for node in nodes.iter().filter(|node| **node != self.me) {
            let asked = self.links.to(*node).and_then(|mut link| {
                let has = self.running.share(uid, Some(*node));
                tell(&mut link, &Ask::Wait { uid, has })?;
                Ok((*node, link, has))
            });
            match asked {
                Ok(asked) => waiting.push(asked),
                Err(_) => lost.insert(*node),
            }
        }
        let home = nodes.contains(&self.me);
        if home && caller.turn.is_none() {
            caller.turn = Some(self.line.wait(caller.who.uid)?);
        }
        let mut closed = None;
        while home || !waiting.is_empty() || closed.is_some_and(|since: Instant| since.elapsed() < 2 * AGAIN)
        {
            let mut fds = vec![PollFd::new(&caller.socket, PollFlags::RDHUP)];
            fds.extend(caller.turn.iter().map(|turn| PollFd::new(turn.wake(), PollFlags::IN)));
            fds.extend(waiting.iter().map(|(_, link, _)| PollFd::new(link, PollFlags::IN)));
            let _interrupted = poll(&mut fds, Some(&LOOK));
            if !fds[0].revents().is_empty() {
                bail!("its caller has gone");
            }
            for at in (0..waiting.len()).rev() {
                match waiting[at].1.receive() {
                    Ok(None) => {}
                    Ok(Some(frame)) if matches!(tern_wire::decode(&frame.payload), Ok(Said::Room)) => {
                        let (node, link, _) = waiting.swap_remove(at);
                        return Ok(Waited::Room(node, Box::new(link)));
                    }
                    // What serves there may be there again in a moment, as when it is replaced by a newer one.
                    _ => {
                        lost.insert(waiting.swap_remove(at).0);
                        closed = Some(Instant::now());
                    }
                }
            }
            caller.turn.iter().for_each(Turn::looked);
            // What runs of his has changed since: one tells of it for all of his.
            if caller.turn.as_ref().is_none_or(|turn| self.line.is_first_of(uid, turn)) {
                for (node, link, told) in &mut waiting {
                    let has = self.running.share(uid, Some(*node));
                    if has.running != told.running && tell(link, &Ask::Has(has)).is_ok() {
                        *told = has;
                    }
                }
            }
            let mut known = self.known()?;
            let waits = |node| node == self.me || waiting.iter().any(|(waits, ..)| *waits == node);
            let another =
                choice::fit(&known, wish).into_iter().any(|node| !waits(node) && !lost.contains(node));
            known.retain(|known| waits(known.node));
            // Who is lost says nothing any more, and no connection ends.
            let gone = known.iter().any(|known| !known.there);
            let room = home && choice::order(&known, self.me, wish, since.elapsed()).contains(&self.me);
            if room && self.is_turn(caller) || gone || another {
                return Ok(Waited::Change);
            }
        }
        Ok(Waited::Nobody)
    }
}
