//! mexec: remote execution of commands that are placed on a node and not migrated afterwards. A
//! build is thousands of short processes that do much I/O. Each is started on the node that runs it
//! best, accesses its home's files there through MFS, and stays there until it ends.
//!
//! ```text
//!  mexec ─▶ home half ══ mutual TLS ══▶ away half ─▶ container (home's files) ─▶ the command
//!           chooses, relays            has slots, assigns them fairly
//! ```
//! Both halves are in one program, `tern-exec`, which runs beside ternd and outlives it. The same
//! program, as a process of its own, is the gatekeeper ([`gatekeeper`]), which accepts commands
//! from machines outside the cluster. The messages are in [`messages`]. docs/design/placing.md
//! explains the design.
#![deny(unsafe_code)]

mod away;
mod container;
mod credit;
mod fairness;
pub mod frames;
pub mod gatekeeper;
mod heartbeat;
mod home;
pub mod hostile;
mod job_table;
pub mod messages;
mod shared_dirs;

pub use container::run as run_container;

use anyhow::{Context, Result};
use away::Away;
use home::Home;
use job_table::JobTable;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tern_control::control_socket::{ControlSocket, not_held};
use tern_control::shim::{ShimReply, ShimRequest};
use tern_node::Config;
use tern_wire::Identity;

/// The socket that `mexec` connects to, in the node's run directory.
pub const SOCKET: &str = "mexec";

/// The maximum number of connections, each with a thread: counted separately for other nodes,
/// callers on this node, and outside clients.
const MAX_CONNECTIONS: usize = 4096;

/// Stack size of a connection's thread, in bytes.
const STACK_SIZE: usize = 256 << 10;

/// Serves both halves of this node for ever: callers at `socket`, and connections that ternd passes
/// on at `control`.
///
/// # Errors
/// If it cannot start, or `control` fails.
pub fn serve(config: Config, control: &ControlSocket, socket: UnixListener) -> Result<()> {
    // Removes the control groups of a predecessor that was killed while ternd was not running.
    tern_cgroup::guests::remove_if_empty();
    let identity = Identity::load(&config.config_dir).context("this node has no usable identity")?;
    tern_node::follow_map(&config.map, &identity).context("the map is not usable")?;
    let jobs = Arc::new(JobTable::default());
    let away = Arc::new(Away::new(config.clone(), &identity, jobs.clone())?);
    let home = Arc::new(Home::new(config, identity, jobs.clone()));
    let callers = Arc::new(AtomicUsize::new(0));
    let accept = move || {
        loop {
            match socket.accept() {
                Ok((caller, _)) => {
                    let home = home.clone();
                    spawn("caller", &callers, move || home.serve(caller));
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
        control.wait(&[], Duration::from_secs(60))?;
        while let Some(caller) = control.accept() {
            match caller.request() {
                ShimRequest::Connection => {
                    if let Some(socket) = caller.receive_connection() {
                        let away = away.clone();
                        spawn("connection", &connections, move || away.serve(socket));
                    }
                }
                ShimRequest::Placed => caller.reply(&ShimReply::Placed(jobs.rows())),
                _ => caller.reply(&not_held()),
            }
        }
        away.reap_idle();
    }
}

/// Runs `work` in a thread of its own, if fewer than the maximum number run. Otherwise drops it,
/// which closes its connection.
fn spawn(name: &str, count: &Arc<AtomicUsize>, work: impl FnOnce() -> Result<()> + Send + 'static) {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::AcqRel);
        }
    }
    if count.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTIONS {
        count.fetch_sub(1, Ordering::AcqRel);
        return tracing::warn!("{MAX_CONNECTIONS} connections are open; a further one was closed");
    }
    let counted = Counted(count.clone());
    let work = move || {
        let _counted = counted;
        if let Err(error) = work() {
            tracing::info!("a connection has ended: {error:#}");
        }
    };
    if let Err(error) = std::thread::Builder::new().name(name.into()).stack_size(STACK_SIZE).spawn(work) {
        tracing::warn!(%error, "no thread for a connection");
    }
}

/// Locks a mutex. Poison is ignored: no holder leaves the data in an inconsistent state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
