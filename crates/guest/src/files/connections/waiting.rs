//! Calls that wait for several descriptors (poll, select), some of which are connections of this
//! node. The guest's kernel makes these calls. For each descriptor at home the guest has a file that
//! only reports readiness ([`tern_readiness`]), open under the same number, and home reports the
//! readiness of the descriptor ([`Message::Watch`]).

use super::RunningCall;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};
use tern_migrate::message::Message;
use tern_readiness::ReadinessFile;
use tern_syscall::{Arg, Call};
use tern_tracee::Memory;
use tern_tracee::listener::Notification;

/// Maximum number of descriptors that a call may wait for here, and of those that are watched.
const MAX_DESCRIPTORS: usize = 1024;

/// The descriptors that a call waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WaitSet {
    /// These. This node's kernel can make the call.
    Known(BTreeSet<i32>),
    /// Home must make the call: it has a signal mask, invalid arguments, or too many descriptors.
    Unknown,
}

/// The descriptors at home whose readiness is known here.
#[derive(Debug, Default)]
pub(crate) struct WatchedDescriptors {
    by_fd: BTreeMap<i32, Watched>,
    /// The descriptors that are about to be watched.
    beginning: Option<Beginning>,
    /// Number of [`Self::begin`] calls.
    count: u64,
    /// The last call to wait had descriptors whose readiness home cannot report.
    was_refused: bool,
}

#[derive(Debug)]
struct Watched {
    file: ReadinessFile,
    /// The guest has it open.
    in_guest: bool,
}

#[derive(Debug)]
struct Beginning {
    number: u64,
    /// Home's answers so far.
    readiness: BTreeMap<i32, Option<u32>>,
    awaited: BTreeSet<i32>,
    /// A worker has been asked for files.
    is_opening: bool,
    files: Option<io::Result<Vec<ReadinessFile>>>,
}

/// A wait with a time limit that this kernel makes.
#[derive(Debug)]
pub(crate) struct NativeWait {
    nr: u32,
    args: [u64; 6],
    until: Instant,
    /// It was interrupted, and the program makes the call again.
    is_interrupted: bool,
    /// This kernel makes it again, with its whole time limit.
    is_repeated: bool,
}

impl WaitSet {
    /// The descriptors that a call waits for; none if it is another call.
    pub(super) fn of(trap: &Notification, memory: &Memory) -> Option<Self> {
        let [first, second, third, fourth, _, sixth] = trap.args;
        let known = match i64::from(trap.nr) {
            libc::SYS_poll => polled(memory, first, second),
            libc::SYS_ppoll if fourth == 0 => polled(memory, first, second),
            libc::SYS_select => selected(memory, first as i32, [second, third, fourth]),
            libc::SYS_pselect6 => {
                // A pointer to the mask, and its length.
                let mask = if sixth == 0 { Some(0) } else { memory.word(sixth).ok() };
                if mask == Some(0) { selected(memory, first as i32, [second, third, fourth]) } else { None }
            }
            libc::SYS_ppoll => None,
            _ => return None,
        };
        Some(known.map_or(Self::Unknown, Self::Known))
    }
}

/// The descriptors of an array of struct pollfd.
fn polled(memory: &Memory, at: u64, count: u64) -> Option<BTreeSet<i32>> {
    let count = usize::try_from(count).ok().filter(|count| *count <= MAX_DESCRIPTORS)?;
    let mut entries = vec![0; count * size_of::<libc::pollfd>()];
    read(memory, at, &mut entries)?;
    Some(in_entries(&entries).collect())
}

/// The descriptors in the bytes of an array of struct pollfd.
fn in_entries(bytes: &[u8]) -> impl Iterator<Item = i32> {
    let entries = bytes.as_chunks::<{ size_of::<libc::pollfd>() }>().0;
    let fd = |entry: &[u8; 8]| entry.first_chunk().map(|fd| i32::from_ne_bytes(*fd));
    entries.iter().filter_map(fd).filter(|fd| *fd >= 0)
}

/// The descriptors in a bit set.
fn in_bits(bytes: &[u8]) -> impl Iterator<Item = i32> {
    let is_set = |fd: &usize| bytes[fd / 8] >> (fd % 8) & 1 == 1;
    (0..bytes.len() * 8).filter(is_set).map(|fd| fd as i32)
}

/// The descriptors that a call waits for which was sent home; none if it is another call.
pub(super) fn sent_descriptors(call: &Call) -> Option<BTreeSet<i32>> {
    let bytes = |arg: &Arg| match arg {
        Arg::Bytes(bytes) => bytes.to_vec(),
        _ => Vec::new(),
    };
    match (i64::from(call.nr), &call.args[..]) {
        (libc::SYS_poll | libc::SYS_ppoll, [entries, ..]) => Some(in_entries(&bytes(entries)).collect()),
        // The kernel ignores bits beyond the number; here they count.
        (libc::SYS_select | libc::SYS_pselect6, [_, read, write, except, ..]) => {
            let sets = [read, write, except].map(bytes);
            Some(sets.iter().flat_map(|set| in_bits(set)).collect())
        }
        _ => None,
    }
}

