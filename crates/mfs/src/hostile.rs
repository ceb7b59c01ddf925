//! Bytes as frames, for what reads those of hostile peers.

/// Each with its length before it in two bytes, the lower one first; what is cut off is left.
pub(crate) fn frames(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk()?;
        let (frame, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        bytes = rest;
        Some(frame)
    })
}
