//! The settings of a program's socket: socket options, and flags of the open file.

mod buffers;
mod file_flags;
mod options;
mod table;

pub use buffers::Buffers;
pub(crate) use buffers::grow_buffers;
pub use file_flags::FileFlags;
pub use options::OptionValue;
pub use table::names;

use crate::error::{InCall, Invalid, SystemError};
use crate::syscalls::{SockOpt, int_option, read_option, set_int_option, write_option};
use libc::{IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use rustix::fd::BorrowedFd;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;

const SO_LINGER: SockOpt = SockOpt(SOL_SOCKET, libc::SO_LINGER);
const SO_RCVTIMEO: SockOpt = SockOpt(SOL_SOCKET, libc::SO_RCVTIMEO);
const SO_SNDTIMEO: SockOpt = SockOpt(SOL_SOCKET, libc::SO_SNDTIMEO);
const SO_MAX_PACING_RATE: SockOpt = SockOpt(SOL_SOCKET, 47);
const TCP_WINDOW_CLAMP: SockOpt = SockOpt(IPPROTO_TCP, libc::TCP_WINDOW_CLAMP);
const TCP_CONGESTION: SockOpt = SockOpt(IPPROTO_TCP, libc::TCP_CONGESTION);
const IPV6_V6ONLY: SockOpt = SockOpt(IPPROTO_IPV6, libc::IPV6_V6ONLY);

/// Length of an algorithm's name with its zero byte (`TCP_CA_NAME_MAX`, include/net/tcp.h).
const MAX_ALGORITHM: usize = 16;

/// Longest time of `SO_RCVTIMEO` and `SO_SNDTIMEO`, in microseconds. The kernel takes a longer one
/// for no limit.
const MAX_TIMEOUT: u64 = 1 << 62;

/// Everything that a program can set on a connected socket and observe, except the options that the
/// crate's page names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Options whose value is an int, one for each row of the table that the kernel has.
    pub options: Vec<OptionValue>,
    /// `SO_REUSEADDR`. Repair mode overwrites it.
    pub reuse_address: bool,
    /// `IPV6_V6ONLY`. It can be set only before the socket has an address.
    pub v6_only: bool,
    /// `SO_RCVBUF`, `SO_SNDBUF` and `SO_BUF_LOCK`.
    pub buffers: Buffers,
    /// `TCP_WINDOW_CLAMP`: the limit of the window that is offered, in bytes.
    pub window_clamp: u32,
    /// `SO_LINGER`: the time in seconds if it is on.
    pub linger: Option<u32>,
    /// `SO_RCVTIMEO` in microseconds; 0 is no limit.
    pub receive_timeout: u64,
    /// `SO_SNDTIMEO` in microseconds; 0 is no limit.
    pub send_timeout: u64,
    /// `SO_MAX_PACING_RATE` in bytes a second; `u64::MAX` is no limit.
    pub max_pacing_rate: u64,
    /// `TCP_CONGESTION`. A node that does not offer the algorithm to all programs uses its default.
    pub congestion: String,
    /// Flags of the open file.
    pub file: FileFlags,
}

impl Settings {
    /// Reads all settings. The socket must not be in repair mode, which hides `SO_REUSEADDR`.
    ///
    /// # Errors
    /// The descriptor is no TCP socket.
    pub(crate) fn read(socket: BorrowedFd<'_>, v6: bool, reuse_address: bool) -> Result<Self, SystemError> {
        let mut rate = [0; 8];
        read_option(socket, SO_MAX_PACING_RATE, &mut rate).in_call("SO_MAX_PACING_RATE")?;
        let clamp = int_option(socket, TCP_WINDOW_CLAMP).in_call("TCP_WINDOW_CLAMP")?;
        Ok(Self {
            options: options::read(socket, v6),
            reuse_address,
            v6_only: v6 && int_option(socket, IPV6_V6ONLY).in_call("IPV6_V6ONLY")? != 0,
            buffers: Buffers::read(socket)?,
            window_clamp: clamp.cast_unsigned(),
            linger: linger(socket)?,
            receive_timeout: timeout(socket, SO_RCVTIMEO).in_call("SO_RCVTIMEO")?,
            send_timeout: timeout(socket, SO_SNDTIMEO).in_call("SO_SNDTIMEO")?,
            max_pacing_rate: u64::from_ne_bytes(rate),
            congestion: algorithm(socket)?,
            file: FileFlags::read(socket)?,
        })
    }

    /// # Errors
    /// [`Invalid::Options`].
    pub(crate) fn validate(&self, v6: bool) -> Result<(), Invalid> {
        let valid = options::are_valid(&self.options, v6)
            && self.buffers.is_valid()
            && self.window_clamp <= i32::MAX.cast_unsigned()
            && self.linger.is_none_or(|seconds| seconds <= i32::MAX.cast_unsigned())
            && self.receive_timeout.max(self.send_timeout) <= MAX_TIMEOUT
            && self.congestion.len() < MAX_ALGORITHM
            && self.congestion.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && self.file.is_valid();
        if valid { Ok(()) } else { Err(Invalid::Options) }
    }

