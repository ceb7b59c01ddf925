//! A job.

use crate::world::id;
use tern_balancer::{ProcessSnapshot, Traffic};
use tern_ids::HomePid;

/// A job's use of files of a node other than its home.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FileUse {
    /// The node with the files.
    pub on: usize,
    /// Calls on them for each second of work.
    pub calls: f64,
    /// Bytes carried by these calls, for each second of work.
    pub bytes: f64,
}

impl FileUse {
    /// The rates at this pace.
    pub(crate) fn traffic(&self, pace: f64) -> Traffic {
        Traffic { calls_per_s: self.calls / pace, bytes_per_s: self.bytes / pace }
    }
}

/// The properties of a job, wherever it runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The node where it is started.
    pub home: usize,
    /// Its arrival, in milliseconds.
    pub arrives_ms: u64,
    /// Its work, in standard CPU seconds.
    pub work_s: f64,
    /// Its memory at the start, in bytes.
    pub memory: f64,
    /// Growth of its memory, in bytes a second.
    pub growth: f64,
    /// The size at which its memory stops growing, in bytes.
    pub max_memory: f64,
    /// Bytes a second that it writes in memory while it runs.
    pub dirty: f64,
    /// Seconds of sleep for each second of work.
    pub sleep: f64,
    /// Calls to home for each second of work.
    pub calls: f64,
    /// Bytes carried by these calls, for each second of work.
    pub bytes: f64,
    /// Its use of another node's files.
    pub files: Option<FileUse>,
    /// If not 0, it runs and rests alternately, for this many milliseconds each.
    pub alternation_ms: u64,
}

impl Job {
    /// A job that only computes.
    pub(crate) fn computing(home: usize, arrives_ms: u64, work_s: f64) -> Self {
        Self {
            home,
            arrives_ms,
            work_s,
            memory: f64::from(8 << 20),
            growth: 0.0,
            max_memory: 0.0,
            dirty: 2e6,
            sleep: 0.0,
            calls: 20.0,
            bytes: 20e3,
            files: None,
            alternation_ms: 0,
        }
    }

    /// Seconds that it waits on a node for remote work, for each second of its own work.
    pub(crate) fn remote_wait(&self, me: usize, call_s: f64, link: f64) -> f64 {
        let away = if self.home == me { 0.0 } else { 1.0 };
        let reach = |calls: f64, bytes: f64| calls * call_s + bytes / link;
        // Home sends requests to the files' node; away, the job also waits for home.
        let files = self.files.filter(|files| files.on != me);
        let files = files.map_or(0.0, |files| (1.0 + away) * reach(files.calls, files.bytes));
        away * reach(self.calls, self.bytes) + files
    }

    /// The seconds that it needs at least, alone at home on a CPU of this speed (1 is standard).
    pub(crate) fn alone_s(&self, speed: f64) -> f64 {
        self.work_s * (1.0 / speed + self.sleep)
    }
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum End {
    /// It finished, at this second.
    Done(f64),
    /// Its node or its home failed.
    Lost,
    /// The node ran out of memory and swap.
    OutOfMemory,
}

/// The state of a job.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub(crate) job: Job,
    pub(crate) at: usize,
    /// Work that is left, in standard CPU seconds.
    pub(crate) remaining_s: f64,
    /// CPU seconds used.
    pub(crate) cpu_s: f64,
    pub(crate) memory: f64,
    /// Fraction of time in which it runs or waits for a CPU.
    pub(crate) busy: f64,
    /// `busy`, smoothed as a sampler does.
    pub(crate) demand: f64,
    /// Wall seconds for a second of work, as of now; 0 while it is frozen or rests.
    pub(crate) pace: f64,
    pub(crate) arrived_ms: u64,
    pub(crate) frozen: bool,
    pub(crate) moves: u32,
    /// The node that it left last, and when.
    pub(crate) last_departure: Option<(usize, u64)>,
    pub(crate) end: Option<End>,
    /// Work done in the current fairness window, in seconds.
    pub(crate) window_s: f64,
}

impl Running {
    /// The process as the home's daemon sees it. `leaving`: its node wants its guests to leave.
    pub(crate) fn process(&self, pid: HomePid, leaving: bool, now_ms: u64) -> ProcessSnapshot {
        let job = &self.job;
        let mut process = ProcessSnapshot::new(pid, id(self.at), self.demand * 100.0, self.cpu_s);
        let pace =
            if self.pace > 0.0 { self.pace / (self.demand / self.busy).max(0.01) } else { f64::INFINITY };
        process.age_s = (now_ms - job.arrives_ms) as f64 / 1000.0;
        process.resident_s = (now_ms - self.arrived_ms) as f64 / 1000.0;
        process.rss = self.memory as u64;
        process.growth = if self.memory < job.max_memory { job.growth as u64 } else { 0 };
        process.dirty = (job.dirty * self.demand.min(1.0)) as u64;
        process.calls_per_s = job.calls / pace;
        process.bytes_per_s = job.bytes / pace;
        process.files = job.files.iter().map(|files| (id(files.on), files.traffic(pace))).collect();
        process.evicted = leaving && self.at != job.home;
        process
    }

    pub(crate) fn new(job: Job, at: usize, now_ms: u64) -> Self {
        Self {
            at,
            remaining_s: job.work_s,
            cpu_s: 0.0,
            memory: job.memory,
            busy: 1.0,
            demand: 1.0,
            pace: 1.0,
            arrived_ms: now_ms,
            frozen: false,
            moves: 0,
            last_departure: None,
            end: None,
            window_s: 0.0,
            job,
        }
    }

    /// Whether it rests now.
    pub(crate) fn is_resting(&self, now_ms: u64) -> bool {
        self.job.alternation_ms > 0 && (now_ms / self.job.alternation_ms) % 2 == 1
    }
}
