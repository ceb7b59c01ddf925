//! The profiles of the processes that this home may move: how much each computes, calls and grows,
//! wherever it runs. At home the kernel has these numbers; for a process that is away its shim
//! reports what the guest's node and the deputy count.

mod delegable_io;
mod remote_files;

use crate::balance::file_traffic::TrafficByProcess;
use crate::process::registry::RegisteredProcess;
use delegable_io::DelegableIo;
use remote_files::{BYTES_PER_ROUND_TRIP, Interval, RemoteFileUse};
use std::collections::{BTreeSet, HashMap, HashSet};
use tern_balancer as balancer;
use tern_balancer::{DecayingRate, Hint};
use tern_control::{Advice, DecayClass, DecayRates, ProcessRow, Workload};
use tern_ids::{HomePid, NodeId};

/// Weight of a new measurement of one second: after two seconds the average has followed three
/// quarters of a change.
const NEW_SAMPLE_WEIGHT: f64 = 0.5;

/// For this long after a refusal a process is not tried again, in milliseconds.
const REFUSAL_LIFETIME_MS: u64 = 30_000;

/// Clock ticks per second, the unit of start times in `/proc`.
const TICKS_PER_S: f64 = 100.0;

/// The profiles of all processes, by pid and start time, as of the last scan.
#[derive(Debug, Default)]
pub(crate) struct Profiles {
    by_process: HashMap<(i32, u64), Profile>,
}

/// The profile of one process.
#[derive(Debug, Clone)]
struct Profile {
    at: NodeId,
    /// When it came there, in milliseconds since boot.
    since_ms: u64,
    /// While it is away: the last counters of its shim, and when they arrived.
    last_counters: Option<(u64, ShimCounters)>,
    /// Percent of a CPU that it would use if it had one to itself.
    demand: f64,
    memory: f64,
    /// Bytes per second.
    growth: f64,
    calls: DecayingRate,
    bytes: DecayingRate,
    remote_files: RemoteFileUse,
    delegable_io: DelegableIo,
    /// When its activity at home was last counted.
    counted_ms: Option<u64>,
    refused: Option<(u64, String)>,
}

/// The counters that a shim keeps of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ShimCounters {
    /// Seconds that it ran or waited for a CPU.
    wanted: f64,
    calls: f64,
    bytes: f64,
    local_file_bytes: f64,
    memory: f64,
}

/// Values that apply to all processes of the node.
#[derive(Debug)]
pub(crate) struct HomeContext<'a> {
    pub(crate) me: NodeId,
    /// No process leaves this node by decision of the balancer (`stay`, `lstay`).
    pub(crate) stay: bool,
    /// Nodes that no process leaves by decision of a balancer.
    pub(crate) closed: &'a HashSet<NodeId>,
    pub(crate) decay: DecayRates,
    /// Milliseconds since boot.
    pub(crate) now_ms: u64,
}

/// A process in the balancer's form, with the start time that identifies it.
#[derive(Debug, Clone)]
pub(crate) struct BalancedProcess {
    pub(crate) start: u64,
    pub(crate) process: balancer::ProcessSnapshot,
}

