//! How long commands took, by class and user: short ones are not sent anywhere.

use crate::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// A command that needs less of a standard CPU gains nothing by another node: to be begun there costs it some milliseconds, and its files as
/// many. How long it was on its way makes no difference: on a busy node that is the others' time, and where all are busy whoever
/// is sent away waits for room besides.
const SHORT: f32 = 0.02;

/// Of the last one's time, how much counts at once: one long command among short ones is no reason to change.
const NEWS: f32 = 0.3;

/// So many classes are known, of all users.
const MOST: usize = 4096;

/// All classes of which something is known.
#[derive(Debug)]
pub(super) struct Classes {
    /// So many of a class may run here at once because they are thought short.
    at_once: usize,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    seconds: HashMap<(u32, String), f32>,
    /// Those that run here because they are thought short.
    running: HashMap<(u32, String), usize>,
}

impl Classes {
    /// Of short commands this node runs so many of a class at once.
    pub(super) fn new(at_once: usize) -> Self {
        Self { at_once, known: Mutex::default() }
    }

    /// That this user's next command of that class is short, as long as it runs; nothing if it is not, or of that class was never
    /// run. A compiler that was asked for its version a hundred times is thought short; when a build begins with it, all that is begun
    /// before the first has ended would stay here. So no more are believed than run here at once: if they are short there is room
    /// again soon, and if not, that is not known yet.
    pub(super) fn short(&self, uid: u32, class: &str) -> Option<Short<'_>> {
        let mut known = lock(&self.known);
        let class = (uid, cut(class));
        known.seconds.get(&class).filter(|seconds| **seconds < SHORT)?;
        let running = known.running.entry(class.clone()).or_default();
        (*running < self.at_once).then(|| {
            *running += 1;
            Short { of: self, class }
        })
    }

    /// What one of them needs of a standard CPU, in seconds; nothing if of that class none was run.
    pub(super) fn need(&self, uid: u32, class: &str) -> Option<f32> {
        lock(&self.known).seconds.get(&(uid, cut(class))).copied()
    }

    /// One of them took so much of a standard CPU.
    pub(super) fn took(&self, uid: u32, class: &str, time: Duration) {
        let classes = &mut lock(&self.known).seconds;
        let seconds = time.as_secs_f32();
        let class = (uid, cut(class));
        if let Some(known) = classes.get_mut(&class) {
            *known += NEWS * (seconds - *known);
            return;
        }
        if classes.len() >= MOST {
            classes.clear();
        }
        classes.insert(class, seconds);
    }
}

fn cut(class: &str) -> String {
    class.chars().take(256).collect()
}

/// A command that runs here because it is thought short, until this is dropped.
#[derive(Debug)]
pub(super) struct Short<'a> {
    of: &'a Classes,
    class: (u32, String),
}

impl Drop for Short<'_> {
    fn drop(&mut self) {
        let running = &mut lock(&self.of.known).running;
        if let Some(count) = running.get_mut(&self.class) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.class);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_becomes_long_and_short_again() {
        let (classes, ms) = (Classes::new(1), Duration::from_millis);
        let is_short = |uid, class| classes.short(uid, class).is_some();
        assert!(!is_short(1, "cc") && classes.need(1, "cc").is_none());
        classes.took(1, "cc", ms(5));
        assert_eq!(classes.need(1, "cc"), Some(0.005));
        assert!(is_short(1, "cc") && !is_short(2, "cc") && !is_short(1, "ld"));
        classes.took(1, "cc", ms(300));
        assert!(!is_short(1, "cc"));
        (0..20).for_each(|_| classes.took(1, "cc", ms(5)));
        assert!(is_short(1, "cc"));
    }

    #[test]
    fn no_more_are_thought_short_than_run_here_at_once() {
        let classes = Classes::new(2);
        let name = "c".repeat(1000);
        for (uid, class) in [(1, &*name), (1, "ld"), (2, "ld")] {
            classes.took(uid, class, Duration::ZERO);
        }
        let mut running: Vec<_> = (0..3).filter_map(|_| classes.short(1, &name)).collect();
        assert_eq!(running.len(), 2);
        let others = (classes.short(1, "ld"), classes.short(2, "ld"));
        assert!(others.0.is_some() && others.1.is_some(), "each class and user by itself");
        running.pop();
        assert!(classes.short(1, &name).is_some());
        drop((running, others));
        assert!(lock(&classes.known).running.is_empty());
    }

    #[test]
    fn nobody_fills_the_memory() {
        let classes = Classes::new(1);
        (0..3 * MOST).for_each(|n| classes.took(n as u32, &"x".repeat(10_000), Duration::ZERO));
        let known = &lock(&classes.known).seconds;
        assert!(known.len() <= MOST);
        assert!(known.keys().all(|(_, class)| class.len() <= 256));
    }
}
