//! What two shims say to each other about one process. The frame's tag is its pid at home; in what concerns one
//! thread ([`Message::is_of_a_thread`]) that thread's number, which for the first one is the same.
//!
//! A message longer than a frame is cut into several, all but the last flagged [`MORE`]. Bytes of pages and
//! files follow their description within the same message, uncopied.

use crate::cpu::{CpuTime, Demand};
use crate::names::NameWord;
use crate::opened::Beginning;
use crate::partial::Partial;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tern_ids::{ContentHash, Epoch, Fingerprint, HomePid, MigrationId, NodeId, SharedFile, ShimId};
use tern_image::place::Place;
use tern_image::{Layout, ProcessImage, Reserve};
use tern_syscall::{ByteBuf, Call, Outcome};
use tern_tracee::pagemap::Run;
use tern_wire::{Frame, Link, LinkError};

/// More of this message follows in the next frame of this tag and kind.
pub const MORE: u16 = 1;
/// A frame's payload is cut at this many bytes.
const CUT: usize = 1 << 20;
/// The longest message: a call may carry 64 MiB, and what describes it.
pub const MOST_MESSAGE: usize = 80 << 20;

/// Asks a node to take a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// [`tern_image::VERSION`].
    pub version: u16,
    /// The migration.
    pub migration: MigrationId,
    /// The process, as home numbers it.
    pub pid: HomePid,
    /// The life that the process would begin there.
    pub epoch: Epoch,
    /// Its home.
    pub home: NodeId,
    /// Home's shim, for asking that node about it when the link is lost.
    pub shim: ShimId,
    /// Its pid as it sees it itself.
    pub own_pid: i32,
    /// Its command line, for `ps` there.
    pub command: String,
    /// Our range in it.
    pub reserve: Reserve,
    /// Home's wall clock now, in nanoseconds.
    pub wall: u64,
    /// What the process may have found out about its processor, and the vDSO that it has.
    pub machine: Machine,
}

/// What of a machine a process can see, and must find again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's features that are instructions, as the kernel lists them, sorted.
    pub cpu_flags: Vec<String>,
    /// What the CPUID instruction tells of them ([`tern_tracee::registers::cpuid_features`]).
    pub cpuid: Vec<u32>,
    /// Length of the extended register area.
    pub xstate_len: u32,
    /// The kernel's own mappings.
    pub vdso: Vdso,
}

/// What a kernel maps into each program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vdso {
    /// The vDSO, whose functions the program may have found.
    pub code: Vec<u8>,
    /// The lengths of all that the kernel maps, in order of address; the vDSO is the last.
    pub lengths: Vec<u64>,
}

/// State of calls and signals that travels with a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Conversation {
    /// Of each thread, in the order of its image.
    pub talks: Vec<Talk>,
    /// How long the process has stood still by the time this is sent, in microseconds.
    pub frozen_us: u64,
    /// How many bytes of content were sent for it.
    pub sent: u64,
    /// The wall clock where it was stopped, when it was, in nanoseconds: it has read no later one.
    pub wall: u64,
    /// CPU time that it has used away, on all nodes.
    pub used: CpuTime,
}

/// State of calls and signals of one thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Talk {
    /// Number of the last call that was sent home.
    pub call: u64,
    /// Whether that call's result has not been delivered: it is asked for again under the same number.
    pub call_open: bool,
    /// How many signals have been taken over from home.
    pub signals: u64,
    /// Those among them that it has not been delivered yet, as siginfo, in order for each number.
    pub carried: Vec<Vec<u8>>,
    /// The restart code with which the program's call was interrupted where it was being made, if it has not been asked
    /// for since: the program is in that call, and a signal that comes meanwhile interrupts it.
    pub resumes: Option<i64>,
    /// A transfer of which a part was done when an interruption cut it short; its rest is the call that comes
    /// first.
    pub partial: Option<Partial>,
    /// CPU time that this thread has used away, on all nodes.
    pub used: CpuTime,
}

/// A system call to be performed by the deputy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallRequest {
    /// Which life makes it; home performs only the current one's.
    pub epoch: Epoch,
    /// Counts up by one a call. A number that home has seen before is the same call asked for again.
    pub number: u64,
    /// How many signals this life had taken over when it made the call. If home has sent more, the call is
    /// not performed: the program must see the signal first, as it would have at home.
    pub signals: u64,
    /// See [`Talk::resumes`].
    pub resumes: Option<i64>,
    /// Writes to files in hand, offsets of theirs, and their ends, that come first: only `pwrite64`, `lseek` and `close`.
    pub before: Vec<Call>,
    /// If it opens a file: so many bytes of that may come with it.
    pub brings: u32,
    /// The call.
    pub call: Call,
    /// If it opens a file of /proc about the program's own memory: what that shows where the memory is.
    pub view: Option<ByteBuf>,
}

