//! Reads the files of processes in `/proc` in a thread of its own.
//!
//! While a process executes a program, a read of some of these files (`io`, and on some kernels
//! `stat`) waits in uninterruptible sleep (`exec_update_lock`). An execve closes files, and each
//! close may wait for a file server, also for ever. So any user could otherwise stop a node's scan
//! of its processes.

use crate::procdir::ProcDir;
use crate::task::{IoCounters, ProcStat, SchedStat};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// How long it may take to read one process. Mostly it takes some ten microseconds.
const TIMEOUT: Duration = Duration::from_millis(100);

/// With this many reads that have not ended, no more are begun: a thread waits in each.
const MAX_STUCK: usize = 16;

/// The files of one process.
#[derive(Debug)]
pub(crate) struct ProcessFiles {
    pub(crate) stat: ProcStat,
    /// The owner of the files.
    pub(crate) owner: u32,
    /// The sum of all threads.
    pub(crate) schedstat: SchedStat,
    pub(crate) io: Option<IoCounters>,
}

/// The thread, and the reads that have not ended in time.
#[derive(Debug)]
pub(crate) struct ProcessReader {
    reads_io: bool,
    thread: Option<ReaderThread>,
    /// By PID. The thread that waits has the second reference.
    stuck: HashMap<i32, Arc<()>>,
}

#[derive(Debug)]
struct ReaderThread {
    ask: Sender<i32>,
    answers: Receiver<Option<ProcessFiles>>,
    /// The thread has another reference.
    lives: Arc<()>,
}

impl ProcessReader {
    /// A reader that also reads `io`, or does not.
    pub(crate) fn new(reads_io: bool) -> Self {
        Self { reads_io, thread: None, stuck: HashMap::new() }
    }

    /// The files of a process. `None` if it is gone, or if it has executed a program for longer than
    /// [`TIMEOUT`].
    pub(crate) fn read(&mut self, pid: i32) -> Option<ProcessFiles> {
        self.stuck.retain(|_, thread| Arc::strong_count(thread) > 1);
        if self.stuck.contains_key(&pid) || self.stuck.len() >= MAX_STUCK {
            return None;
        }
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => ReaderThread::start(self.reads_io)?,
        };
        thread.ask.send(pid).ok()?;
        match thread.answers.recv_timeout(TIMEOUT) {
            Ok(files) => {
                self.thread = Some(thread);
                files
            }
            // The thread ends when its read does.
            Err(_) => {
                self.stuck.insert(pid, thread.lives);
                None
            }
        }
    }
}

impl ReaderThread {
    /// `None` if there are too many threads.
    fn start(reads_io: bool) -> Option<Self> {
        let (ask, pids) = channel();
        let (answer, answers) = channel();
        let lives = Arc::new(());
        let held = Arc::clone(&lives);
        let work = move || {
            let proc = ProcDir::open();
            for pid in pids {
                if answer.send(ProcessFiles::read(&proc, pid, reads_io)).is_err() {
                    break;
                }
            }
            drop(held);
        };
        let thread = std::thread::Builder::new().name("processes".into()).stack_size(128 << 10);
        thread.spawn(work).ok()?;
        Some(Self { ask, answers, lives })
    }
}

impl ProcessFiles {
    fn read(proc: &ProcDir, pid: i32, reads_io: bool) -> Option<Self> {
        // Read before `stat`, so that a change between the two reads is detected in the next scan.
        let first = proc.schedstat(pid).unwrap_or_default();
        let (stat, owner) = proc.stat(pid)?;
        let schedstat = match stat.threads {
            0 | 1 => first,
            _ => {
                let threads = proc.thread_schedstats(pid);
                threads.iter().fold(SchedStat::default(), |sum, (_, one)| sum.plus(one))
            }
        };
        let io = || proc.read(&format!("{pid}/io")).and_then(|text| IoCounters::parse(&text.bytes));
        let io = if reads_io && !stat.is_kernel_thread { io() } else { None };
        Some(Self { stat, owner, schedstat, io })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_read_and_stuck_reads_are_left_out() {
        let me = std::process::id() as i32;
        let mut reader = ProcessReader::new(true);
        assert!(reader.read(me).and_then(|files| files.io).is_some_and(|io| io.reads > 0));
        assert!(reader.read(-1).is_none());
        let waits = Arc::new(());
        let thread = Arc::clone(&waits);
        reader.stuck.insert(me, waits);
        assert!(reader.read(me).is_none());
        drop(thread);
        assert!(reader.read(me).is_some(), "the read has ended");
        let threads: Vec<Arc<()>> = (0..MAX_STUCK).map(|_| Arc::new(())).collect();
        reader.stuck.extend((1..).zip(threads.iter().cloned()));
        assert!(reader.read(me).is_none(), "too many");
        assert!(ProcessReader::new(false).read(me).is_some_and(|files| files.io.is_none()));
    }
}
