//! One command: its streams, signals and end, from here to whoever has it run, and back: its home, or a client outside of the cluster.

use super::rooms::Room;
use crate::lock_step::{Beat, Credit};
use crate::room::News;
use crate::words::{CREDIT, Ended, INPUT, PIECE, Said, Signal, Task, Who, Window, kind};
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
use tern_wire::{Frame, Link};

/// How long the output of a command that has ended is waited for: somebody outside may have been given its end.
const REST: Duration = Duration::from_secs(2);

/// Bytes that may wait for the link before no more output is read.
const ENOUGH: usize = 1 << 20;

/// How the other end of a command's link speaks; of streams all speak alike.
pub(crate) trait Dialect {
    /// The kind and the bytes that say that the command runs.
    ///
    /// # Errors
    /// If that cannot be said.
    fn started(&self) -> Result<(u8, Vec<u8>)>;

    /// The signal that this is.
    ///
    /// # Errors
    /// If it is none.
    fn signal(&self, said: &[u8]) -> Result<Signal>;

    /// How long it may be silent.
    fn patience(&self) -> Duration {
        Beat::LOST
    }

    /// Whether it has said that it will be silent.
    fn is_silent(&self) -> bool {
        false
    }
}

/// A command. When it is dropped it ends, with all that it has started.
#[derive(Debug)]
pub(crate) struct Job {
    room: Arc<Room>,
    /// To its init, which ends when this is closed.
    line: UnixStream,
    input: Option<OwnedFd>,
    /// What of its input it has not taken yet.
    unread: Vec<u8>,
    /// No more comes.
    input_ends: bool,
    output: [Option<OwnedFd>; 2],
    credit: [Credit; 2],
    begun: Instant,
    /// It runs: that is said before anything of its output.
    runs: bool,
    /// Since when its end is known.
    ended: Option<(Ended, Instant)>,
    terminal: bool,
}

impl Job {
    /// Begins a command in its room; whether it really runs is heard later.
    pub(crate) fn begin(task: &Task, who: &Who, room: Arc<Room>) -> Result<Self> {
        let (line, theirs) = UnixStream::pair()?;
        line.set_nonblocking(true)?;
        let mut job = Self {
            room,
            line,
            input: None,
            unread: Vec::new(),
            input_ends: false,
            output: [None, None],
            credit: [Credit::default(), Credit::default()],
            begun: Instant::now(),
            runs: false,
            ended: None,
            terminal: task.terminal.is_some(),
        };
        let streams = match task.terminal {
            Some(window) => job.terminal(window)?,
            None => job.pipes(task)?,
        };
        // They are opened anew under names like /dev/stderr, which is who owns them may.
        for stream in &streams {
            own(stream, who, job.terminal);
        }
        let [input, output, error] = &streams;
        // Its home's caller may have written what it is to read.
        job.room.catch_up()?;
        job.room.begin(task, who, [input.as_fd(), output.as_fd(), error.as_fd(), theirs.as_fd()])?;
        Ok(job)
    }