/// Its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallResult {
    /// The call's number.
    pub number: u64,
    /// What the kernel returned (restart codes included) and wrote.
    pub outcome: Outcome,
    /// After a fork: the child as home numbers it; so too a new thread.
    pub child: Option<HomePid>,
    /// After a mapping of a file: what was mapped.
    pub file: Option<Mapped>,
    /// What those calls returned that were to be made before it, as far as they were made.
    pub before: Vec<i64>,
    /// What is to be known of open files, by their descriptors.
    pub files: Vec<(i32, FileWord)>,
}

impl CallResult {
    /// The result of a call of which there is nothing else to say.
    #[must_use]
    pub fn new(number: u64, outcome: Outcome) -> Self {
        Self { number, outcome, child: None, file: None, before: Vec::new(), files: Vec::new() }
    }
}

/// What home says of an open file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileWord {
    /// Nobody but this process has this open file: it may read ahead and write behind where it runs.
    InHand(InHand),
    /// What was read of it is what it is. Of what this very call has read: and not of the moment in which that may change
    /// unnoticed.
    Steady,
    /// It has been changed by somebody: what was read ahead is old.
    Changed,
    /// The file in hand is this node's own, which home sees through MFS: there it can be opened itself.
    Near(Place),
    /// The file in hand, which this very call has opened, begins so.
    Begins(Box<Beginning>),
    /// The file in hand, which is only read, is on a file system that home declares as shared: there it can be opened on another node that
    /// declares it too, and read as long as home says that it is steady.
    Shared(Box<SharedPlace>),
}

/// A file of a file system that nodes share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPlace {
    /// The directory that home declares.
    pub root: ByteBuf,
    /// The path below it, without links.
    pub path: ByteBuf,
    /// As home sees it.
    pub file: SharedFile,
    /// Who has it open: user, group, and his other groups.
    pub who: (u32, u32, Vec<u32>),
}

/// Transfers of more bytes than this are made at home also on files in hand: they gain nothing.
pub const MOST_IN_HAND: u64 = 128 << 10;

/// An open file that only one process has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InHand {
    /// Its file, by device and inode at home.
    pub id: (u64, u64),
    /// Where it is read and written next.
    pub offset: u64,
    /// It may be read.
    pub reads: bool,
    /// It may be written.
    pub writes: bool,
    /// Its file system is that of home's own kernel: nobody else has a part in its end.
    pub local: bool,
}

/// What is behind a mapping that home has made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mapped {
    /// A file.
    File(tern_image::FileRef),
    /// Nothing: it was /dev/zero.
    Zero,
}

