//! The event loop: waits for events, draws, and carries out effects.

use crate::appearance::{self, Appearance};
use crate::event::{Effect, Query, UiEvent};
use crate::model::list::{ProcessList, SortOrder};
use crate::model::{Model, ViewSettings};
use crate::request::{RequestFn, TopError};
use crate::terminal::{self, Screen};
use crate::update::{time_until_query, update};
use crate::users::UserNames;
use crate::{once, source};
use rustix::process::{Pid, Signal};
use signal_hook::low_level::emulate_default_handler;
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};
use tern_control::Reply;
use tern_ids::HomePid;

/// The view at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitialView {
    /// The bars of all nodes (`mon`).
    Cluster,
    /// The processes of this node (`mtop`).
    Processes(SortOrder),
}

/// The maximum age of the times on the screen.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);
/// The time between the two lists of processes that are compared to compute the CPU use.
const CPU_SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// The size of the picture where there is no terminal to query.
const DEFAULT_SIZE: (u16, u16) = (80, 24);

fn new_model(view: InitialView, settings: ViewSettings, interval: Option<Duration>) -> Model {
    let mut model = Model::new(Appearance::from_env(), settings, UserNames::from_passwd());
    model.interval = interval.unwrap_or(model.interval);
    if let InitialView::Processes(order) = view {
        model.list = Some(ProcessList::new(None, order));
        model.list_only = true;
    }
    model
}

/// Shows the cluster until the user quits.
///
/// # Errors
/// If standard output is not a terminal.
pub fn show(
    view: InitialView,
    settings: ViewSettings,
    interval: Option<Duration>,
    request: &RequestFn,
) -> Result<(), TopError> {
    if !io::stdout().is_terminal() {
        return Err(TopError::new(2, "standard output is not a terminal").hint("--once or --json"));
    }
    if appearance::is_dumb() {
        return print_repeatedly(view, settings, interval, request);
    }
    let (sender, events) = mpsc::channel();
    let screen = Screen::take_over(&sender)?;
    source::start(&sender)?;
    let event_loop = EventLoop {
        screen,
        model: new_model(view, settings, interval),
        started: Instant::now(),
        request,
        sender,
        events,
    };
    match event_loop.run()? {
        // Ends this process as if the signal had not been caught; the terminal has been restored.
        LoopEnd::Signal(signal) => Ok(emulate_default_handler(signal)?),
        LoopEnd::Panic => Err(TopError::new(70, "")),
        LoopEnd::Quit => Ok(()),
    }
}

/// How the loop ended.
enum LoopEnd {
    Quit,
    Signal(i32),
    Panic,
}

struct EventLoop<'a> {
    screen: Screen,
    model: Model,
    started: Instant,
    request: &'a RequestFn,
    sender: Sender<UiEvent>,
    events: Receiver<UiEvent>,
}

impl EventLoop<'_> {
    fn run(mut self) -> Result<LoopEnd, TopError> {
        let mut effects = self.handle(UiEvent::Time(Duration::ZERO));
        loop {
            for effect in effects {
                if let Some(end) = self.perform(effect)? {
                    return Ok(end);
                }
            }
            self.model.size = self.screen.size()?;
            self.screen.draw(&self.model)?;
            effects = match self.events.recv_timeout(time_until_query(&self.model).min(REDRAW_INTERVAL)) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => Vec::new(),
                Err(RecvTimeoutError::Disconnected) => return Ok(LoopEnd::Quit),
            };
            // All pending events are handled before drawing, so that the picture does not fall
            // behind a key that repeats.
            while let Ok(event) = self.events.try_recv() {
                effects.extend(self.handle(event));
            }
            effects.extend(self.handle(UiEvent::Time(self.started.elapsed())));
        }
    }

    fn handle(&mut self, event: UiEvent) -> Vec<Effect> {
        self.model.now = self.started.elapsed();
        update(&mut self.model, event)
    }

    fn perform(&mut self, effect: Effect) -> Result<Option<LoopEnd>, TopError> {
        match effect {
            Effect::Query(query) => source::send_query(query, self.request, &self.sender),
            Effect::Signal { pid, command, signal } => {
                let outcome = send_signal(pid, &command, signal);
                update(&mut self.model, UiEvent::ActionDone(outcome));
            }
            // The signal goes to the whole group, so that the program that started this one stops
            // too. This process receives the signal as `UiEvent::Stop`.
            Effect::StopAll => {
                rustix::process::kill_current_process_group(Signal::TSTP).map_err(io::Error::from)?;
            }
            Effect::Stop if terminal::can_be_continued() => {
                terminal::restore();
                emulate_default_handler(signal_hook::consts::SIGTSTP)?;
                self.screen.take_over_again()?;
            }
            Effect::Stop => {
                let error =
                    TopError::new(2, "cannot stop, because no shell would continue it").hint("q, to quit");
                self.model.show_error(&error);
            }
            Effect::Redraw => self.screen.take_over_again()?,
            Effect::Quit => return Ok(Some(LoopEnd::Quit)),
            Effect::EndBySignal(signal) => return Ok(Some(LoopEnd::Signal(signal))),
            Effect::Panicked => return Ok(Some(LoopEnd::Panic)),
        }
        Ok(None)
    }
}

