//! Corrupted variants of valid input, for tests of code that decodes messages of peers. The fuzz
//! targets' corpora start from the same.

/// `bytes` truncated at every `step`-th byte, and with every `step`-th bit flipped.
pub fn corrupted_variants(bytes: &[u8], step: usize) -> impl Iterator<Item = Vec<u8>> {
    let turned = (0..bytes.len() * 8).step_by(step).map(|bit| {
        let mut turned = bytes.to_vec();
        turned[bit / 8] ^= 1 << (bit % 8);
        turned
    });
    (0..bytes.len()).step_by(step).map(|end| bytes[..end].to_vec()).chain(turned)
}
