//! Sockets, which stay at home.

use super::vocabulary::*;
use Direction::{Receive, Send};
use Flow::{Read, Write};
use Interrupted::EintrIfSocketTimeout;

const SOCKET: &str = "The socket is the deputy's.";
const NEW: &str = "New descriptors are the deputy's, in home's network.";
const NO_TIMEOUT: Timeout = Timeout::None;

/// The kernel refuses an address longer than sockaddr_storage before it reads it.
const fn address_in(arg: u8) -> Shape {
    struct_in(arg, Width::Int, limits::MAX_ADDRESS as u64)
}
const fn address_out(length: u8) -> Shape {
    Shape::Out(Len::Pointed(length), Amount::Pointed(length), When::AtLeast(0))
}
const ADDRESS_LENGTH: Shape = Shape::Length { max: limits::MAX_ADDRESS, signed: true };
const OPTION_LENGTH: Shape = Shape::Length { max: 65536, signed: true };

/// Options whose value contains pointers: packet filter programs, netfilter tables, zero-copy
/// receive, SCTP's connectx, and two address families that register memory.
fn option(args: &[u64; 6]) -> Route {
    const FANOUT_DATA: i32 = 22;
    const SOL_RDS: i32 = 276;
    match (args[1] as i32, args[2] as i32) {
        (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER | libc::SO_ATTACH_REUSEPORT_CBPF)
        | (libc::SOL_PACKET, FANOUT_DATA)
        | (libc::IPPROTO_IP, 64 | 96 | 128..=131)
        | (libc::IPPROTO_IPV6, 64)
        | (libc::IPPROTO_TCP, libc::TCP_ZEROCOPY_RECEIVE)
        | (libc::IPPROTO_SCTP, 107..=111)
        | (libc::SOL_XDP | SOL_RDS, _) => Route::Homeward(reason::SOCKET_OPTION),
        _ => Route::Home,
    }
}
/// With MSG_ZEROCOPY, home's kernel would read the buffer after the deputy has used it for another call.
fn with_flags(flags: u64) -> Route {
    if flags as i32 & libc::MSG_ZEROCOPY == 0 { Route::Home } else { Route::Homeward(reason::LENT_BUFFERS) }
}
const SEND: &str = "Home; Homeward with MSG_ZEROCOPY";

const OPTIONS: &str = "Home; Homeward for the few options whose value holds pointers";

rows! {
    41 socket HOME [V, V, V] {} NEW;
    42 connect HOME [FD, address_in(2), V] {waits(EintrIfSocketTimeout, NO_TIMEOUT)} SOCKET;
    43 accept HOME [FD, address_out(2), ADDRESS_LENGTH] {waits(EintrIfSocketTimeout, NO_TIMEOUT) consumes()} NEW;
    44 sendto (Rule::By(|args| with_flags(args[3]), SEND)) [FD, data_in(2), V, V, address_in(5), V]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT) flow(Write)} SOCKET;
    45 recvfrom HOME [FD, data_out(2), V, V, address_out(5), ADDRESS_LENGTH]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT) consumes() flow(Read)} SOCKET;
    46 sendmsg (Rule::By(|args| with_flags(args[2]), SEND)) [FD, Shape::Messages(Send, None), V]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT) flow(Write)}
        "The socket is the deputy's, and so are the descriptors that it may carry.";
    47 recvmsg HOME [FD, Shape::Messages(Receive, None), V]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT) consumes() flow(Read)}
        "The socket is the deputy's, and so are the descriptors that it may carry.";
    48 shutdown HOME [FD, V] {} SOCKET;
    49 bind HOME [FD, address_in(2), V] {} SOCKET;
    50 listen HOME [FD, V] {} SOCKET;
    51 getsockname HOME [FD, address_out(2), ADDRESS_LENGTH] {} SOCKET;
    52 getpeername HOME [FD, address_out(2), ADDRESS_LENGTH] {} SOCKET;
    53 socketpair HOME [V, V, V, output(8)] {consumes()} NEW;
    54 setsockopt (Rule::By(option, OPTIONS)) [FD, V, V, struct_in(4, Width::Int, 1 << 20), V] {} SOCKET;
    55 getsockopt (Rule::By(option, OPTIONS)) [FD, V, V, Shape::InOut(Len::Pointed(4)), OPTION_LENGTH] {} SOCKET;
    288 accept4 HOME [FD, address_out(2), ADDRESS_LENGTH, V]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT) consumes()} NEW;
    299 recvmmsg HOME [FD, Shape::Messages(Receive, Some(2)), V, V, inout(PAIR)]
        {waits(EintrIfSocketTimeout, Timeout::TimeLeft(4)) consumes()} SOCKET;
    307 sendmmsg (Rule::By(|args| with_flags(args[3]), SEND)) [FD, Shape::Messages(Send, Some(2)), V, V]
        {waits(EintrIfSocketTimeout, NO_TIMEOUT)} SOCKET;
}
