//! What a program has said about its memory (madvise, mlock). It goes with the memory: what a child must not see (keys, the
//! state of a random number generator) it must not see away either.

use serde::{Deserialize, Serialize};
use tern_tracee::procfs::Mapping;

/// What was said about a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Advice(u8);

/// One thing that can be said: how smaps shows it; what says it, and what takes it back, if anything can.
struct Word {
    flag: [u8; 2],
    say: i32,
    unsay: Option<i32>,
}

/// Bit by bit.
const WORDS: [Word; 5] = [
    Word { flag: *b"dc", say: libc::MADV_DONTFORK, unsay: Some(libc::MADV_DOFORK) },
    Word { flag: *b"wf", say: libc::MADV_WIPEONFORK, unsay: Some(libc::MADV_KEEPONFORK) },
    Word { flag: *b"dd", say: libc::MADV_DONTDUMP, unsay: Some(libc::MADV_DODUMP) },
    Word { flag: *b"hg", say: libc::MADV_HUGEPAGE, unsay: None },
    Word { flag: *b"nh", say: libc::MADV_NOHUGEPAGE, unsay: None },
];
/// Locked: not said by madvise, and no matter of [`Advice::steps`].
const LOCKED: u8 = 1 << WORDS.len();
/// Locked page by page, as they are touched.
const ON_FAULT: u8 = LOCKED << 1;

impl Advice {
    /// What smaps shows of a mapping.
    #[must_use]
    pub fn of(mapping: &Mapping) -> Self {
        let bit = |flag: &[u8; 2], bit: u8| if mapping.has(flag) { bit } else { 0 };
        let words = WORDS.iter().enumerate().map(|(at, word)| bit(&word.flag, 1 << at));
        Self(words.fold(bit(b"lo", LOCKED) | bit(b"lf", ON_FAULT), |all, one| all | one))
    }

    /// The madvise calls that turn `now` into this.
    pub fn steps(self, now: Self) -> impl Iterator<Item = i32> {
        WORDS.iter().enumerate().filter_map(move |(at, word)| match ((self.0, now.0), 1 << at) {
            ((then, now), bit) if then & bit == now & bit => None,
            ((then, _), bit) if then & bit == 0 => word.unsay,
            _ => Some(word.say),
        })
    }

    /// Whether it may not be swapped.
    #[must_use]
    pub fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// What is said by mlock: nothing, or the flags of mlock2.
    #[must_use]
    pub fn lock(self) -> Option<u64> {
        self.is_locked().then_some(u64::from(self.0 & ON_FAULT != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(flags: &[[u8; 2]]) -> Advice {
        let (start, end, prot, shared, offset, device, inode) = (0, 0x1000, 3, false, 0, 0, 0);
        let (name, flags) = (Vec::new(), flags.to_vec());
        Advice::of(&Mapping { start, end, prot, shared, offset, device, inode, name, flags })
    }

    #[test]
    fn what_differs_is_said_or_taken_back() {
        let (none, key) = (Advice::default(), advice(&[*b"rd", *b"wf", *b"dd", *b"lo"]));
        assert_eq!(key.steps(none).collect::<Vec<_>>(), [libc::MADV_WIPEONFORK, libc::MADV_DONTDUMP]);
        assert_eq!(none.steps(key).collect::<Vec<_>>(), [libc::MADV_KEEPONFORK, libc::MADV_DODUMP]);
        assert_eq!(key.steps(key).count(), 0);
        // There is no way back from a wish for huge pages, but to the other one.
        let (huge, small) = (advice(&[*b"hg"]), advice(&[*b"nh"]));
        assert_eq!(none.steps(huge).count(), 0);
        assert_eq!(small.steps(huge).collect::<Vec<_>>(), [libc::MADV_NOHUGEPAGE]);
        assert_eq!((none.lock(), key.lock()), (None, Some(0)));
        assert_eq!(advice(&[*b"lo", *b"lf"]).lock(), Some(1));
    }
}
