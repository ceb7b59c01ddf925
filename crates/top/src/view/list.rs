//! The processes of one node.

use super::{Canvas, figures, status};
use crate::appearance::Tone;
use crate::layout::list_lines;
use crate::model::Model;
use crate::model::list::{Entry, List, Order};
use ratatui::style::Style;
use tern_ids::NodeId;

/// A column: its heading, its width, whether it is set to the right, and from which width of the screen on it
/// is there.
type Column = (&'static str, usize, bool, u16, fn(&Model, &Entry) -> String);

const COLUMNS: [Column; 9] = [
    ("PID", 7, true, 0, |_, entry| entry.row.pid.to_string()),
    ("USER", 8, false, 50, |model, entry| model.users.name(entry.row.uid)),
    ("WHERE", 5, true, 0, |_, entry| node(entry.row.r#where)),
    ("FROM", 4, true, 0, |_, entry| node(entry.row.from)),
    ("STATE", 9, false, 72, |_, entry| entry.row.state.clone()),
    ("%CPU", 5, true, 30, |_, entry| entry.cpu.map_or_else(|| "-".into(), |cpu| format!("{cpu:.1}"))),
    ("MEM", 6, true, 90, |_, entry| match entry.row.usage.memory {
        0 => "-".into(),
        known => figures::short_bytes(known),
    }),
    ("TIME", 7, true, 46, |_, entry| figures::cpu_time(entry.row.cpu_seconds)),
    ("MIGS", 4, true, 60, |_, entry| entry.row.migrations.to_string()),
];

fn node(node: Option<NodeId>) -> String {
    node.map_or_else(|| "-".into(), |node| node.to_string())
}

/// Draws the list instead of the bars.
pub(super) fn draw(canvas: &mut Canvas<'_>) {
    let model = canvas.model;
    let Some(list) = &model.list else { return };
    title(canvas, list);
    let columns: Vec<&Column> = COLUMNS.iter().filter(|(.., from, _)| canvas.columns() >= *from).collect();
    let mut heading = String::new();
    for (name, width, right, ..) in &columns {
        heading += &cell(name, *width, *right);
    }
    canvas.write(0, 1, &(heading + "COMMAND"), canvas.style(Tone::Heading));
    let lines = list_lines(model);
    if list.entries.is_empty() {
        let width = usize::from(canvas.columns()).saturating_sub(4).max(1);
        for (line, text) in (3..).zip(status::wrapped(&why_empty(canvas, list), width)).take(lines) {
            canvas.write(2, line, &text, canvas.style(Tone::Heading));
        }
    }
    let top = list.window(lines);
    for (line, (place, entry)) in list.entries.iter().enumerate().skip(top).take(lines).enumerate() {
        let line = line as u16 + 2;
        let mut text = String::new();
        for (_, width, right, _, content) in &columns {
            text += &cell(&model.appearance.text(&content(model, entry)), *width, *right);
        }
        text += &model.appearance.text(&entry.row.command);
        canvas.write(0, line, &text, Style::new());
        if model.keys && place == list.place() {
            // The sign tells it where reverse cannot be seen.
            canvas.sign(0, line, ">", Style::new());
            canvas.highlight(line, canvas.style(Tone::Chosen));
        }
    }
    let last = canvas.lines();
    if last >= 4 {
        said(canvas, list, last - 2);
        status::keys(canvas, last - 1, &status::LIST_KEYS);
    }
}

fn cell(text: &str, width: usize, right: bool) -> String {
    let text: String = text.chars().take(width).collect();
    if right { format!("{text:>width$} ") } else { format!("{text:<width$} ") }
}

fn title(canvas: &mut Canvas<'_>, list: &List) {
    let model = canvas.model;
    let name = if model.only_list { "mtop" } else { "mon" };
    let column = canvas.write(0, 0, name, canvas.style(Tone::Heading));
    if let Some(said) = status::silence(canvas) {
        canvas.write(column + 2, 0, &said, canvas.style(Tone::Bad));
        return;
    }
    let mut text = String::new();
    let about = list.of.or(model.me()).and_then(|id| model.node(id));
    if let Some(about) = about {
        let load = figures::four(f64::from(about.load) / 100.0);
        text += &format!("node {} {}  load {load}  ", about.node, about.host);
    } else if let Some(id) = list.of {
        text += &format!("node {id}  ");
    }
    // Of a node that has not answered nobody knows how many it has.
    if list.heard.is_some() {
        text += &figures::count(list.entries.len() as u64, "process");
    }
    let guests = list.entries.iter().filter(|entry| entry.row.from.is_some()).count();
    if guests > 0 {
        text += &format!(", {} here", figures::count(guests as u64, "guest"));
    }
    let at_home = |entry: &&Entry| entry.row.from.is_none() && entry.row.state != "home";
    let away = list.entries.iter().filter(at_home).count();
    if away > 0 {
        text += &format!(", {away} away");
    }
    text += match list.order {
        _ if list.heard.is_none() => "",
        Order::Cpu => "  by CPU",
        Order::Time => "  by time",
        Order::Pid => "  by pid",
    };
    let text = model.appearance.text(&text);
    canvas.write(column + 2, 0, &text, canvas.style(Tone::Heading));
}

fn why_empty(canvas: &Canvas<'_>, list: &List) -> String {
    match (list.heard, list.of) {
        (Some(_), _) => "none of its processes is away, and none of another node is here".into(),
        // Here is room for all of it.
        (None, of) => match (&canvas.model.message, of) {
            (Some(message), _) => canvas.model.appearance.text(&message.text),
            (None, Some(node)) => format!("asking node {node}"),
            (None, None) => "asking ternd".into(),
        },
    }
}

/// A message, or what holds the chosen process.
fn said(canvas: &mut Canvas<'_>, list: &List, line: u16) {
    let model = canvas.model;
    if model.message.is_some() && list.heard.is_none() && list.entries.is_empty() {
        // It stands in place of the processes.
        return;
    }
    if model.message.is_some() {
        return status::news(canvas, line, 1);
    }
    match list.chosen() {
        Some(entry) if !entry.row.reason.is_empty() => {
            let text = format!("{}: {}", entry.row.pid, entry.row.reason);
            canvas.write(0, line, &model.appearance.text(&text), canvas.style(Tone::Notice));
        }
        _ => status::news(canvas, line, 1),
    }
}
