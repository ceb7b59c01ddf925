//! MFS: the files of every node, below `/mfs/NODE` on every node.
//!
//! ```text
//!  program ─▶ kernel ─FUSE─▶ client ══ connections, mutual TLS ══▶ serve ─▶ kernel of its node
//! ```
//! Client and server are processes of their own (`tern-mfs`) and outlive ternd. The same is true of
//! the process that serves the tree from which guests map files of their home ([`guest_tree`]). The
//! protocol is in [`message`], the design in docs/design/files.md.
#![deny(unsafe_code)]

pub mod client;
pub mod guest_tree;
mod hostile;
pub mod message;
mod packing;
pub mod serve;

use rustix::io::Errno;
use rustix::net::sockopt;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_wire::{Link, LinkError};

/// Sends a frame, compressed where that pays. Times out only when the peer has accepted none of it
/// for `timeout`: a large frame may take long on a slow link.
fn send(link: &mut Link, kind: u8, tag: u64, parts: &[&[u8]], timeout: Duration) -> Result<(), LinkError> {
    match packing::pack(link, parts) {
        Some(packed) => link.queue(kind | packing::PACKED, tag, &[&packed])?,
        None => link.queue(kind, tag, parts)?,
    }
    loop {
        let unsent = link.unsent();
        match link.drain(Instant::now() + timeout) {
            Err(LinkError::Timeout) if link.unsent() < unsent => {}
            done => return done,
        }
    }
}

/// Enables TCP keepalive: the kernel detects within 15 s that the peer's machine is gone, and
/// within 5 s that it was reset. The server can then let the client's session expire with its
/// locks, and a client with a request in flight sends it again. A machine that was reset answers
/// only segments that it receives, such as keepalive probes.
fn set_keepalive(socket: &impl AsFd) -> Result<(), Errno> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(3))?;
    sockopt::set_tcp_keepcnt(socket, 3)
}

/// Locks a mutex and ignores poisoning: either its data is consistent even after a holder has
/// panicked, or the panic ends the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Raises this process's limit of file descriptors to its hard limit. Returns the limit, clamped to
/// 256..=1,048,576.
pub(crate) fn raise_descriptor_limit() -> usize {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    // Some systems allow a thousand million descriptors, far more than are needed.
    let _unchanged = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
    let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
    usize::try_from(allowed).unwrap_or(1 << 20).clamp(256, 1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use tern_wire::{Authority, Identity, Preamble};

    #[test]
    fn slow_link_does_not_time_out() {
        const TIMEOUT: Duration = Duration::from_millis(500);
        let authority = Authority::create("test").unwrap();
        let [one, two] =
            [1, 2].map(|node| Identity::issued_by_authority(&authority, tern_ids::NodeId(node)).unwrap());
        for end in [&one, &two] {
            end.members().set([one.member(), two.member()]);
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let deadline = Instant::now() + Duration::from_secs(30);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut socket: TcpStream = listener.accept().unwrap().0;
                std::io::Read::read_exact(&mut socket, &mut vec![0; Preamble::Files.to_bytes().len()])
                    .unwrap();
                let mut link = Link::accept(socket, &two.cluster_server().unwrap(), deadline).unwrap();
                for _ in 0..40 {
                    std::thread::sleep(TIMEOUT / 10);
                    link.recv(deadline).unwrap();
                }
            });
            let tls = one.cluster_client(tern_ids::NodeId(2)).unwrap();
            let mut link = Link::connect(&address, Preamble::Files, &tls, deadline).unwrap();
            let large = vec![0; 1 << 20];
            // In total, several times what the buffers of both sockets hold.
            for tag in 0..39 {
                link.queue(1, tag, &[&large]).unwrap();
            }
            let begun = Instant::now();
            send(&mut link, 1, 39, &[&large], TIMEOUT).unwrap();
            assert!(begun.elapsed() > TIMEOUT, "it was not slow");
        });
    }
}
