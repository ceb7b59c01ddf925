//! Takes the terminal over and restores it: at the end, on a panic, and while the program is
//! stopped.

use crate::event::UiEvent;
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

/// Whether the terminal is taken over. The thread that clears this restores the terminal.
static TAKEN_OVER: AtomicBool = AtomicBool::new(false);

/// Whether a thread has panicked; the terminal is then not taken over again.
static PANICKED: AtomicBool = AtomicBool::new(false);
/// Held while a thread draws. A panicking thread waits for the end of the drawing, which would
/// otherwise overwrite its report.
static DRAWING: Mutex<()> = Mutex::new(());

fn lock_drawing() -> MutexGuard<'static, ()> {
    DRAWING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The terminal, taken over until this is dropped.
#[derive(Debug)]
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal over; this thread draws on it. A panic of any thread restores the
    /// terminal before it is reported, and is sent as an event, so that nothing is drawn over the
    /// report.
    ///
    /// # Errors
    /// If standard output is not a terminal.
    pub fn take_over(events: &Sender<UiEvent>) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        let events = events.clone();
        let drawing_thread = thread::current().id();
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // If the drawing thread panics, it may hold the lock itself.
                let _wait = (thread::current().id() != drawing_thread).then(lock_drawing);
                PANICKED.store(true, Ordering::Release);
                restore();
                let _gone = events.send(UiEvent::Panicked);
                report(panic);
            }));
        });
        Ok(Self { terminal: enter_screen()? })
    }

    /// The terminal's columns and lines.
    ///
    /// # Errors
    /// If the terminal is gone.
    pub fn size(&self) -> io::Result<(u16, u16)> {
        self.terminal.size().map(|size| (size.width, size.height))
    }

    /// Draws the changes.
    ///
    /// # Errors
    /// If the terminal is gone.
    pub fn draw(&mut self, model: &Model) -> io::Result<()> {
        let _drawing = lock_drawing();
        if TAKEN_OVER.load(Ordering::Acquire) {
            self.terminal.draw(|frame| view::draw(model, frame.buffer_mut()))?;
        }
        Ok(())
    }

    /// Takes the terminal over again and clears it, because another program may have used it.
    ///
    /// # Errors
    /// If the terminal is gone.
    pub fn take_over_again(&mut self) -> io::Result<()> {
        let _drawing = lock_drawing();
        if PANICKED.load(Ordering::Acquire) {
            return Ok(());
        }
        // Not `Terminal::clear`, which may query the cursor's position: the thread that reads keys
        // would receive the reply.
        self.terminal = enter_screen()?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn enter_screen() -> io::Result<Terminal<CrosstermBackend<Stdout>>> {
    if !io::stdout().is_terminal() {
        return Err(io::Error::other("standard output is not a terminal"));
    }
    terminal::enable_raw_mode()?;
    TAKEN_OVER.store(true, Ordering::Release);
    let all = terminal::Clear(terminal::ClearType::All);
    execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide, all)?;
    Terminal::new(CrosstermBackend::new(io::stdout()))
}

/// Restores the terminal. Does nothing if it is not taken over; errors mean that the terminal is
/// gone.
pub fn restore() {
    if TAKEN_OVER.swap(false, Ordering::AcqRel) {
        let _gone = execute!(io::stdout(), terminal::LeaveAlternateScreen, cursor::Show);
        let _gone = terminal::disable_raw_mode();
    }
}

/// Whether a shell could continue this program if it stopped: whether an ancestor outside our
/// process group is in our session. Otherwise the group is orphaned, and the kernel does not let
/// `SIGTSTP` stop it either.
#[must_use]
pub fn can_be_continued() -> bool {
    let field = |pid: i32| {
        let stat = tern_control::procfs::read_text(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may contain some.
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
