//! How long commands took, by class and user: short ones are not sent anywhere.

use crate::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// A command that takes less gains nothing by another node: to be begun there costs it some milliseconds, and its files as many.
const SHORT: f32 = 0.02;

/// Of the last one's time, how much counts at once: one long command among short ones is no reason to change.
const NEWS: f32 = 0.3;

/// So many classes are known, of all users.
const MOST: usize = 4096;

/// All classes of which something is known.
#[derive(Debug, Default)]
pub(super) struct Classes(Mutex<HashMap<(u32, String), f32>>);

impl Classes {
    /// Whether this user's commands of that class are short. What has never been run is not.
    pub(super) fn is_short(&self, uid: u32, class: &str) -> bool {
        lock(&self.0).get(&(uid, class.to_owned())).is_some_and(|seconds| *seconds < SHORT)
    }

    /// One of them took so long.
    pub(super) fn took(&self, uid: u32, class: &str, time: Duration) {
        let mut classes = lock(&self.0);
        let seconds = time.as_secs_f32();
        if let Some(known) = classes.get_mut(&(uid, class.to_owned())) {
            *known += NEWS * (seconds - *known);
            return;
        }
        if classes.len() >= MOST {
            classes.clear();
        }
        classes.insert((uid, class.chars().take(256).collect()), seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_becomes_long_and_short_again() {
        let (classes, ms) = (Classes::default(), Duration::from_millis);
        assert!(!classes.is_short(1, "cc"));
        classes.took(1, "cc", ms(5));
        assert!(classes.is_short(1, "cc") && !classes.is_short(2, "cc") && !classes.is_short(1, "ld"));
        classes.took(1, "cc", ms(300));
        assert!(!classes.is_short(1, "cc"));
        (0..20).for_each(|_| classes.took(1, "cc", ms(5)));
        assert!(classes.is_short(1, "cc"));
    }

    #[test]
    fn nobody_fills_the_memory() {
        let classes = Classes::default();
        (0..3 * MOST).for_each(|n| classes.took(n as u32, &"x".repeat(10_000), Duration::ZERO));
        assert!(lock(&classes.0).len() <= MOST);
        assert!(lock(&classes.0).keys().all(|(_, class)| class.len() <= 256));
    }
}
