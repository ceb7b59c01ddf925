//! A call as it is sent home: its number, the values of its plain arguments, and the data behind
//! its pointers, but no address of the guest.

use crate::ByteBuf;
use crate::row::Timeout;
use crate::shape::Shape;
use crate::table;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A system call, gathered from the guest. At home it is untrusted until [`Call::lay_out`] has
/// accepted it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Its number.
    pub nr: u32,
    /// Its arguments. Those that the row does not name are `Value(0)`.
    pub args: [Arg; 6],
}

/// One argument of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Arg {
    /// A number, a descriptor, or NULL.
    Value(u64),
    /// A pointer to memory that the guest cannot access. The deputy's kernel gets an inaccessible
    /// pointer too, and decides what that means.
    BadPointer,
    /// A pointer to an address of the kernel, which the kernel may refuse earlier than any other.
    KernelPointer,
    /// A pointer to memory that the kernel only writes; its length follows from the other
    /// arguments.
    Output,
    /// Data that the kernel reads: a struct, a string with its NUL, a buffer.
    Bytes(ByteBuf),
    /// An iovec array.
    Segments(Segments),
    /// The message of sendmsg and recvmsg, or the messages of sendmmsg and recvmmsg.
    Messages(Vec<SocketMessage>),
    /// Strings with their NULs, concatenated.
    Strings(ByteBuf),
}

/// The memory of an iovec array.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segments {
    /// The length of each segment.
    pub lens: Vec<u32>,
    /// The data of all segments if it is sent, as far as the guest can read it; empty if it is
    /// received.
    pub bytes: ByteBuf,
    /// The number of bytes at the end of the segments, together, that begin with one that the guest
    /// cannot access. The deputy's kernel finds them inaccessible too.
    pub inaccessible: u64,
}

/// A struct msghdr.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketMessage {
    /// msg_name
    pub name: MessageBuffer,
    /// msg_iov
    pub segments: Segments,
    /// msg_control
    pub control: MessageBuffer,
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MessageBuffer {
    /// NULL.
    Null,
    /// A buffer of this many bytes for the kernel to write.
    Output(u32),
    /// Data that the kernel reads.
    Bytes(ByteBuf),
}

/// The result of a call in the deputy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The kernel's return value; if negative, -errno or a restart code.
    pub ret: i64,
    /// Output buffers, in the order of
    /// [`Gathered::output_buffers`](crate::Gathered::output_buffers). An element is empty if the
    /// kernel wrote nothing there, or left the content unchanged; empty elements at the end are
    /// omitted.
    pub outs: Vec<ByteBuf>,
}

impl Call {
    /// The argument values that determine the call's route and shapes: plain values, and 1 for each
    /// pointer that is not NULL.
    #[must_use]
    pub fn values(&self) -> [u64; 6] {
        std::array::from_fn(|i| match self.args[i] {
            Arg::Value(value) => value,
            _ => 1,
        })
    }

    /// Bytes of data that it sends.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        let sent =
            |part: &MessageBuffer| if let MessageBuffer::Bytes(bytes) = part { bytes.len() } else { 0 };
        let argument = |arg: &Arg| match arg {
            Arg::Value(_) | Arg::BadPointer | Arg::KernelPointer | Arg::Output => 0,
            Arg::Bytes(bytes) | Arg::Strings(bytes) => bytes.len(),
            Arg::Segments(segments) => segments.bytes.len(),
            Arg::Messages(messages) => {
                messages.iter().map(|m| sent(&m.name) + m.segments.bytes.len() + sent(&m.control)).sum()
            }
        };
        self.args.iter().map(argument).sum::<usize>() as u64
    }

    /// The signal mask that the call sets while it waits, if any.
    #[must_use]
    pub fn mask(&self) -> Option<u64> {
        let arg = usize::from(table::row(self.nr)?.mask?);
        let Arg::Bytes(bytes) = self.args.get(arg)? else { return None };
        // A mask pair is the size, followed by the mask if there is one.
        let mask = match table::row(self.nr)?.shapes(&self.values()).get(arg)? {
            Shape::MaskPair => bytes.get(8..16)?,
            _ => bytes.get(..8)?,
        };
        Some(u64::from_le_bytes(mask.try_into().ok()?))
    }

    /// Subtracts elapsed time from the call's timeout, before the call is repeated after an
    /// interruption. The result is at least zero; a call with timeout zero only polls.
    pub fn subtract_elapsed(&mut self, passed: Duration) {
        let Some(wait) = table::row(self.nr).and_then(|row| row.wait) else { return };
        match wait.timeout {
            Timeout::Millis(arg) => {
                if let Arg::Value(value) = &mut self.args[usize::from(arg)]
                    && let Ok(left) = u64::try_from(*value as i32)
                {
                    *value = left.saturating_sub(u64::try_from(passed.as_millis()).unwrap_or(u64::MAX));
                }
            }
            Timeout::Timespec(arg) | Timeout::TimeLeft(arg) => {
                // select(2) has a struct timeval.
                let units = if i64::from(self.nr) == libc::SYS_select { 1_000_000 } else { 1_000_000_000 };
                if let Arg::Bytes(bytes) = &mut self.args[usize::from(arg)]
                    && let Ok(words) = <&mut [u8; 16]>::try_from(bytes.as_mut_slice())
                {
                    *words = subtract(*words, passed, units);
                }
            }
            Timeout::None | Timeout::Absolute(_) => {}
        }
    }
}

