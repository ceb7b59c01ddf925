//! What goes over slow links is packed (lz4).
//!
//! A packed frame says so in its kind. Its payload is the length of what was packed, four bytes with the lowest first, and that as
//! one block. Who sends decides frame by frame, and keeps nothing in mind: how fast the link is the kernel knows, and whether the
//! content shrinks three samples of it tell.

use std::os::fd::{AsFd, AsRawFd};
use tern_wire::Frame;
use tern_wire::limits::MOST_PAYLOAD;

/// In the kind of a packed frame.
pub(crate) const PACKED: u8 = 0x80;

/// Smaller frames (bytes) are not worth a look.
const WORTH: usize = 16 << 10;

/// A link that takes less than this (bytes per second) is slow: one of 1 Gbit/s is. To pack a byte and to unpack it takes some
/// 1 ns together, and half a byte on such a link 4 ns.
const SLOW: u64 = 150_000_000;

/// How much of the content is tried, at its beginning, in its middle and at its end.
const SAMPLE: usize = 4 << 10;

/// The parts of a frame as one packed payload, if that is worth it on this link.
pub(crate) fn pack(link: &impl AsFd, parts: &[&[u8]]) -> Option<Vec<u8>> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    if length < WORTH || pace(link).is_none_or(|pace| pace >= SLOW) {
        return None;
    }
    packed(parts, length)
}

fn packed(parts: &[&[u8]], length: usize) -> Option<Vec<u8>> {
    let plain = parts.concat();
    let shrinks = |plain: &[u8], packed: usize| packed <= plain.len() / 8 * 7;
    let samples: Vec<u8> = [0, length / 2, length.saturating_sub(SAMPLE)]
        .into_iter()
        .flat_map(|at| plain.get(at..(at + SAMPLE).min(length)).unwrap_or_default())
        .copied()
        .collect();
    if !shrinks(&samples, lz4_flex::block::compress(&samples).len()) {
        return None;
    }
    let packed = lz4_flex::block::compress_prepend_size(&plain);
    shrinks(&plain, packed.len()).then_some(packed)
}

/// The frame as it was before it was packed, if it was; none if no sender packs so.
pub(crate) fn unpack(frame: Frame) -> Option<Frame> {
    if frame.kind & PACKED == 0 {
        return Some(frame);
    }
    let (length, packed) = frame.payload.split_first_chunk()?;
    let length = u32::from_le_bytes(*length) as usize;
    if !(WORTH..=MOST_PAYLOAD).contains(&length) {
        return None;
    }
    let mut payload = vec![0; length];
    let unpacked = lz4_flex::block::decompress_into(packed, &mut payload).ok()?;
    (unpacked == length).then_some(Frame { kind: frame.kind & !PACKED, payload, ..frame })
}

/// How many bytes per second the other end has taken of late (`tcpi_delivery_rate`, Linux 4.9 and later); none if that is not
/// known, or says only how little we had to send.
#[allow(unsafe_code, reason = "TCP_INFO has no safe form")]
fn pace(socket: &impl AsFd) -> Option<u64> {
    /// Where in struct tcp_info of the kernel's interface, which only grows at its end: the lowest bit says that the sender was
    /// the limit; and the rate.
    const LIMITED: usize = 7;
    const RATE: usize = 160;
    let mut info = [0u8; RATE + 8];
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: the pointers are to bytes and their number, both valid for the call and written by it alone.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if outcome != 0 || (length as usize) < info.len() || info[LIMITED] & 1 != 0 {
        return None;
    }
    let rate = u64::from_ne_bytes(*info[RATE..].first_chunk()?);
    (rate > 0).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: Vec<u8>) -> Frame {
        Frame { kind, flags: 0, tag: 7, payload }
    }

    fn text(length: usize) -> Vec<u8> {
        (0..).flat_map(|at| format!("{at} words that are said again\n").into_bytes()).take(length).collect()
    }

    fn noise(length: usize) -> Vec<u8> {
        let mut state = 1u64;
        std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .take(length)
        .collect()
    }

    #[test]
    fn what_shrinks_is_packed_and_comes_back() {
        for length in [WORTH, 100_001, 1 << 20] {
            let (head, data) = (noise(40), text(length));
            let packed = packed(&[&head, &data], 40 + length).unwrap();
            assert!(packed.len() < length / 2, "{}", packed.len());
            let back = unpack(frame(PACKED | 2, packed)).unwrap();
            assert_eq!((back.kind, back.tag), (2, 7));
            assert!(back.payload == [head, data].concat());
        }
        assert_eq!(packed(&[&noise(1 << 20)], 1 << 20), None);
        let plain = unpack(frame(2, vec![1, 2, 3])).unwrap();
        assert_eq!((plain.kind, plain.payload), (2, vec![1, 2, 3]));
    }

    #[test]
    fn what_no_sender_packs_is_refused() {
        let plain = text(WORTH);
        let good = packed(&[&plain], WORTH).unwrap();
        let with_length = |length: u32| [&length.to_le_bytes(), &good[4..]].concat();
        for wrong in [0, 1, WORTH as u32 - 1, WORTH as u32 + 1, MOST_PAYLOAD as u32 + 1, u32::MAX] {
            assert!(unpack(frame(PACKED | 1, with_length(wrong))).is_none(), "{wrong}");
        }
        for short in 0..good.len() {
            assert!(unpack(frame(PACKED | 1, good[..short].to_vec())).is_none(), "{short}");
        }
        // Whatever it is, it is as long as it says, or nothing.
        for at in 4..good.len() {
            let mut wrong = good.clone();
            wrong[at] ^= 0x55;
            assert!(unpack(frame(PACKED | 1, wrong)).is_none_or(|frame| frame.payload.len() == WORTH));
        }
        assert!(
            unpack(frame(PACKED | 1, [&(1u32 << 20).to_le_bytes(), &noise(5000)[..]].concat())).is_none()
        );
    }
}
