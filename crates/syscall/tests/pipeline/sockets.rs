//! Sockets: addresses, options, messages, and descriptors passed in messages.

use super::arena::Arena;
use super::{alone, args, close, native, same, same_but_for_padding, same_result};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixStream};

fn udp() -> (UdpSocket, UdpSocket) {
    let one = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let two = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    (one, two)
}

fn fd(socket: &impl AsRawFd) -> u64 {
    socket.as_raw_fd() as u64
}

/// struct sockaddr_in.
fn address(socket: &UdpSocket) -> [u8; 16] {
    let port = socket.local_addr().expect("a bound socket").port().to_be_bytes();
    let mut address = [0; 16];
    address[..8].copy_from_slice(&[2, 0, port[0], port[1], 127, 0, 0, 1]);
    address
}

#[test]
fn making_sockets() {
    let _alone = alone();
    assert!(same(libc::SYS_socket, |_| args(&[2, 2, 0]), |ret, _| close(ret)).0 >= 0);
    let fds = std::cell::Cell::new(0);
    let pair = |a: &mut Arena| {
        fds.set(a.reserve(8));
        args(&[1, 1, 0, fds.get()])
    };
    let (ret, _) = same(libc::SYS_socketpair, pair, |_, a| {
        close(a.int(fds.get()).into());
        close(a.int(fds.get() + 4).into());
    });
    assert_eq!(ret, 0);
}

#[test]
fn addresses() {
    let _alone = alone();
    let (one, two) = udp();
    for length in [0, 4, 16, 100, 5000] {
        let name = |a: &mut Arena| args(&[fd(&one), a.reserve(128), a.ints(&[length])]);
        assert_eq!(same_result(libc::SYS_getsockname, name), 0);
    }
    let negative = |a: &mut Arena| args(&[fd(&one), a.reserve(128), a.ints(&[-1])]);
    assert_eq!(same_result(libc::SYS_getsockname, negative), -i64::from(libc::EINVAL));
    let faulty = |_: &mut Arena| args(&[fd(&one), 1, 1]);
    assert_eq!(same_result(libc::SYS_getsockname, faulty), -i64::from(libc::EFAULT));
    assert_eq!(same_result(libc::SYS_connect, |a| args(&[fd(&one), a.put(&address(&two)), 16])), 0);
    let long = |a: &mut Arena| args(&[fd(&one), a.put(&address(&two)), 500]);
    assert_eq!(same_result(libc::SYS_connect, long), -i64::from(libc::EINVAL));
    let bound = |a: &mut Arena| args(&[fd(&one), a.put(&address(&two)), 16]);
    assert_eq!(same_result(libc::SYS_bind, bound), -i64::from(libc::EINVAL));
}

#[test]
fn options() {
    let _alone = alone();
    let (one, _) = udp();
    let (level, name) = (libc::SOL_SOCKET as u64, libc::SO_BROADCAST as u64);
    assert_eq!(same_result(libc::SYS_setsockopt, |a| args(&[fd(&one), level, name, a.ints(&[1]), 4])), 0);
    for length in [2, 4, 64] {
        let get = |a: &mut Arena| args(&[fd(&one), level, name, a.reserve(64), a.ints(&[length])]);
        let (ret, mut arena) = same(libc::SYS_getsockopt, get, |_, _| {});
        assert_eq!(ret, 0);
        let written = length.min(4).to_le_bytes();
        assert!(arena.snapshot().windows(4).any(|word| word == written), "the length that was written");
    }
}

#[test]
fn datagrams() {
    let _alone = alone();
    let (one, two) = udp();
    two.set_nonblocking(true).expect("a socket");
    let drain = |_, _: &mut _| while two.recv(&mut [0; 64]).is_ok() {};
    let send = |a: &mut Arena| args(&[fd(&one), a.put(b"datagram"), 8, 0, a.put(&address(&two)), 16]);
    assert_eq!(same(libc::SYS_sendto, send, drain).0, 8);

    for (size, flags) in [(64, 0), (3, 0), (3, libc::MSG_TRUNC)] {
        let receive = |a: &mut Arena| {
            one.send_to(b"datagram", two.local_addr().expect("a bound socket")).expect("loopback");
            args(&[fd(&two), a.reserve(size), size as u64, flags as u64, a.reserve(128), a.ints(&[128])])
        };
        let ret = same_result(libc::SYS_recvfrom, receive);
        assert_eq!(ret, if flags == 0 { size.min(8) as i64 } else { 8 });
    }
    let nothing = |a: &mut Arena| args(&[fd(&two), a.reserve(8), 8, 0, 0, 0]);
    assert_eq!(same_result(libc::SYS_recvfrom, nothing), -i64::from(libc::EAGAIN));
    // No data is taken from the socket if it could not be delivered.
    one.send_to(b"kept", two.local_addr().expect("a bound socket")).expect("loopback");
    let mut arena = Arena::new();
    let call = args(&[fd(&two), 4096, 64, 0, 0, 0]);
    assert_eq!(crate::forwarded(libc::SYS_recvfrom, &call, &mut arena), -i64::from(libc::EFAULT));
}

/// A struct msghdr.
fn header(a: &mut Arena, name: (u64, u64), segments: &[(u64, u64)], control: (u64, u64)) -> [u64; 7] {
    let words: Vec<u64> = segments.iter().flat_map(|&(base, len)| [base, len]).collect();
    [name.0, name.1, a.words(&words), segments.len() as u64, control.0, control.1, 0]
}

