//! Handles keys while processes are shown.

use crate::event::Effect;
use crate::layout::list_lines;
use crate::model::Model;
use crate::model::list::SortOrder;
use crate::model::prompt::{Prompt, PromptKind};
use crate::request::TopError;
use ratatui::crossterm::event::KeyCode;

/// Handles a key.
pub(super) fn handle_key(model: &mut Model, code: KeyCode) -> Vec<Effect> {
    let height = list_lines(model);
    let me = model.me();
    let Some(list) = &mut model.list else { return Vec::new() };
    let page = height.max(1).cast_signed();
    match code {
        KeyCode::Char('q' | 'Q') | KeyCode::Esc if model.list_only => return vec![Effect::Quit],
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => model.list = None,
        KeyCode::Down => list.move_selection(1, height),
        KeyCode::Up => list.move_selection(-1, height),
        KeyCode::PageDown => list.move_selection(page, height),
        KeyCode::PageUp => list.move_selection(-page, height),
        KeyCode::Home => list.move_selection(isize::MIN, height),
        KeyCode::End => list.move_selection(isize::MAX, height),
        KeyCode::Char('P') => list.sort_by(SortOrder::Cpu),
        KeyCode::Char('T') => list.sort_by(SortOrder::Time),
        KeyCode::Char('N') => list.sort_by(SortOrder::Pid),
        KeyCode::Char(key @ ('m' | 'k')) => {
            let Some(entry) = list.selected_entry() else { return Vec::new() };
            let (pid, command) = (entry.row.pid, program_name(&entry.row.command));
            // Pids are those of the home, and only the home moves and signals a process.
            match entry.row.from.or(list.node) {
                Some(home) if Some(home) != me => {
                    let what = if key == 'm' { "moved" } else { "signalled" };
                    let text = format!("{pid} {command} can only be {what} on its home, node {home}");
                    model.show_error(&TopError::new(4, text).hint(format!("mon on node {home}")));
                }
                _ if key == 'm' => model.prompt = Some(Prompt::new(PromptKind::Move { pid, command })),
                _ => model.prompt = Some(Prompt::new(PromptKind::Signal { pid, command })),
            }
        }
        _ => {}
    }
    Vec::new()
}

/// The name of the program in a command line.
fn program_name(command: &str) -> String {
    let program = command.split_whitespace().next().unwrap_or_default();
    program.rsplit('/').next().unwrap_or_default().to_owned()
}
