//! Carries the frames of a tunnel on a link between two nodes.
//!
//! A link is authenticated and encrypted, and uses the port that the nodes' other links use. Frames are
//! lost while it is broken; TCP sends their bytes again.

use crate::path::TunnelInterface;
use anyhow::{Result, anyhow};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_redirect::{MAX_TUNNEL_FRAME_LEN, MAX_TUNNEL_QUEUE, Tunnel};
use tern_wire::{Frame, Link, LinkError};

/// Kinds of frames on the link of a tunnel. A frame of the interface is one message.
const PACKET: u8 = 2;
/// Request of the guest's node, after all that its interface had: send all that the other interface has,
/// and then the reply with the same tag.
const FLUSH: u8 = 3;
const FLUSHED: u8 = 4;
/// From the guest's node now and then, so that home notices a broken link.
const KEEPALIVE: u8 = 5;

/// Frames that are carried in one direction before the other one is looked at.
const MAX_IN_A_ROW: usize = 64;

/// Bytes that wait for the link, above which the interface's queue is no longer emptied, so that it
/// fills and the kernel drops frames. TCP then sends more slowly.
const MAX_UNSENT: usize = 256 << 10;

/// Interval of keepalive frames, and how long home waits for one. The second is long, since a node that
/// is slow is not gone.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(180);

/// How long the other machine may acknowledge nothing that was sent to it.
const ACK_TIMEOUT: Duration = Duration::from_secs(15);

/// How often a thread that carries frames looks whether it is to end.
const CHECK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Why frames are not carried any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CarryError {
    /// The link broke.
    #[error("the link broke: {0:#}")]
    Link(#[from] anyhow::Error),
    /// The interface was deleted. A tunnel needs a new one.
    #[error("the interface cannot be read: {0}")]
    Interface(std::io::Error),
}

impl From<LinkError> for CarryError {
    fn from(error: LinkError) -> Self {
        Self::Link(error.into())
    }
}

/// Requests of the guest's node that what each end's interface has arrives at the other one.
#[derive(Debug)]
pub(crate) struct Flushes {
    numbers: Mutex<Numbers>,
    /// Signalled when `replied` or `connected` changes.
    changed: Condvar,
    /// Wakes the thread that carries the frames.
    wake: OwnedFd,
}

/// Numbers of requests. Each request has the number after the last one.
#[derive(Debug, Default)]
struct Numbers {
    connected: bool,
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
    /// both directions; false without a link, or after `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let mut numbers = self.numbers();
        numbers.requested += 1;
        let number = numbers.requested;
        let _woken_already = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        let waits = |numbers: &mut Numbers| numbers.connected && numbers.replied < number;
        let waited = self.changed.wait_timeout_while(numbers, limit, waits);
        let (numbers, _) = waited.unwrap_or_else(PoisonError::into_inner);
        numbers.replied >= number
    }

    /// Called when a link begins or ends to carry frames. Requests that a link has lost fail.
    pub(crate) fn set_connected(&self, connected: bool) {
        let mut numbers = self.numbers();
        (numbers.connected, numbers.sent) = (connected, numbers.requested);
        self.changed.notify_all();
    }

    /// The number of the request that is to be sent, if there is one.
    fn take(&self) -> Option<u64> {
        let mut numbers = self.numbers();
        if numbers.sent == numbers.requested {
            return None;
        }
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
/// If the link breaks, or the interface is gone.
pub(crate) fn carry(
    link: &mut Link,
    interface: &TunnelInterface,
    goes_on: impl Fn() -> bool,
) -> Result<(), CarryError> {
    interface.set_connected(true);
    let carried = carry_frames(link, interface, goes_on);
    interface.set_connected(false);
    carried
}

fn carry_frames(
    link: &mut Link,
    interface: &TunnelInterface,
    goes_on: impl Fn() -> bool,
) -> Result<(), CarryError> {
    let (tunnel, flushes) = (interface.tunnel()?, interface.flushes());
    let mut buffer = vec![0; MAX_TUNNEL_FRAME_LEN];
    let (mut received_at, mut kept_alive_at) = (Instant::now(), Instant::now());
    while goes_on() {
        for _ in 0..MAX_IN_A_ROW {
            let Some(frame) = link.receive()? else { break };
            received_at = Instant::now();
            receive(link, tunnel, flushes, &frame, &mut buffer)?;
            link.recycle(frame.payload);
        }
        if link.unsent() <= MAX_UNSENT {
            send(link, tunnel, MAX_IN_A_ROW, &mut buffer)?;
        }
        match flushes {
            Some(flushes) => {
                if let Some(number) = flushes.take() {
                    send(link, tunnel, MAX_TUNNEL_QUEUE, &mut buffer)?;
                    link.queue(FLUSH, number, &[])?;
                }
                if kept_alive_at.elapsed() > KEEPALIVE_INTERVAL {
                    kept_alive_at = Instant::now();
                    link.queue(KEEPALIVE, 0, &[])?;
                }
            }
            None if received_at.elapsed() > SILENCE_TIMEOUT => {
                return Err(anyhow!("the other node is silent").into());
            }
            None => {}
        }
        if link.time_without_ack() > ACK_TIMEOUT {
            return Err(anyhow!("the other machine does not answer").into());
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
) -> Result<(), CarryError> {
    match (frame.kind, flushes) {
        (PACKET, _) => {
            if let Err(error) = tunnel.write(&frame.payload) {
                tracing::debug!(%error, "a packet of a tunnel was dropped");
            }
        }
        (FLUSH, None) => {
            send(link, tunnel, MAX_TUNNEL_QUEUE, buffer)?;
            link.queue(FLUSHED, frame.tag, &[])?;
        }
        (KEEPALIVE, None) => {}
        (FLUSHED, Some(flushes)) => flushes.reply(frame.tag),
        _ => return Err(anyhow!("a frame of kind {} in a tunnel", frame.kind).into()),
    }
    Ok(())
}

/// Sends up to `max_frames` of the interface's frames.
fn send(link: &mut Link, tunnel: &Tunnel, max_frames: usize, buffer: &mut [u8]) -> Result<(), CarryError> {
    for _ in 0..max_frames {
        match tunnel.read(buffer) {
            Ok(length) => match link.queue(PACKET, 0, &[&buffer[..length]]) {
                // TCP sends them again.
                Err(LinkError::Full) => break,
                queued => queued?,
            },
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(CarryError::Interface(error)),
        }
    }
    Ok(())
}

/// Waits until there is something to carry, or for a second.
fn wait(link: &mut Link, tunnel: &Tunnel, flushes: Option<&Flushes>) -> Result<(), CarryError> {
    let wants = if link.wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    let mut events = vec![PollFd::from_borrowed_fd(link.as_fd(), wants)];
    if link.unsent() <= MAX_UNSENT {
        events.push(PollFd::new(tunnel, PollFlags::IN));
    }
    if let Some(flushes) = flushes {
        events.push(PollFd::new(&flushes.wake, PollFlags::IN));
    }
    rustix::io::retry_on_intr(|| poll(&mut events, Some(&CHECK_INTERVAL))).map_err(anyhow::Error::from)?;
    drop(events);
    if let Some(flushes) = flushes {
        let _nothing = rustix::io::read(&flushes.wake, &mut [0u8; 8][..]);
    }
    link.flush().map_err(LinkError::from)?;
    Ok(())
}