#[test]
fn messages() {
    let _alone = alone();
    let (one, two) = udp();
    two.set_nonblocking(true).expect("a socket");
    let drain = |_, _: &mut _| while two.recv(&mut [0; 64]).is_ok() {};
    let send = |a: &mut Arena| {
        let (name, head, tail) = (a.put(&address(&two)), a.put(b"head"), a.put(b"-and-tail"));
        let header = header(a, (name, 16), &[(head, 4), (tail, 9)], (0, 0));
        args(&[fd(&one), a.words(&header), 0])
    };
    assert_eq!(same(libc::SYS_sendmsg, send, drain).0, 13);
    for named in [true, false] {
        let receive = |a: &mut Arena| {
            one.send_to(b"head-and-tail", two.local_addr().expect("a bound socket")).expect("loopback");
            let name = if named { (a.reserve(64), 64) } else { (0, 0) };
            let (head, tail, control) = (a.reserve(4), a.reserve(20), a.reserve(64));
            let header = header(a, name, &[(head, 4), (tail, 20)], (control, 64));
            args(&[fd(&two), a.words(&header), 0])
        };
        assert_eq!(same_result(libc::SYS_recvmsg, receive), 13);
    }
    let bad = |a: &mut Arena| {
        let header = header(a, (1, 16), &[], (0, 0));
        args(&[fd(&one), a.words(&header), 0])
    };
    assert_eq!(same_result(libc::SYS_sendmsg, bad), -i64::from(libc::EFAULT));
    let many = |a: &mut Arena| args(&[fd(&one), a.words(&[0, 0, 16, 5000, 0, 0, 0]), 0]);
    assert_eq!(same_result(libc::SYS_sendmsg, many), -i64::from(libc::EMSGSIZE));
}

#[test]
fn many_messages() {
    let _alone = alone();
    let (one, two) = udp();
    two.set_nonblocking(true).expect("a socket");
    let drain = |_, _: &mut _| while two.recv(&mut [0; 64]).is_ok() {};
    let send = |a: &mut Arena| {
        let name = a.put(&address(&two));
        let mut words = Vec::new();
        for text in ["one", "two+", "three"] {
            let data = a.put(text.as_bytes());
            words.extend(header(a, (name, 16), &[(data, text.len() as u64)], (0, 0)));
            words.push(0xdead);
        }
        args(&[fd(&one), a.words(&words), 3, 0])
    };
    assert_eq!(same(libc::SYS_sendmmsg, send, drain).0, 3);
    let receive = |a: &mut Arena| {
        for text in ["one", "two+"] {
            one.send_to(text.as_bytes(), two.local_addr().expect("a bound socket")).expect("loopback");
        }
        let mut words = Vec::new();
        for _ in 0..4 {
            let (name, data) = (a.reserve(32), a.reserve(50));
            words.extend(header(a, (name, 32), &[(data, 50)], (0, 0)));
            words.push(0xdead);
        }
        args(&[fd(&two), a.words(&words), 4, 0, 0])
    };
    assert_eq!(same_result(libc::SYS_recvmmsg, receive), 2);
}

#[test]
fn descriptors_travel_in_messages() {
    let _alone = alone();
    let (one, two) = UnixDatagram::pair().expect("a pair");
    let rights = |fd: u64| {
        let mut control = [0; 24];
        control[..8].copy_from_slice(&20u64.to_le_bytes());
        control[8..12].copy_from_slice(&libc::SOL_SOCKET.to_le_bytes());
        control[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_le_bytes());
        control[16..20].copy_from_slice(&(fd as u32).to_le_bytes());
        control
    };
    let send = |a: &mut Arena| {
        let (data, control) = (a.put(b"x"), a.put(&rights(fd(&one))));
        let header = header(a, (0, 0), &[(data, 1)], (control, 24));
        args(&[fd(&one), a.words(&header), 0])
    };
    let control = std::cell::Cell::new(0);
    let receive = |a: &mut Arena| {
        let data = a.reserve(8);
        control.set(a.reserve(64));
        let header = header(a, (0, 0), &[(data, 8)], (control.get(), 64));
        args(&[fd(&two), a.words(&header), 0])
    };
    // One message for each way to receive.
    assert_eq!(same_result(libc::SYS_sendmsg, send), 1);
    let (ret, _) = same_but_for_padding(libc::SYS_recvmsg, receive, |_, a| {
        let got = a.int(control.get() + 16);
        let flags = native(libc::SYS_fcntl as u32, &args(&[got as u64, libc::F_GETFD as u64]));
        assert_eq!(flags, 0, "descriptor {got} has arrived");
        close(got.into());
    });
    assert_eq!(ret, 1);
}

#[test]
fn streams_end() {
    let _alone = alone();
    let (one, two) = UnixStream::pair().expect("a pair");
    assert_eq!(same_result(libc::SYS_shutdown, |_| args(&[fd(&one), 1])), 0);
    assert_eq!(same_result(libc::SYS_recvfrom, |a| args(&[fd(&two), a.reserve(8), 8, 0, 0, 0])), 0);
    assert_eq!(
        same_result(libc::SYS_accept, |a| args(&[fd(&two), a.reserve(16), a.ints(&[16])])),
        -i64::from(libc::EINVAL)
    );
}
