//! The terminal, taken over and given back: at the end, on a panic, and while the program is stopped.

use crate::event::Event;
use crate::model::Model;
use crate::view;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::{cursor, execute, terminal};
use std::io::{self, IsTerminal, Stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;

/// Whether the terminal is ours now. Whoever makes it false gives it back.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Whether a thread has panicked: the terminal is not taken again then.
static PANICKED: AtomicBool = AtomicBool::new(false);
/// Held by the thread that draws while it does so. Another that panics waits for the end of the picture, which
/// would otherwise be drawn over its report.
static DRAWING: Mutex<()> = Mutex::new(());

fn drawing() -> MutexGuard<'static, ()> {
    DRAWING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A terminal that is ours until this is dropped.
#[derive(Debug)]
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal over, for this thread to draw on. A panic of any thread gives it back before it is reported, and is sent as an
    /// event, so that nobody draws over the report.
    ///
    /// # Errors
    /// If standard output is no terminal.
    pub fn take(events: &Sender<Event>) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        let events = events.clone();
        let drawer = thread::current().id();
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // The drawer itself may have panicked while it drew, and then it holds the lock.
                let _wait = (thread::current().id() != drawer).then(drawing);
                PANICKED.store(true, Ordering::Release);
                give_back();
                let _gone = events.send(Event::Panicked);
                report(panic);
            }));
        });
        Ok(Self { terminal: seize()? })
    }

    /// Its columns and lines.
    ///
    /// # Errors
    /// If the terminal has gone.
    pub fn size(&self) -> io::Result<(u16, u16)> {
        self.terminal.size().map(|size| (size.width, size.height))
    }

    /// Draws what has changed.
    ///
    /// # Errors
    /// If the terminal has gone.
    pub fn draw(&mut self, model: &Model) -> io::Result<()> {
        let _drawing = drawing();
        if TAKEN.load(Ordering::Acquire) {
            self.terminal.draw(|frame| view::draw(model, frame.buffer_mut()))?;
        }
        Ok(())
    }

    /// Takes it anew, with nothing on it: somebody else may have used it.
    ///
    /// # Errors
    /// If the terminal has gone.
    pub fn again(&mut self) -> io::Result<()> {
        let _drawing = drawing();
        if PANICKED.load(Ordering::Acquire) {
            return Ok(());
        }
        // Not `Terminal::clear`, which may ask where the cursor is; the thread that waits for keys would take
        // the answer.
        self.terminal = seize()?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

fn seize() -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
    if !io::stdout().is_terminal() {
        return Err(io::Error::other("standard output is none"));
    }
    terminal::enable_raw_mode()?;
    TAKEN.store(true, Ordering::Release);
    let all = terminal::Clear(terminal::ClearType::All);
    execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide, all)?;
    Terminal::new(CrosstermBackend::new(io::stdout()))
}

/// Gives the terminal back as it was. Does nothing the second time. Errors mean that there is no terminal any more.
pub fn give_back() {
    if TAKEN.swap(false, Ordering::AcqRel) {
        let _gone = execute!(io::stdout(), terminal::LeaveAlternateScreen, cursor::Show);
        let _gone = terminal::disable_raw_mode();
    }
}

/// Whether somebody would start us again if we stopped: some shell, that is, a process of our session above our
/// process group. Otherwise the group is orphaned, and the kernel would not let `SIGTSTP` stop it either.
#[must_use]
pub fn can_be_continued() -> bool {
    let field = |pid: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses, and may have such in it.
        let (_, rest) = stat.rsplit_once(") ")?;
        let mut fields = rest.split(' ').skip(1).map(str::parse::<i32>);
        let mut next = || fields.next()?.ok();
        Some((next()?, next()?, next()?))
    };
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let Some((mut parent, group, session)) = field(own) else { return false };
    while let Some((above, parents_group, parents_session)) = field(parent) {
        if parents_group != group {
            return parents_session == session;
        }
        parent = above;
    }
    false
}
