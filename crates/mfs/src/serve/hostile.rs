//! Performs the requests of a hostile client, for the fuzz target `requests` and for tests
//! (`crates/mfs/fuzz`).

use super::budget::FdBudget;
use super::export::Export;
use super::leases::LeaseTable;
use super::perform::OpContext;
use super::release;
use super::session::Session;
use crate::message::{FileReply, FileRequest, Op, Piggyback, Purpose};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of descriptors of the session: few, so that it must forget objects.
const MAX_DESCRIPTORS: usize = 24;

/// Maximum size in bytes of the files created, to spare the tester's disk.
const MAX_FILE_SIZE: u64 = 1 << 20;

/// Performs all requests in these bytes, each preceded by its length, in a session that exports
/// only this directory. Returns the number of replies. The directory is emptied and filled with a
/// few files first.
///
/// # Errors
/// If the directory cannot be prepared.
pub fn perform_all(dir: &Path, bytes: &[u8]) -> io::Result<usize> {
    prepare(dir)?;
    let export = Export { paths: vec![dir.to_owned()], ..Export::default() };
    let (session, leases) = (
        Session::with_first_number(1, &export, &FdBudget::new(MAX_DESCRIPTORS), Purpose::Container)?,
        Arc::new(LeaseTable::new(true)),
    );
    session.set_callback(true);
    let context = OpContext { session: &session, export: &export, leases: &leases };
    let apply = |piggyback: Piggyback| {
        piggyback.forgotten.into_iter().for_each(|(object, count)| session.forget(object, count));
        piggyback.released.into_iter().for_each(|resource| release::release(&session, &leases, resource));
    };
    let (mut out, mut replies) = (Vec::new(), 0);
    for frame in crate::hostile::frames(bytes) {
        let Ok((request, data)) = postcard::take_from_bytes::<FileRequest>(frame) else { break };
        out.clear();
        let reply = match request {
            FileRequest::Begin { .. } => break,
            FileRequest::Release(piggyback) => {
                apply(piggyback);
                FileReply::Done
            }
            FileRequest::WaitForRecalls { returned } => {
                leases.return_leases(&session, &returned);
                FileReply::Recalled(
                    session.next_recalls(Duration::ZERO).map_or_else(Vec::new, |(leases, _)| leases),
                )
            }
            FileRequest::Renew => {
                leases.renew(&session);
                FileReply::Done
            }
            FileRequest::Call { checks, piggyback, op, .. } => {
                apply(piggyback);
                super::to_reply(context.perform(&checks, limit_size(op), data, &mut out))
            }
        };
        tern_wire::encode(&reply).map_err(io::Error::other)?;
        replies += 1;
    }
    Ok(replies)
}

fn prepare(dir: &Path) -> io::Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    fs::create_dir_all(dir.join("d"))?;
    fs::write(dir.join("a"), "some bytes")?;
    std::os::unix::fs::symlink("/etc/passwd", dir.join("l"))?;
    let fifo = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, dir.join("p"), rustix::fs::FileType::Fifo, fifo, 0)?;
    Ok(())
}

/// Limits offsets and lengths, so that files stay small.
fn limit_size(mut op: Op) -> Op {
    let limit = |number: &mut u64| *number %= MAX_FILE_SIZE;
    match &mut op {
        Op::Write { at, .. } => limit(at),
        Op::SetAttr { change, .. } => change.size.iter_mut().for_each(limit),
        Op::Fallocate { at, length, .. } => {
            limit(at);
            limit(length);
        }
        Op::CopyFileRange { to_at, length, .. } => {
            limit(to_at);
            limit(length);
        }
        _ => {}
    }
    op
}