fn send_signal(pid: HomePid, command: &str, signal: i32) -> Result<String, TopError> {
    let (Some(to), Some(number)) = (Pid::from_raw(pid.0), Signal::from_named_raw(signal)) else {
        return Err(TopError::new(2, format!("invalid pid {pid} or signal {signal}")));
    };
    match rustix::process::kill_process(to, number) {
        Ok(()) => Ok(format!("sent signal {signal} to {pid} {command}")),
        Err(error) => {
            let code = if error == rustix::io::Errno::PERM { 3 } else { 1 };
            let reason = io::Error::from(error).to_string();
            let reason = reason.split(" (os error").next().unwrap_or_default();
            Err(TopError::new(code, format!("cannot signal {pid} {command}: {}", reason.to_lowercase())))
        }
    }
}

/// Queries the daemon and returns one picture as text. A list of processes is queried twice, to
/// compute the CPU use.
///
/// # Errors
/// If the daemon does not answer; for the bars, also if the node is in no cluster.
pub fn print_once(
    view: InitialView,
    settings: ViewSettings,
    request: &RequestFn,
) -> Result<String, TopError> {
    let mut model = new_model(view, settings, None);
    model.size = DEFAULT_SIZE;
    if let Ok(size) = rustix::termios::tcgetwinsize(io::stdout())
        && size.ws_col > 0
        && size.ws_row > 1
    {
        model.size = (size.ws_col, size.ws_row - 1);
    }
    fetch(&mut model, Query::Cluster, request);
    fetch(&mut model, Query::Placed, request);
    match view {
        InitialView::Cluster => {
            if let Some(error) = model.cluster.error {
                return Err(error);
            }
            if model.nodes().is_empty() {
                return Err(
                    TopError::new(5, "this node is not in a cluster").hint("tern init, tern join or setpe")
                );
            }
        }
        InitialView::Processes(_) => {
            // Errors are returned, not drawn in the picture.
            let rows = || match request(&Query::Processes(None).request())? {
                Reply::Processes(rows) => Ok(rows),
                _ => Err(TopError::new(70, "ternd sent an unexpected reply")),
            };
            let started = Instant::now();
            let first = rows()?;
            std::thread::sleep(CPU_SAMPLE_INTERVAL);
            let second = rows()?;
            if let Some(list) = &mut model.list {
                list.update(first, Duration::ZERO);
                list.update(second, started.elapsed());
                // All processes, whatever the terminal's height.
                model.size.1 = u16::try_from(list.entries.len()).unwrap_or(u16::MAX - 5) + 4;
            }
        }
    }
    Ok(once::render(&model))
}

fn fetch(model: &mut Model, query: Query, request: &RequestFn) {
    let reply = request(&query.request());
    update(model, UiEvent::Reply(query, reply));
}

/// On a terminal whose cursor cannot be moved: prints one picture after the other.
fn print_repeatedly(
    view: InitialView,
    settings: ViewSettings,
    interval: Option<Duration>,
    request: &RequestFn,
) -> Result<(), TopError> {
    loop {
        let text = print_once(view, settings, request)?;
        if writeln!(io::stdout(), "{text}").and_then(|()| io::stdout().flush()).is_err() {
            // The reader has closed the output.
            return Ok(());
        }
        std::thread::sleep(interval.unwrap_or(Duration::from_secs(2)));
    }
}
