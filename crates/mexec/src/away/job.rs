//! A running command: relays its streams, signals and end to its peer, which is its home node or a
//! client outside of the cluster.

use super::containers::Container;
use crate::container::InitEvent;
use crate::credit::Credit;
use crate::heartbeat::Heartbeat;
use crate::messages::{
    ExecReply, ExitReport, MAX_DATA_LEN, STDIN, STREAM_CREDIT, Signal, Task, WindowSize, kind,
};
use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Gid, Uid};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_ids::Credentials;
use tern_wire::{Frame, Link};

/// How long output is awaited after a command has ended: a process outside of its pid namespace may
/// hold the other end of its pipe.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);

/// The maximum number of unsent bytes of the link before reading of output pauses.
const MAX_UNSENT: usize = 1 << 20;

/// The parts of the protocol in which the two kinds of peers differ. Frames of streams are the
/// same.
pub(crate) trait PeerProtocol {
    /// The kind and payload of the frame that reports that the command runs.
    ///
    /// # Errors
    /// If it cannot be encoded.
    fn encode_started(&self) -> Result<(u8, Vec<u8>)>;

    /// Decodes a signal.
    ///
    /// # Errors
    /// If it is malformed, or not allowed.
    fn decode_signal(&self, payload: &[u8]) -> Result<Signal>;

    /// How long the peer may be silent before it counts as lost.
    fn silence_timeout(&self) -> Duration {
        Heartbeat::NODE_TIMEOUT
    }

    /// Whether the peer has announced that it will be silent.
    fn is_paused(&self) -> bool {
        false
    }
}

/// A running command. Dropping it ends the command and everything that it has started.
#[derive(Debug)]
pub(crate) struct Job {
    container: Arc<Container>,
    /// The socket of its init, which exits when this is closed.
    init: UnixStream,
    input: Option<OwnedFd>,
    /// Input that was received and not written to the command yet.
    pending_input: Vec<u8>,
    /// No more input arrives.
    input_ended: bool,
    output: [Option<OwnedFd>; 2],
    credit: [Credit; 2],
    started: Instant,
    /// It runs. This is reported before any of its output.
    is_running: bool,
    /// Its exit report, and the time from which the rest of its output is awaited.
    ended: Option<(ExitReport, Instant)>,
    has_terminal: bool,
}

impl Job {
    /// Starts a command in its container. Whether its program can be executed is reported later.
    pub(crate) fn start(task: &Task, credentials: &Credentials, container: Arc<Container>) -> Result<Self> {
        let (init, init_end) = UnixStream::pair()?;
        init.set_nonblocking(true)?;
        let mut job = Self {
            container,
            init,
            input: None,
            pending_input: Vec::new(),
            input_ended: false,
            output: [None, None],
            credit: [Credit::default(), Credit::default()],
            started: Instant::now(),
            is_running: false,
            ended: None,
            has_terminal: task.terminal.is_some(),
        };
        let streams = match task.terminal {
            Some(window) => job.open_terminal(window)?,
            None => job.open_pipes(task)?,
        };
        // A program may reopen its streams by names such as /dev/stderr, which the kernel allows
        // only to their owner.
        for stream in &streams {
            set_owner(stream, credentials, job.has_terminal);
        }
        let [input, output, error] = &streams;
        // The caller may have just written files that the command will read.
        job.container.sync_with_home()?;
        let fds = [input.as_fd(), output.as_fd(), error.as_fd(), init_end.as_fd()];
        job.container.launch(task, credentials, fds)?;
        Ok(job)
    }