    fn pipes(&mut self, task: &Task) -> Result<[OwnedFd; 3]> {
        let input = if task.input {
            let (theirs, own) = pipe_with(PipeFlags::CLOEXEC)?;
            rustix::fs::fcntl_setfl(&own, OFlags::NONBLOCK)?;
            self.input = Some(own);
            theirs
        } else {
            std::fs::File::open("/dev/null")?.into()
        };
        let mut reading = |at: usize| -> Result<OwnedFd> {
            let (own, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
            rustix::fs::fcntl_setfl(&own, OFlags::NONBLOCK)?;
            self.output[at] = Some(own);
            Ok(theirs)
        };
        let output = reading(0)?;
        let error = if task.joined { output.try_clone()? } else { reading(1)? };
        Ok([input, output, error])
    }

    fn terminal(&mut self, window: Window) -> Result<[OwnedFd; 3]> {
        let own = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&own)?;
        let theirs = ioctl_tiocgptpeer(&own, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        rustix::fs::fcntl_setfl(&own, OFlags::NONBLOCK)?;
        self.input = Some(own.try_clone()?);
        self.output[0] = Some(own);
        self.resize(window);
        Ok([theirs.try_clone()?, theirs.try_clone()?, theirs])
    }

    fn resize(&self, window: Window) {
        if let Some(terminal) = self.output[0].as_ref().filter(|_| self.terminal) {
            let size = Winsize { ws_row: window.rows, ws_col: window.columns, ws_xpixel: 0, ws_ypixel: 0 };
            let _as_it_was = tcsetwinsize(terminal, size);
        }
    }

    /// Attends to it until it has ended; what is to be said of that.
    ///
    /// # Errors
    /// If the other end is gone or says what nobody says; the command ends then.
    pub(crate) fn attend(&mut self, link: &mut Link, dialect: &impl Dialect) -> Result<Said> {
        let mut beat = Beat::new(dialect.patience());
        loop {
            while let Some(frame) = link.receive()? {
                beat.heard();
                self.hear(&frame, link, dialect)?;
                link.recycle(frame.payload);
            }
            if dialect.is_silent() {
                beat.heard();
            }
            if beat.is_due()? {
                link.queue(kind::BEAT, 0, &[])?;
            }
            if let Some(said) = self.news(link, dialect)? {
                return Ok(said);
            }
            if self.runs {
                self.write_input(link)?;
                for at in 0..2 {
                    self.read_output(at, link)?;
                }
            }
            if self.is_held(link)
                && let Some((_, since)) = &mut self.ended
            {
                *since = Instant::now();
            }
            if let Some((ended, since)) = self.ended
                && (self.output.iter().all(Option::is_none) || since.elapsed() > REST)
            {
                return Ok(Said::Ended(ended));
            }
            self.wait(link)?;
        }
    }

    /// Whether there may be more of its output than whoever it is for takes now, however long he takes.
    fn is_held(&self, link: &Link) -> bool {
        let mut open = self.output.iter().zip(&self.credit).filter(|(output, _)| output.is_some());
        open.any(|(_, credit)| credit.left() == 0 || link.unsent() > ENOUGH)
    }

    fn wait(&self, link: &Link) -> Result<()> {
        let sends = if link.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(link, PollFlags::IN | sends)];
        if self.ended.is_none() {
            fds.push(PollFd::new(&self.line, PollFlags::IN));
        }
        if let Some(input) = self.input.as_ref().filter(|_| !self.unread.is_empty()) {
            fds.push(PollFd::new(input, PollFlags::OUT));
        }
        if self.runs && link.unsent() < ENOUGH {
            let wanted = self.output.iter().zip(&self.credit).filter(|(_, credit)| credit.left() > 0);
            fds.extend(wanted.filter_map(|(out, _)| Some(PollFd::new(out.as_ref()?, PollFlags::IN))));
        }
        let most = if self.ended.is_some() { Duration::from_millis(50) } else { Beat::OFTEN };
        match poll(&mut fds, Some(&Timespec::try_from(most)?)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn hear(&mut self, frame: &Frame, link: &mut Link, dialect: &impl Dialect) -> Result<()> {
        let stream = frame.tag as u8;
        match (frame.kind, stream) {
            (kind::DATA, INPUT) => {
                if frame.payload.len() + self.unread.len() > CREDIT {
                    bail!("more input than may be under way");
                }
                if self.input.is_some() {
                    // So may who says this have done.
                    self.room.catch_up()?;
                    self.unread.extend_from_slice(&frame.payload);
                } else {
                    taken(link, frame.payload.len())?;
                }
            }
            (kind::END, INPUT) => {
                self.room.catch_up()?;
                self.input_ends = true;
            }
            (kind::END, 1 | 2) => self.output[usize::from(stream) - 1] = None,
            (kind::TAKEN, 1 | 2) => self.credit[usize::from(stream) - 1].give(&frame.payload)?,
            (kind::SIGNAL, _) => {
                let Signal { number, group } = dialect.signal(&frame.payload)?;
                if (1..=64).contains(&number) {
                    self.room.catch_up()?;
                    let mut bytes = [u8::from(group); 5];
                    bytes[1..].copy_from_slice(&number.to_le_bytes());
                    // It may have ended just now.
                    let _gone = self.line.write_all(&bytes);
                }
            }
            (kind::WINDOW, _) => self.resize(tern_wire::decode(&frame.payload)?),
            (kind::BEAT, _) => {}
            (other, _) => bail!("a piece of kind {other} for a command"),
        }
        Ok(())
    }

    fn write_input(&mut self, link: &mut Link) -> Result<()> {
        let Some(input) = &self.input else { return Ok(()) };
        let mut done = 0;
        let mut over = false;
        while done < self.unread.len() {
            match rustix::io::write(input, &self.unread[done..]) {
                Ok(count) => done += count,
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                // Nobody reads any more.
                Err(_) => {
                    (done, over) = (self.unread.len(), true);
                }
            }
        }
        self.unread.drain(..done);
        if done > 0 {
            taken(link, done)?;
        }
        if over {
            link.queue(kind::END, INPUT.into(), &[])?;
        }
        if over || self.input_ends && self.unread.is_empty() {
            if self.terminal {
                // The end of what is typed: there is one for each line.
                let _full = rustix::io::write(input, &[4]);
            }
            self.input = None;
        }
        Ok(())
    }

    fn read_output(&mut self, at: usize, link: &mut Link) -> Result<()> {
        let stream = at as u64 + 1;
        let mut bytes = [0; PIECE];
        while let Some(output) = &self.output[at] {
            let most = self.credit[at].left().min(PIECE);
            if most == 0 || link.unsent() > ENOUGH {
                return Ok(());
            }
            match rustix::io::read(output, &mut bytes[..most]) {
                // EIO: the terminal has nobody else any more.
                Ok(0) | Err(rustix::io::Errno::IO) => {
                    self.output[at] = None;
                    link.queue(kind::END, stream, &[])?;
                }
                Ok(count) => {
                    self.credit[at].take(count);
                    link.queue(kind::DATA, stream, &[&bytes[..count]])?;
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("its output cannot be read"),
            }
        }
        Ok(())
    }

    /// What its init says.
    fn news(&mut self, link: &mut Link, dialect: &impl Dialect) -> Result<Option<Said>> {
        if self.ended.is_some() {
            return Ok(None);
        }
        match News::read(&mut self.line) {
            Ok(News::Started) => {
                self.runs = true;
                let (kind, said) = dialect.started()?;
                link.queue(kind, 0, &[&said])?;
            }
            Ok(News::NotStarted(what, errno)) => return Ok(Some(Said::NotStarted(what, errno))),
            Ok(News::Ended(status, cpu)) => self.end(status, cpu),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // Its init was killed, and it with that.
            Err(error) => {
                tracing::info!(%error, "a command's init was killed");
                self.end(libc::SIGKILL, 0);
            }
        }
        Ok(None)
    }

    fn end(&mut self, status: i32, cpu: u64) {
        let wall = u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.ended = Some((Ended { status, cpu, wall }, Instant::now()));
    }
}

/// Gives a stream to the user whose command it is for, as a shell's pipes and a login's terminal are.
fn own(stream: &OwnedFd, who: &Who, terminal: bool) {
    let is_pipe =
        || rustix::fs::fstat(stream).is_ok_and(|is| FileType::from_raw_mode(is.st_mode) == FileType::Fifo);
    if rustix::process::geteuid().is_root() && (terminal || is_pipe()) {
        let group = (!terminal).then(|| Gid::from_raw(who.gid));
        // A container's root may not: then it is only not to be opened by name.
        let _as_it_was = rustix::fs::fchown(stream, Some(Uid::from_raw(who.uid)), group);
    }
}

fn taken(link: &mut Link, count: usize) -> Result<()> {
    if link.unsent() > 2 * ENOUGH {
        bail!("it says more than it hears");
    }
    Ok(link.queue(kind::TAKEN, INPUT.into(), &[&(count as u32).to_le_bytes()])?)
}
