//! What single processes use, and what they would use: for deciding which of them to move, and for lists.
//!
//! A process that has not been given a CPU since the last scan has done nothing: one small file tells, and what is known
//! of it holds. Only what others do to it may have changed (its group, its parent), so it is read anew now and then all
//! the same.

use crate::procdir::ProcDir;
use crate::task::{Io, Stat, TICKS, Turns, real_user};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A process at the time of a scan.
#[derive(Debug, Clone, PartialEq)]
pub struct Process {
    /// Its number in this node.
    pub pid: i32,
    /// When it was started, in ticks since boot; with the pid it names one process for good.
    pub start: u64,
    /// Parent.
    pub parent: i32,
    /// Process group.
    pub group: i32,
    /// Session.
    pub session: i32,
    /// It has a controlling terminal.
    pub terminal: bool,
    /// The user it acts as; the real one, if it has made itself untraceable.
    pub user: u32,
    /// The name, not the command line.
    pub command: String,
    /// `R`, `S`, `D`, `T`, `Z` …
    pub state: char,
    /// Threads.
    pub threads: u32,
    /// CPU time used so far, user and system.
    pub used: Duration,
    /// Bytes in memory.
    pub resident: u64,
    /// Its reads and writes so far; nothing if we may not know.
    pub io: Option<Io>,
    /// What came since the last scan that it was in, or since it was born, if that was after the scan before; nothing in
    /// the first scan of all.
    pub rates: Option<Rates>,
}

/// What a process did between two scans, per second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rates {
    /// Percent of one CPU that it ran.
    pub used: f32,
    /// Percent of one CPU that it would have run, had it not had to wait for one.
    pub wanted: f32,
    /// How often it was given a CPU: how often it has waited for something, where nobody takes the CPU from it.
    pub turns: f32,
    /// Calls that read or write: an estimate, from below, of its calls to home when it is away.
    pub calls: f32,
    /// Bytes read and written.
    pub bytes: f32,
    /// Bytes by which it grew in memory, or shrank.
    pub growth: f32,
}

/// Which processes a scan is of.
#[derive(Debug, Clone, Copy)]
pub enum Which<'a> {
    /// All of this node but the kernel's own.
    All,
    /// These, as far as they exist.
    These(&'a [i32]),
}

/// Remembers the last scan.
#[derive(Debug)]
pub struct Processes {
    proc: ProcDir,
    known: HashMap<i32, Known>,
    /// Inodes of the kernel's own.
    of_kernel: HashMap<i32, u64>,
    scans: u32,
    /// When all were scanned last.
    all_at: Option<Instant>,
    page: u64,
}

#[derive(Debug)]
struct Known {
    process: Process,
    turns: Turns,
    at: Instant,
    scan: u32,
}

/// In so many scans each process is read anew once, even if it rests.
const ANEW: u32 = 16;

impl Processes {
    /// Nothing is known yet: the first scan has no rates.
    #[must_use]
    pub fn new() -> Self {
        Self {
            proc: ProcDir::open(),
            known: HashMap::new(),
            of_kernel: HashMap::new(),
            scans: 0,
            all_at: None,
            page: rustix::param::page_size() as u64,
        }
    }

    /// The processes as they are now, in the order asked for, and their rates since the last scan. What was in that
    /// one and is not in this is forgotten.
    pub fn scan(&mut self, which: Which<'_>) -> Vec<Process> {
        self.scans = self.scans.wrapping_add(1);
        let listed: Vec<(i32, u64)> = match which {
            Which::All => self.proc.numbers("."),
            Which::These(pids) => pids.iter().map(|&pid| (pid, 0)).collect(),
        };
        if matches!(which, Which::All) {
            let now: HashMap<_, _> = listed.iter().copied().collect();
            self.of_kernel.retain(|pid, inode| now.get(pid) == Some(inode));
        }
        let begun = Instant::now();
        let found = listed.iter().filter_map(|&(pid, inode)| self.visit(pid, inode)).collect();
        self.all_at = matches!(which, Which::All).then_some(begun);
        let scans = self.scans;
        self.known.retain(|_, known| known.scan == scans);
        found
    }

    fn visit(&mut self, pid: i32, inode: u64) -> Option<Process> {
        if self.of_kernel.contains_key(&pid) && inode != 0 {
            return None;
        }
        let now = Instant::now();
        let before = self.known.remove(&pid);
        let known = match before {
            Some(known) if !self.is_due(pid) && self.rests(pid, &known) => Known {
                process: Process { rates: Some(Rates::default()), ..known.process },
                at: now,
                scan: self.scans,
                ..known
            },
            before => self.read(pid, inode, now, before.as_ref())?,
        };
        let process = known.process.clone();
        self.known.insert(pid, known);
        Some(process)
    }

