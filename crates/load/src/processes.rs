//! The usage of single processes, and the usage that they would have with a CPU of their own: for
//! deciding which to move, and for lists.
//!
//! A process that has not been scheduled since the last scan has done nothing: one small file shows
//! that, and the stored data stays valid. Only what other processes do to it may have changed (its
//! group, its parent), so it is still read again from time to time.

use crate::procdir::{ProcDir, ProcessFiles};
use crate::task::{IoCounters, ProcStat, SchedStat, TICKS_PER_SECOND, real_user};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::{ReadError, read_process};

/// A process as of a scan.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessSample {
    /// Its PID on this node.
    pub pid: i32,
    /// Start time, in ticks since boot; unique together with the PID.
    pub start: u64,
    /// Parent PID.
    pub parent: i32,
    /// Process group.
    pub group: i32,
    /// Session.
    pub session: i32,
    /// Whether it has a controlling terminal.
    pub terminal: bool,
    /// Its effective user; the real user, if it has made itself untraceable.
    pub user: u32,
    /// Its name, not the command line.
    pub command: String,
    /// State: `R`, `S`, `D`, `T`, `Z` …
    pub state: char,
    /// Number of threads.
    pub threads: u32,
    /// CPU time used so far, user and system.
    pub used: Duration,
    /// Bytes resident in memory.
    pub resident: u64,
    /// Its reads and writes so far; `None` if access is denied, or they are not scanned.
    pub io: Option<IoCounters>,
    /// Rates since the last scan, if that scan included the process. Rates since its start, if the
    /// process started after the last scan and that scan covered all processes. Otherwise `None`.
    pub rates: Option<ProcessRates>,
}

/// Activity of a process between two scans, per second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ProcessRates {
    /// Percent of one CPU that it used.
    pub used: f32,
    /// Percent of one CPU that it would have used without waiting for a CPU.
    pub demand: f32,
    /// How often it was scheduled: unless it is preempted, how often it has waited for an event.
    pub timeslices: f32,
    /// Read and write calls: a lower estimate of its calls to home when it is away.
    pub calls: f32,
    /// Bytes read and written.
    pub bytes: f32,
    /// Growth of resident memory in bytes; may be negative.
    pub growth: f32,
}

/// The processes that a scan covers.
#[derive(Debug, Clone, Copy)]
pub enum ScanScope<'a> {
    /// All of this node except kernel threads.
    All,
    /// These PIDs, as far as they exist.
    Pids(&'a [i32]),
}

/// Scans processes, and stores the last scan.
#[derive(Debug)]
pub struct ProcessScanner {
    proc: Arc<ProcDir>,
    reads_io: bool,
    last_reads: HashMap<i32, LastRead>,
    /// Inodes of kernel threads, by PID.
    kernel_threads: HashMap<i32, u64>,
    scans: u32,
    /// When the last scan began, if it covered all processes.
    all_at: Option<Instant>,
    page: u64,
}

#[derive(Debug)]
struct LastRead {
    process: ProcessSample,
    schedstat: SchedStat,
    at: Instant,
    scan: u32,
}

/// Each process is read again at least once in this many scans, even if idle.
const REREAD_INTERVAL: u32 = 16;

impl ProcessScanner {
    /// No scan is stored yet: the first one has no rates.
    #[must_use]
    pub fn new() -> Self {
        Self {
            proc: Arc::new(ProcDir::open()),
            reads_io: true,
            last_reads: HashMap::new(),
            kernel_threads: HashMap::new(),
            scans: 0,
            all_at: None,
            page: rustix::param::page_size() as u64,
        }
    }

    /// As [`new`](Self::new), without the processes' reads and writes.
    #[must_use]
    pub fn without_io() -> Self {
        Self { reads_io: false, ..Self::new() }
    }

    /// Scans processes, in the given order, with their rates since the last scan. Processes that
    /// were in the last scan and are not in this one are dropped. A process that waits in an
    /// execve(2) is as at its last scan, or left out if it is new.
    pub fn scan(&mut self, which: ScanScope<'_>) -> Vec<ProcessSample> {
        self.scans = self.scans.wrapping_add(1);
        let listed: Vec<(i32, u64)> = match which {
            ScanScope::All => self.proc.numeric_entries("."),
            ScanScope::Pids(pids) => pids.iter().map(|&pid| (pid, 0)).collect(),
        };
        if matches!(which, ScanScope::All) {
            let now: HashMap<_, _> = listed.iter().copied().collect();
            self.kernel_threads.retain(|pid, inode| now.get(pid) == Some(inode));
        }
        let begun = Instant::now();
        let found = listed.iter().filter_map(|&(pid, inode)| self.sample(pid, inode)).collect();
        self.all_at = matches!(which, ScanScope::All).then_some(begun);
        let scans = self.scans;
        self.last_reads.retain(|_, last| last.scan == scans);
        found
    }

