//! What this home knows of each of its processes that may be balanced: how much it computes, calls and grows, wherever
//! it runs. At home the kernel tells; of one that is away its shim does, by what the guest's node and its deputy count.

mod in_hand;
mod on_files;

use crate::registry::Started;
use crate::traffic::ByProcess;
use in_hand::InHand;
use on_files::{OnFiles, TRIP, While};
use std::collections::{BTreeSet, HashMap, HashSet};
use tern_balancer as balancer;
use tern_balancer::{Decayed, Hint};
use tern_control::{Advice, Decay, Forget, Habit, ProcessRow};
use tern_ids::{HomePid, NodeId};

/// Of a new measurement of demand or growth, this part is taken at once: two seconds show most of a change.
const NEW: f64 = 0.5;

/// Nobody asks again for so long whether what cannot move can move now.
const REFUSED_FOR_MS: u64 = 30_000;

/// Clock ticks a second, as /proc counts starts.
const TICKS: f64 = 100.0;

/// Remembers the last look.
#[derive(Debug, Default)]
pub(crate) struct Habits {
    known: HashMap<(i32, u64), Known>,
}

/// One process.
#[derive(Debug, Clone)]
struct Known {
    at: NodeId,
    /// When it came there.
    since_ms: u64,
    /// Away: what had been counted when we learnt last, and when that was.
    heard: Option<(u64, Counted)>,
    /// Percent of a CPU that it would use.
    demand: f64,
    memory: f64,
    /// Bytes a second.
    growth: f64,
    calls: Decayed,
    bytes: Decayed,
    on_files: OnFiles,
    in_hand: InHand,
    /// When what it did at home was counted last.
    counted_ms: Option<u64>,
    refused: Option<(u64, String)>,
}

/// What a shim has counted of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Counted {
    /// Seconds that it ran or waited for a CPU.
    wanted: f64,
    calls: f64,
    bytes: f64,
    near: f64,
    memory: f64,
}

/// What is true of all processes of the node.
#[derive(Debug)]
pub(crate) struct House<'a> {
    pub(crate) me: NodeId,
    /// None leaves this node by itself (`stay`, `lstay`).
    pub(crate) stay: bool,
    /// Nodes that none leaves by itself.
    pub(crate) closed: &'a HashSet<NodeId>,
    pub(crate) decay: Decay,
    /// Milliseconds since the machine started.
    pub(crate) now_ms: u64,
}

/// A process as the balancer takes it, and as it is found again.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) start: u64,
    pub(crate) process: balancer::Process,
}

impl Habits {
    /// Looks at those that may be balanced, among all of the node's. `rows` is what the shims hold.
    pub(crate) fn look(
        &mut self,
        all: &[tern_load::Process],
        eligible: Vec<Started>,
        rows: &[ProcessRow],
        traffic: &ByProcess,
        house: &House<'_>,
    ) -> Vec<Candidate> {
        let here: HashMap<i32, &tern_load::Process> = all.iter().map(|found| (found.pid, found)).collect();
        let rows: HashMap<i32, &ProcessRow> =
            rows.iter().filter(|row| row.from.is_none()).map(|row| (row.pid.0, row)).collect();
        let mut known = HashMap::with_capacity(self.known.len());
        let mut candidates = Vec::new();
        for started in eligible {
            let Some(found) = here.get(&started.pid) else { continue };
            if found.state == 'Z' {
                continue;
            }
            let row = rows.get(&started.pid).copied();
            let key = (started.pid, started.start);
            let mut before = self.known.remove(&key);
            if let Some((known, told)) = before.as_mut().zip(traffic.get(&started.pid)) {
                known.on_files.hear(told);
            }
            let now = follow(before, found, row, &started.said.advice, house);
            candidates.push(Candidate {
                start: started.start,
                process: describe(&started, &now, found, row, house),
            });
            known.insert(key, now);
        }
        self.known = known;
        candidates
    }

    /// It cannot be moved, as somebody has just found out.
    pub(crate) fn refused(&mut self, pid: HomePid, why: String, now_ms: u64) {
        for (_, known) in self.known.iter_mut().filter(|((known, _), _)| *known == pid.0) {
            known.refused = Some((now_ms, why.clone()));
        }
    }