    fn is_due(&self, pid: i32) -> bool {
        self.scans.wrapping_add(pid.unsigned_abs()).is_multiple_of(ANEW)
    }

    /// Of more threads than one the first says nothing of the others, and where nothing is counted, nothing is said.
    fn rests(&self, pid: i32, known: &Known) -> bool {
        known.process.threads == 1
            && known.turns != Turns::default()
            && known.process.state != 'R'
            && self.proc.turns(pid) == Some(known.turns)
    }

    fn read(&mut self, pid: i32, inode: u64, now: Instant, before: Option<&Known>) -> Option<Known> {
        // Before `stat`, so that what changes between the two is seen as a change next time.
        let first = self.proc.turns(pid).unwrap_or_default();
        let (stat, owner) = self.proc.stat(pid)?;
        if stat.of_kernel {
            self.of_kernel.insert(pid, inode);
            return None;
        }
        let turns = match stat.threads {
            0 | 1 => first,
            _ => self.proc.turns_of_threads(pid).iter().fold(Turns::default(), |sum, (_, one)| sum.plus(one)),
        };
        let before = before.filter(|before| before.process.start == stat.start);
        let io = self.proc.read(&format!("{pid}/io")).and_then(|text| Io::parse(&text.bytes));
        let user = self.user(pid, owner, &stat, before);
        let mut process = Process {
            pid,
            start: stat.start,
            parent: stat.parent,
            group: stat.group,
            session: stat.session,
            terminal: stat.terminal,
            user,
            command: stat.command,
            state: stat.state,
            threads: stat.threads,
            used: Duration::from_millis(stat.ticks.saturating_mul(1000 / TICKS)),
            resident: stat.resident_pages.saturating_mul(self.page),
            io,
            rates: None,
        };
        process.rates = match before {
            Some(before) => Some(rates(&before.process, &before.turns, &process, &turns, now - before.at)),
            // What has been born since the last scan has done all that it has done in its life.
            None => self.all_at.and_then(|then| newborn(&process, &turns, now - then)),
        };
        Some(Known { process, turns, at: now, scan: self.scans })
    }

    /// Who has made himself untraceable is shown as root's: then `status` is asked, which costs more, once for each
    /// program that it runs.
    fn user(&self, pid: i32, owner: u32, stat: &Stat, before: Option<&Known>) -> u32 {
        if owner != 0 {
            return owner;
        }
        match before {
            Some(before) if before.process.command == stat.command => before.process.user,
            _ => self
                .proc
                .read(&format!("{pid}/status"))
                .and_then(|text| real_user(&text.bytes))
                .unwrap_or(owner),
        }
    }
}

impl Default for Processes {
    fn default() -> Self {
        Self::new()
    }
}

/// The kernel tells in ticks when a process began, so of one that is only a few of them old nothing is known.
const LEAST_AGE: Duration = Duration::from_millis(100);

/// What it has done in its life, per second, if it was born since the last scan. That it grew is no habit: it was loaded.
fn newborn(process: &Process, turns: &Turns, since: Duration) -> Option<Rates> {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec.try_into().unwrap_or(0));
    let age = now.checked_sub(Duration::from_millis(process.start.saturating_mul(1000 / TICKS)))?;
    if age < LEAST_AGE || age > since + LEAST_AGE {
        return None;
    }
    let nothing = Process { used: Duration::ZERO, io: process.io.map(|_| Io::default()), ..process.clone() };
    Some(Rates { growth: 0.0, ..rates(&nothing, &Turns::default(), process, turns, age) })
}

