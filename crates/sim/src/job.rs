//! One job.

use crate::world::id;
use tern_balancer::{Process, Traffic};
use tern_ids::HomePid;

/// What a job does on files of another node than its home.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Files {
    /// The node that has them.
    pub on: usize,
    /// Calls for each second of work.
    pub calls: f64,
    /// Bytes of these, for each second of work.
    pub bytes: f64,
}

impl Files {
    /// At this pace.
    pub(crate) fn traffic(&self, pace: f64) -> Traffic {
        Traffic { calls_per_s: self.calls / pace, bytes_per_s: self.bytes / pace }
    }
}

/// What it is, wherever it runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The node where it is started.
    pub home: usize,
    /// When, in milliseconds.
    pub arrives_ms: u64,
    /// Standard CPU seconds.
    pub work_s: f64,
    /// Bytes.
    pub memory: f64,
    /// Bytes a second that it grows by.
    pub growth: f64,
    /// Up to so many bytes.
    pub memory_most: f64,
    /// Bytes a second that it writes while it runs.
    pub dirty: f64,
    /// Seconds that it sleeps for each second of work.
    pub sleep: f64,
    /// Calls to home for each second of work.
    pub calls: f64,
    /// Bytes of these, for each second of work.
    pub bytes: f64,
    /// What it does on another node's files.
    pub files: Option<Files>,
    /// Runs and rests in turn, for so many milliseconds each; 0: always runs.
    pub turns_ms: u64,
}

impl Job {
    /// Pure computing.
    pub(crate) fn computing(home: usize, arrives_ms: u64, work_s: f64) -> Self {
        Self {
            home,
            arrives_ms,
            work_s,
            memory: f64::from(8 << 20),
            growth: 0.0,
            memory_most: 0.0,
            dirty: 2e6,
            sleep: 0.0,
            calls: 20.0,
            bytes: 20e3,
            files: None,
            turns_ms: 0,
        }
    }

    /// Seconds that it waits on a node for what is made elsewhere, for each second of work.
    pub(crate) fn talk(&self, me: usize, call_s: f64, link: f64) -> f64 {
        let away = if self.home == me { 0.0 } else { 1.0 };
        let reach = |calls: f64, bytes: f64| calls * call_s + bytes / link;
        // Home asks the files' node, and elsewhere home is asked for that.
        let files = self.files.filter(|files| files.on != me);
        let files = files.map_or(0.0, |files| (1.0 + away) * reach(files.calls, files.bytes));
        away * reach(self.calls, self.bytes) + files
    }

    /// Seconds that it needs at least, alone on a CPU of this speed (1 is standard), at home.
    pub(crate) fn alone_s(&self, speed: f64) -> f64 {
        self.work_s * (1.0 / speed + self.sleep)
    }
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum End {
    /// All done, at this second.
    Done(f64),
    /// Its node or its home died.
    Lost,
    /// There was no memory left, not even swap.
    OutOfMemory,
}

/// How far it is.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub(crate) job: Job,
    pub(crate) at: usize,
    pub(crate) left_s: f64,
    /// CPU seconds used.
    pub(crate) cpu_s: f64,
    pub(crate) memory: f64,
    /// The part of time in which it runs or waits for a CPU.
    pub(crate) busy: f64,
    /// The same, smoothed, as one sees it who looks once a second.
    pub(crate) demand: f64,
    /// Seconds for a second of work, as of now; 0 while it stands still.
    pub(crate) pace: f64,
    pub(crate) came_ms: u64,
    pub(crate) frozen: bool,
    pub(crate) moves: u32,
    /// The node that it left last, and when.
    pub(crate) left: Option<(usize, u64)>,
    pub(crate) end: Option<End>,
    /// Work done since the fairness of its share was looked at.
    pub(crate) window_s: f64,
}

impl Running {
    /// What the home's daemon sees of it; the node where it is may want its guests gone.
    pub(crate) fn process(&self, pid: HomePid, leaving: bool, now_ms: u64) -> Process {
        let job = &self.job;
        let mut process = Process::new(pid, id(self.at), self.demand * 100.0, self.cpu_s);
        let pace =
            if self.pace > 0.0 { self.pace / (self.demand / self.busy).max(0.01) } else { f64::INFINITY };
        process.age_s = (now_ms - job.arrives_ms) as f64 / 1000.0;
        process.resident_s = (now_ms - self.came_ms) as f64 / 1000.0;
        process.rss = self.memory as u64;
        process.growth = if self.memory < job.memory_most { job.growth as u64 } else { 0 };
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
            left_s: job.work_s,
            cpu_s: 0.0,
            memory: job.memory,
            busy: 1.0,
            demand: 1.0,
            pace: 1.0,
            came_ms: now_ms,
            frozen: false,
            moves: 0,
            left: None,
            end: None,
            window_s: 0.0,
            job,
        }
    }

    /// Whether it rests now.
    pub(crate) fn rests(&self, now_ms: u64) -> bool {
        self.job.turns_ms > 0 && (now_ms / self.job.turns_ms) % 2 == 1
    }
}