impl Profiles {
    /// Updates the profiles from a scan: `all` lists the processes of the node, `eligible` the
    /// processes that may be balanced, and `rows` the processes that its shims hold.
    pub(crate) fn update(
        &mut self,
        all: &[tern_load::ProcessSample],
        eligible: Vec<RegisteredProcess>,
        rows: &[ProcessRow],
        traffic: &TrafficByProcess,
        context: &HomeContext<'_>,
    ) -> Vec<BalancedProcess> {
        let here: HashMap<i32, &tern_load::ProcessSample> =
            all.iter().map(|found| (found.pid, found)).collect();
        let rows: HashMap<i32, &ProcessRow> =
            rows.iter().filter(|row| row.from.is_none()).map(|row| (row.pid.0, row)).collect();
        let mut by_process = HashMap::with_capacity(self.by_process.len());
        let mut candidates = Vec::new();
        for started in eligible {
            let Some(found) = here.get(&started.pid) else { continue };
            if found.state == 'Z' {
                continue;
            }
            let row = rows.get(&started.pid).copied();
            let key = (started.pid, started.start);
            let mut before = self.by_process.remove(&key);
            if let Some((profile, reports)) = before.as_mut().zip(traffic.get(&started.pid)) {
                profile.remote_files.add_report(reports);
            }
            let now = update_profile(before, found, row, &started.registration.advice, context);
            candidates.push(BalancedProcess {
                start: started.start,
                process: describe(&started, &now, found, row, context),
            });
            by_process.insert(key, now);
        }
        self.by_process = by_process;
        candidates
    }

    /// Records that the process cannot be moved.
    pub(crate) fn record_refusal(&mut self, pid: HomePid, why: String, now_ms: u64) {
        for (_, profile) in self.by_process.iter_mut().filter(|((number, _), _)| *number == pid.0) {
            profile.refused = Some((now_ms, why.clone()));
        }
    }

    /// Why the process could not be moved when this was last tried.
    pub(crate) fn refusal(&self, pid: HomePid) -> Option<&str> {
        let profile = self.by_process.iter().find(|((number, _), _)| *number == pid.0)?.1;
        profile.refused.as_ref().map(|(_, why)| why.as_str())
    }
}

