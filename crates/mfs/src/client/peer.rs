//! One node, seen from here: the lanes to it, and whether it answers.
//!
//! Who calls takes a lane that nobody uses, or makes another one, or waits. He asks and waits for the answer himself: so no
//! thread is between the program and the other node's, and as many calls are under way as there are lanes. If the connection
//! breaks he connects again and asks under the same number until the time is over; after that the node is lost, and calls
//! fail at once until it answers again, which one caller a second may find out.

mod ear;

use super::belief::Forgetting;
use super::lasting::Term;
use super::owed::{Owed, Part};
use super::sound::{Wanted, brought};
use super::unsaved::Boot;
use crate::message::{ANSWER, ASK, Answer, Ask, Caller, Deed, Object, Purpose, Release, Step, VERSION};
use crate::{keep_alive, lock, packing, send};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_node::map::Map;
use tern_wire::{ClientTls, FrameError, Identity, Link, LinkError, Preamble};

/// How many lanes there are to one node.
const MOST_LANES: u16 = 16;

/// The numbers of the lanes on which it is looked whether the node is there, and on which it asks leases back.
const LOOKING: u16 = MOST_LANES;
const EAR: u16 = MOST_LANES + 1;

/// How often who waits for an answer looks whether the node is there at all.
pub(crate) const LOOK: Duration = Duration::from_secs(2);

/// How long a lost node is not asked.
const REST: Duration = Duration::from_secs(1);

/// What an answer brought.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) answer: Answer,
    /// In which boot of the node's machine it was given.
    pub(crate) boot: Boot,
    /// How many leases had been asked back by then.
    told: u64,
    frame: Vec<u8>,
    from: usize,
}

impl Heard {
    /// What was read.
    pub(crate) fn data(&self) -> &[u8] {
        self.frame.get(self.from..).unwrap_or_default()
    }
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unheard {
    /// The server says so.
    Errno(Errno),
    /// The server holds the object or the file no more.
    Forgotten,
    /// A step leads elsewhere by now.
    Elsewhere,
}

impl From<Errno> for Unheard {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// What all peers of a mounted tree have in common.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) identity: Identity,
    pub(crate) map: std::path::PathBuf,
    /// This mount's, for as long as it lasts.
    pub(crate) session: [u8; 16],
    /// How long a call waits for a node that is lost.
    pub(crate) patience: Duration,
    /// What the tree is for: that of a room goes by lasting leases ([`super::lasting`]).
    pub(crate) purpose: Purpose,
    /// The way to have the kernel forget.
    pub(crate) forgetting: Forgetting,
}

#[derive(Debug)]
struct Lane {
    number: u16,
    /// How many calls it has made.
    count: u64,
    /// The last of them whose answer nobody waits for any more, and whether the server has still to be told.
    given_up: u64,
    untold: bool,
    /// With the boot of the machine at the other end.
    link: Option<(Link, Boot)>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Lane>,
    /// How many wait for one. Nobody else need be woken, which is a system call even if nobody is there.
    waiting: usize,
    /// Lanes that there are.
    made: u16,
    /// The last sign of life, and until when it is not asked.
    seen: Option<Instant>,
    lost_until: Option<Instant>,
    /// The session was new to the server so often: what it held before is gone.
    epoch: u64,
    /// The boot of its machine by that machine's word, and by ours.
    boot: (String, Boot),
}

/// What is asked, until there is an answer.
#[allow(clippy::large_enum_variant, reason = "one at a time, on its thread's stack")]
enum Asking<'a> {
    /// With what goes besides.
    Deed(Caller, Vec<Step>, Deed, Part),
    Other(&'a Ask),
}

/// One node.
#[derive(Debug)]
pub(crate) struct Peer {
    node: NodeId,
    pub(crate) common: std::sync::Arc<Common>,
    state: Mutex<State>,
    idle: Condvar,
    recalls: AtomicU64,
    /// Counts what was changed from here.
    changes: AtomicU64,
    /// Counts how often a file was given an extended attribute from here.
    given: AtomicU64,
    pub(crate) owed: Owed,
    /// Counts the owners of locks.
    owners: AtomicU64,
    /// Read while an answer is passed on to the kernel.
    pub(crate) gate: RwLock<()>,
    pub(crate) term: Term,
}

impl Peer {
    pub(crate) fn new(node: NodeId, common: std::sync::Arc<Common>) -> Self {
        Self {
            node,
            common,
            state: Mutex::default(),
            idle: Condvar::new(),
            recalls: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            given: AtomicU64::new(0),
            owed: Owed::default(),
            owners: AtomicU64::new(0),
            gate: RwLock::default(),
            term: Term::default(),
        }
    }

