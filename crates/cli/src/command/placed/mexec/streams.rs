//! Forwards the standard streams and the signals of a command that runs elsewhere. Input is read
//! and each output is written by a thread of its own, so that a slow reader of one stream does not
//! delay the other.

use super::signals::{self, SignalEvent, SignalQueue};
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
use tern_mexec::frames::{FrameReader, LocalFrame, encode_frame};
use tern_mexec::messages::{ExecReply, MAX_DATA_LEN, STDIN, STREAM_CREDIT, Signal, Task, WindowSize, kind};

/// How often a background process checks whether it has become the terminal's foreground group.
const FOREGROUND_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The socket to this node's tern-exec, for writing.
type ExecutorSocket = Arc<Mutex<UnixStream>>;

fn send(executor: &ExecutorSocket, kind: u8, stream: u8, bytes: &[u8]) -> io::Result<()> {
    executor.lock().unwrap_or_else(PoisonError::into_inner).write_all(&encode_frame(kind, stream, bytes))
}

/// Flow control for standard input.
#[derive(Debug, Default)]
struct Credit {
    state: Mutex<CreditState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CreditState {
    /// Bytes sent but not acknowledged.
    unacked: usize,
    /// Whether the command has closed its input.
    is_closed: bool,
}

impl Credit {
    fn change(&self, change: impl FnOnce(&mut CreditState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits until one more chunk may be sent; false if the command has closed its input.
    fn wait(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full =
            |state: &mut CreditState| state.unacked + MAX_DATA_LEN > STREAM_CREDIT && !state.is_closed;
        let state = self.changed.wait_while(state, is_full).unwrap_or_else(PoisonError::into_inner);
        !state.is_closed
    }
}

/// Serves a command that runs elsewhere until its end and returns the final reply. All output has
/// been written by then. With `group`, SIGHUP, SIGINT and SIGQUIT go to the command's whole process
/// group, whatever sent them.
///
/// # Errors
/// If the connection to tern-exec fails.
pub(super) fn serve(executor: UnixStream, task: &Task, group: bool) -> Result<ExecReply, Failure> {
    let failure = |error: io::Error| super::connection_failure(&error);
    let signals = SignalQueue::new(task.ignored_signals).map_err(|e| failure(e.into()))?;
    let _raw = task.terminal.is_some().then(RawTerminal::set).flatten();
    let mut from = executor.try_clone().map_err(failure)?;
    let executor: ExecutorSocket = Arc::new(Mutex::new(executor));
    let credit = Arc::new(Credit::default());
    if task.forwards_stdin {
        let (executor, credit) = (executor.clone(), credit.clone());
        // This thread may still be blocked in a read when the command ends; it ends with the
        // process.
        spawn(move || read_input(&executor, &credit))?;
    }
    let mut writers = [None, None];
    let mut inbox = FrameReader::default();
    loop {
        let mut fds = [PollFd::new(&from, PollFlags::IN), PollFd::new(signals.descriptor(), PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(failure(error.into())),
        }
        let is_readable = !fds[0].revents().is_empty();
        while let Some(event) = signals.next() {
            forward_signal(&executor, event, task, group).map_err(failure)?;
        }
        if is_readable && !inbox.fill(&mut from).map_err(failure)? {
            return Err(failure(io::ErrorKind::UnexpectedEof.into()));
        }
        while let Some(frame) = inbox.next_frame().map_err(failure)? {
            if let Some(reply) = handle_frame(frame, &executor, &credit, &mut writers)? {
                // All output is written before the end is reported.
                for writer in writers.into_iter().flatten() {
                    drop(writer.0);
                    let _done = writer.1.join();
                }
                return Ok(reply);
            }
        }
    }
}

type Writer = (Sender<Vec<u8>>, JoinHandle<()>);

fn handle_frame(
    frame: LocalFrame,
    executor: &ExecutorSocket,
    credit: &Credit,
    writers: &mut [Option<Writer>; 2],
) -> Result<Option<ExecReply>, Failure> {
    match (frame.kind, frame.stream) {
        (kind::EXEC_REPLY, _) => {
            let reply =
                tern_mexec::frames::decode(&frame.payload).map_err(|e| super::connection_failure(&e))?;
            return Ok(Some(reply));
        }
        (kind::DATA, 1 | 2) => {
            let at = usize::from(frame.stream) - 1;
            if writers[at].is_none() {
                let (sender, receiver) = channel();
                let (executor, stream) = (executor.clone(), frame.stream);
                writers[at] = Some((sender, spawn(move || write_output(stream, &receiver, &executor))?));
            }
            if let Some((sender, _)) = &writers[at] {
                let _ended = sender.send(frame.payload);
            }
        }
        (kind::CREDIT, STDIN) => {
            let count = frame.payload.try_into().map_or(0, u32::from_le_bytes) as usize;
            credit.change(|state| state.unacked = state.unacked.saturating_sub(count));
        }
        (kind::END, STDIN) => credit.change(|state| state.is_closed = true),
        _ => {}
    }
    Ok(None)
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Failure> {
    Ok(thread::Builder::new().stack_size(256 << 10).spawn(work)?)
}

fn forward_signal(executor: &ExecutorSocket, event: SignalEvent, task: &Task, group: bool) -> io::Result<()> {
    let send_signal =
        |signal: Signal| send(executor, kind::SIGNAL, 0, &tern_wire::encode(&signal).unwrap_or_default());
    match event {
        SignalEvent::Signal(Signal { number, group: own }) => {
            let to_group = group && matches!(number, libc::SIGHUP | libc::SIGINT | libc::SIGQUIT);
            send_signal(Signal { number, group: own || to_group })
        }
        SignalEvent::Stop => {
            // This terminal cannot stop the command, which has another controlling terminal or none.
            send_signal(Signal { number: libc::SIGSTOP, group: true })?;
            signals::stop();
            send_signal(Signal { number: libc::SIGCONT, group: true })
        }
        SignalEvent::Resized => match RawTerminal::window().filter(|_| task.terminal.is_some()) {
            Some(window) => send(executor, kind::WINDOW, 0, &tern_wire::encode(&window).unwrap_or_default()),
            None => Ok(()),
        },
    }
}

fn read_input(executor: &ExecutorSocket, credit: &Credit) {
    let input = rustix::stdio::stdin();
    let is_terminal = isatty(input);
    let mut bytes = [0; MAX_DATA_LEN];
    while credit.wait() {
        // A background read would stop this process (SIGTTIN), even if the command never reads.
        while is_terminal && tcgetpgrp(input).is_ok_and(|group| group != rustix::process::getpgrp()) {
            thread::sleep(FOREGROUND_POLL_INTERVAL);
        }
        match rustix::io::read(input, &mut bytes) {
            Ok(0) => break,
            Ok(count) => {
                credit.change(|state| state.unacked += count);
                if send(executor, kind::DATA, STDIN, &bytes[..count]).is_err() {
                    return;
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_until_ready(input, PollFlags::IN),
            Err(_) => break,
        }
    }
    let _gone = send(executor, kind::END, STDIN, &[]);
}

fn write_output(stream: u8, chunks: &Receiver<Vec<u8>>, executor: &ExecutorSocket) {
    let mut is_open = true;
    for chunk in chunks {
        let mut rest = &chunk[..];
        while is_open && !rest.is_empty() {
            let output = if stream == 1 { rustix::stdio::stdout() } else { rustix::stdio::stderr() };
            match rustix::io::write(output, rest) {
                Ok(count) => rest = &rest[count..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_until_ready(output, PollFlags::OUT),
                Err(_) => {
                    // The command is notified by SIGPIPE, as it would be on this node.
                    is_open = false;
                    let _gone = send(executor, kind::END, stream, &[]);
                }
            }
        }
        let _gone = send(executor, kind::CREDIT, stream, &(chunk.len() as u32).to_le_bytes());
    }
}

fn wait_until_ready(descriptor: BorrowedFd<'_>, what: PollFlags) {
    let _interrupted = poll(&mut [PollFd::new(&descriptor, what)], Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
}

/// The terminal in raw mode; restored on drop.
pub(super) struct RawTerminal(Termios);

impl RawTerminal {
    fn set() -> Option<Self> {
        let input = rustix::stdio::stdin();
        let old_modes = tcgetattr(input).ok()?;
        let mut raw = old_modes.clone();
        raw.make_raw();
        tcsetattr(input, OptionalActions::Drain, &raw).ok()?;
        Some(Self(old_modes))
    }

    /// The size of the terminal on standard input, if there is one.
    pub(super) fn window() -> Option<WindowSize> {
        let size = tcgetwinsize(rustix::stdio::stdin()).ok()?;
        Some(WindowSize { rows: size.ws_row, columns: size.ws_col })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _gone = tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &self.0);
    }
}
