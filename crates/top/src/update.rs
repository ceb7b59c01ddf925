//! Applies events to the model, and returns the effects.

mod bars;
mod list;
mod prompt;
mod reply;

use crate::event::{Effect, Query, UiEvent};
use crate::model::{INTERVALS, Model};
use crate::view::help;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::signal::SIGINT;
use std::time::Duration;

/// Applies an event to the model. Returns the effects to carry out.
pub fn update(model: &mut Model, event: UiEvent) -> Vec<Effect> {
    match event {
        UiEvent::Time(now) => {
            model.now = now;
            due_queries(model)
        }
        UiEvent::Size(columns, lines) => {
            model.size = (columns, lines);
            Vec::new()
        }
        UiEvent::Key(key) if key.kind == KeyEventKind::Release => Vec::new(),
        UiEvent::Key(key) => handle_key(model, key),
        UiEvent::Reply(query, reply) => {
            reply::apply(model, query, reply);
            Vec::new()
        }
        UiEvent::ActionDone(Ok(text)) => {
            model.show_message(text);
            Vec::new()
        }
        UiEvent::ActionDone(Err(error)) => {
            model.show_error(&error);
            Vec::new()
        }
        UiEvent::Stop => vec![Effect::Stop],
        UiEvent::Continue => vec![Effect::Redraw],
        UiEvent::Terminate(signal) => vec![Effect::EndBySignal(signal)],
        UiEvent::Panicked => vec![Effect::Panicked],
    }
}

/// The time until the next query is due.
#[must_use]
pub fn time_until_query(model: &Model) -> Duration {
    let next = |pending: Option<Duration>, last: Option<Duration>| match (pending, last) {
        (Some(_), _) => Duration::MAX,
        (None, None) => Duration::ZERO,
        (None, Some(last)) => (last + model.interval).saturating_sub(model.now),
    };
    let cluster = next(model.cluster.pending_since, model.cluster.last_sent);
    model.list.as_ref().map_or(cluster, |list| cluster.min(next(list.pending_since, list.last_sent)))
}

/// The queries that are due. At most one of each kind is pending, so a slow daemon is not queried
/// more often.
fn due_queries(model: &mut Model) -> Vec<Effect> {
    let (now, interval) = (model.now, model.interval);
    let start_if_due = |pending: &mut Option<Duration>, last: &mut Option<Duration>| {
        let due = pending.is_none() && last.is_none_or(|last| now.saturating_sub(last) >= interval);
        if due {
            (*pending, *last) = (Some(now), Some(now));
        }
        due
    };
    let mut effects = Vec::new();
    if start_if_due(&mut model.cluster.pending_since, &mut model.cluster.last_sent) {
        effects.push(Effect::Query(Query::Cluster));
    }
    if let Some(list) = &mut model.list
        && start_if_due(&mut list.pending_since, &mut list.last_sent)
    {
        effects.push(Effect::Query(Query::Processes(list.node)));
    }
    effects
}

fn handle_key(model: &mut Model, key: KeyEvent) -> Vec<Effect> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            // Ends as if the terminal had sent the signal, so that a script that runs this program
            // ends as well.
            KeyCode::Char('c') => vec![Effect::EndBySignal(SIGINT)],
            KeyCode::Char('z') => vec![Effect::StopAll],
            KeyCode::Char('l') => vec![Effect::Redraw],
            _ => Vec::new(),
        };
    }
    if model.prompt.is_some() {
        return prompt::handle_key(model, key.code);
    }
    if let Some(top) = model.help {
        let last = help::max_scroll(model.size);
        let page = usize::from(model.size.1).max(1);
        model.help = match key.code {
            KeyCode::Down => Some((top + 1).min(last)),
            KeyCode::Up => Some(top.saturating_sub(1)),
            KeyCode::PageDown => Some((top + page).min(last)),
            KeyCode::PageUp => Some(top.saturating_sub(page)),
            KeyCode::Home => Some(0),
            KeyCode::End => Some(last),
            _ => None,
        };
        return Vec::new();
    }
    model.message = None;
    match key.code {
        KeyCode::Char('h' | 'H' | '?') | KeyCode::F(1) => model.help = Some(0),
        KeyCode::Char('+') => change_interval(model, true),
        KeyCode::Char('-') => change_interval(model, false),
        code if model.list.is_some() => return list::handle_key(model, code),
        code => return bars::handle_key(model, code),
    }
    Vec::new()
}

fn change_interval(model: &mut Model, faster: bool) {
    let current =
        INTERVALS.iter().position(|interval| *interval >= model.interval).unwrap_or(INTERVALS.len() - 1);
    let place = if faster { current.saturating_sub(1) } else { (current + 1).min(INTERVALS.len() - 1) };
    model.interval = INTERVALS[place];
    model.show_message(format!("refreshes every {} s", model.interval.as_secs_f64()));
}
