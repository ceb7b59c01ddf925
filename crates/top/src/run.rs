//! The loop: waits for events, draws, and does what is to be done.

use crate::appearance::{self, Appearance};
use crate::ask::{Ask, Trouble};
use crate::event::{Effect, Event, Question};
use crate::model::list::{List, Order};
use crate::model::{Model, Settings};
use crate::terminal::{self, Screen};
use crate::update::{until_due, update};
use crate::users::Users;
use crate::{once, source};
use rustix::process::{Pid, Signal};
use signal_hook::low_level::emulate_default_handler;
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};
use tern_control::Reply;
use tern_ids::HomePid;

/// What is shown at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The bars of all nodes (`mon`).
    Cluster,
    /// The processes of this node (`mtop`).
    Processes(Order),
}

/// How long the clock of what is on the screen may stand still.
const TICK: Duration = Duration::from_secs(1);
/// How far apart two lists are asked for whose difference is the use of CPU.
const APART: Duration = Duration::from_secs(1);
/// What is printed where there is no terminal to ask for its size.
const PAGE: (u16, u16) = (80, 24);

fn model(subject: Subject, settings: Settings, pace: Option<Duration>) -> Model {
    let mut model = Model::new(Appearance::of_environment(), settings, Users::of_this_machine());
    model.pace = pace.unwrap_or(model.pace);
    if let Subject::Processes(order) = subject {
        model.list = Some(List::new(None, order));
        model.only_list = true;
    }
    model
}

/// Shows the cluster until the user has seen enough.
///
/// # Errors
/// If there is no terminal to show it on.
pub fn show(subject: Subject, settings: Settings, pace: Option<Duration>, ask: &Ask) -> Result<(), Trouble> {
    if !io::stdout().is_terminal() {
        return Err(Trouble::new(2, "standard output is no terminal").hint("--once or --json"));
    }
    if appearance::is_dumb() {
        return print_on(subject, settings, pace, ask);
    }
    let (sender, events) = mpsc::channel();
    let screen = Screen::take(&sender)?;
    source::start(&sender)?;
    let shown =
        Loop { screen, model: model(subject, settings, pace), begun: Instant::now(), ask, sender, events };
    match shown.run()? {
        // As if we had never caught it; the terminal has been given back.
        End::Signal(signal) => Ok(emulate_default_handler(signal)?),
        End::Panic => Err(Trouble::new(70, "")),
        End::Well => Ok(()),
    }
}

/// How the loop ended.
enum End {
    Well,
    Signal(i32),
    Panic,
}

struct Loop<'a> {
    screen: Screen,
    model: Model,
    begun: Instant,
    ask: &'a Ask,
    sender: Sender<Event>,
    events: Receiver<Event>,
}

impl Loop<'_> {
    fn run(mut self) -> Result<End, Trouble> {
        let mut effects = self.tell(Event::Time(Duration::ZERO));
        loop {
            for effect in effects {
                if let Some(end) = self.perform(effect)? {
                    return Ok(end);
                }
            }
            self.model.size = self.screen.size()?;
            self.screen.draw(&self.model)?;
            effects = match self.events.recv_timeout(until_due(&self.model).min(TICK)) {
                Ok(event) => self.tell(event),
                Err(RecvTimeoutError::Timeout) => Vec::new(),
                Err(RecvTimeoutError::Disconnected) => return Ok(End::Well),
            };
            // All that has happened is drawn at once: a key that is held down does not fall behind.
            while let Ok(event) = self.events.try_recv() {
                effects.extend(self.tell(event));
            }
            effects.extend(self.tell(Event::Time(self.begun.elapsed())));
        }
    }

    fn tell(&mut self, event: Event) -> Vec<Effect> {
        self.model.now = self.begun.elapsed();
        update(&mut self.model, event)
    }

    fn perform(&mut self, effect: Effect) -> Result<Option<End>, Trouble> {
        match effect {
            Effect::Ask(question) => source::ask(question, self.ask, &self.sender),
            Effect::Signal { pid, command, signal } => {
                let outcome = send_signal(pid, &command, signal);
                update(&mut self.model, Event::Outcome(outcome));
            }
            // The whole group, so that whatever has started us stops too; ours comes back as `Event::Stop`.
            Effect::StopAll => {
                rustix::process::kill_current_process_group(Signal::TSTP).map_err(io::Error::from)?;
            }
            Effect::Stop if terminal::can_be_continued() => {
                terminal::give_back();
                emulate_default_handler(signal_hook::consts::SIGTSTP)?;
                self.screen.again()?;
            }
            Effect::Stop => {
                let trouble = Trouble::new(2, "there is no shell that would go on with it");
                self.model.complain(&trouble);
            }
            Effect::Redraw => self.screen.again()?,
            Effect::Quit => return Ok(Some(End::Well)),
            Effect::End(signal) => return Ok(Some(End::Signal(signal))),
            Effect::Panicked => return Ok(Some(End::Panic)),
        }
        Ok(None)
    }
}