/// The descriptors of three bit sets, each of which may be missing.
fn selected(memory: &Memory, count: i32, sets: [u64; 3]) -> Option<BTreeSet<i32>> {
    let count = usize::try_from(count).ok().filter(|count| *count <= MAX_DESCRIPTORS)?;
    let mut fds = BTreeSet::new();
    for at in sets.into_iter().filter(|at| *at != 0) {
        let mut bits = vec![0; count.div_ceil(64) * 8];
        read(memory, at, &mut bits)?;
        fds.extend(in_bits(&bits).filter(|fd| (*fd as usize) < count));
    }
    Some(fds)
}

fn read(memory: &Memory, at: u64, bytes: &mut [u8]) -> Option<()> {
    (memory.read_some(at, bytes).ok()? == bytes.len()).then_some(())
}

impl WatchedDescriptors {
    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.by_fd.is_empty()
    }

    /// Those that the guest has open.
    pub(super) fn in_guest(&self) -> impl Iterator<Item = i32> {
        self.by_fd.iter().filter(|(_, watched)| watched.in_guest).map(|(fd, _)| *fd)
    }

    /// Whether this one is watched.
    pub(super) fn has(&self, fd: i32) -> bool {
        self.by_fd.contains_key(&fd)
    }

    /// Whether home's answer, or a worker's, is awaited.
    pub(super) fn is_beginning(&self) -> bool {
        self.beginning.is_some()
    }

    /// Whether descriptors could not be watched. Returned once.
    pub(super) fn take_refused(&mut self) -> bool {
        std::mem::take(&mut self.was_refused)
    }

    /// Whether so many more can be watched.
    pub(super) fn has_room_for(&self, more: usize) -> bool {
        self.by_fd.len() + more <= MAX_DESCRIPTORS
    }

    /// Begins to watch descriptors, with this message to home. Over when [`Self::receive`] or
    /// [`Self::finish_opening`] returns true.
    pub(super) fn begin(&mut self, fds: BTreeSet<i32>) -> Message {
        self.count += 1;
        let message = Message::Watch(fds.iter().copied().collect());
        self.beginning = Some(Beginning {
            number: self.count,
            readiness: BTreeMap::new(),
            awaited: fds,
            is_opening: false,
            files: None,
        });
        message
    }

    /// The number of a request for readiness files, and how many are needed. Each request is
    /// returned only once.
    pub(super) fn start_opening(&mut self) -> Option<(u64, usize)> {
        let beginning = self.beginning.as_mut().filter(|beginning| !beginning.is_opening)?;
        beginning.is_opening = true;
        Some((beginning.number, beginning.awaited.len()))
    }

    /// Stores the files of a request.
    pub(super) fn finish_opening(&mut self, number: u64, files: io::Result<Vec<ReadinessFile>>) -> bool {
        if let Some(beginning) = self.beginning.as_mut().filter(|beginning| beginning.number == number) {
            beginning.files = Some(files);
        }
        self.finish()
    }

    /// Handles home's report.
    pub(super) fn receive(&mut self, report: &[(i32, Option<u32>)]) -> bool {
        for (fd, readiness) in report {
            match (self.by_fd.get(fd), readiness, &mut self.beginning) {
                (Some(watched), Some(readiness), _) => watched.file.set(*readiness),
                // The next wait has it watched again, or returns the connections.
                (Some(_), None, _) => drop(self.by_fd.remove(fd)),
                (None, _, Some(beginning)) if beginning.awaited.contains(fd) => {
                    beginning.readiness.insert(*fd, *readiness);
                }
                _ => {}
            }
        }
        self.finish()
    }

    /// Watches the descriptors if all answers are here.
    fn finish(&mut self) -> bool {
        let is_complete = |beginning: &mut Beginning| {
            beginning.files.is_some() && beginning.readiness.len() == beginning.awaited.len()
        };
        let Some(Beginning { readiness, files: Some(files), .. }) = self.beginning.take_if(is_complete)
        else {
            return false;
        };
        match files {
            Ok(files) => {
                for ((fd, readiness), file) in readiness.into_iter().zip(files) {
                    if let Some(readiness) = readiness {
                        file.set(readiness);
                        self.by_fd.insert(fd, Watched { file, in_guest: false });
                    } else {
                        tracing::debug!(fd, "home cannot report the readiness of a descriptor");
                        self.was_refused = true;
                    }
                }
            }
            Err(error) => {
                tracing::info!(%error, "there are no files to report readiness");
                self.was_refused = true;
            }
        }
        true
    }

    /// The request to home for all of them, to be sent on a new link.
    pub(super) fn request_all(&self) -> Option<Message> {
        let beginning = self.beginning.iter().flat_map(|beginning| &beginning.awaited);
        let all: Vec<i32> = self.by_fd.keys().chain(beginning).copied().collect();
        (!all.is_empty()).then_some(Message::Watch(all))
    }

    /// Has `open` open a watched descriptor in the guest, unless it is open there.
    pub(super) fn open(
        &mut self,
        fd: i32,
        open: impl FnOnce(&ReadinessFile) -> io::Result<()>,
    ) -> io::Result<()> {
        match self.by_fd.get_mut(&fd) {
            Some(watched) if !watched.in_guest => {
                open(&watched.file)?;
                watched.in_guest = true;
            }
            _ => {}
        }
        Ok(())
    }

    /// Forgets a descriptor under whose number the guest has another file now, or will have. Returns
    /// whether the guest has it open.
    pub(super) fn replace(&mut self, fd: i32) -> bool {
        self.by_fd.remove(&fd).is_some_and(|watched| watched.in_guest)
    }

    /// Forgets all. Returns those that the guest has open.
    pub(super) fn forget_all(&mut self) -> Vec<i32> {
        let all = std::mem::take(&mut self.by_fd).into_iter();
        all.filter(|(_, watched)| watched.in_guest).map(|(fd, _)| fd).collect()
    }
}

