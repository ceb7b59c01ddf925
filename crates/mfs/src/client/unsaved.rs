//! What was written to a file, and is not known to be on its node's disk: it goes with that machine's memory.
//!
//! A server that begins anew on the same boot of its machine finds all that in the kernel. After a reset it may be gone. Who had the
//! file open for writing then is told so (EIO) whatever he does with it, and who only reads it if he wants it saved.

use crate::lock;
use std::sync::Mutex;

/// The boots of a node's machine that were seen, counted from 1.
pub(crate) type Boot = u64;

/// What of one file, or of a directory's entries, is not saved.
#[derive(Debug, Default)]
pub(crate) struct Unsaved(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// How often it was written.
    writes: u64,
    /// In which boot, if not all of it has been saved since; 0 if it has.
    within: Boot,
    /// The last boot with which something was lost.
    lost: Boot,
}

impl State {
    /// It is seen in this boot; or was, if that comes late.
    fn seen(&mut self, boot: Boot) {
        if self.within != 0 && self.within < boot {
            (self.lost, self.within) = (self.within, 0);
        }
    }
}

impl Unsaved {
    /// It was written in this boot.
    pub(crate) fn written(&self, boot: Boot) {
        let mut state = lock(&self.0);
        state.writes += 1;
        state.seen(boot);
        if boot < state.within {
            state.lost = state.lost.max(boot);
        } else {
            state.within = boot;
        }
    }

    /// How often it was written; to be asked before it is saved.
    pub(crate) fn writes(&self) -> u64 {
        lock(&self.0).writes
    }

    /// All of so many writes that are of this boot are saved.
    pub(crate) fn saved(&self, writes: u64, boot: Boot) {
        let mut state = lock(&self.0);
        state.seen(boot);
        if state.writes == writes && state.within == boot {
            state.within = 0;
        }
    }

    /// Whether something was lost since the boot in which it was opened; this is another one, or the same.
    pub(crate) fn has_lost(&self, since: Boot, boot: Boot) -> bool {
        let mut state = lock(&self.0);
        state.seen(boot);
        since <= state.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_saved_is_lost_with_its_boot() {
        let file = Unsaved::default();
        assert!(!file.has_lost(1, 2), "nothing was written");
        file.written(2);
        assert!(!file.has_lost(1, 2), "nor reset");
        assert!(file.has_lost(1, 3) && file.has_lost(2, 3));
        assert!(!file.has_lost(3, 3), "who opens it later is not concerned");
        file.written(3);
        assert!(file.has_lost(2, 3) && !file.has_lost(3, 3));
    }

    #[test]
    fn what_is_saved_is_not_lost() {
        let file = Unsaved::default();
        file.written(1);
        let before = file.writes();
        file.written(1);
        file.saved(before, 1);
        assert!(file.has_lost(1, 2), "one came while the other was saved");
        file.written(2);
        file.saved(file.writes(), 2);
        assert!(!file.has_lost(2, 3));
    }

    #[test]
    fn a_late_word_of_an_old_boot_is_of_what_is_lost() {
        let file = Unsaved::default();
        file.written(2);
        file.written(1);
        assert!(file.has_lost(1, 2) && !file.has_lost(2, 2));
    }
}