    fn sample(&mut self, pid: i32, inode: u64) -> Option<ProcessSample> {
        if self.kernel_threads.contains_key(&pid) && inode != 0 {
            return None;
        }
        let now = Instant::now();
        let before = self.last_reads.remove(&pid);
        let last = match before {
            Some(last) if !self.is_due_for_reread(pid) && self.is_idle(pid, &last) => LastRead {
                process: ProcessSample { rates: Some(ProcessRates::default()), ..last.process },
                at: now,
                scan: self.scans,
                ..last
            },
            before => match self.files(pid) {
                Ok(files) => self.read(pid, inode, now, files, before.as_ref())?,
                Err(ReadError::Gone) => return None,
                Err(ReadError::Overdue) => {
                    let last = before?;
                    let process = ProcessSample { rates: Some(ProcessRates::default()), ..last.process };
                    LastRead { process, scan: self.scans, ..last }
                }
            },
        };
        let process = last.process.clone();
        self.last_reads.insert(pid, last);
        Some(process)
    }

    fn is_due_for_reread(&self, pid: i32) -> bool {
        self.scans.wrapping_add(pid.unsigned_abs()).is_multiple_of(REREAD_INTERVAL)
    }

    /// With several threads, the first thread's counters do not show what the others did. All-zero
    /// counters mean that the kernel does not count.
    fn is_idle(&self, pid: i32, last: &LastRead) -> bool {
        last.process.threads == 1
            && last.schedstat != SchedStat::default()
            && last.process.state != 'R'
            && self.proc.schedstat(pid) == Some(last.schedstat)
    }

    fn files(&self, pid: i32) -> Result<ProcessFiles, ReadError> {
        let (proc, reads_io) = (Arc::clone(&self.proc), self.reads_io);
        read_process(pid, move || proc.files(pid, reads_io))
    }

    /// `None` for a kernel thread.
    fn read(
        &mut self,
        pid: i32,
        inode: u64,
        now: Instant,
        files: ProcessFiles,
        before: Option<&LastRead>,
    ) -> Option<LastRead> {
        let ProcessFiles { stat, owner, schedstat, io } = files;
        if stat.is_kernel_thread {
            self.kernel_threads.insert(pid, inode);
            return None;
        }
        let before = before.filter(|before| before.process.start == stat.start);
        let user = self.user(pid, owner, &stat, before);
        let mut process = ProcessSample {
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
            used: Duration::from_millis(stat.ticks.saturating_mul(1000 / TICKS_PER_SECOND)),
            resident: stat.resident_pages.saturating_mul(self.page),
            io,
            rates: None,
        };
        process.rates = match before {
            Some(before) => {
                Some(rates(&before.process, &before.schedstat, &process, &schedstat, now - before.at))
            }
            // All activity of a process started since the last scan falls between the two scans.
            None => self.all_at.and_then(|then| rates_since_start(&process, &schedstat, now - then)),
        };
        Some(LastRead { process, schedstat, at: now, scan: self.scans })
    }