impl NativeWait {
    /// A call that this kernel makes, which began at this time; none if this kernel also keeps its time
    /// limit, in the program's memory, or if it has none.
    pub(crate) fn of((nr, args): RunningCall, began: Instant) -> Option<Self> {
        let millis = args[timeout_argument(nr)?] as i32;
        let timeout = Duration::from_millis(u64::try_from(millis).ok()?);
        Some(Self { nr, args, until: began + timeout, is_interrupted: false, is_repeated: false })
    }

    /// Records that the call was interrupted, and will be made again.
    pub(super) fn interrupt(&mut self) {
        self.is_interrupted = true;
    }

    /// Records that this kernel makes the call again, with its whole time limit.
    pub(super) fn repeat(&mut self) {
        (self.is_interrupted, self.is_repeated) = (false, true);
    }

    /// Whether the program makes this call again after an interruption.
    pub(super) fn continues_in(&self, trap: &Notification) -> bool {
        self.is_interrupted && (trap.nr, trap.args) == (self.nr, self.args)
    }

    /// Reduces the time limit of a call that continues this one to the rest.
    pub(super) fn limit_to_rest(&self, trap: &mut Notification) {
        let Some(timeout) = timeout_argument(self.nr) else { return };
        let left = self.until.saturating_duration_since(Instant::now());
        // Rounded up, since the call must not end early.
        trap.args[timeout] = left.as_micros().div_ceil(1000) as u64;
    }

    /// When the shim must end the call. This kernel keeps the time limit of a call itself, unless the
    /// call is repeated.
    pub(crate) fn must_end_at(&self) -> Option<Instant> {
        self.is_repeated.then_some(self.until)
    }
}