/// All messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// home → guest: what home's monotonic and boot clocks show, in nanoseconds. Answered by a [`Message::Beat`].
    Clocks([u64; 2]),
    /// home → guest
    Offer(Box<Offer>),
    /// guest → home: it may come. Answers to an offer name the life that was offered: an earlier offer of the
    /// same process may have been withdrawn meanwhile.
    /// (Whether the node can show its guests files of their home.)
    Accepted(Epoch, bool),
    /// guest → home: it may not; why.
    Declined(Epoch, String),
    /// sender → receiver: the address space to build.
    Space(Box<Layout>),
    /// receiver → sender: indices of files whose content is wanted.
    Want(Epoch, Vec<u32>),
    /// sender → receiver: a piece of a file's content follows.
    File {
        /// Index in the last layout.
        file: u32,
        /// Where the piece belongs.
        offset: u64,
    },
    /// sender → receiver: a piece of shared memory, which everybody has left alone by now, follows.
    Object {
        /// Index in the last layout.
        file: u32,
        /// Where the piece belongs.
        offset: u64,
    },
    /// sender → receiver: this part of shared memory is zero.
    Hole {
        /// Index in the last layout.
        file: u32,
        /// Where it begins.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// sender → receiver: the content of these pages follows.
    Pages(Vec<Run>),
    /// sender → receiver: these pages hold nothing.
    Forget(Vec<Run>),
    /// sender → receiver: the rest; the process stands still.
    Image(Box<ProcessImage>, Conversation),
    /// receiver → home: the process could be resumed here. How many bytes were sent for it, as its sender said: of a
    /// journey onward home does not know.
    Ready(Epoch, u64),
    /// home → guest: resume it, as this life.
    Go(Epoch),
    /// home → guest: resume these, which share memory, as these lives: all of them or none.
    GoTogether(Vec<(HomePid, Epoch)>),
    /// guest → home: it runs, after it has stood still for so many microseconds in all.
    Running(Epoch, u64),
    /// home → guest: send the process away.
    Depart(Departure),
    /// guest → home: what comes of the process from here on is of this departure. What is still under way of an earlier one,
    /// which was called off, comes before.
    Departing(MigrationId),
    /// guest → next guest, first of all: what comes on this link is for this life, as home has offered it. A link of an
    /// earlier departure, of which something is still under way, was for another.
    Brings(Epoch),
    /// guest → home: it did not go; why. It runs on.
    Stayed(String),
    /// home → guest: the process is elsewhere now; end your copy.
    Drop,
    /// home → guest: it did not work out; let your copy run on.
    Thaw,
    /// guest → home, of a thread
    Call(Box<CallRequest>),
    /// home → guest, of a thread
    Result(Box<CallResult>),
    /// home → guest: the calls that were to be made before this thread's call of this number have been, and returned this;
    /// it is still being made itself.
    Before(u64, Vec<i64>),
    /// home → guest: this thread's deputy has ended, as its program asked and is waiting for: it may end there too.
    ThreadEnded,
    /// home → guest: a signal for this thread, or which home's kernel has given to it: its number in the thread's
    /// count, and its siginfo.
    Signal(u64, Vec<u8>),
    /// home → guest: stand still (job control), or go on.
    Stop(bool),
    /// guest → home: the program was killed by this signal, raised by this thread there.
    Died(i32),
    /// guest → home: its node has ended the program; why.
    PutDown(String),
    /// guest → home: this thread needs something that only home has; fetch its process home, and why.
    FetchHome(String),
    /// guest → home: the content of this file is wanted, for a mapping that this thread's deputy has just made.
    WantContent(ContentHash),
    /// home → guest: a piece of it follows.
    Content {
        /// The file's hash.
        hash: ContentHash,
        /// Where the piece belongs.
        offset: u64,
    },
    /// guest → home, on a new link, of each thread, the first one last: this life is here, and it has taken over so
    /// many signals.
    Present(Epoch, u64),
    /// guest → home: this thread's signal mask is this now, since a handler has returned.
    Mask(u64),
    /// Nothing; shows that the link is alive.
    Beat,
    /// guest → home: CPU time that the process has used away, on all nodes, and what else it asks of this one.
    Used(CpuTime, Demand),
    /// guest → home: the same of one thread.
    ThreadUsed(CpuTime),
    /// home → guest: say what the process has used as soon as that is so much, in nanoseconds on all nodes; or do not any
    /// more.
    Watch(Option<u64>),
    /// home → guest: the same of one thread.
    WatchThread(Option<u64>),
    /// sender → receiver, before an address space: the numbers, as they see them, of the threads that the process has now
    /// besides its first one. They can be made while it still runs.
    Crew(Vec<i32>),
    /// guest → home, of a thread that may make no call for long: it has taken over so many signals.
    Heard(u64),
    /// home → guest: what is to be known of names. What follows on this link may be the answer to whoever has changed something, and comes later.
    Names(NameWord),
}

/// Where a guest is to go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// Home, over the link on which this arrives.
    Home {
        /// The migration.
        migration: MigrationId,
        /// With whom it shares memory, itself among them: they stand still together before its image is sent.
        together: Vec<HomePid>,
    },
    /// To another guest shim.
    Onward {
        /// The life that it is to have there.
        life: Epoch,
        /// That node's daemon.
        address: String,
        /// The shim there.
        shim: ShimId,
        /// Its key.
        fingerprint: Fingerprint,
    },
}

impl Message {
    /// Whether the tag names a thread and not the process. One that is about the content of a mapped file does: the
    /// thread that maps it waits for it.
    #[must_use]
    pub fn is_of_a_thread(&self) -> bool {
        matches!(
            self,
            Self::Call(_)
                | Self::Result(_)
                | Self::Before(..)
                | Self::ThreadEnded
                | Self::Signal(..)
                | Self::Died(_)
                | Self::FetchHome(_)
                | Self::WantContent(_)
                | Self::Content { .. }
                | Self::Present(..)
                | Self::Mask(_)
                | Self::ThreadUsed(_)
                | Self::WatchThread(_)
                | Self::Heard(_)
        )
    }

    /// About so many bytes it takes: what a call carries is most of it.
    fn size(&self) -> usize {
        const SHORT: usize = 256;
        let outs = |outs: &[ByteBuf]| outs.iter().map(|out| out.len() + 8).sum::<usize>();
        let carried = |call: &Call| SHORT + call.carries() as usize;
        match self {
            Self::Call(request) => carried(&request.call) + request.before.iter().map(carried).sum::<usize>(),
            Self::Result(result) => SHORT + outs(&result.outcome.outs),
            Self::Names(NameWord::Listed(listing)) => SHORT + SHORT / 2 * listing.names.len(),
            _ => SHORT,
        }
    }

