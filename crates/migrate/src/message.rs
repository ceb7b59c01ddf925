//! The messages that two shims exchange about a process. The frame's tag is the process's pid at
//! home; in a message about one thread ([`Message::is_per_thread`]) it is that thread's number,
//! which equals the pid for the first thread.
//!
//! A message longer than a frame is split over several frames, all but the last flagged
//! [`FLAG_MORE`]. The content of pages and files follows the encoded message in the same payload
//! and is not copied.

use crate::cpu::{CpuTime, GuestDemand};
use crate::departure_failure::DepartureFailure;
use crate::names::NameNotice;
use crate::partial::Partial;
use crate::prefetch::OpenPrefetch;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tern_ids::{
    ConnectionToken, ContentHash, Credentials, Epoch, Fingerprint, HomePid, MigrationId, NodeId, SharedFile,
    ShimId,
};
use tern_image::limits::Limit;
use tern_image::node_file::NodeFile;
use tern_image::object::ObjectId;
use tern_image::{Layout, ProcessImage, Reserve};
use tern_syscall::{ByteBuf, Call, Outcome};
use tern_tracee::pagemap::Run;
use tern_wire::{Frame, Link, LinkError};

/// Frame flag: this message continues in the next frame of the same tag and kind.
pub const FLAG_MORE: u16 = 1;
/// Maximum payload of one frame, in bytes. Longer messages are split.
const MAX_FRAME: usize = 1 << 20;
/// Maximum length of a message, in bytes: a call may carry 64 MiB, plus its description.
const MAX_MESSAGE: usize = 80 << 20;

/// Asks a node to take a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// [`tern_image::VERSION`].
    pub version: u16,
    /// The migration's identifier.
    pub migration: MigrationId,
    /// Home's pid of the process.
    pub pid: HomePid,
    /// The epoch that the process would have there.
    pub epoch: Epoch,
    /// The home node.
    pub home: NodeId,
    /// The home shim. The guest's node asks home's ternd about it when the link is lost.
    pub shim: ShimId,
    /// The pid that the process itself sees.
    pub own_pid: i32,
    /// The command line, shown by `ps` on the guest's node.
    pub command: String,
    /// The address range that Tern reserved in the process.
    pub reserve: Reserve,
    /// Home's wall clock when the offer was made, in nanoseconds since 1970.
    pub wall: u64,
    /// The processor features and the vDSO that the process may rely on.
    pub machine: Machine,
}

/// The properties of a machine that a program can observe, and that the destination must also have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The CPU flags in `/proc/cpuinfo` that stand for instructions, sorted.
    pub cpu_flags: Vec<String>,
    /// The CPUID feature words ([`tern_tracee::registers::cpuid_features`]).
    pub cpuid: Vec<u32>,
    /// Length of the XSAVE area, in bytes.
    pub xstate_len: u32,
    /// The mappings that the kernel makes in each process.
    pub vdso: Vdso,
}

/// The mappings that a kernel makes in each process (vvar, vDSO).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vdso {
    /// Content of the vDSO. The program may have resolved addresses in it.
    pub code: Vec<u8>,
    /// Lengths of all these mappings, by address. The vDSO is the last.
    pub lengths: Vec<u64>,
}

/// The state of a process's calls and signals, sent with its image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct ProcessSync {
    /// One entry for each thread, in the order of the image.
    pub threads: Vec<ThreadSync>,
    /// How long the process has been frozen when this is sent, in microseconds.
    pub frozen_us: u64,
    /// Bytes of content sent for it.
    pub sent: u64,
    /// The source's wall clock when the process was stopped, in nanoseconds since 1970. The process
    /// has read no later time.
    pub wall: u64,
    /// CPU time used away from home, on all nodes.
    pub used: CpuTime,
}

