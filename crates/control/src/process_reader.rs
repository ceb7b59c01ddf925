//! Reads `/proc/PID` of other processes in threads, so that no caller waits for long.
//!
//! While a process executes a program, many reads about it wait, those of `exe`, `io` and, on newer
//! kernels, `stat` among them (`exec_update_lock`). execve(2) closes files, and each close may wait
//! for a file server, for ever. A read of `cmdline` may wait for a page fault of the process. So
//! without a limit any user could stop a node's scan of its processes.

use crate::procfs::read_text;
use rustix::thread::gettid;
use std::collections::HashMap;
use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A read is overdue if its thread is blocked for this time. Most reads take some ten microseconds.
/// On a busy machine a thread may also have to wait for a CPU, which does not count.
const MAX_BLOCKED: Duration = Duration::from_millis(100);

/// The maximum duration of a read in any case.
const TIMEOUT: Duration = Duration::from_secs(10);

/// With fewer overdue reads, they are not counted by user.
const MIN_COUNTED: usize = 4;

/// Maximum number of overdue reads that concern the processes of one user. More reads are refused.
const MAX_PER_USER: usize = 4;

/// Maximum number of overdue reads in all. Each has a thread.
const MAX_OVERDUE: usize = 256;

/// Threads without work that are kept.
const MAX_IDLE: usize = 1;

/// Stack of a thread, in bytes.
const STACK_SIZE: usize = 128 << 10;

/// Why a process was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadError {
    /// There is no such process, or its file cannot be read.
    Gone,
    /// The read did not end in time, or is refused because earlier ones have not ended: the process
    /// is executing a program and waits for a file server. It exists.
    Overdue,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "there is no such process",
            Self::Overdue => "the process is executing a program, which waits for a file server",
        })
    }
}

impl std::error::Error for ReadError {}

/// Reads about a process. Waits until the read is over, or is blocked for 100 ms. For any thread.
///
/// # Errors
/// [`ReadError::Gone`] if `read` finds nothing, [`ReadError::Overdue`] if it takes too long. A read
/// that is overdue goes on, and no other of the same process begins before it has ended.
pub fn read_process<T: Send + 'static>(
    pid: i32,
    read: impl FnOnce() -> Option<T> + Send + 'static,
) -> Result<T, ReadError> {
    // One for the whole program, so that the limits hold for all callers together.
    static READER: LazyLock<ProcessReader> = LazyLock::new(ProcessReader::default);
    READER.read(pid, read)
}

/// The threads that read, and the reads that are overdue.
#[derive(Debug, Default)]
struct ProcessReader(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Threads without work.
    idle: Vec<Sender<Job>>,
    /// Overdue reads by PID, with the process's real user if it is known.
    overdue: HashMap<i32, Option<u32>>,
}

/// A read for one caller.
struct Job {
    pid: i32,
    /// Reads, unless there is a reason to refuse that.
    read: Box<dyn FnOnce(Option<ReadError>) -> SendReply + Send>,
    progress: Arc<Mutex<Progress>>,
    /// The thread that executes this.
    thread: Sender<Job>,
}

/// Sends the reply to the caller.
type SendReply = Box<dyn FnOnce() + Send>;

#[derive(Debug, Default)]
struct Progress {
    /// The thread that reads.
    thread: Option<i32>,
    user: Option<u32>,
    has_ended: bool,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Job({})", self.pid)
    }
}

