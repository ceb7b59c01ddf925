//! A program's advice about its memory (madvise, mlock). It is sent with the memory. So content
//! that a child must not inherit (keys, the state of a random number generator) is not inherited on
//! another node either.

use serde::{Deserialize, Serialize};
use tern_tracee::procfs::Mapping;

/// The advice in force for a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryAdvice(u8);

/// A kind of advice: its flag in smaps, the madvise call that sets it, and the one that clears it,
/// if there is one.
struct AdviceKind {
    flag: [u8; 2],
    set: i32,
    clear: Option<i32>,
}

/// One bit each, in this order.
const KINDS: [AdviceKind; 5] = [
    AdviceKind { flag: *b"dc", set: libc::MADV_DONTFORK, clear: Some(libc::MADV_DOFORK) },
    AdviceKind { flag: *b"wf", set: libc::MADV_WIPEONFORK, clear: Some(libc::MADV_KEEPONFORK) },
    AdviceKind { flag: *b"dd", set: libc::MADV_DONTDUMP, clear: Some(libc::MADV_DODUMP) },
    AdviceKind { flag: *b"hg", set: libc::MADV_HUGEPAGE, clear: None },
    AdviceKind { flag: *b"nh", set: libc::MADV_NOHUGEPAGE, clear: None },
];
/// Locked by mlock. Not set by madvise, and so not part of [`MemoryAdvice::changes_from`].
const LOCKED: u8 = 1 << KINDS.len();
/// Locked page by page, as pages are touched (MLOCK_ONFAULT).
const ON_FAULT: u8 = LOCKED << 1;

impl MemoryAdvice {
    /// The advice that smaps shows for a mapping.
    #[must_use]
    pub fn of(mapping: &Mapping) -> Self {
        let bit = |flag: &[u8; 2], bit: u8| if mapping.has(flag) { bit } else { 0 };
        let bits = KINDS.iter().enumerate().map(|(at, kind)| bit(&kind.flag, 1 << at));
        Self(bits.fold(bit(b"lo", LOCKED) | bit(b"lf", ON_FAULT), |all, one| all | one))
    }

    /// The madvise calls that turn `now` into this.
    pub(crate) fn changes_from(self, now: Self) -> impl Iterator<Item = i32> {
        KINDS.iter().enumerate().filter_map(move |(at, kind)| match ((self.0, now.0), 1 << at) {
            ((then, now), bit) if then & bit == now & bit => None,
            ((then, _), bit) if then & bit == 0 => kind.clear,
            _ => Some(kind.set),
        })
    }

    /// Whether the region is locked in memory.
    #[must_use]
    pub fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// The mlock2 flags of a locked region.
    #[must_use]
    pub fn mlock2_flags(self) -> Option<u64> {
        self.is_locked().then_some(u64::from(self.0 & ON_FAULT != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(flags: &[[u8; 2]]) -> MemoryAdvice {
        let (start, end, prot, shared, offset, device, inode) = (0, 0x1000, 3, false, 0, 0, 0);
        let (name, flags) = (Vec::new(), flags.to_vec());
        MemoryAdvice::of(&Mapping { start, end, prot, shared, offset, device, inode, name, flags })
    }

    #[test]
    fn advice_changes_are_set_or_cleared() {
        let (none, key) = (MemoryAdvice::default(), advice(&[*b"rd", *b"wf", *b"dd", *b"lo"]));
        assert_eq!(key.changes_from(none).collect::<Vec<_>>(), [libc::MADV_WIPEONFORK, libc::MADV_DONTDUMP]);
        assert_eq!(none.changes_from(key).collect::<Vec<_>>(), [libc::MADV_KEEPONFORK, libc::MADV_DODUMP]);
        assert_eq!(key.changes_from(key).count(), 0);
        // MADV_HUGEPAGE can only be replaced by MADV_NOHUGEPAGE, not cleared.
        let (huge, small) = (advice(&[*b"hg"]), advice(&[*b"nh"]));
        assert_eq!(none.changes_from(huge).count(), 0);
        assert_eq!(small.changes_from(huge).collect::<Vec<_>>(), [libc::MADV_NOHUGEPAGE]);
        assert_eq!((none.mlock2_flags(), key.mlock2_flags()), (None, Some(0)));
        assert_eq!(advice(&[*b"lo", *b"lf"]).mlock2_flags(), Some(1));
    }
}
