//! Between a caller and the node that runs its command: what one says the other hears.
//!
//! Neither is waited for, so that one who takes nothing, a stopped caller say, is still told from one who is lost. What is under way is
//! bounded by the streams' credit.

use super::Outcome;
use crate::lock_step::Beat;
use crate::pieces::{Inbox, Outbox};
use crate::words::{CREDIT, Ended, Said, kind};
use anyhow::{Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::unix::net::UnixStream;
use tern_wire::Link;

/// How much of a repeatable command's output is held back: what its caller has not seen can be made again.
const MOST_HELD: usize = CREDIT / 2;

/// More than ever waits for a caller of what a node sends within its credit, also if that comes byte by byte.
const MOST_WAITING: usize = 32 * CREDIT;

/// What its node says, until it is passed on.
#[derive(Debug, Default)]
struct Held {
    holds: bool,
    pieces: Vec<(u8, u8, Vec<u8>)>,
    bytes: usize,
}

/// Relays until the command has ended, or one of the two is gone: what has come of it, and its end, if that is known and the link is
/// good for another one.
///
/// # Errors
/// If the caller is gone; the command ends then, as the link is closed.
pub(crate) fn relay(
    link: &mut Link,
    caller: &mut UnixStream,
    said: Said,
    hold: bool,
) -> Result<(Outcome, Option<Ended>)> {
    caller.set_nonblocking(true)?;
    let outcome = converse(link, caller, said, hold);
    caller.set_nonblocking(false)?;
    outcome
}

fn converse(
    link: &mut Link,
    caller: &mut UnixStream,
    said: Said,
    hold: bool,
) -> Result<(Outcome, Option<Ended>)> {
    let (mut inbox, mut outbox, mut beat) = (Inbox::default(), Outbox::default(), Beat::new(Beat::LOST));
    let mut held = Held { holds: hold, ..Held::default() };
    held.pass(kind::SAID, 0, &tern_wire::encode(&said)?, &mut outbox);
    if matches!(said, Said::NotStarted(..)) {
        held.release(&mut outbox);
        finish(outbox, caller)?;
        return Ok((Outcome::Over, None));
    }
    let ended = loop {
        match forward(link, &mut held, &mut outbox, &mut beat) {
            Ok(None) => {}
            Ok(Some(ended)) => break ended,
            Err(error) => {
                tracing::info!("a command is lost: {error:#}");
                return Ok(lost(&held, outbox, caller));
            }
        }
        outbox.flush(caller)?;
        while let Some(piece) = inbox.piece()? {
            if !piece.is_sound() || !(kind::DATA..=kind::WINDOW).contains(&piece.kind) {
                bail!("its caller says what no caller says");
            }
            if link.queue(piece.kind, piece.stream.into(), &[&piece.bytes]).is_err() {
                return Ok(lost(&held, outbox, caller));
            }
        }
        let sends = |waits: bool| if waits { PollFlags::OUT } else { PollFlags::empty() };
        let mut fds = [
            PollFd::new(&*link, PollFlags::IN | sends(link.wants_write())),
            PollFd::new(&*caller, PollFlags::IN | sends(!outbox.is_empty())),
        ];
        match poll(&mut fds, Some(&Timespec::try_from(Beat::OFTEN)?)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let comes = fds[1].revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR);
        if comes && !inbox.fill(caller)? {
            bail!("its caller has gone");
        }
    };
    held.release(&mut outbox);
    finish(outbox, caller)?;
    Ok((Outcome::Over, Some(ended)))
}

/// Passes on what the node says; the command's end, if that is among it.
fn forward(link: &mut Link, held: &mut Held, outbox: &mut Outbox, beat: &mut Beat) -> Result<Option<Ended>> {
    while let Some(frame) = link.receive()? {
        beat.heard();
        match frame.kind {
            kind::BEAT => {}
            kind::SAID => {
                held.pass(frame.kind, 0, &frame.payload, outbox);
                if let Said::Ended(how) = tern_wire::decode(&frame.payload)? {
                    return Ok(Some(how));
                }
            }
            kind::DATA | kind::END | kind::TAKEN if frame.tag < 3 => {
                held.pass(frame.kind, frame.tag as u8, &frame.payload, outbox);
            }
            other => bail!("a piece of kind {other} of a command"),
        }
        link.recycle(frame.payload);
        if outbox.len() > MOST_WAITING {
            bail!("it sends more than may be under way");
        }
    }
    if beat.is_due()? {
        link.queue(kind::BEAT, 0, &[])?;
    }
    Ok(None)
}

impl Held {
    fn pass(&mut self, kind: u8, stream: u8, bytes: &[u8], outbox: &mut Outbox) {
        if !self.holds {
            return outbox.add(kind, stream, bytes);
        }
        // Also what carries nothing takes a place.
        self.bytes += bytes.len().max(1);
        self.pieces.push((kind, stream, bytes.to_vec()));
        // What takes input, or says much, is not repeated: its caller has to go on.
        if self.bytes > MOST_HELD || kind == kind::TAKEN {
            self.release(outbox);
        }
    }

    /// From now on everything is passed on at once.
    fn release(&mut self, outbox: &mut Outbox) {
        self.holds = false;
        for (kind, stream, bytes) in self.pieces.drain(..) {
            outbox.add(kind, stream, &bytes);
        }
    }
}

/// The node is lost. What it has said is passed on, unless all of it can be made anew.
fn lost(held: &Held, outbox: Outbox, caller: &mut UnixStream) -> (Outcome, Option<Ended>) {
    let _gone = finish(outbox, caller);
    if held.holds { (Outcome::Lost, None) } else { (Outcome::Cut, None) }
}

/// Everything leaves, however slowly the caller takes it.
fn finish(mut outbox: Outbox, caller: &mut UnixStream) -> Result<()> {
    caller.set_nonblocking(false)?;
    Ok(outbox.flush(caller)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::Halves;
    use crate::words::PIECE;
    use std::time::{Duration, Instant};

    #[test]
    fn a_node_that_heeds_no_credit_fills_no_memory() {
        for (holds, kind, bytes) in
            [(false, kind::DATA, &[7; PIECE][..]), (true, kind::DATA, &[7; PIECE]), (true, kind::END, &[])]
        {
            let (mut near, mut far) = Halves::new().unwrap().link().unwrap();
            let soon = Instant::now() + Duration::from_secs(30);
            let sender = std::thread::spawn(move || while far.send(kind, 1, &[bytes], soon).is_ok() {});
            let (mut outbox, mut beat) = (Outbox::default(), Beat::new(Beat::LOST));
            let mut held = Held { holds, ..Held::default() };
            let refused = loop {
                match forward(&mut near, &mut held, &mut outbox, &mut beat) {
                    Ok(_) => assert!(Instant::now() < soon, "{} bytes wait", outbox.len()),
                    Err(refused) => break refused,
                }
            };
            assert!(refused.to_string().contains("more than may be under way"), "{refused:#}");
            assert!(outbox.len() < MOST_WAITING + 2 * PIECE && held.pieces.is_empty());
            drop(near);
            sender.join().unwrap();
        }
    }
}
