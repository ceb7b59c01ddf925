//! A command's streams: what comes for it is read here, and what it writes is written here, each in a thread of its own, so that one who
//! takes nothing holds up no other.

use super::signals::{self, Came, Signals};
use crate::Failure;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tern_mexec::pieces::{Inbox, Piece, whole};
use tern_mexec::words::{CREDIT, INPUT, PIECE, Said, Signal, Task, Window, kind};

/// How often who runs in the background looks whether the terminal is his by now.
const LOOK: Duration = Duration::from_millis(200);

/// The socket to the home half, to write to.
type Home = Arc<Mutex<UnixStream>>;

fn tell(home: &Home, kind: u8, stream: u8, bytes: &[u8]) -> io::Result<()> {
    home.lock().unwrap_or_else(PoisonError::into_inner).write_all(&whole(kind, stream, bytes))
}

/// How much of standard input may be sent.
#[derive(Debug, Default)]
struct Credit {
    /// What is under way, and whether anybody still takes it.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Credit {
    fn change(&self, change: impl FnOnce(&mut (usize, bool))) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits until so much more may be sent; false if nobody takes it.
    fn wait(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |state: &mut (usize, bool)| state.0 + PIECE > CREDIT && !state.1;
        let state = self.changed.wait_while(state, full).unwrap_or_else(PoisonError::into_inner);
        !state.1
    }
}

