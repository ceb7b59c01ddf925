//! Keys while the bars are shown.

use crate::event::Effect;
use crate::layout::Layout;
use crate::model::list::{List, Order};
use crate::model::prompt::{About, Prompt};
use crate::model::{Display, Model, Width};
use ratatui::crossterm::event::KeyCode;
use tern_ids::NodeId;

/// A key was pressed.
pub(super) fn pressed(model: &mut Model, code: KeyCode) -> Vec<Effect> {
    let settings = &mut model.settings;
    match code {
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => return vec![Effect::Quit],
        KeyCode::Char('l') => settings.display = Display::Load,
        KeyCode::Char('L') => settings.display = Display::LogLoad,
        KeyCode::Char('s') => settings.display = Display::Speed,
        KeyCode::Char('m') => settings.display = Display::Memory,
        KeyCode::Char('r') => settings.display = Display::RawMemory,
        KeyCode::Char('u') => settings.display = Display::Utilisability,
        KeyCode::Char('w') => settings.width = Width::Wide,
        KeyCode::Char('v') => settings.width = Width::Vertical,
        KeyCode::Char('V') => settings.width = Width::Tight,
        KeyCode::Char('a') => settings.width = Width::Auto,
        KeyCode::Char('d') => settings.dead = !settings.dead,
        KeyCode::Char('t') => settings.totals = !settings.totals,
        KeyCode::Right | KeyCode::Down => step(model, 1),
        KeyCode::Left | KeyCode::Up => step(model, -1),
        KeyCode::PageDown => turn(model, true),
        KeyCode::PageUp => turn(model, false),
        KeyCode::Home => step(model, isize::MIN),
        KeyCode::End => step(model, isize::MAX),
        KeyCode::Enter => {
            if let Some(node) = model.chosen.or(model.me()) {
                return open(model, node);
            }
        }
        KeyCode::Char(digit @ '1'..='9') => {
            model.prompt = Some(Prompt::new(About::Node));
            return super::prompt::pressed(model, KeyCode::Char(digit));
        }
        _ => {}
    }
    Vec::new()
}

/// Chooses another node, and turns the page to it.
fn step(model: &mut Model, by: isize) {
    let numbers: Vec<NodeId> = model.shown().iter().map(|node| node.node).collect();
    let layout = Layout::of(model);
    let (before, _) = layout.page(model);
    let Some(last) = numbers.len().checked_sub(1) else { return };
    let place = match model.chosen {
        // A node that is shown no more is between others.
        Some(chosen) => match numbers.binary_search(&chosen) {
            Ok(place) => place.saturating_add_signed(by).min(last),
            Err(place) => place.min(last),
        },
        None if by.unsigned_abs() > 1 => 0usize.saturating_add_signed(by).min(last),
        None => before,
    };
    show(model, &numbers, place, before, layout.per_page);
}

/// Turns a page; the choice keeps its place on it.
fn turn(model: &mut Model, onward: bool) {
    let numbers: Vec<NodeId> = model.shown().iter().map(|node| node.node).collect();
    let layout = Layout::of(model);
    let (before, _) = layout.page(model);
    let Some(last) = numbers.len().checked_sub(1) else { return };
    let turned = |place: usize| {
        let place = if onward { place + layout.per_page } else { place.saturating_sub(layout.per_page) };
        place.min(last)
    };
    if let Some(chosen) = model.chosen {
        let place = turned(numbers.binary_search(&chosen).unwrap_or_else(|place| place));
        model.chosen = Some(numbers[place]);
    }
    let first = turned(before).min(numbers.len().saturating_sub(layout.per_page));
    model.settings.first = Some(numbers[first]);
    if let Some(chosen) = model.chosen.and_then(|chosen| numbers.binary_search(&chosen).ok()) {
        show(model, &numbers, chosen, first, layout.per_page);
    }
}

/// Chooses the node at this place, on a page that has it.
fn show(model: &mut Model, numbers: &[NodeId], place: usize, before: usize, per_page: usize) {
    model.chosen = Some(numbers[place]);
    let first = before.clamp((place + 1).saturating_sub(per_page), place);
    model.settings.first = Some(numbers[first]);
}

/// Shows the processes of a node.
pub(super) fn open(model: &mut Model, node: NodeId) -> Vec<Effect> {
    model.chosen = Some(node);
    let of = (Some(node) != model.me()).then_some(node);
    model.list = Some(List::new(of, Order::default()));
    super::due(model)
}
