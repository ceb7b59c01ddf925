//! Draws the processes of one node.

use super::{Canvas, format, status};
use crate::appearance::Tone;
use crate::layout::list_lines;
use crate::model::Model;
use crate::model::list::{ProcessEntry, ProcessList, SortOrder};
use ratatui::style::Style;
use tern_ids::NodeId;

/// A column: its heading, its width, whether it is right-aligned, the minimum width of the screen
/// at which it is shown, and its content.
type Column = (&'static str, usize, bool, u16, fn(&Model, &ProcessEntry) -> String);

const COLUMNS: [Column; 9] = [
    ("PID", 7, true, 0, |_, entry| entry.row.pid.to_string()),
    ("USER", 8, false, 50, |model, entry| model.users.name(entry.row.uid)),
    ("WHERE", 5, true, 0, |_, entry| node(entry.row.r#where)),
    ("FROM", 4, true, 0, |_, entry| node(entry.row.from)),
    ("STATE", 9, false, 72, |_, entry| entry.row.state.clone()),
    ("%CPU", 5, true, 30, |_, entry| entry.cpu.map_or_else(|| "-".into(), |cpu| format!("{cpu:.1}"))),
    ("MEM", 6, true, 90, |_, entry| match entry.row.usage.memory {
        0 => "-".into(),
        known => format::short_bytes(known),
    }),
    ("TIME", 7, true, 46, |_, entry| format::cpu_time(entry.row.cpu_seconds)),
    ("MIGS", 4, true, 60, |_, entry| entry.row.migrations.to_string()),
];

fn node(node: Option<NodeId>) -> String {
    node.map_or_else(|| "-".into(), |node| node.to_string())
}

/// Draws the list in place of the bars.
pub(super) fn draw(canvas: &mut Canvas<'_>) {
    let model = canvas.model;
    let Some(list) = &model.list else { return };
    title(canvas, list);
    let columns: Vec<&Column> =
        COLUMNS.iter().filter(|(.., min_columns, _)| canvas.columns() >= *min_columns).collect();
    let mut heading = String::new();
    for (name, width, right_aligned, ..) in &columns {
        heading += &cell(name, *width, *right_aligned);
    }
    canvas.write(0, 1, &(heading + "COMMAND"), canvas.style(Tone::Heading));
    let lines = list_lines(model);
    if list.entries.is_empty() {
        let width = usize::from(canvas.columns()).saturating_sub(4).max(1);
        for (line, text) in (3..).zip(status::wrap(&why_empty(canvas, list), width)).take(lines) {
            canvas.write(2, line, &text, canvas.style(Tone::Heading));
        }
    }
    let top = list.first_visible(lines);
    for (line, (index, entry)) in list.entries.iter().enumerate().skip(top).take(lines).enumerate() {
        let line = line as u16 + 2;
        let mut text = String::new();
        for (_, width, right_aligned, _, content) in &columns {
            text += &cell(&model.appearance.sanitize(&content(model, entry)), *width, *right_aligned);
        }
        text += &model.appearance.sanitize(&entry.row.command);
        canvas.write(0, line, &text, Style::new());
        if model.is_interactive && index == list.selected_index() {
            // The sign marks the line on terminals without reverse video.
            canvas.put(0, line, ">", Style::new());
            canvas.highlight(line, canvas.style(Tone::Selected));
        }
    }
    let last = canvas.lines();
    if last >= 4 {
        draw_message(canvas, list, last - 2);
        status::keys(canvas, last - 1, &status::LIST_KEYS);
    }
}

fn cell(text: &str, width: usize, right_aligned: bool) -> String {
    let text: String = text.chars().take(width).collect();
    if right_aligned { format!("{text:>width$} ") } else { format!("{text:<width$} ") }
}

fn title(canvas: &mut Canvas<'_>, list: &ProcessList) {
    let model = canvas.model;
    let name = if model.list_only { "mtop" } else { "mon" };
    let column = canvas.write(0, 0, name, canvas.style(Tone::Heading));
    if let Some(notice) = status::stale_notice(canvas) {
        canvas.write(column + 2, 0, &notice, canvas.style(Tone::Bad));
        return;
    }
    let mut text = String::new();
    let node = list.node.or(model.me()).and_then(|id| model.node(id));
    if let Some(node) = node {
        let load = format::four_columns(f64::from(node.load) / 100.0);
        text += &format!("node {} {}  load {load}  ", node.node, node.host);
    } else if let Some(id) = list.node {
        text += &format!("node {id}  ");
    }
    // The number of processes is unknown before the node replies.
    if list.received_at.is_some() {
        text += &format::count(list.entries.len() as u64, "process");
    }
    let guests = list.entries.iter().filter(|entry| entry.row.from.is_some()).count();
    if guests > 0 {
        text += &format!(", {} here", format::count(guests as u64, "guest"));
    }
    let is_away = |entry: &&ProcessEntry| entry.row.from.is_none() && entry.row.state != "home";
    let away = list.entries.iter().filter(is_away).count();
    if away > 0 {
        text += &format!(", {away} away");
    }
    text += match list.order {
        _ if list.received_at.is_none() => "",
        SortOrder::Cpu => "  by CPU",
        SortOrder::Time => "  by time",
        SortOrder::Pid => "  by pid",
    };
    let text = model.appearance.sanitize(&text);
    canvas.write(column + 2, 0, &text, canvas.style(Tone::Heading));
}

fn why_empty(canvas: &Canvas<'_>, list: &ProcessList) -> String {
    match (list.received_at, list.node) {
        (Some(_), _) => "none of its processes is away, and it has no guests".into(),
        // A message has more room here than in its own line.
        (None, of) => match (&canvas.model.message, of) {
            (Some(message), _) => canvas.model.appearance.sanitize(&message.text),
            (None, Some(node)) => format!("waiting for node {node}"),
            (None, None) => "waiting for ternd".into(),
        },
    }
}

/// Draws the message, or the reason why the selected process does not move.
fn draw_message(canvas: &mut Canvas<'_>, list: &ProcessList, line: u16) {
    let model = canvas.model;
    if model.message.is_some() && list.received_at.is_none() && list.entries.is_empty() {
        // The message is drawn in place of the processes.
        return;
    }
    if model.message.is_some() {
        return status::messages(canvas, line, 1);
    }
    match list.selected_entry() {
        Some(entry) if !entry.row.reason.is_empty() => {
            let text = format!("{}: {}", entry.row.pid, entry.row.reason);
            canvas.write(0, line, &model.appearance.sanitize(&text), canvas.style(Tone::Notice));
        }
        _ => status::messages(canvas, line, 1),
    }
}
