//! Handles keys while the bars are shown.

use crate::event::Effect;
use crate::layout::ScreenLayout;
use crate::model::list::{ProcessList, SortOrder};
use crate::model::prompt::{Prompt, PromptKind};
use crate::model::{ColumnWidth, Display, Model};
use ratatui::crossterm::event::KeyCode;
use tern_ids::NodeId;

/// Handles a key.
pub(super) fn handle_key(model: &mut Model, code: KeyCode) -> Vec<Effect> {
    let settings = &mut model.settings;
    match code {
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => return vec![Effect::Quit],
        KeyCode::Char('l') => settings.display = Display::Load,
        KeyCode::Char('L') => settings.display = Display::LogLoad,
        KeyCode::Char('s') => settings.display = Display::Speed,
        KeyCode::Char('m') => settings.display = Display::Memory,
        KeyCode::Char('r') => settings.display = Display::RawMemory,
        KeyCode::Char('u') => settings.display = Display::Utilisability,
        KeyCode::Char('w') => settings.width = ColumnWidth::Wide,
        KeyCode::Char('v') => settings.width = ColumnWidth::Vertical,
        KeyCode::Char('V') => settings.width = ColumnWidth::Tight,
        KeyCode::Char('a') => settings.width = ColumnWidth::Auto,
        KeyCode::Char('d') => settings.dead = !settings.dead,
        KeyCode::Char('t') => settings.totals = !settings.totals,
        KeyCode::Right | KeyCode::Down => move_selection(model, 1),
        KeyCode::Left | KeyCode::Up => move_selection(model, -1),
        KeyCode::PageDown => turn_page(model, true),
        KeyCode::PageUp => turn_page(model, false),
        KeyCode::Home => move_selection(model, isize::MIN),
        KeyCode::End => move_selection(model, isize::MAX),
        KeyCode::Enter => {
            if let Some(node) = model.selected.or(model.me()) {
                return open_node(model, node);
            }
        }
        KeyCode::Char(digit @ '1'..='9') => {
            model.prompt = Some(Prompt::new(PromptKind::Node));
            return super::prompt::handle_key(model, KeyCode::Char(digit));
        }
        _ => {}
    }
    Vec::new()
}

/// Moves the selection, and turns to its page.
fn move_selection(model: &mut Model, by: isize) {
    let numbers: Vec<NodeId> = model.shown().iter().map(|node| node.node).collect();
    let layout = ScreenLayout::new(model);
    let (before, _) = layout.page(model);
    let Some(last) = numbers.len().checked_sub(1) else { return };
    let index = match model.selected {
        // A selected node that is no longer shown has an insertion point between others.
        Some(selected) => match numbers.binary_search(&selected) {
            Ok(index) => index.saturating_add_signed(by).min(last),
            Err(index) => index.min(last),
        },
        None if by.unsigned_abs() > 1 => 0usize.saturating_add_signed(by).min(last),
        None => before,
    };
    select(model, &numbers, index, before, layout.per_page);
}

/// Turns a page; the selection keeps its position on it.
fn turn_page(model: &mut Model, forward: bool) {
    let numbers: Vec<NodeId> = model.shown().iter().map(|node| node.node).collect();
    let layout = ScreenLayout::new(model);
    let (before, _) = layout.page(model);
    let Some(last) = numbers.len().checked_sub(1) else { return };
    let turned = |index: usize| {
        let index = if forward { index + layout.per_page } else { index.saturating_sub(layout.per_page) };
        index.min(last)
    };
    if let Some(selected) = model.selected {
        let index = turned(numbers.binary_search(&selected).unwrap_or_else(|index| index));
        model.selected = Some(numbers[index]);
    }
    let first = turned(before).min(numbers.len().saturating_sub(layout.per_page));
    model.settings.first = Some(numbers[first]);
    if let Some(selected) = model.selected.and_then(|selected| numbers.binary_search(&selected).ok()) {
        select(model, &numbers, selected, first, layout.per_page);
    }
}

/// Selects the node at `index` and turns to a page that contains it.
fn select(model: &mut Model, numbers: &[NodeId], index: usize, before: usize, per_page: usize) {
    model.selected = Some(numbers[index]);
    let first = before.clamp((index + 1).saturating_sub(per_page), index);
    model.settings.first = Some(numbers[first]);
}

/// Shows the processes of a node.
pub(super) fn open_node(model: &mut Model, node: NodeId) -> Vec<Effect> {
    model.selected = Some(node);
    let of = (Some(node) != model.me()).then_some(node);
    model.list = Some(ProcessList::new(of, SortOrder::default()));
    super::due_queries(model)
}