/// The state of one thread's calls and signals.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct ThreadSync {
    /// Number of the last call sent home.
    pub call: u64,
    /// The result of that call has not been delivered. The next node requests it again under the
    /// same number.
    pub call_pending: bool,
    /// Number of signals received from home.
    pub signals: u64,
    /// The received signals that are not yet delivered to the program, as siginfo, in order for
    /// each signal number.
    pub pending_signals: Vec<Vec<u8>>,
    /// The restart code (-ERESTARTSYS and the like) of an interrupted call, until the call is
    /// requested again. The program is still in that call, and a signal that arrives meanwhile
    /// interrupts it.
    pub restart_code: Option<i64>,
    /// A transfer that was interrupted after a part of it. The next call transfers the rest.
    pub partial: Option<Partial>,
    /// CPU time that this thread used away from home, on all nodes.
    pub used: CpuTime,
}

/// A system call that the deputy is to perform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallRequest {
    /// The epoch that makes the call. Home performs only calls of the current one.
    pub epoch: Epoch,
    /// The thread's call number, one more for each call. A number that home has seen before is a
    /// repeated request for the same call.
    pub number: u64,
    /// Number of signals that this epoch had received when it made the call. If home has sent more,
    /// it does not perform the call: the program must see the signal first, as it would have at
    /// home.
    pub signals: u64,
    /// See [`ThreadSync::restart_code`].
    pub restart_code: Option<i64>,
    /// Pending writes, seeks and closes of delegated files, performed before the call: only
    /// `pwrite64`, `lseek` and `close`.
    pub prelude: Vec<Call>,
    /// If the call opens a file: the maximum number of bytes of its content to send with the
    /// result.
    pub max_prefetch: u32,
    /// The call.
    pub call: Call,
    /// If the call opens a file of /proc about the program's own memory: its content as seen on the
    /// guest's node, where the memory is.
    pub procfs_view: Option<ByteBuf>,
    /// If the call closes a descriptor: the shared memory whose content must be at home after that.
    pub to_publish: Vec<ObjectId>,
}

/// The result of a [`CallRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallResult {
    /// The call's number.
    pub number: u64,
    /// The kernel's return value (restart codes included) and output buffers.
    pub outcome: Outcome,
    /// After a fork or a thread's creation: the child's pid at home.
    pub child: Option<HomePid>,
    /// After an mmap of a file: what was mapped.
    pub file: Option<Mapped>,
    /// Return values of the calls of [`CallRequest::prelude`] that were performed, in order.
    pub prelude: Vec<i64>,
    /// Cache notices about open files, by descriptor.
    pub notices: Vec<(i32, FileNotice)>,
    /// After a call that may have changed them: the limits on memory that bind the process.
    pub limits: Option<Vec<Limit>>,
}

impl CallResult {
    /// A result without a child, a mapping, notices or limits.
    #[must_use]
    pub fn new(number: u64, outcome: Outcome) -> Self {
        let (prelude, notices) = (Vec::new(), Vec::new());
        Self { number, outcome, child: None, file: None, prelude, notices, limits: None }
    }
}

/// A notice about an open file, on which the guest's cache of the file depends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileNotice {
    /// The file is delegated: no other process has this open file description, so the guest may
    /// read ahead and write behind.
    Delegated(FileDelegation),
    /// Data read ahead is still valid. Not sent for the file that this very call has read, nor for
    /// a file changed so recently that another change could get the same time stamp.
    Unchanged,
    /// The file was changed by another process: data read ahead is stale.
    Changed,
    /// The delegated file, which home sees through MFS, is stored on the guest's own node, where
    /// the guest can open it.
    LocalFile(NodeFile),
    /// The delegation is to be returned: the file system is nearly full, so that a delayed write
    /// might fail.
    Recalled,
    /// Attributes and first bytes of the delegated file that this very call opened.
    Prefetched(Box<OpenPrefetch>),
    /// The delegated file is read only and on a file system that home declares as shared. A node
    /// that declares the same file system can open it there, and read it while home reports it
    /// unchanged.
    Shared(Box<SharedFileRef>),
    /// The descriptor is a TCP connection that only this process uses. The guest's node may take it
    /// from home under this token (docs/design/connections.md).
    Connection(ConnectionToken),
    /// The descriptor is an epoll set that only this process uses, with these members. One of them is
    /// the connection that is offered with it.
    EpollSet(Vec<EpollMember>),
}

