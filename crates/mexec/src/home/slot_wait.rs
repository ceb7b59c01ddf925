//! Waiting for a free slot, on this node and on others.

use super::caller::Caller;
use super::queue::QueuePlace;
use super::ranking::{self, Constraint};
use super::{ExcludedNodes, Home, REQUEST_TIMEOUT, RETRY_INTERVAL};
use crate::messages::{ExecReply, ExecRequest, PendingReason, kind};
use anyhow::{Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::Instant;
use tern_ids::NodeId;
use tern_wire::Link;

/// How often a waiting caller checks whether this node has a free slot.
const SLOT_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The result of waiting for a slot.
pub(super) enum WaitOutcome {
    Slot(NodeId, Box<Link>),
    /// This node has a slot, one of the nodes is lost, or another node has become available: nodes
    /// are to be ranked again.
    Changed,
    /// None of the nodes can be reached.
    NoNodes,
}

impl Home {
    /// Waits until one of these nodes has a free slot. The connections to the others are then
    /// closed, which removes the caller from their queues. A node that cannot be reached is
    /// excluded.
    pub(super) fn wait_for_slot<'a>(
        &'a self,
        constraint: &Constraint,
        nodes: &[NodeId],
        (excluded, since): (&mut ExcludedNodes, Instant),
        caller: &mut Caller<'a>,
    ) -> Result<WaitOutcome> {
        caller.set_pending(PendingReason::Slot(nodes.to_vec()))?;
        let uid = caller.credentials.uid;
        let send = |link: &mut Link, request: &ExecRequest| -> Result<()> {
            let bytes = tern_wire::encode(request)?;
            Ok(link.send(kind::EXEC_REQUEST, 0, &[&bytes], Instant::now() + REQUEST_TIMEOUT)?)
        };
        let mut waiting = Vec::new();
        for node in nodes.iter().filter(|node| **node != self.me) {
            let requested = self.links.get(*node).and_then(|mut link| {
                let usage = self.usage.of_user(uid, Some(*node));
                send(&mut link, &ExecRequest::WaitForSlot { uid, usage })?;
                Ok((*node, link, usage))
            });
            match requested {
                Ok(requested) => waiting.push(requested),
                Err(_) => excluded.insert(*node),
            }
        }
        let is_home_possible = nodes.contains(&self.me);
        if is_home_possible && caller.queue_place.is_none() {
            caller.queue_place = Some(self.queue.enqueue(caller.credentials.uid)?);
        }
        let mut closed = None;
        while is_home_possible
            || !waiting.is_empty()
            || closed.is_some_and(|since: Instant| since.elapsed() < 2 * RETRY_INTERVAL)
        {
            let mut fds = vec![PollFd::new(&caller.socket, PollFlags::RDHUP)];
            fds.extend(caller.queue_place.iter().map(|place| PollFd::new(place.event(), PollFlags::IN)));
            fds.extend(waiting.iter().map(|(_, link, _)| PollFd::new(link, PollFlags::IN)));
            let _interrupted = poll(&mut fds, Some(&SLOT_CHECK_INTERVAL));
            if !fds[0].revents().is_empty() {
                bail!("its caller has disconnected");
            }
            for at in (0..waiting.len()).rev() {
                match waiting[at].1.receive() {
                    Ok(None) => {}
                    Ok(Some(frame))
                        if matches!(tern_wire::decode(&frame.payload), Ok(ExecReply::SlotOffered)) =>
                    {
                        let (node, link, _) = waiting.swap_remove(at);
                        return Ok(WaitOutcome::Slot(node, Box::new(link)));
                    }
                    // The executor there may be back in a moment, for example after an upgrade.
                    _ => {
                        excluded.exclude_for_restart(waiting.swap_remove(at).0);
                        closed = Some(Instant::now());
                    }
                }
            }
            caller.queue_place.iter().for_each(QueuePlace::clear_event);
            // Report changes of the user's usage. If several callers of the user are in the queue
            // for this node, only the first of them does so.
            if caller.queue_place.as_ref().is_none_or(|place| self.queue.is_first_of_user(uid, place)) {
                for (node, link, reported) in &mut waiting {
                    let usage = self.usage.of_user(uid, Some(*node));
                    if usage.running != reported.running
                        && send(link, &ExecRequest::UpdateUsage(usage)).is_ok()
                    {
                        *reported = usage;
                    }
                }
            }
            let mut known = self.known_nodes()?;
            let is_awaited = |node| node == self.me || waiting.iter().any(|(waiting, ..)| *waiting == node);
            let another = ranking::eligible(&known, constraint)
                .into_iter()
                .any(|node| !is_awaited(node) && !excluded.contains(node));
            known.retain(|known| is_awaited(known.node));
            // A node that fails sends nothing, and its connection does not close.
            let is_one_dead = known.iter().any(|known| !known.is_reachable);
            let has_slot = is_home_possible
                && ranking::rank(&known, self.me, constraint, since.elapsed()).contains(&self.me);
            if has_slot && self.is_next(caller) || is_one_dead || another {
                return Ok(WaitOutcome::Changed);
            }
        }
        Ok(WaitOutcome::NoNodes)
    }
}
