//! The help page: what the keys do.

use super::Canvas;
use super::status::wrap;
use crate::appearance::Tone;

const KEYS: [(&str, &str); 30] = [
    ("", "Bars"),
    ("l  L", "load: 1 is one standard CPU kept busy; L for a logarithmic scale"),
    ("m", "memory in use, and available to a new process (+)"),
    ("r", "the same, but caches count as in use"),
    ("s", "speed of a CPU, 10000 is the standard; the number of CPUs is below"),
    ("u", "utilisability: percent of the time not spent waiting for paging"),
    ("w v V a", "wide, vertical or tight columns; a for the widest that fit"),
    ("d", "also show nodes that are dead (X) or unknown (?)"),
    ("t", "totals of the cluster"),
    ("left right", "select a node; also PageUp PageDown Home End"),
    ("0-9", "go to a node by its number"),
    ("Enter", "the processes of the selected node"),
    ("+  -", "refresh more often, less often"),
    ("", "Marks below a node"),
    ("^", "it is selected"),
    ("?", "suspected to be dead: it did not reply to a node"),
    ("b s l q", "block, stay, lstay, quiet, as set by mosctl"),
    ("", "Processes"),
    ("up down", "select a process; also PageUp PageDown Home End"),
    ("m", "migrate it: to a node's number or host, or home"),
    ("k", "send it a signal"),
    ("P  T  N", "sort by CPU, time, pid"),
    ("WHERE", "the node where a process of this node runs"),
    ("FROM", "the home of a guest"),
    ("q  Esc", "back to the bars"),
    ("", "Everywhere"),
    ("h  ?", "this page"),
    ("^L", "redraw"),
    ("^Z", "stop; fg continues"),
    ("q  ^C", "quit"),
];

/// The column at which the meanings begin.
const MEANING_COLUMN: u16 = 14;

/// The lines of the help, wrapped to `columns`.
fn lines(columns: u16) -> Vec<(&'static str, String)> {
    let width = usize::from(columns.saturating_sub(MEANING_COLUMN)).max(1);
    let lines = KEYS.iter().flat_map(|(key, meaning)| {
        let texts = if key.is_empty() { vec![(*meaning).to_owned()] } else { wrap(meaning, width) };
        texts.into_iter().enumerate().map(|(line, text)| match (key.is_empty(), line) {
            (true, _) => (HEADING, text),
            (false, 0) => (*key, text),
            (false, _) => ("", text),
        })
    });
    lines.collect()
}

/// The key of a line that is a heading.
const HEADING: &str = "heading";

/// The maximum number of lines by which the help can be scrolled. Its last line is then the last on
/// the screen.
#[must_use]
pub fn max_scroll((columns, height): (u16, u16)) -> usize {
    lines(columns).len().saturating_sub(usize::from(height).saturating_sub(1))
}

pub(super) fn draw(canvas: &mut Canvas<'_>, top: usize) {
    let top = top.min(max_scroll((canvas.columns(), canvas.lines())));
    let title = "Keys: up and down scroll, any other key closes this page";
    canvas.write(0, 0, title, canvas.style(Tone::Selected));
    let height = usize::from(canvas.lines());
    for (line, (key, meaning)) in (1..).zip(lines(canvas.columns()).iter().skip(top)).take(height) {
        if *key == HEADING {
            canvas.write(0, line, meaning, canvas.style(Tone::Heading));
        } else {
            canvas.write(2, line, key, canvas.style(Tone::Notice));
            canvas.write(MEANING_COLUMN, line, meaning, ratatui::style::Style::new());
        }
    }
}
