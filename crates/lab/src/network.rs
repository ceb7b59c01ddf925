//! The network between the nodes: interfaces, shaping, cut cables, and the programs that implement
//! it.

pub(crate) mod cuts;
pub(crate) mod emulator;
pub(crate) mod iproute2;
pub(crate) mod layout;
pub(crate) mod link_spec;
// Raw packet sockets: libc's sockaddr_ll and setsockopt.
#[allow(unsafe_code, reason = "raw packet sockets")]
mod packet_socket;
mod segment;
pub(crate) mod switch;