    /// The user of a process. The files of an untraceable process are owned by root. In that case
    /// the user is read from `status`, which is slower, but only once for each program that the
    /// process runs.
    fn user(&self, pid: i32, owner: u32, stat: &ProcStat, before: Option<&LastRead>) -> u32 {
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

impl Default for ProcessScanner {
    fn default() -> Self {
        Self::new()
    }
}

/// The kernel reports start times in ticks, so the rates of a process that is only a few ticks old
/// are not computed.
const MIN_AGE: Duration = Duration::from_millis(100);

/// Its rates since its start, if it started after the last scan. Growth is left out: loading the
/// program is no trend.
fn rates_since_start(process: &ProcessSample, stat: &SchedStat, since: Duration) -> Option<ProcessRates> {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec.try_into().unwrap_or(0));
    let age =
        now.checked_sub(Duration::from_millis(process.start.saturating_mul(1000 / TICKS_PER_SECOND)))?;
    if age < MIN_AGE || age > since + MIN_AGE {
        return None;
    }
    let nothing = ProcessSample {
        used: Duration::ZERO,
        io: process.io.map(|_| IoCounters::default()),
        ..process.clone()
    };
    Some(ProcessRates { growth: 0.0, ..rates(&nothing, &SchedStat::default(), process, stat, age) })
}

fn rates(
    before: &ProcessSample,
    stat_before: &SchedStat,
    now: &ProcessSample,
    stat: &SchedStat,
    span: Duration,
) -> ProcessRates {
    let span = span.as_secs_f64().max(1e-3);
    let per_second = |grown: u64| (grown as f64 / span) as f32;
    let percent = |nanos: u64| (nanos as f64 / 1e7 / span) as f32;
    // The sum no longer includes the counters of ended threads, so it may have fallen.
    let fresh = SchedStat {
        run_ns: stat.run_ns.saturating_sub(stat_before.run_ns),
        wait_ns: stat.wait_ns.saturating_sub(stat_before.wait_ns),
        timeslices: stat.timeslices.saturating_sub(stat_before.timeslices),
    };
    // The process's tick counter includes ended threads.
    let ticked = now.used.saturating_sub(before.used).as_nanos().try_into().unwrap_or(u64::MAX);
    let run = match now.threads {
        0 | 1 => fresh.run_ns,
        _ => fresh.run_ns.max(ticked),
    };
    let io = now.io.zip(before.io);
    let io = io.map(|(now, then)| {
        (now.calls().saturating_sub(then.calls()), now.bytes().saturating_sub(then.bytes()))
    });
    let (calls, bytes) = io.unwrap_or_default();
    ProcessRates {
        used: percent(run),
        demand: percent(run.saturating_add(fresh.wait_ns)),
        timeslices: per_second(fresh.timeslices),
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

    /// Scans until `holds` is true of the process.
    fn until(
        processes: &mut ProcessScanner,
        pid: i32,
        holds: impl Fn(&ProcessSample) -> bool,
    ) -> ProcessSample {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let found = processes.scan(ScanScope::Pids(&[pid]));
            match found.into_iter().next() {
                Some(process) if holds(&process) => return process,
                process => assert!(Instant::now() < end, "{process:?}"),
            }
            sleep(Duration::from_millis(200));
        }
    }

    #[test]
    fn busy_writing_and_sleeping_processes_are_distinguished() {
        let busy = shell("while :; do :; done");
        let writes = shell("while :; do echo 0123456789; done > /dev/null");
        let sleeps = shell("exec sleep 1000");
        let mut processes = ProcessScanner::new();
        let id = |child: &Ended| child.0.id() as i32;

        // Its demand is one CPU, however few CPUs there are and whatever else runs.
        let busy = until(&mut processes, id(&busy), |p| {
            p.rates.is_some_and(|r| (80.0..125.0).contains(&r.demand) && r.calls < 5.0)
        });
        assert_eq!((busy.parent, busy.threads), (std::process::id() as i32, 1));
        assert!(busy.resident > 0 && busy.user == rustix::process::geteuid().as_raw());

        let writes = until(&mut processes, id(&writes), |p| p.rates.is_some_and(|r| r.calls > 100.0));
        let rates = writes.rates.unwrap();
        assert!((10.0..12.0).contains(&(rates.bytes / rates.calls)), "{rates:?}");

        let sleeps = until(&mut processes, id(&sleeps), |p| p.rates == Some(ProcessRates::default()));
        assert_eq!((sleeps.command.as_str(), sleeps.state), ("sleep", 'S'));
    }

    #[test]
    fn growth_is_measured() {
        // Each step doubles the memory.
        let grows = shell(
            "a=0123456789abcdef; while :; do a=$a$a; sleep 0.2; [ ${#a} -gt 8000000 ] && sleep 1000; done",
        );
        let mut processes = ProcessScanner::new();
        until(&mut processes, grows.0.id() as i32, |p| p.rates.is_some_and(|r| r.growth > 1e6));
    }

    #[test]
    fn ended_processes_are_dropped_and_new_ones_have_no_rates() {
        let child = shell("exec sleep 1000");
        let pid = child.0.id() as i32;
        let mut processes = ProcessScanner::new();
        assert_eq!(processes.scan(ScanScope::Pids(&[pid]))[0].rates, None);
        assert!(processes.scan(ScanScope::Pids(&[pid, pid]))[0].rates.is_some());
        assert!(processes.scan(ScanScope::Pids(&[])).is_empty());
        assert_eq!(processes.scan(ScanScope::Pids(&[pid]))[0].rates, None, "it was forgotten");
        drop(child);
        assert!(processes.scan(ScanScope::Pids(&[pid, 0, -1])).is_empty());
        assert!(processes.last_reads.is_empty());
    }

    #[test]
    fn all_processes_except_kernel_threads_are_found() {
        let mut processes = ProcessScanner::new();
        for _ in 0..2 {
            let all = processes.scan(ScanScope::All);
            assert!(all.iter().any(|p| p.pid == std::process::id() as i32 && p.threads > 1));
            assert!(all.iter().all(|p| p.command != "kthreadd"));
        }
        let first = all_of_kernel(&processes);
        processes.scan(ScanScope::All);
        assert!(all_of_kernel(&processes).iter().any(|pid| first.contains(pid)) || first.is_empty());
    }

    #[test]
    fn new_process_has_rates_since_its_start() {
        let mut processes = ProcessScanner::new();
        processes.scan(ScanScope::All);
        let busy = shell("while :; do :; done");
        let pid = busy.0.id() as i32;
        // The process is in no earlier scan.
        sleep(Duration::from_millis(300));
        let all = processes.scan(ScanScope::All);
        let first = all.iter().find(|one| one.pid == pid).unwrap().rates.unwrap();
        assert!((50.0..150.0).contains(&first.demand) && first.growth == 0.0, "{first:?}");
        // The recent rates of a process that is not new are unknown.
        let mut others = ProcessScanner::new();
        others.scan(ScanScope::All);
        let old = others.last_reads.remove(&pid);
        assert!(old.is_some());
        sleep(Duration::from_millis(20));
        let all = others.scan(ScanScope::All);
        assert_eq!(all.iter().find(|one| one.pid == pid).unwrap().rates, None);
    }

    fn all_of_kernel(processes: &ProcessScanner) -> Vec<i32> {
        processes.kernel_threads.keys().copied().collect()
    }
}
