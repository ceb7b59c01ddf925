//! What takes a while is waited for by threads of their own, so many of each user: the others' files answer meanwhile.

use crate::asking::Asked;
use crate::lock;
use crate::tasks::is_interrupted;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tern_control::Reply;

/// At once, in all and of one user. All of them are ternd's conversations with root, of which it has 256.
const MOST: usize = 64;
const MOST_OF_ONE: usize = 16;

/// How often who waits looks whether a signal has come for him.
const LOOK: Duration = Duration::from_millis(50);

/// Who waits.
#[derive(Debug, Default)]
pub(crate) struct Waiting(Mutex<HashMap<u32, usize>>);

/// One who waits, until he is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    all: Arc<Waiting>,
    uid: u32,
}

impl Waiting {
    /// Lets one more of this user wait.
    ///
    /// # Errors
    /// `EBUSY` if too many do.
    pub(crate) fn take(self: &Arc<Self>, uid: u32) -> Result<Turn, Errno> {
        let mut all = lock(&self.0);
        let own = all.get(&uid).copied().unwrap_or(0);
        if own >= MOST_OF_ONE || all.values().sum::<usize>() >= MOST {
            return Err(Errno::BUSY);
        }
        *all.entry(uid).or_default() += 1;
        Ok(Turn { all: self.clone(), uid })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut all = lock(&self.all.0);
        if let Some(own) = all.get_mut(&self.uid) {
            *own -= 1;
            if *own == 0 {
                all.remove(&self.uid);
            }
        }
    }
}

/// Waits for ternd's answer, however long that takes, or until a signal comes for this thread: what was begun goes on then.
///
/// # Errors
/// `EINTR`, or what ternd says.
pub(crate) fn wait(asked: Asked, tid: u32) -> Result<Reply, Errno> {
    while !asked.comes_within(LOOK) {
        if is_interrupted(tid) {
            return Err(Errno::INTR);
        }
    }
    asked.answer()
}

/// Waits for it without anybody who could be told.
pub(crate) fn wait_alone(asked: Asked) -> Result<Reply, Errno> {
    while !asked.comes_within(Duration::from_secs(3600)) {}
    asked.answer()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_does_not_take_all() {
        let all = Arc::new(Waiting::default());
        let own: Vec<_> = (0..MOST_OF_ONE).map(|_| all.take(7).unwrap()).collect();
        assert_eq!(all.take(7).unwrap_err(), Errno::BUSY);
        let others: Vec<_> =
            (0..MOST - MOST_OF_ONE).map(|user| all.take(100 + user as u32).unwrap()).collect();
        assert_eq!(all.take(8).unwrap_err(), Errno::BUSY);
        drop(own);
        assert!(all.take(7).is_ok());
        drop(others);
        assert!(lock(&all.0).is_empty());
    }
}
