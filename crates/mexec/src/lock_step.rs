//! What keeps two ends in step: credit for a stream's bytes, and a beat that says that the other end is there.

use crate::words::CREDIT;
use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// How many bytes of a stream may be sent.
#[derive(Debug)]
pub(crate) struct Credit(usize);

impl Default for Credit {
    fn default() -> Self {
        Self(CREDIT)
    }
}

impl Credit {
    /// So many.
    pub(crate) fn left(&self) -> usize {
        self.0
    }

    /// So many have been sent: at most those that were left.
    pub(crate) fn take(&mut self, count: usize) {
        self.0 = self.0.saturating_sub(count);
    }

    /// The other end has taken some, as this says.
    ///
    /// # Errors
    /// If it takes more than there was.
    pub(crate) fn give(&mut self, said: &[u8]) -> Result<()> {
        let Ok(bytes) = said.try_into() else { bail!("a credit of {} bytes", said.len()) };
        let more = u32::from_le_bytes(bytes) as usize;
        if more > CREDIT - self.0 {
            bail!("it takes more than was sent");
        }
        self.0 += more;
        Ok(())
    }
}

/// When something is to be said only so that the other end knows we are here, and when it is taken for lost.
#[derive(Debug)]
pub(crate) struct Beat {
    said: Instant,
    heard: Instant,
    lost: Duration,
}

impl Beat {
    /// How often something is said.
    pub(crate) const OFTEN: Duration = Duration::from_secs(2);

    /// How long another node may be silent.
    pub(crate) const LOST: Duration = Duration::from_secs(10);

    /// From now on; the other end may be silent for so long.
    pub(crate) fn new(lost: Duration) -> Self {
        Self { said: Instant::now(), heard: Instant::now(), lost }
    }

    /// The other end has said something.
    pub(crate) fn heard(&mut self) {
        self.heard = Instant::now();
    }

    /// Whether it is time to say something; it will be said then.
    ///
    /// # Errors
    /// If the other end has been silent for too long.
    pub(crate) fn is_due(&mut self) -> Result<bool> {
        if self.heard.elapsed() > self.lost {
            bail!("nothing was heard of it for {} s", self.lost.as_secs());
        }
        if self.said.elapsed() < Self::OFTEN {
            return Ok(false);
        }
        self.said = Instant::now();
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_never_grows_beyond_what_it_was() {
        let mut credit = Credit::default();
        credit.take(100);
        assert!(credit.give(&101u32.to_le_bytes()).is_err());
        credit.give(&100u32.to_le_bytes()).unwrap();
        assert_eq!(credit.left(), CREDIT);
        assert!(credit.give(&[1]).is_err());
    }
}