    pub(crate) fn node(&self) -> NodeId {
        self.node
    }

    /// Whether its files are believed by lasting leases.
    pub(crate) fn is_lasting(&self) -> bool {
        self.common.purpose == Purpose::Room
    }

    pub(crate) fn forgetting(&self) -> &Forgetting {
        &self.common.forgetting
    }

    /// How often leases were asked back.
    pub(crate) fn recalls(&self) -> u64 {
        self.recalls.load(Ordering::Acquire)
    }

    /// They are asked back once more, which makes something void; no answer of before is on its way to the kernel any more.
    pub(crate) fn count_recall(&self, makes_void: impl FnOnce()) {
        self.with_nothing_on_its_way(|| {
            self.recalls.fetch_add(1, Ordering::AcqRel);
            makes_void();
        });
    }

    /// Does something while no answer is being passed on to the kernel.
    pub(crate) fn with_nothing_on_its_way<T>(&self, change: impl FnOnce() -> T) -> T {
        let _nobody = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        change()
    }

    /// How often something was changed from here.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Something was changed; the kernel does not know that yet.
    pub(crate) fn count_change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// How often a file was given an extended attribute from here.
    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// One is about to be, or just was.
    pub(crate) fn count_given(&self) {
        self.given.fetch_add(1, Ordering::AcqRel);
    }

