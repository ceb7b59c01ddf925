//! Typed messages as payloads of frames, encoded with postcard. A message fills the whole payload.

use crate::limits::MAX_PAYLOAD;
use serde::{Serialize, de::DeserializeOwned};

/// Why a message could not be encoded or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// It does not fit into one frame.
    #[error("a message of {0} bytes does not fit into a frame")]
    TooLong(usize),
    /// It cannot be encoded.
    #[error("the message cannot be encoded")]
    Encode(#[source] postcard::Error),
    /// The bytes do not decode to this type.
    #[error("the peer's message is malformed")]
    Malformed(#[source] postcard::Error),
    /// Bytes follow the message.
    #[error("{0} bytes follow the peer's message")]
    Trailing(usize),
}

/// Encodes a message.
///
/// # Errors
/// If it is longer than the maximum payload.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_stdvec(message).map_err(MessageError::Encode)?;
    if bytes.len() > MAX_PAYLOAD {
        return Err(MessageError::TooLong(bytes.len()));
    }
    Ok(bytes)
}

/// Decodes a message. Sequences never allocate more elements than the payload can hold.
///
/// # Errors
/// If the payload is not exactly one `T`.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, MessageError> {
    let (message, rest) = postcard::take_from_bytes(payload).map_err(MessageError::Malformed)?;
    if rest.is_empty() { Ok(message) } else { Err(MessageError::Trailing(rest.len())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Sample = (u64, String, Vec<(u8, Option<i64>)>, [u8; 4]);

    proptest! {
        #[test]
        fn messages_round_trip(sample: Sample) {
            prop_assert_eq!(decode::<Sample>(&encode(&sample).unwrap()), Ok(sample));
        }

        #[test]
        fn truncated_messages_are_errors(sample: Sample, cut in 1usize..8) {
            let bytes = encode(&sample).unwrap();
            prop_assert!(decode::<Sample>(&bytes[..bytes.len().saturating_sub(cut)]).is_err());
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes: Vec<u8>) {
            let _outcome = decode::<Sample>(&bytes);
        }
    }

    #[test]
    fn trailing_bytes_are_refused() {
        assert_eq!(decode::<u8>(&[1, 2, 3]), Err(MessageError::Trailing(2)));
    }

    #[test]
    fn false_length_does_not_allocate() {
        // A vector of 2^60 elements, none of which follow.
        let bytes = postcard::to_stdvec(&(1u64 << 60)).unwrap();
        assert!(decode::<Vec<u64>>(&bytes).is_err());
    }

    #[test]
    fn message_longer_than_a_frame_is_refused() {
        assert_eq!(encode(&text(MAX_PAYLOAD)).map(|b| b.len()), Err(MessageError::TooLong(MAX_PAYLOAD + 3)));
    }

    fn text(length: usize) -> String {
        "x".repeat(length)
    }
}