/// A member of an epoll set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpollMember {
    /// The descriptor under which it was added, which still refers to it.
    pub fd: i32,
    /// Events and flags (epoll_ctl(2)).
    pub events: u32,
    /// The program's data.
    pub data: u64,
}

/// A file on a file system that nodes share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedFileRef {
    /// The mount directory that home declares as shared.
    pub root: ByteBuf,
    /// The path below it, with symbolic links resolved.
    pub path: ByteBuf,
    /// The file's identity as home sees it.
    pub file: SharedFile,
    /// The credentials of the process that has it open.
    pub credentials: Credentials,
}

/// Maximum length of a transfer on a delegated file that the guest performs. Longer ones are
/// forwarded: caching gains nothing.
pub const MAX_DELEGATED_IO: u64 = 128 << 10;

/// A file delegation. Only one process has this open file description, and its guest caches the
/// file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDelegation {
    /// Device and inode at home.
    pub id: (u64, u64),
    /// The file offset.
    pub offset: u64,
    /// Opened for reading.
    pub can_read: bool,
    /// Opened for writing.
    pub can_write: bool,
    /// The process opened the file while it was away, and the file system is home's own, so no
    /// other machine can change the file without home's kernel. Some calls on the file then need
    /// not go home, such as its close.
    pub is_home_local: bool,
}

/// The object behind a mapping that home made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mapped {
    /// A file, or shared memory that is new or that the guest's node has already.
    File(tern_image::FileRef),
    /// A file that becomes shared memory of the process, with its content: pieces, and the offset of
    /// each. The rest is zeroes.
    Shared(tern_image::FileRef, Vec<(u64, ByteBuf)>),
    /// Zeroes: the program mapped /dev/zero.
    Zero,
}

