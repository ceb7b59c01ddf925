//! Whether the machine at the other end of a link still acknowledges.
//!
//! A peer process that answers late must not be taken for dead: it may be slow or stopped, or its
//! machine may be busy. So this module does not rely on answers of the process. The peer's kernel
//! acknowledges each segment that arrives, even while the process is stopped, and this node's
//! kernel reports the time since the last acknowledgement (`TCP_INFO` of tcp(7)).

use rustix::fd::AsFd;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The kernel counts the time since the last acknowledgement in ticks, of 10 ms at most.
const TICK: Duration = Duration::from_millis(10);

/// Watches the acknowledgements on one connection.
#[derive(Debug, Default)]
pub(crate) struct AckWatch {
    /// The time of the last call that found a new acknowledgement, or nothing to acknowledge.
    unanswered_since: Option<Instant>,
}

impl AckWatch {
    /// How long nothing has been acknowledged although something was sent. The caller sends something
    /// each second and then calls this. A caller that was delayed sent nothing meanwhile; that time
    /// does not count.
    pub(crate) fn time_without_ack(&mut self, socket: &impl AsFd) -> Duration {
        let now = Instant::now();
        let Some(state) = TcpState::of(socket) else { return Duration::ZERO };
        let acked_at = now.checked_sub(state.since_ack);
        let answered = |since: Instant| acked_at.is_none_or(|at| at + TICK >= since);
        match self.unanswered_since {
            // While the receiver's window is closed, nothing is in flight; the kernel then sends
            // window probes, at growing intervals.
            Some(since) if !answered(since) && (state.in_flight || state.unanswered_probes) => {
                now.saturating_duration_since(since)
            }
            _ => {
                self.unanswered_since = Some(now);
                Duration::ZERO
            }
        }
    }
}

/// Whether the peer's machine has acknowledged everything that was sent to it.
pub(crate) fn is_all_acknowledged(socket: &impl AsFd) -> bool {
    TcpState::of(socket).is_some_and(|state| !state.in_flight && !state.unanswered_probes)
}

/// The fields of `struct tcp_info` that are used.
struct TcpState {
    since_ack: Duration,
    in_flight: bool,
    unanswered_probes: bool,
}

impl TcpState {
    /// None if the socket is not a TCP connection.
    #[allow(unsafe_code, reason = "TCP_INFO has no safe form")]
    fn of(socket: &impl AsFd) -> Option<Self> {
        // SAFETY: a struct of integers, for which zero is a value.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
        // SAFETY: the pointers are to the struct and its size, both valid for the call and written by
        // it alone.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_TCP,
                libc::TCP_INFO,
                (&raw mut info).cast(),
                &raw mut length,
            )
        };
        (result == 0).then(|| Self {
            since_ack: Duration::from_millis(info.tcpi_last_ack_recv.into()),
            in_flight: info.tcpi_unacked > 0,
            unanswered_probes: info.tcpi_probes > 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    /// A peer that never reads still acknowledges, after a little data and after so much that its
    /// window is closed.
    #[test]
    fn peer_that_does_not_read_is_not_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _never_reads = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut watch = AckWatch::default();
        for _ in 0..5 {
            socket.write_all(b"beat").unwrap();
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(watch.time_without_ack(&socket), Duration::ZERO);
        }
        while socket.write(&[0; 1 << 16]).is_ok() {}
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(watch.time_without_ack(&socket), Duration::ZERO);
        }
    }

    #[test]
    fn delay_of_the_caller_does_not_count() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut watch = AckWatch::default();
        assert_eq!(watch.time_without_ack(&socket), Duration::ZERO);
        std::thread::sleep(Duration::from_millis(100));
        socket.write_all(b"beat").unwrap();
        assert_eq!(watch.time_without_ack(&socket), Duration::ZERO);
    }
}
