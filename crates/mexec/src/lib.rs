//! mexec: commands that are placed, not moved. A build is thousands of short processes that read and write much; each is begun on
//! the node that runs it best, sees its home's files there through MFS, and stays until it ends.
//!
//! ```text
//!  mexec ─▶ home half ══ mutual TLS ══▶ away half ─▶ room (home's files) ─▶ the command, as its user
//!           chooses, relays            has so much room, gives it out fairly
//! ```
//! Both halves are one program, `tern-exec`, beside ternd, which it outlives; so is the gatekeeper ([`outside`]), to whom machines that are in
//! no cluster bring their commands. What they say to each other is in [`words`]; why it is so
//! in docs/design/placing.md.
#![deny(unsafe_code)]

mod away;
mod board;
mod home;
pub mod hostile;
mod lock_step;
pub mod outside;
pub mod pieces;
mod room;
mod shared;
mod turns;
pub mod words;

pub use room::run as be_room;

use anyhow::{Context, Result};
use away::Away;
use board::Board;
use home::Home;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tern_control::door::{Door, not_here};
use tern_control::shim::{ShimReply, ShimRequest};
use tern_node::Config;
use tern_wire::Identity;

/// The socket to which `mexec` speaks, in the node's run directory.
pub const SOCKET: &str = "mexec";

/// The most connections of other nodes, and of callers here; each has a thread.
const MOST: usize = 4096;

/// The stack of such a thread.
const STACK: usize = 256 << 10;

/// Serves both halves of this node for ever: callers at `socket`, and connections that ternd passes on at `door`.
///
/// # Errors
/// If it cannot begin; nothing is left then.
pub fn serve(config: Config, door: &Door, socket: UnixListener) -> Result<()> {
    // Of one that was killed while no ternd was there.
    tern_cgroup::guests::tidy();
    let identity = Identity::load(&config.config_dir).context("this node has no usable identity")?;
    let board = Arc::new(Board::default());
    let away = Arc::new(Away::new(config.clone(), &identity, board.clone())?);
    let home = Arc::new(Home::new(config, identity, board.clone()));
    let callers = Arc::new(AtomicUsize::new(0));
    let accept = move || {
        loop {
            match socket.accept() {
                Ok((caller, _)) => {
                    let home = home.clone();
                    in_thread("caller", &callers, move || home.serve(caller));
                }
                Err(error) => {
                    tracing::warn!(%error, "a caller cannot be accepted");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    };
    std::thread::Builder::new().name("callers".into()).spawn(accept)?;
    let connections = Arc::new(AtomicUsize::new(0));
    loop {
        door.wait(&[], Duration::from_secs(60))?;
        while let Some(caller) = door.next() {
            match caller.request() {
                ShimRequest::Connection => {
                    if let Some(socket) = caller.connection() {
                        let away = away.clone();
                        in_thread("connection", &connections, move || away.serve(socket));
                    }
                }
                ShimRequest::Placed => caller.answer(&ShimReply::Placed(board.rows())),
                _ => caller.answer(&not_here()),
            }
        }
        away.tidy();
    }
}

/// Does something in a thread of its own, among so many; else it is dropped, which closes its connection.
fn in_thread(name: &str, count: &Arc<AtomicUsize>, work: impl FnOnce() -> Result<()> + Send + 'static) {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::AcqRel);
        }
    }
    if count.fetch_add(1, Ordering::AcqRel) >= MOST {
        count.fetch_sub(1, Ordering::AcqRel);
        return tracing::warn!("{MOST} connections; one was closed");
    }
    let counted = Counted(count.clone());
    let work = move || {
        let _counted = counted;
        if let Err(error) = work() {
            tracing::info!("a connection has ended: {error:#}");
        }
    };
    if let Err(error) = std::thread::Builder::new().name(name.into()).stack_size(STACK).spawn(work) {
        tracing::warn!(%error, "no thread for a connection");
    }
}

/// A lock whose holder cannot leave it half changed, or has ended with the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