/// Attends to a command that runs elsewhere until its end; what was said of that. All its output is written by then. With `group`, what a
/// terminal could have sent reaches its process group.
///
/// # Errors
/// If the home half is gone.
pub(super) fn attend(home: UnixStream, task: &Task, group: bool) -> Result<Said, Failure> {
    let gone = |error: io::Error| super::broken(&error);
    let signals = Signals::new(task.signals.0).map_err(|e| gone(e.into()))?;
    let _raw = task.terminal.is_some().then(Raw::set).flatten();
    let mut from = home.try_clone().map_err(gone)?;
    let home: Home = Arc::new(Mutex::new(home));
    let credit = Arc::new(Credit::default());
    if task.input {
        let (home, credit) = (home.clone(), credit.clone());
        // It may be in a read when all is over, and ends with the process.
        spawn(move || read_input(&home, &credit))?;
    }
    let mut writers = [None, None];
    let mut inbox = Inbox::default();
    loop {
        let mut fds = [PollFd::new(&from, PollFlags::IN), PollFd::new(signals.descriptor(), PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(gone(error.into())),
        }
        let comes = !fds[0].revents().is_empty();
        while let Some(came) = signals.next() {
            pass(&home, came, task, group).map_err(gone)?;
        }
        if comes && !inbox.fill(&mut from).map_err(gone)? {
            return Err(gone(io::ErrorKind::UnexpectedEof.into()));
        }
        while let Some(piece) = inbox.piece().map_err(gone)? {
            if let Some(said) = hear(piece, &home, &credit, &mut writers)? {
                // What it wrote is written before anybody hears of its end.
                for writer in writers.into_iter().flatten() {
                    drop(writer.0);
                    let _done = writer.1.join();
                }
                return Ok(said);
            }
        }
    }
}

type Writer = (Sender<Vec<u8>>, JoinHandle<()>);

fn hear(
    piece: Piece,
    home: &Home,
    credit: &Credit,
    writers: &mut [Option<Writer>; 2],
) -> Result<Option<Said>, Failure> {
    match (piece.kind, piece.stream) {
        (kind::SAID, _) => {
            let said = tern_mexec::pieces::read(&piece.bytes).map_err(|e| super::broken(&e))?;
            return Ok(Some(said));
        }
        (kind::DATA, 1 | 2) => {
            let at = usize::from(piece.stream) - 1;
            if writers[at].is_none() {
                let (sender, receiver) = channel();
                let (home, stream) = (home.clone(), piece.stream);
                writers[at] = Some((sender, spawn(move || write_output(stream, &receiver, &home))?));
            }
            if let Some((sender, _)) = &writers[at] {
                let _over = sender.send(piece.bytes);
            }
        }
        (kind::TAKEN, INPUT) => {
            let count = piece.bytes.try_into().map_or(0, u32::from_le_bytes) as usize;
            credit.change(|state| state.0 = state.0.saturating_sub(count));
        }
        (kind::END, INPUT) => credit.change(|state| state.1 = true),
        _ => {}
    }
    Ok(None)
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Failure> {
    Ok(thread::Builder::new().stack_size(256 << 10).spawn(work)?)
}

fn pass(home: &Home, came: Came, task: &Task, group: bool) -> io::Result<()> {
    let say = |signal: Signal| tell(home, kind::SIGNAL, 0, &tern_wire::encode(&signal).unwrap_or_default());
    match came {
        Came::Signal(Signal { number, group: own }) => {
            let as_typed = group && matches!(number, libc::SIGHUP | libc::SIGINT | libc::SIGQUIT);
            say(Signal { number, group: own || as_typed })
        }
        Came::Stop => {
            // It has no terminal that could stop it.
            say(Signal { number: libc::SIGSTOP, group: true })?;
            signals::stop();
            say(Signal { number: libc::SIGCONT, group: true })
        }
        Came::Size => match Raw::window().filter(|_| task.terminal.is_some()) {
            Some(window) => tell(home, kind::WINDOW, 0, &tern_wire::encode(&window).unwrap_or_default()),
            None => Ok(()),
        },
    }
}

fn read_input(home: &Home, credit: &Credit) {
    let input = rustix::stdio::stdin();
    let terminal = isatty(input);
    let mut bytes = [0; PIECE];
    while credit.wait() {
        // Who reads in the background is stopped, and a command that does not even read would be, too.
        while terminal && tcgetpgrp(input).is_ok_and(|group| group != rustix::process::getpgrp()) {
            thread::sleep(LOOK);
        }
        match rustix::io::read(input, &mut bytes) {
            Ok(0) => break,
            Ok(count) => {
                credit.change(|state| state.0 += count);
                if tell(home, kind::DATA, INPUT, &bytes[..count]).is_err() {
                    return;
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for(input, PollFlags::IN),
            Err(_) => break,
        }
    }
    let _gone = tell(home, kind::END, INPUT, &[]);
}

fn write_output(stream: u8, pieces: &Receiver<Vec<u8>>, home: &Home) {
    let mut open = true;
    for piece in pieces {
        let mut left = &piece[..];
        while open && !left.is_empty() {
            let output = if stream == 1 { rustix::stdio::stdout() } else { rustix::stdio::stderr() };
            match rustix::io::write(output, left) {
                Ok(count) => left = &left[count..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_for(output, PollFlags::OUT),
                Err(_) => {
                    // Its writer is told as it would be here: by SIGPIPE.
                    open = false;
                    let _gone = tell(home, kind::END, stream, &[]);
                }
            }
        }
        let _gone = tell(home, kind::TAKEN, stream, &(piece.len() as u32).to_le_bytes());
    }
}

fn wait_for(descriptor: BorrowedFd<'_>, what: PollFlags) {
    let _interrupted = poll(&mut [PollFd::new(&descriptor, what)], Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
}

/// The terminal passes everything on as it is typed; as it was when this is dropped.
pub(super) struct Raw(Termios);

impl Raw {
    fn set() -> Option<Self> {
        let input = rustix::stdio::stdin();
        let before = tcgetattr(input).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(input, OptionalActions::Drain, &raw).ok()?;
        Some(Self(before))
    }

    /// The terminal's size, if standard input is one.
    pub(super) fn window() -> Option<Window> {
        let size = tcgetwinsize(rustix::stdio::stdin()).ok()?;
        Some(Window { rows: size.ws_row, columns: size.ws_col })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _gone = tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &self.0);
    }
}