/// A message between shims.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// home → guest: home's monotonic and boot clocks, in nanoseconds. Answered by a
    /// [`Message::Heartbeat`].
    Clocks([u64; 2]),
    /// home → guest: asks the node to take a process.
    Offer(Box<Offer>),
    /// guest → home: the offer is accepted. The answers to an offer repeat its epoch, since an
    /// earlier offer of the same process may have been withdrawn meanwhile. The flag says whether
    /// the node can mount files of home for its guests.
    Accepted(Epoch, bool),
    /// guest → home: the offer is declined, with the reason.
    Declined(Epoch, String),
    /// sender → receiver: the address space to build.
    Space(Box<Layout>),
    /// receiver → sender: indices of the files whose content the receiver needs.
    RequestFiles(Epoch, Vec<u32>),
    /// sender → receiver, followed by a piece of a file's content.
    File {
        /// Index in the last layout.
        file: u32,
        /// Offset of the piece in the file.
        offset: u64,
    },
    /// sender → receiver, followed by a piece of shared memory. All processes that share it are
    /// stopped.
    Object {
        /// Index in the last layout.
        file: u32,
        /// Offset of the piece in the object.
        offset: u64,
    },
    /// sender → receiver: a range of shared memory that is zero.
    Hole {
        /// Index in the last layout.
        file: u32,
        /// Offset of the range.
        offset: u64,
        /// Length of the range, in bytes.
        length: u64,
    },
    /// sender → receiver, followed by the content of these pages.
    Pages(Vec<Run>),
    /// sender → receiver: these pages have no content any more.
    DiscardPages(Vec<Run>),
    /// sender → receiver: the rest of the process, which is frozen.
    Image(Box<ProcessImage>, ProcessSync),
    /// receiver → home: the process can be resumed here. With the number of bytes sent for it, as
    /// reported by the sender: home does not see the traffic of a journey Onward.
    Ready(Epoch, u64),
    /// home → guest: resume the process in this epoch.
    Go(Epoch),
    /// home → guest: resume these processes, which share memory, each in its epoch: all or none.
    GoGroup(Vec<(HomePid, Epoch)>),
    /// guest → home: the process runs. With the total time that it was frozen, in microseconds.
    Running(Epoch, u64),
    /// home → guest: send the process away.
    Depart(Departure),
    /// guest → home: the messages about the process from here on belong to this departure. Those
    /// before it may belong to an earlier departure that was aborted.
    Departing(MigrationId),
    /// guest → next guest, first message of a link: the link transfers the process for this epoch,
    /// which home has offered. A link of an earlier, aborted departure may still deliver messages
    /// for another epoch.
    TransferFor(Epoch),
    /// guest → home: the departure failed. The process runs on.
    DepartureFailed(DepartureFailure),
    /// home → guest: the process runs elsewhere now; end the local copy.
    Drop,
    /// home → guest: the migration failed; resume the local copy.
    Thaw,
    /// guest → home, per thread: a call to perform.
    Call(Box<CallRequest>),
    /// home → guest, per thread: the result of a call.
    Result(Box<CallResult>),
    /// home → guest, per thread: the calls of [`CallRequest::prelude`] of the call with this number
    /// have returned these values. The call itself is still pending.
    PreludeDone(u64, Vec<i64>),
    /// home → guest, per thread: the thread's deputy has exited, as the program requested. The
    /// guest's thread, which waits for this, may exit too.
    ThreadExited,
    /// home → guest, per thread: a signal that home's kernel delivered to this thread, with its
    /// number in the thread's count and its siginfo.
    Signal(u64, Vec<u8>),
    /// home → guest: job control: stop (true) or continue.
    Stop(bool),
    /// guest → home, per thread: the program was killed by this signal, which this thread raised on
    /// the guest's node. Home answers the first report of a core-dumping signal with `Depart`,
    /// since the core is dumped at home. A second report states that this process cannot depart.
    KilledBySignal(i32),
    /// guest → home: the guest's node killed the program, with the reason.
    KilledByNode(String),
    /// guest → home, per thread: this thread needs something that only home can do; fetch the
    /// process home. With the reason.
    FetchHome(String),
    /// guest → home, per thread: request for the content of a file that the thread's deputy has
    /// just mapped.
    RequestContent(ContentHash),
    /// home → guest, per thread, followed by a piece of content that was requested by
    /// [`Message::RequestContent`].
    Content {
        /// The file's hash.
        hash: ContentHash,
        /// Offset of the piece in the file.
        offset: u64,
    },
    /// home → guest, per thread: the content that was requested by [`Message::RequestContent`] cannot
    /// be read.
    NoContent(ContentHash),
    /// guest → home, on a new link, once for each thread, and for the first thread last: the
    /// process is here in this epoch. With the number of signals that the thread has received.
    Reattach(Epoch, u64),
    /// guest → home, per thread: the thread's signal mask after a signal handler returned.
    Mask(u64),
    /// Heartbeat.
    Heartbeat,
    /// guest → home: CPU time that the process used away, summed over all nodes, and its other
    /// demands on this node.
    Usage(CpuTime, GuestDemand),
    /// guest → home, per thread: CPU time that the thread used away, summed over all nodes.
    ThreadUsage(CpuTime),
    /// home → guest: report the process's usage as soon as its CPU time away, summed over all
    /// nodes, reaches this many nanoseconds; `None` cancels.
    WatchUsage(Option<u64>),
    /// home → guest, per thread: as [`Message::WatchUsage`], for the CPU time of this thread.
    WatchThreadUsage(Option<u64>),
    /// sender → receiver, before an address space: the numbers of the process's threads other than
    /// the first, as the process sees them. The receiver can create them while the process still
    /// runs at the source.
    Threads(Vec<i32>),
    /// guest → home, per thread: acknowledges this many signals. Sent for a thread that may make no
    /// call for long, and when handlers of timers' signals have returned: the second is the set of
    /// their numbers. Home then sends the next signals of these numbers.
    SignalAck(u64, u64),
    /// home → guest: a notice about cached names. Sent before any message by which a program on
    /// that node could learn of the change, such as the result of the call that made it.
    Names(NameNotice),
    /// guest → home: report the readiness of these descriptors, from now until they are closed. The
    /// guest waits for them together with files of its node.
    Watch(Vec<i32>),
    /// home → guest: the readiness of watched descriptors, in events of poll(2), or none if it cannot
    /// be reported. Sent once for each descriptor after [`Message::Watch`], then for each event, and
    /// for each change that a call has made before the call's result.
    Readiness(Vec<(i32, Option<u32>)>),
    /// home → guest: home's tern-net has given up the connection that was offered under this
    /// descriptor.
    ConnectionLost(i32),
    /// guest → home: no process of the family maps these pieces of anonymous shared memory any more
    /// (device and inode at home). Their content is gone.
    Unmapped(Vec<(u64, u64)>),
    /// guest → home, per thread: the kernel of the guest's node has refused to create this child or
    /// thread. Home removes its half without a trace. Sent again on a new link until
    /// [`Message::CreationUndone`] arrives.
    NotCreated,
    /// home → guest: home's half of this child or thread, which the guest's node could not create,
    /// is gone.
    CreationUndone,
}