/// The row, if the process runs on another node; it is then more accurate than `/proc` here.
fn row_if_away(row: Option<&ProcessRow>, me: NodeId) -> Option<&ProcessRow> {
    row.filter(|row| row.r#where.is_some_and(|node| node != me))
}

fn update_profile(
    before: Option<Profile>,
    found: &tern_load::ProcessSample,
    row: Option<&ProcessRow>,
    advice: &Advice,
    context: &HomeContext<'_>,
) -> Profile {
    let at = row.and_then(|row| row.r#where).unwrap_or(context.me);
    let mut profile = before.unwrap_or_else(|| Profile {
        at,
        // It has been here since it started.
        since_ms: context.now_ms.saturating_sub((age(found.start, context) * 1e3) as u64),
        last_counters: None,
        demand: 0.0,
        memory: 0.0,
        growth: 0.0,
        calls: DecayingRate::default(),
        bytes: DecayingRate::default(),
        remote_files: RemoteFileUse::default(),
        delegable_io: DelegableIo::default(),
        counted_ms: None,
        refused: None,
    });
    if profile.at != at {
        // The counters start anew at each node; the behaviour is assumed to be the same.
        (profile.at, profile.since_ms, profile.last_counters, profile.counted_ms) =
            (at, context.now_ms, None, None);
        profile.remote_files.clear_reports();
    }
    let decay = decay(advice.decay, context.decay);
    match row_if_away(row, context.me) {
        Some(row) => profile.add_counters(ShimCounters::of(row), decay, context.now_ms),
        None => {
            profile.memory = found.resident as f64;
            if let Some(rates) = &found.rates {
                let before_ms = profile.counted_ms.replace(context.now_ms);
                let seconds =
                    before_ms.map_or(1.0, |then| context.now_ms.saturating_sub(then).max(1) as f64 / 1e3);
                profile.update_demand(rates.demand.into(), rates.growth.into(), seconds);
                let (calls, bytes) = (f64::from(rates.calls) * seconds, f64::from(rates.bytes) * seconds);
                let calls = profile.forwarded_calls(found, rates, calls, bytes);
                profile.add_interval(Interval { seconds, calls, bytes, away: None }, decay);
            }
        }
    }
    profile
}

impl ShimCounters {
    fn of(row: &ProcessRow) -> Self {
        let usage = row.usage;
        Self {
            wanted: row.cpu_seconds + usage.waited_seconds,
            calls: usage.calls as f64,
            bytes: usage.call_bytes as f64,
            local_file_bytes: usage.local_bytes as f64,
            memory: usage.memory as f64,
        }
    }
}

impl Profile {
    /// The number of these calls at home that would be forwarded if the process were away. Files of
    /// a process with several threads are not delegated.
    fn forwarded_calls(
        &mut self,
        found: &tern_load::ProcessSample,
        rates: &tern_load::ProcessRates,
        calls: f64,
        bytes: f64,
    ) -> f64 {
        let many = f64::from(rates.calls) * 100.0 > delegable_io::MIN_CALLS_PER_CPU_S * f64::from(rates.used);
        if !many || found.threads > 1 {
            return calls;
        }
        let part = self.delegable_io.sequential_share(found.pid, bytes);
        (calls * (1.0 - part) + bytes * part / BYTES_PER_ROUND_TRIP).min(calls)
    }

    /// Adds the counters of the shim. They arrive once a second, so most scans find no change.
    fn add_counters(&mut self, now: ShimCounters, decay: balancer::Decay, now_ms: u64) {
        // Until the deputy has received numbers from the guest's node, the CPU time is that of the
        // process at home and the waiting time is missing.
        if now.memory == 0.0 && now.wanted > 0.0 && self.last_counters.is_none() {
            return;
        }
        self.memory = now.memory;
        let Some((then_ms, then)) = self.last_counters else {
            self.last_counters = Some((now_ms, now));
            return;
        };
        let seconds = now_ms.saturating_sub(then_ms) as f64 / 1e3;
        if (seconds >= 0.5 && now != then) || seconds > 3.0 {
            let more = |now: f64, then: f64| (now - then).max(0.0);
            // A shim that was replaced starts to count from zero.
            let growth = if then.memory > 0.0 { (now.memory - then.memory) / seconds } else { 0.0 };
            self.update_demand(more(now.wanted, then.wanted) / seconds * 100.0, growth, seconds);
            let away = Some((
                self.at,
                now_ms.saturating_sub(self.since_ms),
                more(now.local_file_bytes, then.local_file_bytes),
            ));
            let (calls, bytes) = (more(now.calls, then.calls), more(now.bytes, then.bytes));
            self.add_interval(Interval { seconds, calls, bytes, away }, decay);
            self.last_counters = Some((now_ms, now));
        }
    }

    fn update_demand(&mut self, demand: f64, growth: f64, seconds: f64) {
        // The first measurement counts fully. Later, a measurement over less than a second counts
        // less.
        let part = if self.demand == 0.0 { 1.0 } else { NEW_SAMPLE_WEIGHT * seconds.min(1.0) };
        self.demand += (demand - self.demand) * part;
        self.growth += (growth - self.growth) * part;
    }

    fn add_interval(&mut self, now: Interval, decay: balancer::Decay) {
        let (calls, bytes) = self.remote_files.add_interval(now, decay);
        self.calls.add(calls / now.seconds, decay);
        self.bytes.add(bytes / now.seconds, decay);
    }
}

fn age(start: u64, context: &HomeContext<'_>) -> f64 {
    (context.now_ms as f64 / 1e3 - start as f64 / TICKS_PER_S).max(0.0)
}

/// The decay per second of a process of this class. The node's settings give the decay per
/// interval.
fn decay(class: Option<DecayClass>, node: DecayRates) -> balancer::Decay {
    let kept = match class {
        Some(DecayClass::Never) => return balancer::Decay::None,
        Some(DecayClass::Fast) => node.fast,
        Some(DecayClass::Keep(kept)) => kept,
        Some(DecayClass::Slow) | None => node.slow,
    };
    let each_second = (f64::from(kept) / 1e3).powf(1.0 / f64::from(node.interval.max(1)));
    balancer::Decay::Custom((each_second * 1e3).round() as u16)
}

fn describe(
    started: &RegisteredProcess,
    profile: &Profile,
    found: &tern_load::ProcessSample,
    row: Option<&ProcessRow>,
    context: &HomeContext<'_>,
) -> balancer::ProcessSnapshot {
    let advice = &started.registration.advice;
    let away = row_if_away(row, context.me);
    let cpu_s = away.map_or(found.used.as_secs_f64(), |row| row.cpu_seconds);
    let moving = row.is_some_and(|row| matches!(&*row.state, "migrating" | "suspended" | "frozen"));
    let refused = profile
        .refused
        .as_ref()
        .is_some_and(|(at, _)| context.now_ms.saturating_sub(*at) < REFUSAL_LIFETIME_MS);
    let closed =
        if away.is_some() { context.closed.contains(&profile.at) } else { context.stay || found.threads > 1 };
    balancer::ProcessSnapshot {
        age_s: age(started.start, context),
        resident_s: context.now_ms.saturating_sub(profile.since_ms) as f64 / 1e3,
        rss: profile.memory as u64,
        growth: profile.growth.max(0.0) as u64,
        calls_per_s: profile.calls.rate(),
        bytes_per_s: profile.bytes.rate(),
        files: profile.remote_files.rates(),
        claim: advice.memory.unwrap_or(0),
        hint: match advice.workload {
            Some(Workload::Cpu) => Hint::Cpu,
            Some(Workload::Io) => Hint::Io,
            None => Hint::None,
        },
        locked: started.registration.locked,
        allowed: advice.only.as_ref().map(|only| only.iter().copied().collect::<BTreeSet<_>>()),
        forbidden: advice.not.iter().copied().collect(),
        movable: !(started.registration.never || moving || refused || closed),
        ..balancer::ProcessSnapshot::new(HomePid(started.pid), profile.at, profile.demand, cpu_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_control::Usage;

    const ME: NodeId = NodeId(1);

    fn context(closed: &HashSet<NodeId>, now_ms: u64) -> HomeContext<'_> {
        HomeContext { me: ME, stay: false, closed, decay: DecayRates::default(), now_ms }
    }

    /// A process that was started ten seconds after boot.
    fn found(wanted: f32) -> tern_load::ProcessSample {
        tern_load::ProcessSample {
            pid: 7,
            start: 1000,
            parent: 1,
            group: 7,
            session: 7,
            terminal: false,
            user: 0,
            command: "x".into(),
            state: 'R',
            threads: 1,
            used: std::time::Duration::from_secs(3),
            resident: 5 << 20,
            io: None,
            rates: Some(tern_load::ProcessRates {
                demand: wanted,
                calls: 8.0,
                ..tern_load::ProcessRates::default()
            }),
        }
    }

    fn away(node: u16, cpu_seconds: f64, waited_seconds: f64, calls: u64) -> ProcessRow {
        ProcessRow {
            pid: HomePid(7),
            uid: 0,
            r#where: Some(NodeId(node)),
            from: None,
            state: "running".into(),
            cpu_seconds,
            migrations: 1,
            reason: String::new(),
            command: "x".into(),
            usage: Usage { memory: 9 << 20, waited_seconds, calls, ..Usage::default() },
            started: None,
        }
    }

    #[test]
    fn demand_is_tracked_from_home_to_away() {
        let closed = HashSet::new();
        let advice = Advice::default();
        let at = |now_ms| context(&closed, now_ms);
        let profile = update_profile(None, &found(80.0), None, &advice, &at(20_000));
        assert_eq!((profile.at, profile.since_ms, profile.memory as u64), (ME, 10_000, 5 << 20));
        assert!((profile.demand - 80.0).abs() < 0.01 && (profile.calls.rate() - 8.0).abs() < 0.01);
        // It has left: the first counters of its shim are only a starting point.
        let profile =
            update_profile(Some(profile), &found(0.0), Some(&away(2, 3.0, 0.0, 100)), &advice, &at(21_000));
        assert_eq!((profile.at, profile.since_ms, profile.memory as u64), (NodeId(2), 21_000, 9 << 20));
        assert!((profile.demand - 80.0).abs() < 0.01);
        // It ran half of the second and waited for a CPU the other half, so its demand is a whole
        // CPU.
        let profile =
            update_profile(Some(profile), &found(0.0), Some(&away(2, 3.5, 0.5, 104)), &advice, &at(22_000));
        assert!((profile.demand - 90.0).abs() < 0.01, "a new measurement counts half: {}", profile.demand);
        assert!((4.0..8.0).contains(&profile.calls.rate()));
        // Unchanged counters are ignored at first, and taken as idleness after a while.
        let profile =
            update_profile(Some(profile), &found(0.0), Some(&away(2, 3.5, 0.5, 104)), &advice, &at(23_000));
        assert!((profile.demand - 90.0).abs() < 0.01);
        let profile =
            update_profile(Some(profile), &found(0.0), Some(&away(2, 3.5, 0.5, 104)), &advice, &at(26_000));
        assert!((profile.demand - 45.0).abs() < 0.01);
    }

    #[test]
    fn counters_without_numbers_of_the_guest_are_skipped() {
        let closed = HashSet::new();
        let advice = Advice::default();
        let at = |now_ms| context(&closed, now_ms);
        let profile = update_profile(None, &found(100.0), None, &advice, &at(20_000));
        // The CPU time it used at home, and no waiting time.
        let mut early = away(2, 3.0, 0.0, 0);
        early.usage.memory = 0;
        let profile = update_profile(Some(profile), &found(0.0), Some(&early), &advice, &at(21_000));
        assert_eq!((profile.at, profile.memory as u64), (NodeId(2), 5 << 20), "the demand is unchanged");
        let profile =
            update_profile(Some(profile), &found(0.0), Some(&away(2, 3.2, 0.5, 4)), &advice, &at(22_000));
        let profile =
            update_profile(Some(profile), &found(0.0), Some(&away(2, 3.4, 1.3, 8)), &advice, &at(23_000));
        assert!((profile.demand - 100.0).abs() < 0.01, "{}", profile.demand);
    }

    #[test]
    fn file_io_counts_as_large_forwarded_calls() {
        use std::io::Write;
        let closed = HashSet::new();
        let advice = Advice::default();
        // This test process has written a file of 1 MB in 1,000 calls.
        let path = std::env::temp_dir().join(format!("habits-{}", std::process::id()));
        let mut file = std::fs::File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(&vec![7; 1_000_000]).unwrap();
        let calls = |pid: i32, threads: u32| {
            let rates = tern_load::ProcessRates {
                demand: 50.0,
                used: 50.0,
                calls: 1e3,
                bytes: 1e6,
                ..Default::default()
            };
            let found = tern_load::ProcessSample { pid, threads, rates: Some(rates), ..found(0.0) };
            update_profile(None, &found, None, &advice, &context(&closed, 20_000)).calls.rate()
        };
        let own = std::process::id() as i32;
        assert!((7.0..20.0).contains(&calls(own, 1)), "{}", calls(own, 1));
        assert!((calls(own, 2) - 1e3).abs() < 1.0, "files of a process with threads are not delegated");
        assert!((calls(-1, 1) - 1e3).abs() < 1.0, "its files cannot be read");
    }

    #[test]
    fn decay_is_converted_to_seconds() {
        let node = DecayRates { interval: 2, slow: 810, fast: 490 };
        assert_eq!(decay(None, node), balancer::Decay::Custom(900));
        assert_eq!(decay(Some(DecayClass::Fast), node), balancer::Decay::Custom(700));
        assert_eq!(decay(Some(DecayClass::Keep(0)), node), balancer::Decay::Custom(0));
        assert_eq!(decay(Some(DecayClass::Never), node), balancer::Decay::None);
    }
}