    fn open_pipes(&mut self, task: &Task) -> Result<[OwnedFd; 3]> {
        let input = if task.forwards_stdin {
            let (theirs, own) = pipe_with(PipeFlags::CLOEXEC)?;
            rustix::fs::fcntl_setfl(&own, OFlags::NONBLOCK)?;
            self.input = Some(own);
            theirs
        } else {
            std::fs::File::open("/dev/null")?.into()
        };
        let mut output_pipe = |at: usize| -> Result<OwnedFd> {
            let (own, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
            rustix::fs::fcntl_setfl(&own, OFlags::NONBLOCK)?;
            self.output[at] = Some(own);
            Ok(theirs)
        };
        let output = output_pipe(0)?;
        let error = if task.merges_stderr { output.try_clone()? } else { output_pipe(1)? };
        Ok([input, output, error])
    }

    fn open_terminal(&mut self, window: WindowSize) -> Result<[OwnedFd; 3]> {
        let own = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&own)?;
        let theirs = ioctl_tiocgptpeer(&own, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        rustix::fs::fcntl_setfl(&own, OFlags::NONBLOCK)?;
        self.input = Some(own.try_clone()?);
        self.output[0] = Some(own);
        self.resize(window);
        Ok([theirs.try_clone()?, theirs.try_clone()?, theirs])
    }

    fn resize(&self, window: WindowSize) {
        if let Some(terminal) = self.output[0].as_ref().filter(|_| self.has_terminal) {
            let size = Winsize { ws_row: window.rows, ws_col: window.columns, ws_xpixel: 0, ws_ypixel: 0 };
            let _unchanged = tcsetwinsize(terminal, size);
        }
    }

    /// Relays until the command has ended. Returns the final reply.
    ///
    /// # Errors
    /// If the peer is gone or violates the protocol, or home does not respond. The caller must then
    /// drop the job, which ends the command.
    pub(crate) fn run(&mut self, link: &mut Link, peer: &impl PeerProtocol) -> Result<ExecReply> {
        let mut heartbeat = Heartbeat::new(peer.silence_timeout());
        loop {
            while let Some(frame) = link.receive()? {
                heartbeat.record_received();
                self.handle_frame(&frame, link, peer)?;
                link.recycle(frame.payload);
            }
            if peer.is_paused() {
                heartbeat.record_received();
            }
            if heartbeat.is_due()? {
                link.queue(kind::HEARTBEAT, 0, &[])?;
            }
            if let Some(reply) = self.poll_init(link, peer)? {
                return Ok(reply);
            }
            if self.is_running {
                self.write_input(link)?;
                for at in 0..2 {
                    self.read_output(at, link)?;
                }
            }
            if self.is_blocked(link)
                && let Some((_, since)) = &mut self.ended
            {
                *since = Instant::now();
            }
            if let Some((report, since)) = self.ended
                && (self.output.iter().all(Option::is_none) || since.elapsed() > OUTPUT_TIMEOUT)
            {
                return Ok(ExecReply::Exited(report));
            }
            self.wait(link)?;
        }
    }

    /// Whether more output may be pending than the peer accepts now. A peer may accept no output
    /// for any length of time, so the time while this is true does not count towards
    /// [`OUTPUT_TIMEOUT`].
    fn is_blocked(&self, link: &Link) -> bool {
        let mut open = self.output.iter().zip(&self.credit).filter(|(output, _)| output.is_some());
        open.any(|(_, credit)| credit.left() == 0 || link.unsent() > MAX_UNSENT)
    }

    fn wait(&self, link: &Link) -> Result<()> {
        let out_if_unsent = if link.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(link, PollFlags::IN | out_if_unsent)];
        if self.ended.is_none() {
            fds.push(PollFd::new(&self.init, PollFlags::IN));
        }
        if let Some(input) = self.input.as_ref().filter(|_| !self.pending_input.is_empty()) {
            fds.push(PollFd::new(input, PollFlags::OUT));
        }
        if self.is_running && link.unsent() < MAX_UNSENT {
            let wanted = self.output.iter().zip(&self.credit).filter(|(_, credit)| credit.left() > 0);
            fds.extend(wanted.filter_map(|(out, _)| Some(PollFd::new(out.as_ref()?, PollFlags::IN))));
        }
        let timeout = if self.ended.is_some() { Duration::from_millis(50) } else { Heartbeat::INTERVAL };
        match poll(&mut fds, Some(&Timespec::try_from(timeout)?)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn handle_frame(&mut self, frame: &Frame, link: &mut Link, peer: &impl PeerProtocol) -> Result<()> {
        let stream = frame.tag as u8;
        match (frame.kind, stream) {
            (kind::DATA, STDIN) => {
                if frame.payload.len() + self.pending_input.len() > STREAM_CREDIT {
                    bail!("more input than its credit");
                }
                if self.input.is_some() {
                    // The sender of the input may have changed files that the command will read
                    // next.
                    self.container.sync_with_home()?;
                    self.pending_input.extend_from_slice(&frame.payload);
                } else {
                    return_credit(link, frame.payload.len())?;
                }
            }
            (kind::END, STDIN) => {
                self.container.sync_with_home()?;
                self.input_ended = true;
            }
            (kind::END, 1 | 2) => self.output[usize::from(stream) - 1] = None,
            (kind::CREDIT, 1 | 2) => self.credit[usize::from(stream) - 1].refill(&frame.payload)?,
            (kind::SIGNAL, _) => {
                let Signal { number, group } = peer.decode_signal(&frame.payload)?;
                if (1..=64).contains(&number) {
                    self.container.sync_with_home()?;
                    let mut bytes = [u8::from(group); 5];
                    bytes[1..].copy_from_slice(&number.to_le_bytes());
                    // The command may have just ended.
                    let _gone = self.init.write_all(&bytes);
                }
            }
            (kind::WINDOW, _) => self.resize(tern_wire::decode(&frame.payload)?),
            (kind::HEARTBEAT, _) => {}
            (other, _) => bail!("an unexpected frame of kind {other} for a command"),
        }
        Ok(())
    }

    fn write_input(&mut self, link: &mut Link) -> Result<()> {
        let Some(input) = &self.input else { return Ok(()) };
        let mut written = 0;
        let mut is_closed = false;
        while written < self.pending_input.len() {
            match rustix::io::write(input, &self.pending_input[written..]) {
                Ok(count) => written += count,
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                // All readers are gone.
                Err(_) => {
                    (written, is_closed) = (self.pending_input.len(), true);
                }
            }
        }
        self.pending_input.drain(..written);
        if written > 0 {
            return_credit(link, written)?;
        }
        if is_closed {
            link.queue(kind::END, STDIN.into(), &[])?;
        }
        if is_closed || self.input_ended && self.pending_input.is_empty() {
            if self.has_terminal {
                // ^D, the EOF character of a terminal.
                let _full = rustix::io::write(input, &[4]);
            }
            self.input = None;
        }
        Ok(())
    }

    fn read_output(&mut self, at: usize, link: &mut Link) -> Result<()> {
        let stream = at as u64 + 1;
        let mut bytes = [0; MAX_DATA_LEN];
        while let Some(output) = &self.output[at] {
            let max = self.credit[at].left().min(MAX_DATA_LEN);
            if max == 0 || link.unsent() > MAX_UNSENT {
                return Ok(());
            }
            match rustix::io::read(output, &mut bytes[..max]) {
                // EIO: all other users of the terminal have closed it.
                Ok(0) | Err(rustix::io::Errno::IO) => {
                    self.output[at] = None;
                    link.queue(kind::END, stream, &[])?;
                }
                Ok(count) => {
                    self.credit[at].consume(count);
                    link.queue(kind::DATA, stream, &[&bytes[..count]])?;
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("its output cannot be read"),
            }
        }
        Ok(())
    }

    /// Handles a message of the command's init.
    fn poll_init(&mut self, link: &mut Link, peer: &impl PeerProtocol) -> Result<Option<ExecReply>> {
        if self.ended.is_some() {
            return Ok(None);
        }
        match InitEvent::read(&mut self.init) {
            Ok(InitEvent::Started) => {
                self.is_running = true;
                let (kind, payload) = peer.encode_started()?;
                link.queue(kind, 0, &[&payload])?;
            }
            Ok(InitEvent::StartFailed(what, errno)) => return Ok(Some(ExecReply::StartFailed(what, errno))),
            Ok(InitEvent::Exited(status, cpu_us)) => self.set_ended(status, cpu_us),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // Its init was killed, and so the kernel has killed the command; or its init could not
            // be started.
            Err(error) => {
                tracing::info!(%error, "a command's init was killed");
                self.set_ended(libc::SIGKILL, 0);
            }
        }
        Ok(None)
    }

    fn set_ended(&mut self, status: i32, cpu_us: u64) {
        let wall_us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.ended = Some((ExitReport { status, cpu_us, wall_us }, Instant::now()));
    }
}

/// Makes the command's user the owner of a stream, as for a shell's pipes and a login's terminal.
fn set_owner(stream: &OwnedFd, credentials: &Credentials, is_terminal: bool) {
    let is_pipe = || {
        rustix::fs::fstat(stream).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo)
    };
    if rustix::process::geteuid().is_root() && (is_terminal || is_pipe()) {
        let group = (!is_terminal).then(|| Gid::from_raw(credentials.gid));
        // Root in a user namespace may not be allowed to. Then the stream just cannot be opened by
        // name.
        let _unchanged = rustix::fs::fchown(stream, Some(Uid::from_raw(credentials.uid)), group);
    }
}

fn return_credit(link: &mut Link, count: usize) -> Result<()> {
    if link.unsent() > 2 * MAX_UNSENT {
        bail!("it sends more than it receives");
    }
    Ok(link.queue(kind::CREDIT, STDIN.into(), &[&(count as u32).to_le_bytes()])?)
}
