//! What a hostile client may ask, as the fuzz target `asks` and the tests have it asked: `crates/mfs/fuzz`.

use super::budget::Budget;
use super::export::Export;
use super::leases::Leases;
use super::perform::Performance;
use super::release;
use super::session::Session;
use crate::message::{Answer, Ask, Beside, Deed, Purpose};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Descriptors of the session: few, so that it must forget.
const MOST: usize = 24;

/// The longest file that is made: the disk is the tester's.
const LONGEST: u64 = 1 << 20;

/// Has all asks done that are in these bytes, each with its length before it, as a session would that may reach this directory and
/// nothing else; how many were answered. The directory is emptied, and has a few things in it at the beginning.
///
/// # Errors
/// If the directory cannot be prepared.
pub fn hear(place: &Path, bytes: &[u8]) -> io::Result<usize> {
    prepare(place)?;
    let export = Export { paths: vec![place.to_owned()], ..Export::default() };
    let (session, leases) =
        (Session::counting_from(1, &export, &Budget::new(MOST), Purpose::Room)?, Arc::new(Leases::new(true)));
    session.hears(true);
    let performance = Performance { session: &session, export: &export, leases: &leases };
    let release = |beside: Beside| {
        beside.forgotten.into_iter().for_each(|(object, count)| session.forget(object, count));
        beside.released.into_iter().for_each(|what| release::release(&session, &leases, what));
    };
    let (mut out, mut answered) = (Vec::new(), 0);
    for frame in crate::hostile::frames(bytes) {
        let Ok((ask, data)) = postcard::take_from_bytes::<Ask>(frame) else { break };
        out.clear();
        let answer = match ask {
            Ask::Begin { .. } => break,
            Ask::Release(beside) => {
                release(beside);
                Answer::Done
            }
            Ask::Hear { given_back } => {
                leases.given_back(&session, &given_back);
                Answer::Recalled(session.recalled(Duration::ZERO).map_or_else(Vec::new, |(leases, _)| leases))
            }
            Ask::Renew => {
                leases.renew(&session);
                Answer::Done
            }
            Ask::Do { steps, beside, deed, .. } => {
                release(beside);
                super::answer(performance.perform(&steps, small(deed), data, &mut out))
            }
        };
        tern_wire::encode(&answer).map_err(io::Error::other)?;
        answered += 1;
    }
    Ok(answered)
}

fn prepare(place: &Path) -> io::Result<()> {
    if place.exists() {
        fs::remove_dir_all(place)?;
    }
    fs::create_dir_all(place.join("d"))?;
    fs::write(place.join("a"), "some bytes")?;
    std::os::unix::fs::symlink("/etc/passwd", place.join("l"))?;
    let fifo = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, place.join("p"), rustix::fs::FileType::Fifo, fifo, 0)?;
    Ok(())
}

/// The same, with files that are not too long.
fn small(mut deed: Deed) -> Deed {
    let limit = |number: &mut u64| *number %= LONGEST;
    match &mut deed {
        Deed::Write { at, .. } => limit(at),
        Deed::Set { change, .. } => change.size.iter_mut().for_each(limit),
        Deed::Allocate { at, length, .. } => {
            limit(at);
            limit(length);
        }
        Deed::Copy { to_at, length, .. } => {
            limit(to_at);
            limit(length);
        }
        _ => {}
    }
    deed
}
