//! What the keys do.

use super::Canvas;
use super::status::wrapped;
use crate::appearance::Tone;

const KEYS: [(&str, &str); 30] = [
    ("", "Bars"),
    ("l  L", "load: 1 is one standard CPU kept busy; L for a logarithmic scale"),
    ("m", "memory in use, and what a newcomer could have (+)"),
    ("r", "the same, with caches counted as in use"),
    ("s", "speed of a CPU, 10000 is the standard; the number of CPUs is below"),
    ("u", "utilisability: percent of the time not spent waiting for paging"),
    ("w v V a", "wide, vertical, tight columns; a for those that fit"),
    ("d", "show also nodes that are dead (X) or were never heard of (?)"),
    ("t", "totals"),
    ("left right", "choose a node; PageUp PageDown Home End go further"),
    ("0-9", "go to a node by its number"),
    ("Enter", "the processes of the chosen node"),
    ("+  -", "ask more often, less often"),
    ("", "Marks below a node"),
    ("^", "it is chosen"),
    ("?", "somebody has had no answer from it"),
    ("b s l q", "block, stay, lstay, quiet: as mosctl has set"),
    ("", "Processes"),
    ("up down", "choose a process; PageUp PageDown Home End go further"),
    ("m", "migrate it: to a node's number or host, or home"),
    ("k", "send it a signal"),
    ("P  T  N", "sort by CPU, time, pid"),
    ("WHERE", "the node where a process of this node runs"),
    ("FROM", "the home of a guest"),
    ("q  Esc", "back to the bars"),
    ("", "Everywhere"),
    ("h  ?", "this page"),
    ("^L", "draw anew"),
    ("^Z", "stop; fg goes on"),
    ("q  ^C", "end"),
];

/// Columns of the keys, with what is left of them.
const KEY: u16 = 14;

/// What there is, for so many columns.
fn lines(columns: u16) -> Vec<(&'static str, String)> {
    let width = usize::from(columns.saturating_sub(KEY)).max(1);
    let lines = KEYS.iter().flat_map(|(key, meaning)| {
        let texts = if key.is_empty() { vec![(*meaning).to_owned()] } else { wrapped(meaning, width) };
        texts.into_iter().enumerate().map(|(line, text)| match (key.is_empty(), line) {
            (true, _) => (HEADING, text),
            (false, 0) => (*key, text),
            (false, _) => ("", text),
        })
    });
    lines.collect()
}

/// What stands for a key where there is a heading.
const HEADING: &str = "heading";

/// How far down the help can be moved.
#[must_use]
pub fn last((columns, height): (u16, u16)) -> usize {
    lines(columns).len().saturating_sub(usize::from(height).saturating_sub(1))
}

pub(super) fn draw(canvas: &mut Canvas<'_>, top: usize) {
    let top = top.min(last((canvas.columns(), canvas.lines())));
    let title = "Keys: up and down move this page, any other leaves it";
    canvas.write(0, 0, title, canvas.style(Tone::Chosen));
    let height = usize::from(canvas.lines());
    for (line, (key, meaning)) in (1..).zip(lines(canvas.columns()).iter().skip(top)).take(height) {
        if *key == HEADING {
            canvas.write(0, line, meaning, canvas.style(Tone::Heading));
        } else {
            canvas.write(2, line, key, canvas.style(Tone::Notice));
            canvas.write(KEY, line, meaning, ratatui::style::Style::new());
        }
    }
}