    /// Sets the options that must be set before the socket has an address and a connection.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub(crate) fn apply_before_bind(&self, socket: BorrowedFd<'_>, v6: bool) -> Result<(), SystemError> {
        if v6 && (int_option(socket, IPV6_V6ONLY).in_call("IPV6_V6ONLY")? != 0) != self.v6_only {
            set_int_option(socket, IPV6_V6ONLY, self.v6_only.into()).in_call("IPV6_V6ONLY")?;
        }
        if !self.congestion.is_empty()
            && algorithm(socket)? != self.congestion
            && is_allowed(&self.congestion)
        {
            write_option(socket, TCP_CONGESTION, self.congestion.as_bytes()).in_call("TCP_CONGESTION")?;
        }
        Ok(())
    }

    /// Sets all other options but the buffers, the window clamp and `SO_REUSEADDR`. An option that
    /// already has its value is not set, since the kernel treats some options that were set
    /// differently from defaults of the same value.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub(crate) fn apply(&self, socket: BorrowedFd<'_>) -> Result<(), SystemError> {
        options::write(socket, &self.options)?;
        if linger(socket)? != self.linger {
            let seconds = self.linger.unwrap_or(0);
            let value = [u32::from(self.linger.is_some()).to_ne_bytes(), seconds.to_ne_bytes()].concat();
            write_option(socket, SO_LINGER, &value).in_call("SO_LINGER")?;
        }
        let timeouts = [
            ("SO_RCVTIMEO", SO_RCVTIMEO, self.receive_timeout),
            ("SO_SNDTIMEO", SO_SNDTIMEO, self.send_timeout),
        ];
        for (name, option, wanted) in timeouts {
            if timeout(socket, option).in_call(name)? != wanted {
                let (seconds, micros) = (wanted / 1_000_000, wanted % 1_000_000);
                let value = [seconds.to_ne_bytes(), micros.to_ne_bytes()].concat();
                write_option(socket, option, &value).in_call(name)?;
            }
        }
        let mut rate = [0; 8];
        read_option(socket, SO_MAX_PACING_RATE, &mut rate).in_call("SO_MAX_PACING_RATE")?;
        if u64::from_ne_bytes(rate) != self.max_pacing_rate {
            let rate = self.max_pacing_rate.to_ne_bytes();
            write_option(socket, SO_MAX_PACING_RATE, &rate).in_call("SO_MAX_PACING_RATE")?;
        }
        self.file.apply(socket)
    }
}

/// Sets `TCP_WINDOW_CLAMP`. In ESTABLISHED a larger clamp also raises `rcv_ssthresh` to at most the
/// window that is offered, and a smaller one lowers it (`tcp_set_window_clamp`, net/ipv4/tcp.c).
///
/// # Errors
/// Those of setsockopt(2).
pub(crate) fn set_window_clamp(socket: BorrowedFd<'_>, bytes: u32) -> Result<(), SystemError> {
    set_int_option(socket, TCP_WINDOW_CLAMP, bytes.cast_signed()).in_call("TCP_WINDOW_CLAMP")
}

fn linger(socket: BorrowedFd<'_>) -> Result<Option<u32>, SystemError> {
    let mut raw = [0; 8];
    read_option(socket, SO_LINGER, &mut raw).in_call("SO_LINGER")?;
    let [on, seconds] = [0, 4].map(|offset| u32::from_ne_bytes([0, 1, 2, 3].map(|i| raw[offset + i])));
    Ok((on != 0).then_some(seconds))
}

/// The microseconds of an option whose value is a `struct timeval` of two 64-bit fields.
fn timeout(socket: BorrowedFd<'_>, option: SockOpt) -> std::io::Result<u64> {
    let mut raw = [0; 16];
    read_option(socket, option, &mut raw)?;
    let [seconds, micros] =
        [0, 8].map(|at| u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| raw[at + i])));
    Ok(seconds.saturating_mul(1_000_000).saturating_add(micros).min(MAX_TIMEOUT))
}

fn algorithm(socket: BorrowedFd<'_>) -> Result<String, SystemError> {
    let mut raw = [0; MAX_ALGORITHM];
    match read_option(socket, TCP_CONGESTION, &mut raw) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(error).in_call("TCP_CONGESTION"),
    }
    let name = raw.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Whether programs without privileges may choose the algorithm in this network namespace. The
/// caller may choose any, and make the kernel load a module for it.
fn is_allowed(algorithm: &str) -> bool {
    let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
    allowed.is_ok_and(|allowed| allowed.split_ascii_whitespace().any(|name| name == algorithm))
}
