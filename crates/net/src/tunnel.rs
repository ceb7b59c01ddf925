//! Carries the frames of a tunnel on a link between two nodes.
//!
//! A link is authenticated and encrypted, and uses the port that the nodes' other links use. Frames are
//! lost while it is broken; TCP sends their bytes again.

use crate::path::TunnelInterface;
use anyhow::{Context, Result, bail, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_redirect::{MAX_TUNNEL_FRAME_LEN, Tunnel};
use tern_wire::{Frame, Link};

/// Kinds of frames on the link of a tunnel. A frame of the interface is one message.
const PACKET: u8 = 2;
/// Request of the guest's node, after all that its interface had: send all that the other interface has,
/// and then the reply with the same tag.
const FLUSH: u8 = 3;
const FLUSHED: u8 = 4;

/// Frames that are carried in one direction before the other one is looked at.
const MAX_IN_A_ROW: usize = 64;

/// Bytes that wait for the link, above which the interface's queue is no longer emptied, so that it
/// fills and the kernel drops frames. TCP then sends more slowly.
const MAX_UNSENT: usize = 256 << 10;

/// The same while a request to send all is performed.
const MAX_UNSENT_OF_FLUSH: usize = 64 << 20;

/// The guest's node sends a request at least this often, so that both nodes notice a broken link.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// A link on which nothing arrives for this long is given up.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(20);

/// How often a thread that carries frames looks whether it is to end.
const CHECK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Requests of the guest's node that what each end's interface has arrives at the other one.
#[derive(Debug)]
pub(crate) struct Flushes {
    numbers: Mutex<Numbers>,
    /// Signalled when `replied` changes.
    changed: Condvar,
    /// Wakes the thread that carries the frames.
    wake: OwnedFd,
}

/// Numbers of requests. Each request has the number after the last one.
#[derive(Debug, Default)]
struct Numbers {
    requested: u64,
    sent: u64,
    replied: u64,
}

impl Flushes {
    /// # Errors
    /// If there is no free descriptor.
    pub(crate) fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { numbers: Mutex::default(), changed: Condvar::new(), wake })
    }

    fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true when all frames have arrived at the other end that one had when this was called, in
    /// both directions; false after `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let mut numbers = self.numbers();
        numbers.requested += 1;
        let number = numbers.requested;
        let _woken_already = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        let waits = |numbers: &mut Numbers| numbers.replied < number;
        let waited = self.changed.wait_timeout_while(numbers, limit, waits);
        let (numbers, _) = waited.unwrap_or_else(PoisonError::into_inner);
        numbers.replied >= number
    }

    /// The number of the request that is to be sent, if there is one.
    fn take(&self, sent_at: &mut Instant) -> Option<u64> {
        let mut numbers = self.numbers();
        if sent_at.elapsed() > KEEPALIVE_INTERVAL && numbers.sent == numbers.requested {
            numbers.requested += 1;
        }
        if numbers.sent == numbers.requested {
            return None;
        }
        *sent_at = Instant::now();
        numbers.sent = numbers.requested;
        Some(numbers.sent)
    }

    fn reply(&self, number: u64) {
        let mut numbers = self.numbers();
        numbers.replied = numbers.replied.max(number.min(numbers.sent));
        self.changed.notify_all();
    }
}

/// Carries frames in both directions while `goes_on`.
///
/// # Errors
/// If the link breaks.
pub(crate) fn carry(link: &mut Link, interface: &TunnelInterface, goes_on: impl Fn() -> bool) -> Result<()> {
    let (tunnel, flushes) = (interface.tunnel()?, interface.flushes());
    let mut buffer = vec![0; MAX_TUNNEL_FRAME_LEN];
    let (mut received_at, mut sent_at) = (Instant::now(), Instant::now());
    while goes_on() {
        for _ in 0..MAX_IN_A_ROW {
            let Some(frame) = link.receive()? else { break };
            received_at = Instant::now();
            receive(link, tunnel, flushes, &frame, &mut buffer)?;
            link.recycle(frame.payload);
        }
        ensure!(received_at.elapsed() < SILENCE_TIMEOUT, "the other node is silent");
        send(link, tunnel, MAX_IN_A_ROW, MAX_UNSENT, &mut buffer)?;
        if let Some(number) = flushes.and_then(|flushes| flushes.take(&mut sent_at)) {
            send(link, tunnel, usize::MAX, MAX_UNSENT_OF_FLUSH, &mut buffer)?;
            link.queue(FLUSH, number, &[])?;
        }
        if !link.has_frame() {
            wait(link, tunnel, flushes)?;
        }
    }
    Ok(())
}

fn receive(
    link: &mut Link,
    tunnel: &Tunnel,
    flushes: Option<&Flushes>,
    frame: &Frame,
    buffer: &mut [u8],
) -> Result<()> {
    match (frame.kind, flushes) {
        (PACKET, _) => {
            if let Err(error) = tunnel.write(&frame.payload) {
                tracing::debug!(%error, "a packet of a tunnel was dropped");
            }
        }
        (FLUSH, None) => {
            send(link, tunnel, usize::MAX, MAX_UNSENT_OF_FLUSH, buffer)?;
            link.queue(FLUSHED, frame.tag, &[])?;
        }
        (FLUSHED, Some(flushes)) => flushes.reply(frame.tag),
        _ => bail!("a frame of kind {} in a tunnel", frame.kind),
    }
    Ok(())
}

/// Sends up to `max_frames` of the interface's frames.
fn send(
    link: &mut Link,
    tunnel: &Tunnel,
    max_frames: usize,
    max_unsent: usize,
    buffer: &mut [u8],
) -> Result<()> {
    for _ in 0..max_frames {
        if link.unsent() > max_unsent {
            break;
        }
        match tunnel.read(buffer) {
            Ok(length) => link.queue(PACKET, 0, &[&buffer[..length]])?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error).context("cannot read from the interface of a tunnel"),
        }
    }
    Ok(())
}

/// Waits until there is something to carry, or for a second.
fn wait(link: &mut Link, tunnel: &Tunnel, flushes: Option<&Flushes>) -> Result<()> {
    let wants = if link.wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    let mut events = vec![PollFd::from_borrowed_fd(link.as_fd(), wants)];
    if link.unsent() <= MAX_UNSENT {
        events.push(PollFd::new(tunnel, PollFlags::IN));
    }
    if let Some(flushes) = flushes {
        events.push(PollFd::new(&flushes.wake, PollFlags::IN));
    }
    rustix::io::retry_on_intr(|| poll(&mut events, Some(&CHECK_INTERVAL)))?;
    drop(events);
    if let Some(flushes) = flushes {
        let _nothing = rustix::io::read(&flushes.wake, &mut [0u8; 8][..]);
    }
    link.flush()?;
    Ok(())
}