    fn kind(&self) -> u8 {
        // Only for logs and for telling messages with bytes behind them; the payload says what it is.
        match self {
            Self::Pages(_) => 1,
            Self::File { .. } | Self::Content { .. } | Self::Object { .. } => 2,
            _ => 0,
        }
    }
}

/// With more than this waiting to leave, the next message waits as well: a call carries up to 64 MiB, and several
/// threads may make such calls at once.
const CROWDED: usize = 32 << 20;

/// How long it waits; whoever takes nothing for so long has lost the link.
const PATIENCE: Duration = Duration::from_secs(5);

/// Queues a message, with bytes behind it where its kind has some. Waits first if very much is on its way already.
///
/// # Errors
/// Those of the link; the message may then have arrived in part, which is as good as not at all.
pub fn send(link: &mut Link, pid: HomePid, message: &Message, bytes: &[u8]) -> Result<(), LinkError> {
    while link.unsent() > CROWDED {
        let before = link.unsent();
        match link.drain(Instant::now() + PATIENCE) {
            Err(LinkError::Timeout) if link.unsent() < before => {}
            done => done?,
        }
    }
    let mut room = Vec::with_capacity(message.size());
    room.extend([0; 4]);
    let mut head = postcard::serialize_with_flavor(message, Room(room)).map_err(|_e| LinkError::Closed)?;
    let length = (head.len() - 4) as u32;
    head[..4].copy_from_slice(&length.to_le_bytes());
    let tag = u64::from(pid.0.cast_unsigned());
    let kind = message.kind();
    if head.len() + bytes.len() <= CUT {
        return link.queue(kind, tag, &[&head, bytes]);
    }
    let whole = head.chunks(CUT).chain(bytes.chunks(CUT));
    let count = whole.clone().count();
    for (at, piece) in whole.enumerate() {
        let flags = if at + 1 < count { MORE } else { 0 };
        link.queue_flagged(kind, flags, tag, &[piece])?;
    }
    Ok(())
}

/// Where a message is written, a piece at a time: what it carries is long.
struct Room(Vec<u8>);

impl postcard::ser_flavors::Flavor for Room {
    type Output = Vec<u8>;

    fn try_extend(&mut self, data: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(data);
        Ok(())
    }

    fn try_push(&mut self, data: u8) -> postcard::Result<()> {
        self.0.push(data);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}

/// A message that has arrived.
#[derive(Debug)]
pub struct Arrived {
    /// About whom.
    pub pid: HomePid,
    /// The message.
    pub message: Message,
    /// The whole payload; the bytes behind the message begin at `rest`.
    payload: Vec<u8>,
    rest: usize,
}

impl Arrived {
    /// The bytes behind the message.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.payload.get(self.rest..).unwrap_or_default()
    }
}

/// Puts messages together from frames.
#[derive(Debug, Default)]
pub struct Inbox {
    partial: HashMap<(u64, u8), Vec<u8>>,
    /// The payload of the last message, if nobody wants it any more.
    spare: Vec<u8>,
}

/// The peer sent what is no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent something that is no message")]
pub struct NoMessage;

impl Inbox {
    /// The payload of the message that was given last, if that has no more use for it: for the link to fill again
    /// ([`Link::recycle`]).
    pub fn spare(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.spare)
    }

    /// Takes a frame; gives the message that it completes.
    ///
    /// # Errors
    /// If it is no message. The link is to be closed then.
    pub fn take(&mut self, frame: Frame) -> Result<Option<Arrived>, NoMessage> {
        let key = (frame.tag, frame.kind);
        let pid = i32::try_from(frame.tag).map_err(|_e| NoMessage)?;
        let mut payload = frame.payload;
        if let Some(mut before) = self.partial.remove(&key) {
            before.extend_from_slice(&payload);
            payload = before;
        }
        let held: usize = self.partial.values().map(Vec::len).sum();
        if payload.len() + held > MOST_MESSAGE {
            return Err(NoMessage);
        }
        if frame.flags & MORE != 0 {
            self.partial.insert(key, payload);
            return Ok(None);
        }
        let (length, body) = payload.split_first_chunk::<4>().ok_or(NoMessage)?;
        let length = u32::from_le_bytes(*length) as usize;
        let message = decode(body.get(..length).ok_or(NoMessage)?)?;
        // One that was put together of many is too much to keep.
        if body.len() == length && payload.capacity() <= 2 * CUT {
            self.spare = std::mem::take(&mut payload);
        }
        Ok(Some(Arrived { pid: HomePid(pid), message, rest: 4 + length, payload }))
    }
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, NoMessage> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        _ => Err(NoMessage),
    }
}