/// The destination of a guest's departure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// Home, over the link on which this arrives.
    Home {
        /// The migration's identifier.
        migration: MigrationId,
        /// The processes that share memory with it, itself included. All of them are stopped before
        /// its image is sent.
        group: Vec<HomePid>,
    },
    /// To another guest shim.
    Onward {
        /// The epoch that the process will have there.
        epoch: Epoch,
        /// Address of that node's ternd.
        address: String,
        /// The shim there.
        shim: ShimId,
        /// Fingerprint of that shim's key.
        fingerprint: Fingerprint,
    },
}

impl Message {
    /// Whether the tag names a thread instead of the process. Messages about the content of a
    /// mapped file name a thread too: the one that made the mapping waits for the content.
    #[must_use]
    pub fn is_per_thread(&self) -> bool {
        matches!(
            self,
            Self::Call(_)
                | Self::Result(_)
                | Self::PreludeDone(..)
                | Self::ThreadExited
                | Self::Signal(..)
                | Self::KilledBySignal(_)
                | Self::FetchHome(_)
                | Self::RequestContent(_)
                | Self::Content { .. }
                | Self::NoContent(_)
                | Self::Reattach(..)
                | Self::Mask(_)
                | Self::ThreadUsage(_)
                | Self::WatchThreadUsage(_)
                | Self::SignalAck(..)
                | Self::NotCreated
        )
    }

    /// Estimated encoded size in bytes. The data of a call makes up most of it.
    fn size(&self) -> usize {
        const SHORT_LEN: usize = 256;
        let outs = |outs: &[ByteBuf]| outs.iter().map(|out| out.len() + 8).sum::<usize>();
        let call_size = |call: &Call| SHORT_LEN + call.data_len() as usize;
        match self {
            Self::Call(request) => {
                call_size(&request.call) + request.prelude.iter().map(call_size).sum::<usize>()
            }
            Self::Result(result) => SHORT_LEN + outs(&result.outcome.outs),
            Self::Names(NameNotice::Listed(listing)) => SHORT_LEN + SHORT_LEN / 2 * listing.entries.len(),
            _ => SHORT_LEN,
        }
    }

    fn kind(&self) -> u8 {
        // For logs, and to distinguish messages followed by bytes. The payload identifies the
        // message.
        match self {
            Self::Pages(_) => 1,
            Self::File { .. } | Self::Content { .. } | Self::Object { .. } => 2,
            _ => 0,
        }
    }
}

/// While more than this many bytes are unsent, the next message waits: a call carries up to 64 MiB,
/// and several threads may make such calls at once.
const MAX_UNSENT: usize = 32 << 20;

