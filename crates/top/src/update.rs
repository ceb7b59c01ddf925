//! What events do to the model, and what is to be done in the world for them.

mod answer;
mod bars;
mod list;
mod prompt;

use crate::event::{Effect, Event, Question};
use crate::model::{Model, PACES};
use crate::view::help;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::signal::SIGINT;
use std::time::Duration;

/// Changes the model as the event says.
pub fn update(model: &mut Model, event: Event) -> Vec<Effect> {
    match event {
        Event::Time(now) => {
            model.now = now;
            due(model)
        }
        Event::Size(columns, lines) => {
            model.size = (columns, lines);
            Vec::new()
        }
        Event::Key(key) if key.kind == KeyEventKind::Release => Vec::new(),
        Event::Key(key) => pressed(model, key),
        Event::Answer(question, reply) => {
            answer::take(model, question, reply);
            Vec::new()
        }
        Event::Outcome(Ok(text)) => {
            model.say(text);
            Vec::new()
        }
        Event::Outcome(Err(trouble)) => {
            model.complain(&trouble);
            Vec::new()
        }
        Event::Stop => vec![Effect::Stop],
        Event::Continue => vec![Effect::Redraw],
        Event::End(signal) => vec![Effect::End(signal)],
        Event::Panicked => vec![Effect::Panicked],
    }
}

/// When the next question is to be asked, from now.
#[must_use]
pub fn until_due(model: &Model) -> Duration {
    let next = |asked: Option<Duration>, last: Option<Duration>| match (asked, last) {
        (Some(_), _) => Duration::MAX,
        (None, None) => Duration::ZERO,
        (None, Some(last)) => (last + model.pace).saturating_sub(model.now),
    };
    let cluster = next(model.cluster.asked, model.cluster.last_asked);
    model.list.as_ref().map_or(cluster, |list| cluster.min(next(list.asked, list.last_asked)))
}

/// The questions that are due. There is one of a kind on its way at most: a daemon that is slow is not asked more
/// often for it.
fn due(model: &mut Model) -> Vec<Effect> {
    let (now, pace) = (model.now, model.pace);
    let ask = |asked: &mut Option<Duration>, last: &mut Option<Duration>| {
        let due = asked.is_none() && last.is_none_or(|last| now.saturating_sub(last) >= pace);
        if due {
            (*asked, *last) = (Some(now), Some(now));
        }
        due
    };
    let mut effects = Vec::new();
    if ask(&mut model.cluster.asked, &mut model.cluster.last_asked) {
        effects.push(Effect::Ask(Question::Cluster));
    }
    if let Some(list) = &mut model.list
        && ask(&mut list.asked, &mut list.last_asked)
    {
        effects.push(Effect::Ask(Question::Processes(list.of)));
    }
    effects
}

fn pressed(model: &mut Model, key: KeyEvent) -> Vec<Effect> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            // As if the terminal had sent it, so that a script that runs us ends as well.
            KeyCode::Char('c') => vec![Effect::End(SIGINT)],
            KeyCode::Char('z') => vec![Effect::StopAll],
            KeyCode::Char('l') => vec![Effect::Redraw],
            _ => Vec::new(),
        };
    }
    if model.prompt.is_some() {
        return prompt::pressed(model, key.code);
    }
    if let Some(top) = model.help {
        let last = help::last(model.size);
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
        KeyCode::Char('+') => change_pace(model, true),
        KeyCode::Char('-') => change_pace(model, false),
        code if model.list.is_some() => return list::pressed(model, code),
        code => return bars::pressed(model, code),
    }
    Vec::new()
}

fn change_pace(model: &mut Model, faster: bool) {
    let slower = PACES.iter().position(|pace| *pace >= model.pace).unwrap_or(PACES.len() - 1);
    let place = if faster { slower.saturating_sub(1) } else { (slower + 1).min(PACES.len() - 1) };
    model.pace = PACES[place];
    model.say(format!("asks every {} s", model.pace.as_secs_f64()));
}