fn send_signal(pid: HomePid, command: &str, signal: i32) -> Result<String, Trouble> {
    let (Some(to), Some(number)) = (Pid::from_raw(pid.0), Signal::from_named_raw(signal)) else {
        return Err(Trouble::new(2, format!("no process {pid}, or no signal {signal}")));
    };
    match rustix::process::kill_process(to, number) {
        Ok(()) => Ok(format!("sent signal {signal} to {pid} {command}")),
        Err(error) => {
            let code = if error == rustix::io::Errno::PERM { 3 } else { 1 };
            let reason = io::Error::from(error).to_string();
            let reason = reason.split(" (os error").next().unwrap_or_default();
            Err(Trouble::new(code, format!("cannot signal {pid} {command}: {}", reason.to_lowercase())))
        }
    }
}

/// Asks once, and returns the picture as text.
///
/// # Errors
/// If the daemon does not answer, or the node is in no cluster.
pub fn print_once(subject: Subject, settings: Settings, ask: &Ask) -> Result<String, Trouble> {
    let mut model = model(subject, settings, None);
    model.size = PAGE;
    if let Ok(size) = rustix::termios::tcgetwinsize(io::stdout())
        && size.ws_col > 0
        && size.ws_row > 1
    {
        model.size = (size.ws_col, size.ws_row - 1);
    }
    learn(&mut model, Question::Cluster, ask);
    learn(&mut model, Question::Placed, ask);
    match subject {
        Subject::Cluster => {
            if let Some(trouble) = model.cluster.trouble {
                return Err(trouble);
            }
            if model.nodes().is_empty() {
                return Err(
                    Trouble::new(5, "this node is in no cluster").hint("tern init, tern join or setpe")
                );
            }
        }
        Subject::Processes(_) => {
            // Not in the middle of the page.
            let rows = |ask: &Ask| match ask(&Question::Processes(None).request())? {
                Reply::Processes(rows) => Ok(rows),
                _ => Err(Trouble::new(70, "ternd has answered another question")),
            };
            let begun = Instant::now();
            let first = rows(ask)?;
            std::thread::sleep(APART);
            let second = rows(ask)?;
            if let Some(list) = &mut model.list {
                list.take(first, Duration::ZERO);
                list.take(second, begun.elapsed());
                // All of them, whatever the terminal's height.
                model.size.1 = u16::try_from(list.entries.len()).unwrap_or(u16::MAX - 5) + 4;
            }
        }
    }
    Ok(once::picture(&model))
}

fn learn(model: &mut Model, question: Question, ask: &Ask) {
    let reply = ask(&question.request());
    update(model, Event::Answer(question, reply));
}

/// On a terminal whose cursor cannot be moved: one picture after the other.
fn print_on(subject: Subject, settings: Settings, pace: Option<Duration>, ask: &Ask) -> Result<(), Trouble> {
    loop {
        let text = print_once(subject, settings, ask)?;
        if writeln!(io::stdout(), "{text}").and_then(|()| io::stdout().flush()).is_err() {
            // Whoever read it has seen enough.
            return Ok(());
        }
        std::thread::sleep(pace.unwrap_or(Duration::from_secs(2)));
    }
}
