//! MFS: the files of every node, below `/mfs/NODE` on every node.
//!
//! ```text
//!  program ─▶ kernel ─FUSE─▶ client ══ lanes, mutual TLS ══▶ serve ─▶ kernel of the node that has the files
//! ```
//! Both halves are processes of their own (`tern-mfs`) and outlive ternd; so is a tree that only guests map files from ([`homes`]). What they say to each other is in [`message`]; what
//! holds of it is in docs/design/files.md.
#![deny(unsafe_code)]

pub mod client;
pub mod homes;
mod hostile;
mod mapped;
pub mod message;
mod packing;
pub mod serve;

use rustix::io::Errno;
use rustix::net::sockopt;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_wire::{Link, LinkError};

/// Who nobody is: what the kernel says by default (`/proc/sys/kernel/overflowuid`).
const NOBODY: u32 = 65_534;

/// Sends a frame, packed where that is worth it, for as long as the other end takes some of it within each `patience`: over a slow link a large one may last.
fn send(link: &mut Link, kind: u8, tag: u64, parts: &[&[u8]], patience: Duration) -> Result<(), LinkError> {
    match packing::pack(link, parts) {
        Some(packed) => link.queue(kind | packing::PACKED, tag, &[&packed])?,
        None => link.queue(kind, tag, parts)?,
    }
    loop {
        let unsent = link.unsent();
        match link.drain(Instant::now() + patience) {
            Err(LinkError::Timeout) if link.unsent() < unsent => {}
            done => return done,
        }
    }
}

/// Has the kernel find out within some 15 s that the peer's machine is gone, and within 5 s that it is another one by now: a server
/// lets its locks go then, and a client that has asked asks again. Of a machine that was reset no word comes by itself.
fn keep_alive(socket: &impl AsFd) -> Result<(), Errno> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(3))?;
    sockopt::set_tcp_keepcnt(socket, 3)
}

/// A lock whose holder cannot leave it half changed, or has ended with the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets this process have as many descriptors as it may; how many that is.
pub(crate) fn descriptors() -> usize {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    // Some systems allow a thousand million; nobody needs so many.
    let _as_it_was = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
    let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
    usize::try_from(allowed).unwrap_or(1 << 20).clamp(256, 1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use tern_wire::{Authority, Identity, Preamble};

    #[test]
    fn a_slow_link_is_no_lost_one() {
        const PATIENCE: Duration = Duration::from_millis(500);
        let authority = Authority::create("test").unwrap();
        let [one, two] = [1, 2].map(|node| Identity::issued_by(&authority, tern_ids::NodeId(node)).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let soon = Instant::now() + Duration::from_secs(30);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut socket: TcpStream = listener.accept().unwrap().0;
                std::io::Read::read_exact(&mut socket, &mut vec![0; Preamble::Files.to_bytes().len()])
                    .unwrap();
                let mut link = Link::accept(socket, &two.cluster_server().unwrap(), soon).unwrap();
                for _ in 0..40 {
                    std::thread::sleep(PATIENCE / 10);
                    link.recv(soon).unwrap();
                }
            });
            let tls = one.cluster_client(tern_ids::NodeId(2)).unwrap();
            let mut link = Link::connect(&address, Preamble::Files, &tls, soon).unwrap();
            let large = vec![0; 1 << 20];
            // Several times what two sockets hold.
            for tag in 0..39 {
                link.queue(1, tag, &[&large]).unwrap();
            }
            let begun = Instant::now();
            send(&mut link, 1, 39, &[&large], PATIENCE).unwrap();
            assert!(begun.elapsed() > PATIENCE, "it was not slow");
        });
    }
}
