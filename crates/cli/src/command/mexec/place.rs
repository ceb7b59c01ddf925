//! From an order to the place where it is run. Who waits long for that at a terminal hears what for.

use super::{broken, tell};
use crate::Failure;
use crate::command::mpmake::notes::{self, Noted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tern_control::RefusalKind;
use tern_mexec::pieces::{self, Piece};
use tern_mexec::words::{Order, Said, TOLD, Wait, kind};

/// How long a place may take before its user hears that it is still looked for.
const PATIENCE: Duration = Duration::from_secs(2);

/// Orders a command; what is said of it first that is not about its place.
///
/// # Errors
/// If what places commands is gone.
pub(super) fn find(home: &mut UnixStream, order: &Order, noted: Option<&Noted>) -> Result<Said, Failure> {
    let begun = Instant::now();
    let mut shows = noted.is_none() && is_at_a_terminal();
    let told = if shows || noted.is_some() { TOLD } else { 0 };
    let bytes = tern_wire::encode(order).map_err(|e| broken(&io::Error::other(e)))?;
    home.write_all(&pieces::whole(kind::ORDER, told, &bytes)).map_err(|e| broken(&e))?;
    let (mut waits, mut chosen) = (None, false);
    loop {
        if shows && !chosen && !comes(home, PATIENCE.saturating_sub(begun.elapsed())) {
            tell(&waits_for(waits.as_ref()));
            shows = false;
        }
        match hear(home)? {
            Said::Waits(wait) => waits = Some(wait),
            Said::Chosen(node, why) => {
                chosen = true;
                if let Some(noted) = noted {
                    noted.begun(Some(node.0), &notes::words(why));
                }
            }
            said => return Ok(said),
        }
    }
}

/// Whether this is what its user waits for: the first process of its group is started by a shell, not by a make or a script.
fn is_at_a_terminal() -> bool {
    io::stderr().is_terminal() && rustix::process::getpgrp() == rustix::process::getpid()
}

fn comes(home: &UnixStream, most: Duration) -> bool {
    let most = Timespec::try_from(most).ok();
    poll(&mut [PollFd::new(home, PollFlags::IN)], most.as_ref()).is_ok_and(|ready| ready > 0)
}

fn waits_for(wait: Option<&Wait>) -> String {
    match wait {
        Some(Wait::Turn) => "waits for its turn: others of your commands wait for room".into(),
        Some(Wait::Node(node)) => format!("waits for node {node} to answer"),
        Some(Wait::Room(nodes)) => {
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            match &nodes[..] {
                [node] => format!("waits for room on node {node}"),
                nodes => format!("waits for room on one of nodes {}", nodes.join(", ")),
            }
        }
        None => "waits for a place".into(),
    }
}

fn hear(home: &mut UnixStream) -> Result<Said, Failure> {
    match pieces::hear(home).map_err(|e| broken(&e))? {
        Piece { kind: kind::SAID, bytes, .. } => pieces::read(&bytes).map_err(|e| broken(&e)),
        piece => {
            Err(Failure::new(RefusalKind::Internal, format!("a piece of kind {} came first", piece.kind)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::NodeId;

    #[test]
    fn what_is_waited_for_is_said() {
        let said = |wait| waits_for(Some(&wait));
        assert_eq!(said(Wait::Room(vec![NodeId(2)])), "waits for room on node 2");
        assert_eq!(said(Wait::Room(vec![NodeId(2), NodeId(3)])), "waits for room on one of nodes 2, 3");
        assert_eq!(said(Wait::Node(NodeId(7))), "waits for node 7 to answer");
    }
}
