//! Processes a hostile stream. Shared by the fuzz target and tests/corpus.rs.

use tern_wire::frame::Decoder;
use tern_wire::limits::{MAX_PAYLOAD, PREAMBLE_LEN};
use tern_wire::{Preamble, decode, encode};

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
enum Sample {
    Nothing,
    Ids { shim: tern_ids::ShimId, node: tern_ids::NodeId },
    Texts(Vec<Option<String>>),
    Numbers { signed: i64, many: Vec<u64>, last: [u8; 32] },
}

/// Decodes the bytes as a peer's stream: a preamble, a byte that sets the length of pieces, and
/// frames. Feeds the frames to the decoder in pieces of that length, and decodes each payload as a
/// message. Returns the number of complete frames.
pub(crate) fn examine(bytes: &[u8]) -> usize {
    let Some((preamble, stream)) = bytes.split_first_chunk::<PREAMBLE_LEN>() else { return 0 };
    if let Ok(read) = Preamble::from_bytes(preamble) {
        assert_eq!(read.to_bytes(), *preamble);
    }
    let piece = usize::from(stream.first().copied().unwrap_or(0)) + 1;
    let (mut decoder, mut frames) = (Decoder::default(), 0);
    for mut part in stream.get(1..).unwrap_or(&[]).chunks(piece) {
        while !part.is_empty() {
            match decoder.feed(&mut part) {
                Err(_) => return frames,
                Ok(None) => assert!(part.is_empty()),
                Ok(Some(frame)) => {
                    frames += 1;
                    assert!(frame.payload.len() <= MAX_PAYLOAD);
                    if let Ok(message) = decode::<Sample>(&frame.payload) {
                        assert_eq!(decode::<Sample>(&encode(&message).unwrap()).unwrap(), message);
                    }
                    decoder.recycle(frame.payload);
                }
            }
        }
    }
    frames
}
