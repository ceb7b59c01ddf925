//! What a hostile peer makes of what may be said, for the tests of all who hear it; the fuzz targets' corpora begin with the same.

/// Ended early, and with a bit turned, at every so many places.
pub fn spoilt(bytes: &[u8], step: usize) -> impl Iterator<Item = Vec<u8>> {
    let turned = (0..bytes.len() * 8).step_by(step).map(|bit| {
        let mut turned = bytes.to_vec();
        turned[bit / 8] ^= 1 << (bit % 8);
        turned
    });
    (0..bytes.len()).step_by(step).map(|end| bytes[..end].to_vec()).chain(turned)
}