/// Time in which the peer must accept some of the unsent bytes. After that the link counts as lost.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Queues a message, followed by `bytes` if its kind has any. Waits first while too much is unsent.
/// `tag` is the process or thread that the message is about; 0 for a heartbeat.
///
/// # Errors
/// Those of the link. The peer may then have received a part of the message, which it discards.
pub fn send(link: &mut Link, tag: HomePid, message: &Message, bytes: &[u8]) -> Result<(), LinkError> {
    while link.unsent() > MAX_UNSENT {
        let before = link.unsent();
        match link.drain(Instant::now() + SEND_TIMEOUT) {
            Err(LinkError::Timeout) if link.unsent() < before => {}
            done => done?,
        }
    }
    let mut buffer = Vec::with_capacity(message.size());
    buffer.extend([0; 4]);
    let mut head =
        postcard::serialize_with_flavor(message, VecFlavor(buffer)).map_err(|_e| LinkError::Closed)?;
    let length = (head.len() - 4) as u32;
    head[..4].copy_from_slice(&length.to_le_bytes());
    let tag = u64::from(tag.0.cast_unsigned());
    let kind = message.kind();
    if head.len() + bytes.len() <= MAX_FRAME {
        return link.queue(kind, tag, &[&head, bytes]);
    }
    let whole = head.chunks(MAX_FRAME).chain(bytes.chunks(MAX_FRAME));
    let count = whole.clone().count();
    for (at, piece) in whole.enumerate() {
        let flags = if at + 1 < count { FLAG_MORE } else { 0 };
        link.queue_flagged(kind, flags, tag, &[piece])?;
    }
    Ok(())
}

/// A postcard output that appends whole slices, since messages carry long buffers.
struct VecFlavor(Vec<u8>);

impl postcard::ser_flavors::Flavor for VecFlavor {
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

/// A received message.
#[derive(Debug)]
pub struct ReceivedMessage {
    /// The frame's tag: the process or thread that the message is about; 0 for a heartbeat.
    pub tag: HomePid,
    /// The message.
    pub message: Message,
    /// The whole payload. The bytes that follow the message begin at `rest`.
    payload: Vec<u8>,
    rest: usize,
}

impl ReceivedMessage {
    /// The bytes that follow the message.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.payload.get(self.rest..).unwrap_or_default()
    }
}

/// Reassembles messages from frames.
#[derive(Debug, Default)]
pub struct Reassembler {
    partial: HashMap<(u64, u8), Vec<u8>>,
    /// Buffer of the last message's payload, if it can be reused.
    spare: Vec<u8>,
}

/// A received payload is not a valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent an invalid message")]
pub struct InvalidMessage;

impl Reassembler {
    /// The payload buffer of the message returned last, if it is free: for the link to fill again
    /// ([`Link::recycle`]).
    pub fn spare(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.spare)
    }

    /// Takes a frame, and returns the message that it completes.
    ///
    /// # Errors
    /// If it is not a valid message. The caller closes the link.
    pub fn take(&mut self, frame: Frame) -> Result<Option<ReceivedMessage>, InvalidMessage> {
        let key = (frame.tag, frame.kind);
        let tag = i32::try_from(frame.tag).map_err(|_e| InvalidMessage)?;
        let mut payload = frame.payload;
        if let Some(mut before) = self.partial.remove(&key) {
            before.extend_from_slice(&payload);
            payload = before;
        }
        let held: usize = self.partial.values().map(Vec::len).sum();
        if payload.len() + held > MAX_MESSAGE {
            return Err(InvalidMessage);
        }
        if frame.flags & FLAG_MORE != 0 {
            self.partial.insert(key, payload);
            return Ok(None);
        }
        let (length, body) = payload.split_first_chunk::<4>().ok_or(InvalidMessage)?;
        let length = u32::from_le_bytes(*length) as usize;
        let message = decode(body.get(..length).ok_or(InvalidMessage)?)?;
        // The buffer of a message that was split over many frames is too large to keep.
        if body.len() == length && payload.capacity() <= 2 * MAX_FRAME {
            self.spare = std::mem::take(&mut payload);
        }
        Ok(Some(ReceivedMessage { tag: HomePid(tag), message, rest: 4 + length, payload }))
    }
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, InvalidMessage> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        _ => Err(InvalidMessage),
    }
}
