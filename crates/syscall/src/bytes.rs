//! Reference-counted bytes that a call sends or returns. Several owners share them without copies:
//! pending writes that wait for a confirmation, the request in flight, and a repetition of it.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Bytes whose clones share memory until one of them is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ByteBuf(Arc<Vec<u8>>);

impl ByteBuf {
    /// An empty buffer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The bytes, copied only if they are shared.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        Arc::unwrap_or_clone(self.0)
    }
}

impl From<Vec<u8>> for ByteBuf {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(bytes))
    }
}

impl From<&[u8]> for ByteBuf {
    fn from(bytes: &[u8]) -> Self {
        bytes.to_vec().into()
    }
}

impl Deref for ByteBuf {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for ByteBuf {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        Arc::make_mut(&mut self.0)
    }
}

impl Serialize for ByteBuf {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for ByteBuf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde_bytes::ByteBuf::deserialize(deserializer).map(|bytes| bytes.into_vec().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_memory_until_written() {
        let first = ByteBuf::from(vec![1, 2, 3]);
        let mut second = first.clone();
        assert_eq!(first.as_ptr(), second.as_ptr());
        second.push(4);
        assert_eq!((first.len(), second.len()), (3, 4));
        let at = second.as_ptr();
        let alone = second.into_vec();
        assert_eq!(alone.as_ptr(), at, "it was nobody else's");
    }

    #[test]
    fn byte_buf_serialises_as_bytes() {
        let bytes = vec![7; 300];
        let sent = postcard::to_stdvec(&ByteBuf::from(bytes.clone())).unwrap();
        assert_eq!(sent, postcard::to_stdvec(&serde_bytes::ByteBuf::from(bytes.clone())).unwrap());
        assert_eq!(postcard::from_bytes::<ByteBuf>(&sent).unwrap().into_vec(), bytes);
    }
}
