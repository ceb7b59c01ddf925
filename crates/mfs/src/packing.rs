//! Compression (lz4) of large frames on slow links.
//!
//! A flag in the frame's kind marks a packed frame. Its payload is the unpacked length, four bytes
//! little-endian, and one lz4 block. The sender decides for each frame and keeps no state: the
//! kernel reports the speed of the link, and three samples show whether the content compresses.

use std::os::fd::{AsFd, AsRawFd};
use tern_wire::Frame;
use tern_wire::limits::MAX_PAYLOAD;

/// Flag in the kind of a packed frame.
pub(crate) const PACKED: u8 = 0x80;

/// Minimum size in bytes of a frame to pack.
const MIN_SIZE: usize = 16 << 10;

/// A link with a lower delivery rate (bytes per second) is slow; this includes 1 Gbit/s. Packing
/// and unpacking take about 1 ns per byte; at 1 Gbit/s, halving a frame saves 4 ns per byte.
const SLOW_LINK_RATE: u64 = 150_000_000;

/// Size in bytes of each sample, taken at the beginning, in the middle and at the end.
const SAMPLE_SIZE: usize = 4 << 10;

/// The parts of a frame as one packed payload, if that pays on this link.
pub(crate) fn pack(link: &impl AsFd, parts: &[&[u8]]) -> Option<Vec<u8>> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    if length < MIN_SIZE || delivery_rate(link).is_none_or(|rate| rate >= SLOW_LINK_RATE) {
        return None;
    }
    pack_if_smaller(parts, length)
}

fn pack_if_smaller(parts: &[&[u8]], length: usize) -> Option<Vec<u8>> {
    let plain = parts.concat();
    let shrinks = |plain: &[u8], packed: usize| packed <= plain.len() / 8 * 7;
    let samples: Vec<u8> = [0, length / 2, length.saturating_sub(SAMPLE_SIZE)]
        .into_iter()
        .flat_map(|at| plain.get(at..(at + SAMPLE_SIZE).min(length)).unwrap_or_default())
        .copied()
        .collect();
    if !shrinks(&samples, lz4_flex::block::compress(&samples).len()) {
        return None;
    }
    let packed = lz4_flex::block::compress_prepend_size(&plain);
    shrinks(&plain, packed.len()).then_some(packed)
}

/// The frame, unpacked if it was packed; `None` if it is malformed.
pub(crate) fn unpack(frame: Frame) -> Option<Frame> {
    if frame.kind & PACKED == 0 {
        return Some(frame);
    }
    let (length, packed) = frame.payload.split_first_chunk()?;
    let length = u32::from_le_bytes(*length) as usize;
    if !(MIN_SIZE..=MAX_PAYLOAD).contains(&length) {
        return None;
    }
    let mut payload = vec![0; length];
    let unpacked = lz4_flex::block::decompress_into(packed, &mut payload).ok()?;
    (unpacked == length).then_some(Frame { kind: frame.kind & !PACKED, payload, ..frame })
}

/// The rate, in bytes per second, at which the peer has recently received data
/// (`tcpi_delivery_rate`, Linux 4.9 and later). `None` if the rate is not known or was limited by
/// the sender.
#[allow(unsafe_code, reason = "TCP_INFO has no safe form")]
fn delivery_rate(socket: &impl AsFd) -> Option<u64> {
    /// Offsets in `struct tcp_info`, which only grows at its end: a byte whose lowest bit says that
    /// the sender was the limit, and the delivery rate.
    const APP_LIMITED_OFFSET: usize = 7;
    const RATE_OFFSET: usize = 160;
    let mut info = [0u8; RATE_OFFSET + 8];
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: the pointers are to bytes and their number, both valid for the call and written by it
    // alone.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 || (length as usize) < info.len() || info[APP_LIMITED_OFFSET] & 1 != 0 {
        return None;
    }
    let rate = u64::from_ne_bytes(*info[RATE_OFFSET..].first_chunk()?);
    (rate > 0).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: Vec<u8>) -> Frame {
        Frame { kind, flags: 0, tag: 7, payload }
    }

    fn text(length: usize) -> Vec<u8> {
        (0..).flat_map(|at| format!("{at} words that are repeated\n").into_bytes()).take(length).collect()
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
    fn compressible_frame_survives_packing() {
        for length in [MIN_SIZE, 100_001, 1 << 20] {
            let (head, data) = (noise(40), text(length));
            let packed = pack_if_smaller(&[&head, &data], 40 + length).unwrap();
            assert!(packed.len() < length / 2, "{}", packed.len());
            let unpacked = unpack(frame(PACKED | 2, packed)).unwrap();
            assert_eq!((unpacked.kind, unpacked.tag), (2, 7));
            assert!(unpacked.payload == [head, data].concat());
        }
        assert_eq!(pack_if_smaller(&[&noise(1 << 20)], 1 << 20), None);
        let plain = unpack(frame(2, vec![1, 2, 3])).unwrap();
        assert_eq!((plain.kind, plain.payload), (2, vec![1, 2, 3]));
    }

    #[test]
    fn malformed_packed_frame_is_refused() {
        let plain = text(MIN_SIZE);
        let good = pack_if_smaller(&[&plain], MIN_SIZE).unwrap();
        let with_length = |length: u32| [&length.to_le_bytes(), &good[4..]].concat();
        for wrong in [0, 1, MIN_SIZE as u32 - 1, MIN_SIZE as u32 + 1, MAX_PAYLOAD as u32 + 1, u32::MAX] {
            assert!(unpack(frame(PACKED | 1, with_length(wrong))).is_none(), "{wrong}");
        }
        for short in 0..good.len() {
            assert!(unpack(frame(PACKED | 1, good[..short].to_vec())).is_none(), "{short}");
        }
        // A corrupt frame unpacks to the length that it claims, or is refused.
        for at in 4..good.len() {
            let mut wrong = good.clone();
            wrong[at] ^= 0x55;
            assert!(unpack(frame(PACKED | 1, wrong)).is_none_or(|frame| frame.payload.len() == MIN_SIZE));
        }
        assert!(
            unpack(frame(PACKED | 1, [&(1u32 << 20).to_le_bytes(), &noise(5000)[..]].concat())).is_none()
        );
    }
}
