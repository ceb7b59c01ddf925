//! Splits fuzzer input into frames.

/// Frames, each preceded by its length in two bytes, little-endian. An incomplete frame at the end
/// is dropped.
pub(crate) fn frames(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk()?;
        let (frame, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        bytes = rest;
        Some(frame)
    })
}
