//! What the kernel here may believe of other nodes' files, and until when.
//!
//! A lease comes with an answer, and counts from before it was asked for. What is asked back meanwhile comes by another
//! connection, the ear, and could overtake the answer on its way to the kernel. So the ear counts first, and has the kernel
//! forget then; who passes an answer on looks at the count, and keeps the ear from counting until the kernel has it.

use super::inode::Inodes;
use super::peer::Peer;
use crate::message::{Answer, Ask, Attributes, Lease, Moment};
use fuser::{INodeNo, Notifier};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tern_wire::Link;

/// How long the ear rests when its connection has broken.
const REST: Duration = Duration::from_millis(200);

/// How things stood before something was asked.
#[derive(Debug, Clone)]
pub(crate) struct Before {
    peer: Arc<Peer>,
    asked: Instant,
    recalls: u64,
}

impl Before {
    pub(crate) fn asking(peer: &Arc<Peer>) -> Self {
        Self { peer: peer.clone(), asked: Instant::now(), recalls: peer.recalls() }
    }

    /// Passes on to the kernel what the answer said, with how long it may believe that.
    pub(crate) fn pass(&self, lease: u32, pass: impl FnOnce(Duration)) {
        let gate = self.peer.gate.read().unwrap_or_else(PoisonError::into_inner);
        let end = self.asked + Duration::from_millis(lease.into());
        let left = if self.peer.recalls() == self.recalls { end } else { self.asked };
        pass(left.saturating_duration_since(Instant::now()));
        drop(gate);
    }
}

/// A state of a file: another one has another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    changed: Moment,
    written: Moment,
    size: u64,
}

impl Version {
    #[cfg(test)]
    pub(crate) fn at(moment: Moment) -> Self {
        Self { changed: moment, written: moment, size: 0 }
    }

    /// Which it is; `None` if a change that came now could have the same.
    pub(crate) fn of(is: &Attributes) -> Option<Self> {
        is.settled.then_some(Self { changed: is.changed, written: is.written, size: is.size })
    }
}

/// The way to have the kernel forget at once: the ear's. It would lose us the answers that the kernel waits for meanwhile, which
/// it takes for older than that; so who answers has it forget by what he answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Forgetting {
    notifier: Arc<OnceLock<Notifier>>,
}

impl Forgetting {
    /// It can be told from now on.
    pub(crate) fn through(&self, notifier: Notifier) {
        let _once = self.notifier.set(notifier);
    }

    /// Has the kernel forget attributes and content of a file, if it knows it. Waits for reads and writes of it that are
    /// under way: no call of the kernel may wait for who does this.
    fn forget(&self, number: u64) {
        if let Some(notifier) = self.notifier.get() {
            let _unknown = notifier.inval_inode(INodeNo(number), 0, 0);
        }
    }
}

/// Listens to a node for what it asks back, for as long as the tree is mounted.
///
/// `tried` is told when that has been tried once.
pub(crate) fn listen(peer: &Peer, inodes: &Inodes, forgetting: &Forgetting, tried: &Sender<()>) -> ! {
    loop {
        let ear = peer.ear();
        let _nobody_waits = tried.send(());
        let _broken = ear.and_then(|link| hear(link, peer, inodes, forgetting));
        std::thread::sleep(REST);
    }
}

fn hear(mut link: Link, peer: &Peer, inodes: &Inodes, forgetting: &Forgetting) -> Option<()> {
    let mut given_back: Vec<Lease> = Vec::new();
    for number in 1.. {
        peer.settle(&mut link, number)?;
        let ask = Ask::Hear { given_back: std::mem::take(&mut given_back) };
        let Answer::Recalled(leases) = peer.hear(&mut link, number, &ask)? else { return None };
        if !leases.is_empty() {
            peer.count_recall();
        }
        for lease in &leases {
            for inode in inodes.of(peer.node(), &lease.of) {
                inode.content.doubt();
                forgetting.forget(inode.number);
            }
        }
        given_back = leases;
    }
    None
}
