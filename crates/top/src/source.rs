//! The sources of events: keys, signals, and replies of the daemon. A thread waits for each.

use crate::event::{Query, UiEvent};
use crate::request::{RequestFn, TopError};
use ratatui::crossterm::event as terminal;
use signal_hook::consts::signal::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use std::io;
use std::sync::mpsc::Sender;
use std::thread;

/// Starts the threads that send keys and signals as events.
///
/// # Errors
/// If a thread cannot be created.
pub fn start(events: &Sender<UiEvent>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT])?;
    let to = events.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            let event = match signal {
                SIGTSTP => UiEvent::Stop,
                SIGCONT => UiEvent::Continue,
                signal => UiEvent::Terminate(signal),
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
                Ok(terminal::Event::Key(key)) => UiEvent::Key(key),
                Ok(terminal::Event::Resize(columns, lines)) => UiEvent::Size(columns, lines),
                Ok(_) => continue,
                // The terminal is gone, so no key can be pressed any more.
                Err(_) => {
                    let _gone = to.send(UiEvent::Terminate(SIGHUP));
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

/// Queries the daemon and sends its reply as an event. A query of the cluster is followed by one of
/// the placed commands. Each query has its own thread, because a migration takes long, and another
/// node may reply slowly.
pub fn send_query(query: Query, request: &RequestFn, events: &Sender<UiEvent>) {
    let (request, to) = (request.clone(), events.clone());
    let failed = query.clone();
    let started = thread::Builder::new().name("query".into()).spawn(move || {
        let reply = request(&query.request());
        let next = (query == Query::Cluster).then_some(Query::Placed);
        let _gone = to.send(UiEvent::Reply(query, reply));
        if let Some(query) = next {
            let reply = request(&query.request());
            let _gone = to.send(UiEvent::Reply(query, reply));
        }
    });
    if let Err(error) = started {
        let error = TopError::new(70, format!("cannot create a thread for the query: {error}"));
        let _gone = events.send(UiEvent::Reply(failed, Err(error)));
    }
}