    /// Why it could not be moved when it was tried last.
    pub(crate) fn reason(&self, pid: HomePid) -> Option<&str> {
        let known = self.known.iter().find(|((known, _), _)| *known == pid.0)?.1;
        known.refused.as_ref().map(|(_, why)| why.as_str())
    }
}

/// Whether it runs elsewhere; then its row tells more of it than /proc does here.
fn is_away(row: Option<&ProcessRow>, me: NodeId) -> Option<&ProcessRow> {
    row.filter(|row| row.r#where.is_some_and(|place| place != me))
}

fn follow(
    before: Option<Known>,
    found: &tern_load::Process,
    row: Option<&ProcessRow>,
    advice: &Advice,
    house: &House<'_>,
) -> Known {
    let at = row.and_then(|row| row.r#where).unwrap_or(house.me);
    let mut known = before.unwrap_or_else(|| Known {
        at,
        // It has been here all the time.
        since_ms: house.now_ms.saturating_sub((age(found.start, house) * 1e3) as u64),
        heard: None,
        demand: 0.0,
        memory: 0.0,
        growth: 0.0,
        calls: Decayed::default(),
        bytes: Decayed::default(),
        on_files: OnFiles::default(),
        in_hand: InHand::default(),
        counted_ms: None,
        refused: None,
    });
    if known.at != at {
        // Counts of another life say nothing of this one, but its habits are the same.
        (known.at, known.since_ms, known.heard, known.counted_ms) = (at, house.now_ms, None, None);
        known.on_files.moved();
    }
    let decay = decay(advice.forget, house.decay);
    match is_away(row, house.me) {
        Some(row) => known.hear(Counted::of(row), decay, house.now_ms),
        None => {
            known.memory = found.resident as f64;
            if let Some(rates) = &found.rates {
                let before_ms = known.counted_ms.replace(house.now_ms);
                let seconds =
                    before_ms.map_or(1.0, |then| house.now_ms.saturating_sub(then).max(1) as f64 / 1e3);
                known.learn(rates.wanted.into(), rates.growth.into(), seconds);
                let (calls, bytes) = (f64::from(rates.calls) * seconds, f64::from(rates.bytes) * seconds);
                let calls = known.would_go_home(found, rates, calls, bytes);
                known.count(While { seconds, calls, bytes, away: None }, decay);
            }
        }
    }
    known
}

impl Counted {
    fn of(row: &ProcessRow) -> Self {
        let usage = row.usage;
        Self {
            wanted: row.cpu_seconds + usage.waited_seconds,
            calls: usage.calls as f64,
            bytes: usage.call_bytes as f64,
            near: usage.near_bytes as f64,
            memory: usage.memory as f64,
        }
    }
}

impl Known {
    /// How many of so many calls and bytes at home would go there if it were away. Who has threads has no files in hand.
    fn would_go_home(
        &mut self,
        found: &tern_load::Process,
        rates: &tern_load::Rates,
        calls: f64,
        bytes: f64,
    ) -> f64 {
        let many = f64::from(rates.calls) * 100.0 > in_hand::FEW * f64::from(rates.used);
        if !many || found.threads > 1 {
            return calls;
        }
        let part = self.in_hand.part(found.pid, bytes);
        (calls * (1.0 - part) + bytes * part / TRIP).min(calls)
    }

    /// What its shim says. That comes once a second, so that between two of its words nothing seems to happen.
    fn hear(&mut self, now: Counted, decay: balancer::Decay, now_ms: u64) {
        // As long as its deputy has not heard from there it says what was before, of the CPU but not of the waiting.
        if now.memory == 0.0 && now.wanted > 0.0 && self.heard.is_none() {
            return;
        }
        self.memory = now.memory;
        let Some((then_ms, then)) = self.heard else {
            self.heard = Some((now_ms, now));
            return;
        };
        let seconds = now_ms.saturating_sub(then_ms) as f64 / 1e3;
        if (seconds >= 0.5 && now != then) || seconds > 3.0 {
            let more = |now: f64, then: f64| (now - then).max(0.0);
            // A shim that has lost its memory counts from nothing again.
            let growth = if then.memory > 0.0 { (now.memory - then.memory) / seconds } else { 0.0 };
            self.learn(more(now.wanted, then.wanted) / seconds * 100.0, growth, seconds);
            let away = Some((self.at, now_ms.saturating_sub(self.since_ms), more(now.near, then.near)));
            let (calls, bytes) = (more(now.calls, then.calls), more(now.bytes, then.bytes));
            self.count(While { seconds, calls, bytes, away }, decay);
            self.heard = Some((now_ms, now));
        }
    }

    fn learn(&mut self, demand: f64, growth: f64, seconds: f64) {
        // The first look at a process that has been there for a while says all; a short one, little.
        let part = if self.demand == 0.0 { 1.0 } else { NEW * seconds.min(1.0) };
        self.demand += (demand - self.demand) * part;
        self.growth += (growth - self.growth) * part;
    }

    fn count(&mut self, now: While, decay: balancer::Decay) {
        let (calls, bytes) = self.on_files.count(now, decay);
        self.calls.add(calls / now.seconds, decay);
        self.bytes.add(bytes / now.seconds, decay);
    }
}

fn age(start: u64, house: &House<'_>) -> f64 {
    (house.now_ms as f64 / 1e3 - start as f64 / TICKS).max(0.0)
}

/// Per interval of the node's choice, told as per second.
fn decay(forget: Option<Forget>, node: Decay) -> balancer::Decay {
    let kept = match forget {
        Some(Forget::Never) => return balancer::Decay::None,
        Some(Forget::Fast) => node.fast,
        Some(Forget::Keep(kept)) => kept,
        Some(Forget::Slow) | None => node.slow,
    };
    let each_second = (f64::from(kept) / 1e3).powf(1.0 / f64::from(node.interval.max(1)));
    balancer::Decay::Custom((each_second * 1e3).round() as u16)
}

fn describe(
    started: &Started,
    known: &Known,
    found: &tern_load::Process,
    row: Option<&ProcessRow>,
    house: &House<'_>,
) -> balancer::Process {
    let advice = &started.said.advice;
    let away = is_away(row, house.me);
    let cpu_s = away.map_or(found.used.as_secs_f64(), |row| row.cpu_seconds);
    let moving = row.is_some_and(|row| matches!(&*row.state, "migrating" | "suspended" | "frozen"));
    let refused =
        known.refused.as_ref().is_some_and(|(at, _)| house.now_ms.saturating_sub(*at) < REFUSED_FOR_MS);
    let closed =
        if away.is_some() { house.closed.contains(&known.at) } else { house.stay || found.threads > 1 };
    balancer::Process {
        age_s: age(started.start, house),
        resident_s: house.now_ms.saturating_sub(known.since_ms) as f64 / 1e3,
        rss: known.memory as u64,
        growth: known.growth.max(0.0) as u64,
        calls_per_s: known.calls.rate(),
        bytes_per_s: known.bytes.rate(),
        files: known.on_files.rates(),
        claim: advice.memory.unwrap_or(0),
        hint: match advice.habit {
            Some(Habit::Cpu) => Hint::Cpu,
            Some(Habit::Io) => Hint::Io,
            None => Hint::None,
        },
        locked: started.said.locked,
        allowed: advice.only.as_ref().map(|only| only.iter().copied().collect::<BTreeSet<_>>()),
        forbidden: advice.not.iter().copied().collect(),
        movable: !(started.said.never || moving || refused || closed),
        ..balancer::Process::new(HomePid(started.pid), known.at, known.demand, cpu_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_control::Usage;

    const ME: NodeId = NodeId(1);

    fn house(closed: &HashSet<NodeId>, now_ms: u64) -> House<'_> {
        House { me: ME, stay: false, closed, decay: Decay::default(), now_ms }
    }

    /// A process that was started ten seconds after the machine.
    fn found(wanted: f32) -> tern_load::Process {
        tern_load::Process {
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
            rates: Some(tern_load::Rates { wanted, calls: 8.0, ..tern_load::Rates::default() }),
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
    fn what_it_does_is_followed_from_home_to_away() {
        let closed = HashSet::new();
        let advice = Advice::default();
        let at = |now_ms| house(&closed, now_ms);
        let known = follow(None, &found(80.0), None, &advice, &at(20_000));
        assert_eq!((known.at, known.since_ms, known.memory as u64), (ME, 10_000, 5 << 20));
        assert!((known.demand - 80.0).abs() < 0.01 && (known.calls.rate() - 8.0).abs() < 0.01);
        // It has left: of what its shim says the first time nothing follows.
        let known = follow(Some(known), &found(0.0), Some(&away(2, 3.0, 0.0, 100)), &advice, &at(21_000));
        assert_eq!((known.at, known.since_ms, known.memory as u64), (NodeId(2), 21_000, 9 << 20));
        assert!((known.demand - 80.0).abs() < 0.01);
        // Half of the second it ran, the other half it waited for a CPU: it wants all of one.
        let known = follow(Some(known), &found(0.0), Some(&away(2, 3.5, 0.5, 104)), &advice, &at(22_000));
        assert!((known.demand - 90.0).abs() < 0.01, "half of what is new: {}", known.demand);
        assert!((4.0..8.0).contains(&known.calls.rate()));
        // Nothing new is no news, and after a while it is.
        let known = follow(Some(known), &found(0.0), Some(&away(2, 3.5, 0.5, 104)), &advice, &at(23_000));
        assert!((known.demand - 90.0).abs() < 0.01);
        let known = follow(Some(known), &found(0.0), Some(&away(2, 3.5, 0.5, 104)), &advice, &at(26_000));
        assert!((known.demand - 45.0).abs() < 0.01);
    }

    #[test]
    fn what_a_shim_says_before_it_has_heard_of_its_guest_is_no_beginning() {
        let closed = HashSet::new();
        let advice = Advice::default();
        let at = |now_ms| house(&closed, now_ms);
        let known = follow(None, &found(100.0), None, &advice, &at(20_000));
        // The CPU time of its life at home, and nothing of what it has waited.
        let mut early = away(2, 3.0, 0.0, 0);
        early.usage.memory = 0;
        let known = follow(Some(known), &found(0.0), Some(&early), &advice, &at(21_000));
        assert_eq!((known.at, known.memory as u64), (NodeId(2), 5 << 20), "it is what it was");
        let known = follow(Some(known), &found(0.0), Some(&away(2, 3.2, 0.5, 4)), &advice, &at(22_000));
        let known = follow(Some(known), &found(0.0), Some(&away(2, 3.4, 1.3, 8)), &advice, &at(23_000));
        assert!((known.demand - 100.0).abs() < 0.01, "{}", known.demand);
    }

    #[test]
    fn what_is_read_of_files_goes_home_in_large_pieces() {
        use std::io::Write;
        let closed = HashSet::new();
        let advice = Advice::default();
        // This test's process itself, which has written a file of 1 MB, by 1,000 calls.
        let path = std::env::temp_dir().join(format!("habits-{}", std::process::id()));
        let mut file = std::fs::File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(&vec![7; 1_000_000]).unwrap();
        let calls = |pid: i32, threads: u32| {
            let rates =
                tern_load::Rates { wanted: 50.0, used: 50.0, calls: 1e3, bytes: 1e6, ..Default::default() };
            let found = tern_load::Process { pid, threads, rates: Some(rates), ..found(0.0) };
            follow(None, &found, None, &advice, &house(&closed, 20_000)).calls.rate()
        };
        let own = std::process::id() as i32;
        assert!((7.0..20.0).contains(&calls(own, 1)), "{}", calls(own, 1));
        assert!((calls(own, 2) - 1e3).abs() < 1.0, "who has threads has none in hand");
        assert!((calls(-1, 1) - 1e3).abs() < 1.0, "nothing is known of its files");
    }

    #[test]
    fn forgetting_is_told_per_second() {
        let node = Decay { interval: 2, slow: 810, fast: 490 };
        assert_eq!(decay(None, node), balancer::Decay::Custom(900));
        assert_eq!(decay(Some(Forget::Fast), node), balancer::Decay::Custom(700));
        assert_eq!(decay(Some(Forget::Keep(0)), node), balancer::Decay::Custom(0));
        assert_eq!(decay(Some(Forget::Never), node), balancer::Decay::None);
    }
}
