//! The same jobs on one imaginary machine that has all CPUs: each job always gets an equal part of
//! them, moves cost nothing, and all information is current. A job can use at most one CPU, and the
//! fastest CPUs are used first. This is what an ideal scheduler could give to all jobs equally.

use crate::job::Job;
use crate::machine::Hardware;

/// The CPUs of some nodes as one pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pool {
    /// Speed and number of CPUs, fastest first.
    tiers: Vec<(f64, f64)>,
}

impl Pool {
    /// The pool of these nodes.
    pub(crate) fn new<'a>(nodes: impl Iterator<Item = &'a Hardware>) -> Self {
        let mut nodes: Vec<(f64, f64)> =
            nodes.map(|node| (f64::from(node.speed) / 10_000.0, node.cpus)).collect();
        nodes.sort_by(|one, other| other.0.total_cmp(&one.0));
        let mut pool = Self::default();
        for (speed, cpus) in nodes {
            match pool.tiers.last_mut() {
                Some((same, count)) if (*same - speed).abs() < 1e-9 => *count += cpus,
                _ => pool.tiers.push((speed, cpus)),
            }
        }
        pool
    }

    /// The share of each of this many threads, in standard CPUs.
    pub(crate) fn share(&self, threads: f64) -> f64 {
        let Some((fastest, _)) = self.tiers.first() else { return 0.0 };
        if threads <= 1.0 {
            return *fastest;
        }
        let (mut left, mut capacity) = (threads, 0.0);
        for (speed, cpus) in &self.tiers {
            let used = left.min(*cpus);
            capacity += used * speed;
            left -= used;
            if left <= 0.0 {
                break;
            }
        }
        capacity / threads
    }

    /// Capacity in standard CPUs.
    pub(crate) fn capacity(&self) -> f64 {
        self.tiers.iter().map(|(speed, cpus)| speed * cpus).sum()
    }

    /// The speed of the fastest CPU.
    pub(crate) fn fastest(&self) -> f64 {
        self.tiers.first().map_or(1.0, |(speed, _)| *speed)
    }
}

/// For each job, the seconds from arrival to end, or `None` if it is not done at `until_ms`; and
/// the fraction of its work that is done. Each of `pools` is in effect from its time on
/// (milliseconds).
pub(crate) fn ideal(
    jobs: &[Job],
    pools: &[(u64, Pool)],
    until_ms: u64,
    step_ms: u64,
) -> Vec<(Option<f64>, f64)> {
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(|index| jobs[*index].arrives_ms);
    let (mut next, mut pool) = (0, 0);
    let mut ends = vec![(None, 0.0); jobs.len()];
    let mut active: Vec<(usize, f64)> = Vec::new();
    let (mut threads, step_s) = (0.0_f64, step_ms as f64 / 1000.0);
    for now_ms in (0..until_ms).step_by(usize::try_from(step_ms).unwrap_or(100).max(1)) {
        while let Some(index) = order.get(next).filter(|index| jobs[**index].arrives_ms <= now_ms) {
            active.push((*index, jobs[*index].work_s));
            threads += 1.0;
            next += 1;
        }
        while pools.get(pool + 1).is_some_and(|(from, _)| *from <= now_ms) {
            pool += 1;
        }
        let Some((_, cpus)) = pools.get(pool) else { break };
        if active.is_empty() && next == order.len() {
            break;
        }
        let share = cpus.share(threads);
        threads = 0.0;
        active.retain_mut(|(index, left)| {
            let job = &jobs[*index];
            if job.alternation_ms > 0 && (now_ms / job.alternation_ms) % 2 == 1 {
                return true;
            }
            let pace = 1.0 / share + job.sleep;
            if *left * pace <= step_s {
                let now_s = now_ms as f64 / 1000.0;
                ends[*index] = (Some(now_s + *left * pace - job.arrives_ms as f64 / 1000.0), 1.0);
                return false;
            }
            *left -= step_s / pace;
            threads += 1.0 / (share * pace);
            true
        });
    }
    for (index, left) in active {
        ends[index].1 = 1.0 - left / jobs[index].work_s;
    }
    ends
}

/// A lower bound of the time, in seconds, at which any schedule ends. Each arrival gives two
/// bounds: the time at which that job would end if it ran alone on the fastest CPU, and the time at
/// which all CPUs could have done the work that arrives then and later. The result is the latest of
/// all these times.
pub(crate) fn earliest_end(jobs: &[Job], pool: &Pool) -> f64 {
    let mut late: Vec<&Job> = jobs.iter().collect();
    late.sort_by_key(|job| std::cmp::Reverse(job.arrives_ms));
    let (mut work, mut earliest) = (0.0, 0.0_f64);
    for job in late {
        let arrives = job.arrives_ms as f64 / 1000.0;
        work += job.work_s;
        earliest = earliest.max(arrives + work / pool.capacity()).max(arrives + job.alone_s(pool.fastest()));
    }
    earliest
}
