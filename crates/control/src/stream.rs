//! JSON documents on a stream, each preceded by its length.

use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// The maximum length of a document, in bytes.
pub const MAX_DOCUMENT_LEN: u32 = 4 << 20;

/// Writes one document and flushes.
///
/// # Errors
/// Those of the stream. It is undefined then how much of the document was sent.
pub fn write<T: Serialize>(stream: &mut impl Write, document: &T) -> io::Result<()> {
    let body = serde_json::to_vec(document)?;
    let length = u32::try_from(body.len()).ok().filter(|n| *n <= MAX_DOCUMENT_LEN);
    let length = length.ok_or_else(|| io::Error::other("document too long"))?;
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend_from_slice(&body);
    stream.write_all(&bytes)?;
    stream.flush()
}

/// Reads one document.
///
/// # Errors
/// Those of the stream; `InvalidData` if it is too long or not a `T`.
pub fn read<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    if length > MAX_DOCUMENT_LEN {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "document too long"));
    }
    // Read through `take`, so that a forged length allocates only what really arrives.
    let mut body = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut body)?;
    if body.len() != length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_slice(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_round_trip_and_bad_lengths_are_refused() {
        let mut bytes = Vec::new();
        write(&mut bytes, &vec![1u8, 2, 3]).unwrap();
        assert_eq!(read::<Vec<u8>>(&mut &bytes[..]).unwrap(), [1, 2, 3]);
        assert!(read::<Vec<u8>>(&mut &bytes[..5]).is_err());
        assert!(read::<Vec<u8>>(&mut &[0xff, 0xff, 0xff, 0xff][..]).is_err());
    }
}
