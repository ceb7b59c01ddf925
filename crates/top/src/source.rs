//! Where events come from: keys, signals, and the daemon's answers, each waited for by a thread.

use crate::ask::{Ask, Trouble};
use crate::event::{Event, Question};
use ratatui::crossterm::event as terminal;
use signal_hook::consts::signal::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use std::io;
use std::sync::mpsc::Sender;
use std::thread;

/// Begins to send what the terminal and other processes have to say.
///
/// # Errors
/// If there is no thread to wait for it.
pub fn start(events: &Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT])?;
    let to = events.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            let event = match signal {
                SIGTSTP => Event::Stop,
                SIGCONT => Event::Continue,
                signal => Event::End(signal),
            };
            if to.send(event).is_err() {
                return;
            }
        }
    })?;
    let to = events.clone();
    thread::Builder::new().name("keys".into()).spawn(move || {
        loop {
            let event = match terminal::read() {
                Ok(terminal::Event::Key(key)) => Event::Key(key),
                Ok(terminal::Event::Resize(columns, lines)) => Event::Size(columns, lines),
                Ok(_) => continue,
                // The terminal has gone, and nobody can press a key any more.
                Err(_) => {
                    let _gone = to.send(Event::End(SIGHUP));
                    return;
                }
            };
            if to.send(event).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Asks the daemon, and sends its answer. Each question has a thread of its own: a migration takes as long as it
/// takes, and another node may be slow to tell its processes.
pub fn ask(question: Question, ask: &Ask, events: &Sender<Event>) {
    let (asked, to) = (ask.clone(), events.clone());
    let again = question.clone();
    let asking = thread::Builder::new().name("ask".into()).spawn(move || {
        let reply = asked(&question.request());
        let with = (question == Question::Cluster).then_some(Question::Placed);
        let _gone = to.send(Event::Answer(question, reply));
        if let Some(question) = with {
            let reply = asked(&question.request());
            let _gone = to.send(Event::Answer(question, reply));
        }
    });
    if let Err(error) = asking {
        let trouble = Trouble::new(70, format!("no thread to ask ternd with: {error}"));
        let _gone = events.send(Event::Answer(again, Err(trouble)));
    }
}
