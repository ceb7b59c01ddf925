//! Keys while processes are shown.

use crate::ask::Trouble;
use crate::event::Effect;
use crate::layout::list_lines;
use crate::model::Model;
use crate::model::list::Order;
use crate::model::prompt::{About, Prompt};
use ratatui::crossterm::event::KeyCode;

/// A key was pressed.
pub(super) fn pressed(model: &mut Model, code: KeyCode) -> Vec<Effect> {
    let height = list_lines(model);
    let me = model.me();
    let Some(list) = &mut model.list else { return Vec::new() };
    let page = height.max(1).cast_signed();
    match code {
        KeyCode::Char('q' | 'Q') | KeyCode::Esc if model.only_list => return vec![Effect::Quit],
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => model.list = None,
        KeyCode::Down => list.step(1, height),
        KeyCode::Up => list.step(-1, height),
        KeyCode::PageDown => list.step(page, height),
        KeyCode::PageUp => list.step(-page, height),
        KeyCode::Home => list.step(isize::MIN, height),
        KeyCode::End => list.step(isize::MAX, height),
        KeyCode::Char('P') => list.sort_by(Order::Cpu),
        KeyCode::Char('T') => list.sort_by(Order::Time),
        KeyCode::Char('N') => list.sort_by(Order::Pid),
        KeyCode::Char(key @ ('m' | 'k')) => {
            let Some(entry) = list.chosen() else { return Vec::new() };
            let (pid, command) = (entry.row.pid, name(&entry.row.command));
            // Pids are those of the home, and only home moves and signals a process.
            match entry.row.from.or(list.of) {
                Some(home) if Some(home) != me => {
                    let what = if key == 'm' { "moved" } else { "signalled" };
                    let said =
                        format!("{pid} {command} is at home on node {home} and can only be {what} there");
                    model.complain(&Trouble::new(4, said));
                }
                _ if key == 'm' => model.prompt = Some(Prompt::new(About::Move { pid, command })),
                _ => model.prompt = Some(Prompt::new(About::Signal { pid, command })),
            }
        }
        _ => {}
    }
    Vec::new()
}

/// The program's name, of its command line.
fn name(command: &str) -> String {
    let program = command.split_whitespace().next().unwrap_or_default();
    program.rsplit('/').next().unwrap_or_default().to_owned()
}
