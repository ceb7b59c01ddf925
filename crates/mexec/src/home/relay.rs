//! Relays between a caller and the node that runs its command.
//!
//! Both connections are non-blocking, so that a peer that reads nothing, such as a stopped caller,
//! can be distinguished from a lost one. The streams' credit bounds the buffered bytes.

use super::RunOutcome;
use crate::frames::{FrameReader, FrameWriter};
use crate::heartbeat::Heartbeat;
use crate::messages::{ExecReply, ExitReport, STREAM_CREDIT, kind};
use anyhow::{Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::unix::net::UnixStream;
use tern_wire::Link;

/// The maximum number of bytes of a repeatable command's output that are held back. As long as the
/// caller has received none of it, the command can be run again.
const MAX_HELD: usize = STREAM_CREDIT / 2;

/// The maximum number of bytes buffered for a caller. A node that respects the streams' credit
/// never causes more, even if it sends single bytes.
const MAX_CALLER_BACKLOG: usize = 32 * STREAM_CREDIT;

/// Frames from the node, held back until they are released to the caller.
#[derive(Debug, Default)]
struct HeldOutput {
    is_holding: bool,
    frames: Vec<(u8, u8, Vec<u8>)>,
    bytes: usize,
}

/// Relays until the command has ended, or one of the peers is gone. Returns the outcome, and the
/// command's exit report if it is known and the link can be used for another command.
///
/// # Errors
/// If the caller is gone. The command then ends too, as the link is closed.
pub(crate) fn relay(
    link: &mut Link,
    caller: &mut UnixStream,
    reply: ExecReply,
    holds_output: bool,
) -> Result<(RunOutcome, Option<ExitReport>)> {
    caller.set_nonblocking(true)?;
    let outcome = relay_frames(link, caller, reply, holds_output);
    caller.set_nonblocking(false)?;
    outcome
}

fn relay_frames(
    link: &mut Link,
    caller: &mut UnixStream,
    reply: ExecReply,
    holds_output: bool,
) -> Result<(RunOutcome, Option<ExitReport>)> {
    let (mut from_caller, mut to_caller) = (FrameReader::default(), FrameWriter::default());
    let mut heartbeat = Heartbeat::new(Heartbeat::NODE_TIMEOUT);
    let mut held = HeldOutput { is_holding: holds_output, ..HeldOutput::default() };
    held.push(kind::EXEC_REPLY, 0, &tern_wire::encode(&reply)?, &mut to_caller);
    if matches!(reply, ExecReply::StartFailed(..)) {
        held.release(&mut to_caller);
        finish(to_caller, caller)?;
        return Ok((RunOutcome::Finished, None));
    }
    let report = loop {
        match forward_from_node(link, &mut held, &mut to_caller, &mut heartbeat) {
            Ok(None) => {}
            Ok(Some(report)) => break report,
            Err(error) => {
                tracing::info!("a command is lost: {error:#}");
                return Ok(node_lost(&held, to_caller, caller));
            }
        }
        to_caller.flush(caller)?;
        while let Some(frame) = from_caller.next_frame()? {
            if !frame.is_valid() || !(kind::DATA..=kind::WINDOW).contains(&frame.kind) {
                bail!("its caller sent an invalid frame");
            }
            if link.queue(frame.kind, frame.stream.into(), &[&frame.payload]).is_err() {
                return Ok(node_lost(&held, to_caller, caller));
            }
        }
        let out_if = |pending: bool| if pending { PollFlags::OUT } else { PollFlags::empty() };
        let mut fds = [
            PollFd::new(&*link, PollFlags::IN | out_if(link.wants_write())),
            PollFd::new(&*caller, PollFlags::IN | out_if(!to_caller.is_empty())),
        ];
        match poll(&mut fds, Some(&Timespec::try_from(Heartbeat::INTERVAL)?)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_readable = fds[1].revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR);
        if is_readable && !from_caller.fill(caller)? {
            bail!("its caller has disconnected");
        }
    };
    held.release(&mut to_caller);
    finish(to_caller, caller)?;
    Ok((RunOutcome::Finished, Some(report)))
}

/// Relays the frames that the node has sent. Returns the exit report, if that was among them.
fn forward_from_node(
    link: &mut Link,
    held: &mut HeldOutput,
    to_caller: &mut FrameWriter,
    heartbeat: &mut Heartbeat,
) -> Result<Option<ExitReport>> {
    while let Some(frame) = link.receive()? {
        heartbeat.record_received();
        match frame.kind {
            kind::HEARTBEAT => {}
            kind::EXEC_REPLY => {
                held.push(frame.kind, 0, &frame.payload, to_caller);
                if let ExecReply::Exited(report) = tern_wire::decode(&frame.payload)? {
                    return Ok(Some(report));
                }
            }
            kind::DATA | kind::END | kind::CREDIT if frame.tag < 3 => {
                held.push(frame.kind, frame.tag as u8, &frame.payload, to_caller);
            }
            other => bail!("an unexpected frame of kind {other} of a command"),
        }
        link.recycle(frame.payload);
        if to_caller.len() > MAX_CALLER_BACKLOG {
            bail!("it sends more than its credit");
        }
    }
    if heartbeat.is_due()? {
        link.queue(kind::HEARTBEAT, 0, &[])?;
    }
    Ok(None)
}

impl HeldOutput {
    fn push(&mut self, kind: u8, stream: u8, payload: &[u8], to_caller: &mut FrameWriter) {
        if !self.is_holding {
            return to_caller.push(kind, stream, payload);
        }
        // An empty frame counts too, since it takes memory.
        self.bytes += payload.len().max(1);
        self.frames.push((kind, stream, payload.to_vec()));
        // A command that consumes input or writes much output is not repeated: its caller must make
        // progress.
        if self.bytes > MAX_HELD || kind == kind::CREDIT {
            self.release(to_caller);
        }
    }

    /// Releases the held frames. Later frames are relayed at once.
    fn release(&mut self, to_caller: &mut FrameWriter) {
        self.is_holding = false;
        for (kind, stream, payload) in self.frames.drain(..) {
            to_caller.push(kind, stream, &payload);
        }
    }
}

/// The node is lost. The relayed frames are flushed to the caller; if all were held back, the
/// command may be run again.
fn node_lost(
    held: &HeldOutput,
    to_caller: FrameWriter,
    caller: &mut UnixStream,
) -> (RunOutcome, Option<ExitReport>) {
    let _gone = finish(to_caller, caller);
    if held.is_holding { (RunOutcome::NodeLost, None) } else { (RunOutcome::Cut, None) }
}

/// Writes everything to the caller, blocking for as long as it takes.
fn finish(mut to_caller: FrameWriter, caller: &mut UnixStream) -> Result<()> {
    caller.set_nonblocking(false)?;
    Ok(to_caller.flush(caller)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::Halves;
    use crate::messages::MAX_DATA_LEN;
    use std::time::{Duration, Instant};

    #[test]
    fn node_that_ignores_credit_cannot_exhaust_memory() {
        for (is_holding, kind, payload) in [
            (false, kind::DATA, &[7; MAX_DATA_LEN][..]),
            (true, kind::DATA, &[7; MAX_DATA_LEN]),
            (true, kind::END, &[]),
        ] {
            let (mut home_end, mut node_end) = Halves::new().unwrap().link().unwrap();
            let deadline = Instant::now() + Duration::from_secs(30);
            let sender =
                std::thread::spawn(move || while node_end.send(kind, 1, &[payload], deadline).is_ok() {});
            let mut to_caller = FrameWriter::default();
            let mut heartbeat = Heartbeat::new(Heartbeat::NODE_TIMEOUT);
            let mut held = HeldOutput { is_holding, ..HeldOutput::default() };
            let refused = loop {
                match forward_from_node(&mut home_end, &mut held, &mut to_caller, &mut heartbeat) {
                    Ok(_) => assert!(Instant::now() < deadline, "{} bytes are buffered", to_caller.len()),
                    Err(refused) => break refused,
                }
            };
            assert!(refused.to_string().contains("more than its credit"), "{refused:#}");
            assert!(to_caller.len() < MAX_CALLER_BACKLOG + 2 * MAX_DATA_LEN && held.frames.is_empty());
            drop(home_end);
            sender.join().unwrap();
        }
    }
}