impl ProcessReader {
    /// As [`read_process`].
    fn read<T: Send + 'static>(
        &self,
        pid: i32,
        read: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> Result<T, ReadError> {
        let idle = {
            let mut state = lock(&self.0);
            if state.overdue.contains_key(&pid) || state.overdue.len() >= MAX_OVERDUE {
                return Err(ReadError::Overdue);
            }
            state.idle.pop()
        };
        // Without a thread nothing is known of the process, as if its read did not end.
        let thread = idle.or_else(|| start_thread(&self.0)).ok_or(ReadError::Overdue)?;
        let (reply, replies) = channel();
        let read = move |refused: Option<ReadError>| -> SendReply {
            let found = refused.map_or_else(|| read().ok_or(ReadError::Gone), Err);
            // After the timeout it is dropped.
            Box::new(move || drop(reply.send(found)))
        };
        let progress = Arc::default();
        let job = Job { pid, read: Box::new(read), progress: Arc::clone(&progress), thread: thread.clone() };
        thread.send(job).map_err(|_ended| ReadError::Overdue)?;
        let (begun, mut before) = (Instant::now(), None);
        loop {
            match replies.recv_timeout(MAX_BLOCKED) {
                Ok(found) => return found,
                // The read has panicked.
                Err(RecvTimeoutError::Disconnected) => return Err(ReadError::Gone),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let thread = lock(&progress).thread;
            let now = thread.and_then(blocked_since);
            if now.is_some() && now == before || begun.elapsed() > TIMEOUT {
                break;
            }
            before = now;
        }
        let mut state = lock(&self.0);
        let progress = lock(&progress);
        if !progress.has_ended {
            state.overdue.insert(pid, progress.user);
        }
        Err(ReadError::Overdue)
    }
}

/// Starts a thread, which ends when all senders of jobs are gone. `None` if there are too many
/// threads.
fn start_thread(state: &Arc<Mutex<State>>) -> Option<Sender<Job>> {
    let (thread, jobs) = channel::<Job>();
    let state = Arc::downgrade(state);
    let work = move || {
        for Job { pid, read, progress, thread } in jobs {
            let Some(state) = state.upgrade() else { break };
            lock(&progress).thread = Some(gettid().as_raw_nonzero().get());
            let ended = EndsRead { pid, state: &state, progress: &progress };
            let reply = read(refusal(&state, pid, &progress));
            drop(ended);
            // Before the reply, so that the caller's next read uses this thread.
            let mut guarded = lock(&state);
            if guarded.idle.len() < MAX_IDLE {
                guarded.idle.push(thread);
            }
            drop(guarded);
            reply();
        }
    };
    let builder = std::thread::Builder::new().name("processes".into()).stack_size(STACK_SIZE);
    builder.spawn(work).ok().map(|_| thread)
}

/// The number of times that a thread of this process has gone to sleep, if it sleeps. If the number
/// does not change, the thread has slept all the time.
fn blocked_since(tid: i32) -> Option<u64> {
    let status = read_text(format!("/proc/self/task/{tid}/status")).ok()?;
    let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    if value("State:")?.starts_with('R') {
        return None;
    }
    value("voluntary_ctxt_switches:")?.parse().ok()
}

/// Why a read is not begun: too many of the same user's are overdue. Only the total is limited for
/// root's processes.
fn refusal(state: &Mutex<State>, pid: i32, progress: &Mutex<Progress>) -> Option<ReadError> {
    if lock(state).overdue.len() < MIN_COUNTED {
        return None;
    }
    let user = real_user(&read_text(format!("/proc/{pid}/status")).ok()?)?;
    lock(progress).user = Some(user);
    let same = lock(state).overdue.values().filter(|one| **one == Some(user)).count();
    (user != 0 && same >= MAX_PER_USER).then_some(ReadError::Overdue)
}

/// The real user in `/proc/PID/status`.
fn real_user(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.parse().ok()
}

/// Records the end of a read when it is dropped, also after a panic.
struct EndsRead<'a> {
    pid: i32,
    state: &'a Mutex<State>,
    progress: &'a Mutex<Progress>,
}

impl Drop for EndsRead<'_> {
    fn drop(&mut self) {
        let mut state = lock(self.state);
        lock(self.progress).has_ended = true;
        state.overdue.remove(&self.pid);
    }
}

/// A lock that stays usable if its holder has panicked: no change of these values is made in steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_until(is_so: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < end);
            std::thread::yield_now();
        }
    }

    #[test]
    fn overdue_reads_delay_only_their_own_process() {
        let reader = ProcessReader::default();
        assert_eq!(reader.read(1, || Some(7)), Ok(7));
        assert_eq!(reader.read(1, || None::<i32>), Err(ReadError::Gone));
        let (release, released) = channel::<()>();
        assert_eq!(reader.read(1, move || released.recv().ok()), Err(ReadError::Overdue));
        assert_eq!(reader.read(1, || Some(7)), Err(ReadError::Overdue), "it is not begun");
        assert_eq!(reader.read(2, || Some(8)), Ok(8));
        drop(release);
        wait_until(|| reader.read(1, || Some(7)) == Ok(7));
    }

    #[test]
    fn overdue_reads_are_limited() {
        let reader = ProcessReader::default();
        let own = rustix::process::getuid().as_raw();
        let other = own + 1;
        let (_kept, blocker) = channel::<()>();
        let me = std::process::id() as i32;
        lock(&reader.0).overdue.extend((0..4).map(|at| (-1 - at, Some(other))));
        assert_eq!(reader.read(me, || Some(7)), Ok(7), "another user's");
        assert_eq!(reader.read(me, move || blocker.recv().ok()), Err(ReadError::Overdue));
        assert_eq!(lock(&reader.0).overdue[&me], Some(own));
        lock(&reader.0).overdue.extend((0..4).map(|at| (-11 - at, Some(own))));
        let refused = reader.read(std::os::unix::process::parent_id() as i32, || Some(7));
        assert_eq!(refused, if own == 0 { Ok(7) } else { Err(ReadError::Overdue) });
        lock(&reader.0).overdue.extend((0..MAX_OVERDUE as i32).map(|at| (-21 - at, None)));
        assert_eq!(reader.read(2, || Some(7)), Err(ReadError::Overdue));
    }

    #[test]
    fn panic_is_the_end_of_its_read_only() {
        let reader = ProcessReader::default();
        let panics = || -> Option<i32> { std::panic::resume_unwind(Box::new(())) };
        assert_eq!(reader.read(1, panics), Err(ReadError::Gone));
        assert_eq!(reader.read(1, || Some(7)), Ok(7));
    }

    #[test]
    fn threads_end_with_their_reader() {
        let held = Arc::new(());
        let reader = ProcessReader::default();
        let weak = Arc::downgrade(&reader.0);
        let used = Arc::clone(&held);
        assert_eq!(reader.read(1, move || Some(Arc::strong_count(&used))), Ok(2));
        drop(reader);
        wait_until(|| weak.upgrade().is_none() && Arc::strong_count(&held) == 1);
    }
}