fn rates(before: &Process, turns_before: &Turns, now: &Process, turns: &Turns, span: Duration) -> Rates {
    let span = span.as_secs_f64().max(1e-3);
    let per_second = |grown: u64| (grown as f64 / span) as f32;
    let percent = |nanos: u64| (nanos as f64 / 1e7 / span) as f32;
    // A thread that ended has taken its counters along.
    let fresh = Turns {
        run: turns.run.saturating_sub(turns_before.run),
        wait: turns.wait.saturating_sub(turns_before.wait),
        turns: turns.turns.saturating_sub(turns_before.turns),
    };
    // The kernel adds the time of threads that ended, in ticks.
    let ticked = now.used.saturating_sub(before.used).as_nanos().try_into().unwrap_or(u64::MAX);
    let run = match now.threads {
        0 | 1 => fresh.run,
        _ => fresh.run.max(ticked),
    };
    let io = now.io.zip(before.io);
    let io = io.map(|(now, then)| {
        (now.calls().saturating_sub(then.calls()), now.bytes().saturating_sub(then.bytes()))
    });
    let (calls, bytes) = io.unwrap_or_default();
    Rates {
        used: percent(run),
        wanted: percent(run.saturating_add(fresh.wait)),
        turns: per_second(fresh.turns),
        calls: per_second(calls),
        bytes: per_second(bytes),
        growth: ((now.resident as f64 - before.resident as f64) / span) as f32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};
    use std::thread::sleep;

    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn shell(script: &str) -> Ended {
        Ended(Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap())
    }

    /// Scans until it holds of the process.
    fn until(processes: &mut Processes, pid: i32, holds: impl Fn(&Process) -> bool) -> Process {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let found = processes.scan(Which::These(&[pid]));
            match found.into_iter().next() {
                Some(process) if holds(&process) => return process,
                process => assert!(Instant::now() < end, "{process:?}"),
            }
            sleep(Duration::from_millis(200));
        }
    }

    #[test]
    fn who_computes_who_writes_and_who_sleeps_are_told_apart() {
        let busy = shell("while :; do :; done");
        let writes = shell("while :; do echo 0123456789; done > /dev/null");
        let sleeps = shell("exec sleep 1000");
        let mut processes = Processes::new();
        let id = |child: &Ended| child.0.id() as i32;

        // However few CPUs there are, and whoever else wants them: it wants one.
        let busy = until(&mut processes, id(&busy), |p| {
            p.rates.is_some_and(|r| (80.0..125.0).contains(&r.wanted) && r.calls < 5.0)
        });
        assert_eq!((busy.parent, busy.threads), (std::process::id() as i32, 1));
        assert!(busy.resident > 0 && busy.user == rustix::process::geteuid().as_raw());

        let writes = until(&mut processes, id(&writes), |p| p.rates.is_some_and(|r| r.calls > 100.0));
        let rates = writes.rates.unwrap();
        assert!((10.0..12.0).contains(&(rates.bytes / rates.calls)), "{rates:?}");

        let sleeps = until(&mut processes, id(&sleeps), |p| p.rates == Some(Rates::default()));
        assert_eq!((sleeps.command.as_str(), sleeps.state), ("sleep", 'S'));
    }

    #[test]
    fn growth_is_seen() {
        // Each step needs room for twice as much.
        let grows = shell(
            "a=0123456789abcdef; while :; do a=$a$a; sleep 0.2; [ ${#a} -gt 8000000 ] && sleep 1000; done",
        );
        let mut processes = Processes::new();
        until(&mut processes, grows.0.id() as i32, |p| p.rates.is_some_and(|r| r.growth > 1e6));
    }

    #[test]
    fn what_ends_is_gone_and_a_new_scan_has_no_rates() {
        let child = shell("exec sleep 1000");
        let pid = child.0.id() as i32;
        let mut processes = Processes::new();
        assert_eq!(processes.scan(Which::These(&[pid]))[0].rates, None);
        assert!(processes.scan(Which::These(&[pid, pid]))[0].rates.is_some());
        assert!(processes.scan(Which::These(&[])).is_empty());
        assert_eq!(processes.scan(Which::These(&[pid]))[0].rates, None, "it was forgotten");
        drop(child);
        assert!(processes.scan(Which::These(&[pid, 0, -1])).is_empty());
        assert!(processes.known.is_empty());
    }

    #[test]
    fn all_are_found_but_the_kernels_own() {
        let mut processes = Processes::new();
        for _ in 0..2 {
            let all = processes.scan(Which::All);
            assert!(all.iter().any(|p| p.pid == std::process::id() as i32 && p.threads > 1));
            assert!(all.iter().all(|p| p.command != "kthreadd"));
        }
        let first = all_of_kernel(&processes);
        processes.scan(Which::All);
        assert!(all_of_kernel(&processes).iter().any(|pid| first.contains(pid)) || first.is_empty());
    }

    #[test]
    fn who_is_new_is_known_by_all_that_it_has_done() {
        let mut processes = Processes::new();
        processes.scan(Which::All);
        let busy = shell("while :; do :; done");
        let pid = busy.0.id() as i32;
        // It has not been scanned before.
        sleep(Duration::from_millis(300));
        let all = processes.scan(Which::All);
        let first = all.iter().find(|one| one.pid == pid).unwrap().rates.unwrap();
        assert!((50.0..150.0).contains(&first.wanted) && first.growth == 0.0, "{first:?}");
        // Of one that was there all the time nobody knows what it did lately.
        let mut others = Processes::new();
        others.scan(Which::All);
        let old = others.known.remove(&pid);
        assert!(old.is_some());
        sleep(Duration::from_millis(20));
        let all = others.scan(Which::All);
        assert_eq!(all.iter().find(|one| one.pid == pid).unwrap().rates, None);
    }

    fn all_of_kernel(processes: &Processes) -> Vec<i32> {
        processes.of_kernel.keys().copied().collect()
    }
}
