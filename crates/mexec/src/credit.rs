//! Credit-based flow control of a stream.

use crate::messages::STREAM_CREDIT;
use anyhow::{Result, bail};

/// The number of bytes of a stream that may be sent.
#[derive(Debug)]
pub(crate) struct Credit(usize);

impl Default for Credit {
    fn default() -> Self {
        Self(STREAM_CREDIT)
    }
}

impl Credit {
    /// The remaining credit.
    pub(crate) fn left(&self) -> usize {
        self.0
    }

    /// Consumes credit for sent bytes, at most what is left.
    pub(crate) fn consume(&mut self, count: usize) {
        self.0 = self.0.saturating_sub(count);
    }

    /// Adds the credit that a [`kind::CREDIT`](crate::messages::kind::CREDIT) payload returns.
    ///
    /// # Errors
    /// If the payload is malformed, or returns more credit than was used.
    pub(crate) fn refill(&mut self, payload: &[u8]) -> Result<()> {
        let Ok(bytes) = payload.try_into() else { bail!("a credit of {} bytes", payload.len()) };
        let more = u32::from_le_bytes(bytes) as usize;
        if more > STREAM_CREDIT - self.0 {
            bail!("it returns more credit than was used");
        }
        self.0 += more;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_never_exceeds_its_initial_value() {
        let mut credit = Credit::default();
        credit.consume(100);
        assert!(credit.refill(&101u32.to_le_bytes()).is_err());
        credit.refill(&100u32.to_le_bytes()).unwrap();
        assert_eq!(credit.left(), STREAM_CREDIT);
        assert!(credit.refill(&[1]).is_err());
    }
}
