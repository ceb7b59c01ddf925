//! Packets that arrive while their connection moves are kept, and given to the node that has it then.
//!
//! A client whose packets are dropped waits for its retransmission timeout, 200 ms or more. A packet
//! socket sees each frame before the table drops it. The frames wait in the socket's queue, in kernel
//! memory; no thread reads them meanwhile.

use crate::elements::Change;
use crate::ends::Ends;
use crate::error::{NEEDS_NET_ADMIN, Result, WithRemedy};
use crate::filter::Filter;
use crate::injector::Injector;
use crate::link::NetworkInterface;
use crate::packet_socket::{self, Receiver};
use crate::table::Table;
use rustix::io::Errno;
use rustix::net::RecvFlags;

/// Largest frame with its header: 64 KiB of IP packet, which generic receive offload can fill, and
/// room for the link's header.
const MAX_FRAME_LEN: usize = (64 << 10) + 256;

/// Frames that are read in a row while the socket still receives, so that a fast client cannot
/// prolong the release.
const MAX_FRAMES_BEFORE_CHANGE: usize = 4096;

/// Counts of the frames that [`Hold::release`] handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Released {
    /// Number of frames that were sent on. One frame may carry several segments.
    pub frames: usize,
    /// Sum of their lengths in bytes.
    pub bytes: usize,
    /// Number of frames that were dropped, for lack of memory or by a refusal of the kernel. TCP sends
    /// them again.
    pub lost: usize,
}

/// Keeps the frames of some connections from [`Hold::open`] on. Dropping it drops the frames; TCP
/// sends them again.
#[derive(Debug)]
pub struct Hold {
    /// One for each interface.
    sockets: Vec<Receiver>,
}

impl Hold {
    /// Begins to keep what these Ethernet interfaces receive from the clients of the connections. Open
    /// it before [`Change::Hold`] is applied; a frame that the socket at home also received is a
    /// duplicate, which TCP ignores.
    ///
    /// `max_bytes` limits the kernel memory for each interface. A frame needs 0.8 to 2.5 KB besides
    /// its bytes. Frames beyond the limit are dropped.
    ///
    /// # Errors
    /// [`crate::RedirectError::TooManyConnections`]; without CAP_NET_RAW and CAP_NET_ADMIN.
    pub fn open(interfaces: &[NetworkInterface], connections: &[Ends], max_bytes: usize) -> Result<Self> {
        let filter = Filter::connections(connections)?;
        let open = |link: &NetworkInterface| {
            packet_socket::open_receiver(link.index, &filter, max_bytes)
                .with_remedy(|| format!("open a packet socket on {}", link.name), NEEDS_NET_ADMIN)
        };
        Ok(Self { sockets: interfaces.iter().map(open).collect::<Result<_>>()? })
    }

    /// Ends the hold: makes the changes in the table, and sends the frames on to where the table then
    /// sends their connections' packets. That is another node ([`Change::Forward`]), or this node's own
    /// socket ([`Change::Forget`]).
    ///
    /// Frames that are held already go first, so that they arrive before those which the client sends
    /// from now on. The whole takes one netlink request before and one after them.
    ///
    /// # Errors
    /// If the table refuses the changes: connections are then still held in the table, and frames may
    /// be lost.
    pub fn release(self, injector: &Injector, table: &mut Table, changes: &[Change]) -> Result<Released> {
        let mut released = Released::default();
        let ways: Vec<_> = changes
            .iter()
            .filter_map(|change| match change {
                Change::Forward(connection, way) => Some(Change::SetWay(*connection, *way)),
                Change::Forget(connection) => Some(Change::ForgetWay(*connection)),
                _ => None,
            })
            .collect();
        table.apply(&ways)?;
        self.drain(injector, MAX_FRAMES_BEFORE_CHANGE, &mut released);
        table.apply(changes)?;
        for socket in &self.sockets {
            // From here on the table handles each packet. Should the kernel refuse the filter, the
            // limit of frames ends the loop.
            let _ = packet_socket::set_filter(socket, &Filter::nothing());
        }
        self.drain(injector, usize::MAX, &mut released);
        for socket in &self.sockets {
            released.lost += packet_socket::dropped(socket).map_or(0, |frames| frames as usize);
        }
        Ok(released)
    }

    fn drain(&self, injector: &Injector, max_frames: usize, released: &mut Released) {
        let mut buffer = vec![0; packet_socket::VNET_HEADER_LEN + MAX_FRAME_LEN];
        for socket in &self.sockets {
            for _ in 0..max_frames {
                let frame = match rustix::net::recv(socket, &mut buffer[..], RecvFlags::TRUNC) {
                    // With TRUNC the length is that of the frame, even if the buffer is shorter.
                    Ok((_, length)) if length > buffer.len() => {
                        released.lost += 1;
                        continue;
                    }
                    Ok((length, _)) => &mut buffer[..length],
                    Err(Errno::INTR) => continue,
                    // The queue is empty, or the interface is gone.
                    Err(_) => break,
                };
                if injector.send(frame).is_ok() {
                    released.frames += 1;
                    released.bytes += frame.len() - packet_socket::VNET_HEADER_LEN;
                } else {
                    released.lost += 1;
                }
            }
        }
    }
}
