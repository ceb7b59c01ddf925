//! Corrupted variants of valid input, for tests of code that decodes messages of peers. The corpora
//! of the fuzz targets start from the same valid input.

/// Variants of `bytes`: one for each `step`-th byte, truncated there, and one for each `step`-th
/// bit, with that bit flipped.
pub fn corrupted_variants(bytes: &[u8], step: usize) -> impl Iterator<Item = Vec<u8>> {
    let flipped = (0..bytes.len() * 8).step_by(step).map(|bit| {
        let mut flipped = bytes.to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        flipped
    });
    (0..bytes.len()).step_by(step).map(|end| bytes[..end].to_vec()).chain(flipped)
}