/// The argument that is the call's time limit in milliseconds.
fn timeout_argument(nr: u32) -> Option<usize> {
    match i64::from(nr) {
        libc::SYS_poll => Some(2),
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => Some(3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trap(nr: i64, args: [u64; 6]) -> Notification {
        Notification { id: 1, pid: 1, nr: nr as u32, ip: 0, args }
    }

    fn known<const N: usize>(fds: [i32; N]) -> Option<WaitSet> {
        Some(WaitSet::Known(fds.into()))
    }

    #[test]
    fn descriptors_are_read_from_the_programs_memory() {
        let memory = Memory::open(std::process::id() as i32).unwrap();
        let of = |nr, args| WaitSet::of(&trap(nr, args), &memory);
        let fds = [5, -1, 900, 5].map(|fd| libc::pollfd { fd, events: 0, revents: 0 });
        let at = fds.as_ptr() as u64;
        assert_eq!(of(libc::SYS_poll, [at, 4, 0, 0, 0, 0]), known([5, 900]));
        assert_eq!(of(libc::SYS_ppoll, [at, 2, 0, 0, 0, 0]), known([5]));
        assert_eq!(of(libc::SYS_ppoll, [at, 2, 0, at, 8, 0]), Some(WaitSet::Unknown), "a mask");
        assert_eq!(of(libc::SYS_poll, [8, 1, 0, 0, 0, 0]), Some(WaitSet::Unknown), "a bad pointer");
        assert_eq!(of(libc::SYS_poll, [at, 1 << 40, 0, 0, 0, 0]), Some(WaitSet::Unknown));
        let bits: [u64; 2] = [1 << 3, 1 << 6 | 1 << 7];
        let at = bits.as_ptr() as u64;
        assert_eq!(of(libc::SYS_select, [71, at, 0, 0, 0, 0]), known([3, 70]), "not 71");
        let others: [u64; 2] = [1 << 5, 0];
        assert_eq!(of(libc::SYS_select, [128, 0, others.as_ptr() as u64, at, 0, 0]), known([3, 5, 70, 71]));
        let (none, mask): ([u64; 2], [u64; 2]) = ([0, 8], [at, 8]);
        assert_eq!(of(libc::SYS_pselect6, [10, at, 0, 0, 0, none.as_ptr() as u64]), known([3]));
        assert_eq!(of(libc::SYS_pselect6, [10, at, 0, 0, 0, mask.as_ptr() as u64]), Some(WaitSet::Unknown));
        assert_eq!(of(libc::SYS_read, [3, at, 8, 0, 0, 0]), None);
    }

    #[test]
    fn descriptors_are_found_in_a_call_that_was_sent_home() {
        let sent = |nr: i64, args: &[Arg]| {
            let mut all = [const { Arg::Value(0) }; 6];
            all[..args.len()].clone_from_slice(args);
            sent_descriptors(&Call { nr: nr as u32, args: all })
        };
        let bytes = |bytes: &[u8]| Arg::Bytes(bytes.to_vec().into());
        let entries = bytes(&[5, 0, 0, 0, 1, 0, 0, 0, 255, 255, 255, 255, 1, 0, 0, 0]);
        assert_eq!(sent(libc::SYS_poll, &[entries.clone(), Arg::Value(2)]), Some([5].into()));
        assert_eq!(sent(libc::SYS_ppoll, &[entries, Arg::Value(2)]), Some([5].into()));
        let sets = [Arg::Value(20), bytes(&[1 << 3, 0]), Arg::Value(0), bytes(&[0, 1 << 4])];
        assert_eq!(sent(libc::SYS_select, &sets), Some([3, 12].into()));
        assert_eq!(sent(libc::SYS_pselect6, &sets), Some([3, 12].into()));
        assert_eq!(sent(libc::SYS_poll, &[Arg::BadPointer]), Some([].into()), "it fails");
        assert_eq!(sent(libc::SYS_io_submit, &[]), None);
    }

    #[test]
    fn interrupted_wait_has_the_rest_of_its_time() {
        let call = trap(libc::SYS_poll, [1, 2, 60_000, 0, 0, 0]);
        let mut wait = NativeWait::of((call.nr, call.args), Instant::now()).unwrap();
        assert!(!wait.continues_in(&call), "another call with the same arguments");
        assert_eq!(wait.must_end_at(), None, "this kernel keeps the limit");
        wait.interrupt();
        assert!(wait.continues_in(&call));
        wait.repeat();
        assert!(wait.must_end_at().is_some() && !wait.continues_in(&call), "the next call is another one");
        wait.interrupt();
        assert!(wait.continues_in(&call));
        for other in [[1, 3, 60_000, 0, 0, 0], [1, 2, 30_000, 0, 0, 0]] {
            assert!(!wait.continues_in(&trap(libc::SYS_poll, other)));
        }
        let rest = |wait: &NativeWait| {
            let mut again = call;
            wait.limit_to_rest(&mut again);
            again.args[2]
        };
        wait.until -= Duration::from_secs(20);
        assert!((30_000..=40_000).contains(&rest(&wait)), "{}", rest(&wait));
        wait.until -= Duration::from_secs(60);
        assert_eq!(rest(&wait), 0);
        assert!(
            NativeWait::of((libc::SYS_poll as u32, [1, 2, u64::MAX, 0, 0, 0]), Instant::now()).is_none(),
            "no limit"
        );
    }

    #[test]
    fn watching_begins_when_home_and_the_worker_have_answered() {
        let mut watched = WatchedDescriptors::default();
        let message = watched.begin([4, 6].into());
        assert_eq!(message, Message::Watch(vec![4, 6]));
        assert_eq!(watched.request_all(), Some(message), "on a new link");
        let (number, count) = watched.start_opening().unwrap();
        assert!(count == 2 && watched.start_opening().is_none() && watched.is_beginning());
        assert!(!watched.receive(&[(4, Some(1)), (9, Some(1))]) && !watched.receive(&[(6, None)]));
        assert!(!watched.finish_opening(number + 1, Ok(Vec::new())), "an answer to another request");
        assert!(watched.finish_opening(number, Err(io::ErrorKind::NotFound.into())));
        assert!(watched.take_refused() && !watched.take_refused());
        assert!(watched.is_empty() && watched.request_all().is_none() && !watched.is_beginning());
    }
}
