//! How long commands took, by class and user: short ones are not sent anywhere.

use crate::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// A command that takes less gains nothing by another node: to be begun there costs it some milliseconds, and its files as many. Nor
/// does one that needs less of a standard CPU gain anything by waiting for room: on a busy node its time is that of others.
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
    took: HashMap<(u32, String), Took>,
    /// Those that run here because they are thought short.
    running: HashMap<(u32, String), usize>,
}

/// In seconds, on average.
#[derive(Debug, Clone, Copy)]
struct Took {
    /// From begin to end.
    wall: f32,
    /// Of a standard CPU.
    need: f32,
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
        self.stays(uid, class, |took| took.wall)
    }

    /// The same of one for which no node has room: that it needs so little that it is not to wait.
    pub(super) fn small(&self, uid: u32, class: &str) -> Option<Short<'_>> {
        self.stays(uid, class, |took| took.need)
    }

    fn stays(&self, uid: u32, class: &str, seconds: impl Fn(&Took) -> f32) -> Option<Short<'_>> {
        let mut known = lock(&self.known);
        let class = (uid, cut(class));
        known.took.get(&class).filter(|took| seconds(took) < SHORT)?;
        let running = known.running.entry(class.clone()).or_default();
        (*running < self.at_once).then(|| {
            *running += 1;
            Short { of: self, class }
        })
    }

    /// What one of them needs of a standard CPU, in seconds; nothing if of that class none was run.
    pub(super) fn need(&self, uid: u32, class: &str) -> Option<f32> {
        lock(&self.known).took.get(&(uid, cut(class))).map(|took| took.need)
    }

    /// One of them took so long, and needed so much of a standard CPU.
    pub(super) fn took(&self, uid: u32, class: &str, wall: Duration, need: Duration) {
        let classes = &mut lock(&self.known).took;
        let last = Took { wall: wall.as_secs_f32(), need: need.as_secs_f32() };
        let class = (uid, cut(class));
        if let Some(known) = classes.get_mut(&class) {
            known.wall += NEWS * (last.wall - known.wall);
            known.need += NEWS * (last.need - known.need);
            return;
        }
        if classes.len() >= MOST {
            classes.clear();
        }
        classes.insert(class, last);
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
        classes.took(1, "cc", ms(5), ms(4));
        assert_eq!(classes.need(1, "cc"), Some(0.004));
        assert!(is_short(1, "cc") && !is_short(2, "cc") && !is_short(1, "ld"));
        classes.took(1, "cc", ms(300), ms(4));
        assert!(!is_short(1, "cc") && classes.small(1, "cc").is_some());
        classes.took(1, "cc", ms(300), ms(300));
        assert!(classes.small(1, "cc").is_none());
        (0..20).for_each(|_| classes.took(1, "cc", ms(5), ms(4)));
        assert!(is_short(1, "cc"));
    }

    #[test]
    fn no_more_are_thought_short_than_run_here_at_once() {
        let classes = Classes::new(2);
        let name = "c".repeat(1000);
        for (uid, class) in [(1, &*name), (1, "ld"), (2, "ld")] {
            classes.took(uid, class, Duration::ZERO, Duration::ZERO);
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
        (0..3 * MOST)
            .for_each(|n| classes.took(n as u32, &"x".repeat(10_000), Duration::ZERO, Duration::ZERO));
        let known = &lock(&classes.known).took;
        assert!(known.len() <= MOST);
        assert!(known.keys().all(|(_, class)| class.len() <= 256));
    }
}