    /// A number that no owner of locks has had.
    pub(crate) fn new_owner(&self) -> u64 {
        self.owners.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Has it done, if these steps stand.
    ///
    /// # Errors
    /// The server's; `EIO` if the node is lost, or the answer to what cannot be done twice is.
    pub(crate) fn call(
        &self,
        who: &Caller,
        steps: Vec<Step>,
        deed: Deed,
        data: &[u8],
    ) -> Result<Heard, Unheard> {
        let (again, wanted) = (deed.survives_restart(), Wanted::of(&deed));
        let (mut lane, end) = self.lane()?;
        // What is written may fill a frame by itself.
        let part = if data.is_empty() { self.owed.take() } else { Part::default() };
        let asking = Asking::Deed(who.clone(), steps, deed, part);
        let heard = self.ask(&mut lane, asking, data, again, end);
        self.give_back(lane);
        let heard = heard?;
        self.comes_after(heard.told);
        match heard.answer {
            Answer::Failed(errno) => Err(Errno::from_raw_os_error(errno.clamp(1, 4095)).into()),
            Answer::Forgotten => Err(Unheard::Forgotten),
            Answer::Elsewhere => Err(Unheard::Elsewhere),
            _ if !wanted.is_met(&heard.answer) => {
                let (objects, opened) = brought(&heard.answer);
                objects.into_iter().for_each(|object| self.forget(object, 1));
                opened.into_iter().for_each(|opened| self.owed.release(Release::File(opened), false));
                Err(Errno::IO.into())
            }
            _ => Ok(heard),
        }
    }

    /// Has its lasting leases hold for another term, and waits for what is asked back of them.
    ///
    /// # Errors
    /// `EIO` if the node is lost.
    pub(crate) fn renew(&self) -> Result<(), Errno> {
        let (mut lane, end) = self.lane()?;
        let heard = self.ask(&mut lane, Asking::Other(&Ask::Renew), &[], true, end);
        self.give_back(lane);
        let heard = heard?;
        self.comes_after(heard.told);
        if heard.answer == Answer::Done { Ok(()) } else { Err(Errno::IO) }
    }

    /// The kernel here knows an object no more; it is said when there is something else to say.
    pub(crate) fn forget(&self, object: Object, count: u64) {
        self.owed.forget(object, count);
    }

    /// The session lets go of this, and of all that is owed, before this returns. If the node cannot be told it is owed to it, and
    /// said on the ear as soon as that is there again.
    pub(crate) fn release_now(&self, what: Release) {
        let mut part = self.owed.take();
        part.beside.released.push(what);
        self.release_all(part);
    }

    /// The same, of all this; whether it was said.
    pub(crate) fn release_all(&self, part: Part) -> bool {
        let Ok((mut lane, end)) = self.lane() else {
            self.owed.put_back(part);
            return false;
        };
        let ask = Ask::Release(part.beside.clone());
        let told = self.ask(&mut lane, Asking::Other(&ask), &[], true, end);
        self.give_back(lane);
        if told.is_err() {
            self.owed.put_back(part);
        }
        told.is_ok()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// A lane of one's own, and until when to try.
    fn lane(&self) -> Result<(Lane, Instant), Errno> {
        let mut end = Instant::now() + self.common.patience;
        let mut state = self.state();
        loop {
            let now = Instant::now();
            if let Some(until) = state.lost_until {
                if now < until {
                    return Err(Errno::IO);
                }
                // We are the one who looks; all others rest until we know.
                state.lost_until = Some(now + LOOK);
                end = end.min(now + LOOK);
            }
            if let Some(lane) = state.idle.pop() {
                return Ok((lane, end));
            }
            if state.made < MOST_LANES {
                state.made += 1;
                let lane = Lane { number: state.made - 1, count: 0, given_up: 0, untold: false, link: None };
                return Ok((lane, end));
            }
            let left = end.saturating_duration_since(now);
            if left.is_zero() {
                return Err(Errno::IO);
            }
            state.waiting += 1;
            state = self.idle.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
    }

    fn give_back(&self, lane: Lane) {
        let mut state = self.state();
        state.idle.push(lane);
        let waited_for = state.waiting > 0;
        drop(state);
        if waited_for {
            self.idle.notify_one();
        }
    }

    /// Asks until there is an answer, on as many connections as it takes.
    fn ask(
        &self,
        lane: &mut Lane,
        mut asking: Asking<'_>,
        data: &[u8],
        again: bool,
        end: Instant,
    ) -> Result<Heard, Errno> {
        lane.count += 1;
        let head = asking.encode()?;
        // The life of the server in which it was sent first.
        let mut sent_in = None;
        loop {
            let there = lane.link.take().and_then(|(link, boot)| Some((still_open(link)?, boot)));
            let link = match there {
                Some(link) => Ok(link),
                None => self.connect(lane.number, lane.given_up, end).inspect(|_| lane.untold = false),
            };
            // Who asks again a server that has forgotten us cannot know whether it was done.
            if !again && sent_in.is_some_and(|epoch| epoch != self.state().epoch) {
                lane.link = link.ok();
                return Err(Errno::IO);
            }
            let done = link.and_then(|(mut link, boot)| {
                sent_in.get_or_insert(self.state().epoch);
                let heard = self.exchange(&mut link, boot, lane.count, &[&head, data])?;
                Ok((link, heard))
            });
            match done {
                Ok((link, heard)) => {
                    lane.link = Some((link, heard.boot));
                    let mut state = self.state();
                    (state.seen, state.lost_until) = (Some(Instant::now()), None);
                    return Ok(heard);
                }
                Err(Failure::Broken) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                Err(failure) => {
                    // What it may have opened, or opens yet, is nobody's.
                    if sent_in.is_some() {
                        (lane.given_up, lane.untold) = (lane.count, true);
                    }
                    if let Asking::Deed(.., part) = &mut asking {
                        self.owed.put_back(std::mem::take(part));
                    }
                    return Err(self.given_up(&failure));
                }
            }
        }
    }

    /// The error of who gives up. If it is for the node's silence, all others rest for a while.
    fn given_up(&self, failure: &Failure) -> Errno {
        match failure {
            Failure::Refused => Errno::ACCESS,
            Failure::TooLong => Errno::TOOBIG,
            Failure::Broken | Failure::Lost => {
                tracing::info!(node = %self.node, "the node does not answer");
                self.state().lost_until = Some(Instant::now() + REST);
                self.idle.notify_all();
                Errno::IO
            }
        }
    }

    /// Sends an ask and waits for its answer; looks now and then whether the node is there.
    fn exchange(&self, link: &mut Link, boot: Boot, tag: u64, parts: &[&[u8]]) -> Result<Heard, Failure> {
        send(link, ASK, tag, parts, self.common.patience)?;
        loop {
            let heard = link.recv(Instant::now() + LOOK);
            match heard.and_then(|frame| packing::unpack(frame).ok_or(LinkError::Closed)) {
                Ok(frame) if frame.kind == ANSWER && frame.tag == tag => {
                    let length = frame.payload.len();
                    let ((told, answer), data) =
                        postcard::take_from_bytes(&frame.payload).map_err(|_malformed| Failure::Broken)?;
                    let from = length - data.len();
                    return Ok(Heard { answer, boot, told, frame: frame.payload, from });
                }
                // Who gives an answer up gives the connection up with it: so nothing else can come on this one.
                Ok(_) => return Err(Failure::Broken),
                Err(LinkError::Timeout) if self.is_there() => {}
                Err(LinkError::Timeout) => return Err(Failure::Lost),
                Err(_) => return Err(Failure::Broken),
            }
        }
    }

    /// Whether the node has given a sign of life within our patience; asks it for one.
    fn is_there(&self) -> bool {
        let fresh = |state: &State| state.seen.is_some_and(|seen| seen.elapsed() < LOOK);
        if fresh(&self.state()) {
            return true;
        }
        let end = Instant::now() + LOOK;
        let _seen_or_not = self.connect(LOOKING, 0, end);
        // The look itself has taken its time already.
        let most = self.common.patience.saturating_sub(LOOK).max(LOOK);
        let state = self.state();
        state.seen.is_some_and(|seen| seen.elapsed() < most)
    }

    fn connect(&self, lane: u16, given_up: u64, end: Instant) -> Result<(Link, Boot), Failure> {
        let map = Map::read(&self.common.map).map_err(|_unreadable| Failure::Broken)?;
        let address = map.address(self.node).map_err(|_unknown| Failure::Lost)?;
        let tls: ClientTls =
            self.common.identity.cluster_client(self.node).map_err(|_unusable| Failure::Lost)?;
        let end = end.min(Instant::now() + LOOK);
        let mut link = Link::connect(&address, Preamble::Files, &tls, end)?;
        keep_alive(&link).map_err(|_gone| Failure::Broken)?;
        let (session, ear) = (self.common.session, lane == EAR);
        let purpose = self.common.purpose;
        let begin = Ask::Begin { version: VERSION, session, lane, given_up, ear, purpose };
        let begin = tern_wire::encode(&begin).map_err(|_long| Failure::Broken)?;
        link.send(ASK, 0, &[&begin], end)?;
        let frame = link.recv(end)?;
        if (frame.kind, frame.tag) != (ANSWER, 0) {
            return Err(Failure::Broken);
        }
        match tern_wire::decode(&frame.payload) {
            Ok((0, Answer::Begun { fresh, boot })) => {
                if fresh && self.common.purpose == Purpose::Room {
                    self.is_void();
                }
                let mut state = self.state();
                // Its first answer may take longer than a look.
                state.seen = Some(Instant::now());
                if fresh {
                    state.epoch += 1;
                    self.owed.begin_anew();
                }
                if state.boot.0 != boot {
                    state.boot = (boot, state.boot.1 + 1);
                }
                Ok((link, state.boot.1))
            }
            Ok((_, Answer::Refused(why))) => {
                tracing::warn!(node = %self.node, why, "the node refuses");
                Err(Failure::Refused)
            }
            _ => Err(Failure::Broken),
        }
    }
}

impl Asking<'_> {
    fn encode(&mut self) -> Result<Vec<u8>, Errno> {
        let encoded = match self {
            Self::Other(ask) => tern_wire::encode(ask),
            Self::Deed(caller, steps, deed, part) => {
                let (caller, deed) = (caller.clone(), deed.clone());
                let (steps, beside) = (std::mem::take(steps), part.beside.clone());
                tern_wire::encode(&Ask::Do { caller, steps, beside, deed })
            }
        };
        encoded.map_err(|_long| Errno::NAMETOOLONG)
    }
}

/// The link, unless its other end is known to be closed: then nothing need be sent to find out. Nothing is to come that was not asked for.
fn still_open(mut link: Link) -> Option<Link> {
    matches!(link.receive(), Ok(None)).then_some(link)
}

/// Why a connection did not bring an answer.
#[derive(Debug)]
enum Failure {
    /// Try another one.
    Broken,
    /// The node has been silent for too long.
    Lost,
    /// It does not want us.
    Refused,
    /// What is asked does not fit into a frame.
    TooLong,
}

impl From<LinkError> for Failure {
    fn from(error: LinkError) -> Self {
        if matches!(error, LinkError::Frame(FrameError::TooLong(_))) { Self::TooLong } else { Self::Broken }
    }
}

#[cfg(test)]
mod tests;
