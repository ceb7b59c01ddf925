//! Run times of commands by class and user. Short commands are not sent to other nodes.

use crate::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// In seconds. A shorter command gains nothing from another node, since starting it there and
/// accessing its files cost some milliseconds each. A command that needs less CPU time than this
/// does not wait for a slot, even if it runs longer: on a busy node it mostly waits for other
/// processes.
const SHORT_SECONDS: f32 = 0.02;

/// The weight of a new measurement in the average: one long command among short ones must not
/// change the decision.
const NEW_WEIGHT: f32 = 0.3;

/// The maximum number of classes, of all users.
const MAX_CLASSES: usize = 4096;

/// All measured classes.
#[derive(Debug)]
pub(super) struct CommandClasses {
    /// The maximum number of commands of a class that may run here at once as short ones.
    max_concurrent_short: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stats: HashMap<(u32, String), ClassStats>,
    /// The number of commands that run here as short ones.
    running: HashMap<(u32, String), usize>,
}

/// Averages in seconds.
#[derive(Debug, Clone, Copy)]
struct ClassStats {
    /// From start to end.
    wall: f32,
    /// CPU time on a standard CPU.
    cpu_need: f32,
}

impl CommandClasses {
    /// At most `max_concurrent_short` commands of a class run here at once as short ones.
    pub(super) fn new(max_concurrent_short: usize) -> Self {
        Self { max_concurrent_short, state: Mutex::default() }
    }

    /// Permits this user's next command of the class to run here as a short one, until the permit
    /// is dropped. `None` if the class is long or was never run, or if too many run already. The
    /// limit matters for a compiler that so far was called only for its version, and therefore
    /// counts as short when a build begins: without the limit, every compilation that starts before
    /// the first has ended would stay here. If the commands are short, a permit becomes free soon;
    /// if not, the average soon shows that.
    pub(super) fn permit_short(&self, uid: u32, class: &str) -> Option<ShortPermit<'_>> {
        self.permit(uid, class, |stats| stats.wall)
    }

    /// As [`permit_short`](Self::permit_short), but by CPU time instead of run time: for a command
    /// that finds no free slot, and needs so little CPU time that it must not wait for one.
    pub(super) fn permit_light(&self, uid: u32, class: &str) -> Option<ShortPermit<'_>> {
        self.permit(uid, class, |stats| stats.cpu_need)
    }

    fn permit(&self, uid: u32, class: &str, seconds: impl Fn(&ClassStats) -> f32) -> Option<ShortPermit<'_>> {
        let mut state = lock(&self.state);
        let class = (uid, truncated(class));
        state.stats.get(&class).filter(|stats| seconds(stats) < SHORT_SECONDS)?;
        let running = state.running.entry(class.clone()).or_default();
        (*running < self.max_concurrent_short).then(|| {
            *running += 1;
            ShortPermit { classes: self, class }
        })
    }

    /// Average seconds of a standard CPU that commands of the class need; `None` if none was run.
    pub(super) fn cpu_need(&self, uid: u32, class: &str) -> Option<f32> {
        lock(&self.state).stats.get(&(uid, truncated(class))).map(|stats| stats.cpu_need)
    }

    /// Records a command's run time, and the CPU time that it needed on a standard CPU.
    pub(super) fn record(&self, uid: u32, class: &str, wall: Duration, cpu_need: Duration) {
        let classes = &mut lock(&self.state).stats;
        let last = ClassStats { wall: wall.as_secs_f32(), cpu_need: cpu_need.as_secs_f32() };
        let class = (uid, truncated(class));
        if let Some(average) = classes.get_mut(&class) {
            average.wall += NEW_WEIGHT * (last.wall - average.wall);
            average.cpu_need += NEW_WEIGHT * (last.cpu_need - average.cpu_need);
            return;
        }
        if classes.len() >= MAX_CLASSES {
            classes.clear();
        }
        classes.insert(class, last);
    }
}

fn truncated(class: &str) -> String {
    class.chars().take(256).collect()
}

/// A permit to run a command here as a short one, until it is dropped.
#[derive(Debug)]
pub(super) struct ShortPermit<'a> {
    classes: &'a CommandClasses,
    class: (u32, String),
}

impl Drop for ShortPermit<'_> {
    fn drop(&mut self) {
        let running = &mut lock(&self.classes.state).running;
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
    fn class_becomes_long_and_short_again() {
        let (classes, ms) = (CommandClasses::new(1), Duration::from_millis);
        let is_short = |uid, class| classes.permit_short(uid, class).is_some();
        assert!(!is_short(1, "cc") && classes.cpu_need(1, "cc").is_none());
        classes.record(1, "cc", ms(5), ms(4));
        assert_eq!(classes.cpu_need(1, "cc"), Some(0.004));
        assert!(is_short(1, "cc") && !is_short(2, "cc") && !is_short(1, "ld"));
        classes.record(1, "cc", ms(300), ms(4));
        assert!(!is_short(1, "cc") && classes.permit_light(1, "cc").is_some());
        classes.record(1, "cc", ms(300), ms(300));
        assert!(classes.permit_light(1, "cc").is_none());
        (0..20).for_each(|_| classes.record(1, "cc", ms(5), ms(4)));
        assert!(is_short(1, "cc"));
    }

    #[test]
    fn short_permits_of_a_class_are_limited() {
        let classes = CommandClasses::new(2);
        let name = "c".repeat(1000);
        for (uid, class) in [(1, &*name), (1, "ld"), (2, "ld")] {
            classes.record(uid, class, Duration::ZERO, Duration::ZERO);
        }
        let mut running: Vec<_> = (0..3).filter_map(|_| classes.permit_short(1, &name)).collect();
        assert_eq!(running.len(), 2);
        let others = (classes.permit_short(1, "ld"), classes.permit_short(2, "ld"));
        assert!(others.0.is_some() && others.1.is_some(), "each class and user by itself");
        running.pop();
        assert!(classes.permit_short(1, &name).is_some());
        drop((running, others));
        assert!(lock(&classes.state).running.is_empty());
    }

    #[test]
    fn memory_use_is_bounded() {
        let classes = CommandClasses::new(1);
        (0..3 * MAX_CLASSES)
            .for_each(|n| classes.record(n as u32, &"x".repeat(10_000), Duration::ZERO, Duration::ZERO));
        let stats = &lock(&classes.state).stats;
        assert!(stats.len() <= MAX_CLASSES);
        assert!(stats.keys().all(|(_, class)| class.len() <= 256));
    }
}