impl Outcome {
    /// Bytes of data that it returns.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        self.outs.iter().map(|out| out.len()).sum::<usize>() as u64
    }
}

/// Subtracts elapsed time from a timespec or timeval, which has so many units in a second. An invalid
/// one is left unchanged.
fn subtract(time: [u8; 16], passed: Duration, units: u32) -> [u8; 16] {
    let words = u128::from_le_bytes(time);
    let (seconds, part) = (words as i64, (words >> 64) as i64);
    let (Ok(whole), Ok(part)) = (u64::try_from(seconds), u32::try_from(part)) else { return time };
    if part >= units {
        return time;
    }
    let nanos_per_unit = 1_000_000_000 / units;
    let left = Duration::new(whole, part * nanos_per_unit).saturating_sub(passed);
    (u128::from(left.as_secs()) | u128::from(left.subsec_nanos() / nanos_per_unit) << 64).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(nr: i64, args: [Arg; 6]) -> Call {
        Call { nr: nr as u32, args }
    }

    fn bytes(bytes: &[u8]) -> Arg {
        Arg::Bytes(ByteBuf::from(bytes))
    }

    fn timespec(seconds: i64, nanos: i64) -> Arg {
        bytes(&[seconds.to_le_bytes(), nanos.to_le_bytes()].concat())
    }

    #[test]
    fn elapsed_time_shortens_millisecond_timeouts() {
        let waiting = |ms: i32| call(libc::SYS_epoll_wait, [0, 1, 8, ms as u64, 0, 0].map(Arg::Value));
        let mut c = waiting(500);
        c.subtract_elapsed(Duration::from_micros(120_900));
        assert_eq!(c.args[3], Arg::Value(380));
        c.subtract_elapsed(Duration::from_secs(9));
        assert_eq!(c.args[3], Arg::Value(0));
        let mut c = waiting(-1);
        c.subtract_elapsed(Duration::from_secs(9));
        assert_eq!(c, waiting(-1));
    }

    #[test]
    fn elapsed_time_shortens_timespec_timeouts() {
        let mut args = [0; 6].map(Arg::Value);
        args[3] = timespec(2, 100);
        let mut c = call(libc::SYS_semtimedop, args.clone());
        c.subtract_elapsed(Duration::from_millis(500));
        assert_eq!(c.args[3], timespec(1, 500_000_100));
        args[3] = timespec(2, 1_000_000_000);
        let mut c = call(libc::SYS_semtimedop, args);
        c.subtract_elapsed(Duration::from_millis(500));
        assert_eq!(c.args[3], timespec(2, 1_000_000_000), "the kernel is to refuse it itself");
    }

    #[test]
    fn elapsed_time_shortens_the_time_left_in_its_units() {
        let mut args = [0; 6].map(Arg::Value);
        args[4] = timespec(1, 999_999);
        let mut c = call(libc::SYS_select, args.clone());
        c.subtract_elapsed(Duration::from_millis(1500));
        assert_eq!(c.args[4], timespec(0, 499_999));
        args[4] = timespec(1, 1_000_000);
        let mut c = call(libc::SYS_select, args);
        c.subtract_elapsed(Duration::from_millis(1500));
        assert_eq!(c.args[4], timespec(1, 1_000_000), "the kernel is to refuse it itself");
    }

    #[test]
    fn masks_are_found() {
        let mut args = [0; 6].map(Arg::Value);
        args[3] = bytes(&7u64.to_le_bytes());
        assert_eq!(call(libc::SYS_ppoll, args.clone()).mask(), Some(7));
        assert_eq!(call(libc::SYS_poll, args.clone()).mask(), None);
        args[5] = bytes(&[8u64.to_le_bytes(), 9u64.to_le_bytes()].concat());
        assert_eq!(call(libc::SYS_pselect6, args.clone()).mask(), Some(9));
        args[5] = bytes(&8u64.to_le_bytes());
        assert_eq!(call(libc::SYS_pselect6, args).mask(), None);
    }
}
