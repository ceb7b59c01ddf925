//! The bars, their scale, and the nodes' numbers below.

use super::Canvas;
use super::scale::{self, Scale};
use crate::appearance::Tone;
use crate::layout::{AXIS_WIDTH, ScreenLayout};
use crate::model::{ColumnWidth, Display};
use ratatui::style::Style;
use tern_control::{NodeLoad, NodeState};

/// The partially filled cells, the lowest first.
const EIGHTHS: [&str; 7] = ["▁", "▂", "▃", "▄", "▅", "▆", "▇"];

/// Draws the scale, the bars and the numbers; the bars start at line `top`.
pub(super) fn draw(canvas: &mut Canvas<'_>, layout: &ScreenLayout, top: u16) {
    if canvas.model.nodes().is_empty() {
        return super::status::draw_empty_reason(canvas, top, layout.chart);
    }
    let display = canvas.model.settings.display;
    // The scale covers all nodes, so turning pages does not change it.
    let scale = Scale::of(display, &canvas.model.shown(), layout.chart);
    draw_axis(canvas, layout, top, &scale);
    let (_, page) = layout.page(canvas.model);
    for (place, node) in page.into_iter().enumerate() {
        let column = AXIS_WIDTH + place as u16 * (layout.bar + layout.gap);
        let bar = Bar { node, column, width: layout.bar, top, lines: layout.chart };
        bar.draw(canvas, &scale, layout.width == ColumnWidth::Wide);
        draw_number(canvas, layout, node, column, top + layout.chart + 1);
    }
}

fn draw_axis(canvas: &mut Canvas<'_>, layout: &ScreenLayout, top: u16, scale: &Scale) {
    let appearance = canvas.model.appearance;
    let faint = canvas.style(Tone::Faint);
    let foot = top + layout.chart;
    for line in top..foot {
        canvas.put(AXIS_WIDTH - 1, line, appearance.choose("│", "|"), faint);
    }
    if layout.numbers > 0 {
        canvas.put(AXIS_WIDTH - 1, foot, appearance.choose("└", "+"), faint);
        for column in AXIS_WIDTH..canvas.columns() {
            canvas.put(column, foot, appearance.choose("─", "-"), faint);
        }
    }
    for tick in &scale.ticks {
        let line = foot - (scale.eighths(*tick, layout.chart) / 8) as u16;
        if line == foot && layout.numbers == 0 {
            continue;
        }
        let width = usize::from(AXIS_WIDTH) - 1;
        let label = scale.label(*tick);
        canvas.write(0, line.max(top), &format!("{label:>width$}"), faint);
        let sign = if line == foot { appearance.choose("└", "+") } else { appearance.choose("┤", "+") };
        canvas.put(AXIS_WIDTH - 1, line.max(top), sign, faint);
    }
}

/// The position of a node's bar.
struct Bar<'a> {
    node: &'a NodeLoad,
    column: u16,
    width: u16,
    top: u16,
    lines: u16,
}

impl Bar<'_> {
    fn draw(&self, canvas: &mut Canvas<'_>, scale: &Scale, with_value: bool) {
        match self.node.state {
            NodeState::Dead => return self.draw_vertically(canvas, "DEAD", "X", canvas.style(Tone::Bad)),
            NodeState::NeverSeen => {
                return self.draw_vertically(canvas, "UNKNOWN", "?", canvas.style(Tone::Notice));
            }
            NodeState::Alive | NodeState::Suspect => {}
        }
        let appearance = canvas.model.appearance;
        let display = canvas.model.settings.display;
        let used = scale.eighths(scale::value(display, self.node), self.lines);
        let total = scale.eighths(scale::total(display, self.node), self.lines);
        let style = canvas.style(bar_tone(display, self.node));
        let free = matches!(display, Display::Memory | Display::RawMemory);
        for height in 0..self.lines {
            let below = u32::from(height) * 8;
            let sign = match used.saturating_sub(below) {
                8.. => appearance.choose("█", "#"),
                // A cell that is at least half filled is drawn full where there are no partial
                // characters, or where `+` for free memory continues above it.
                part if free || !appearance.unicode => match (part >= 4, total.saturating_sub(below) >= 4) {
                    (true, _) => appearance.choose("█", "#"),
                    (false, true) if free => "+",
                    _ => break,
                },
                0 => break,
                part => EIGHTHS[part as usize - 1],
            };
            self.fill_line(canvas, height, sign, style);
        }
        // The height that has been drawn.
        let most = total.max(used);
        let height = if free || !appearance.unicode { (most + 4) / 8 } else { most.div_ceil(8) } as u16;
        if with_value && self.lines > 0 {
            let text = scale::value_text(display, self.node);
            // If the bar reaches the top, the value is written on it, reversed.
            let (line, style) = if height < self.lines {
                (self.line(height), canvas.style(Tone::Own))
            } else {
                (self.top, style.patch(canvas.style(Tone::Selected)))
            };
            let room = usize::from(self.width) + 1;
            canvas.write(self.column, line, &text.chars().take(room).collect::<String>(), style);
        }
    }

    fn line(&self, height: u16) -> u16 {
        self.top + self.lines - 1 - height
    }

    fn fill_line(&self, canvas: &mut Canvas<'_>, height: u16, sign: &str, style: Style) {
        for column in self.column..self.column + self.width {
            canvas.put(column, self.line(height), sign, style);
        }
    }

    /// Draws a word vertically from the foot of the bar, or a single character if it does not fit.
    fn draw_vertically(&self, canvas: &mut Canvas<'_>, word: &str, sign: &str, style: Style) {
        let word = if word.len() > usize::from(self.lines) { sign } else { word };
        let column = self.column + self.width / 2;
        for (height, letter) in word.chars().rev().enumerate().take(usize::from(self.lines)) {
            canvas.put(column, self.line(height as u16), letter.encode_utf8(&mut [0; 4]), style);
        }
    }
}

/// The tone of a bar: above a load of 1, processes wait for CPU; above 2, they wait much.
fn bar_tone(display: Display, node: &NodeLoad) -> Tone {
    let value = scale::value(display, node);
    let (notice, bad) = match display {
        Display::Load | Display::LogLoad => (value > 1.05, value > 2.05),
        Display::Speed => (false, false),
        Display::Memory | Display::RawMemory => {
            let part = value / (node.mem_total.max(1) as f64);
            (display == Display::Memory && part > 0.8, display == Display::Memory && part > 0.95)
        }
        Display::Utilisability => (value < 90.0, value < 50.0),
    };
    match (notice, bad) {
        (_, true) => Tone::Bad,
        (true, false) => Tone::Notice,
        (false, false) => Tone::Good,
    }
}

fn draw_number(canvas: &mut Canvas<'_>, layout: &ScreenLayout, node: &NodeLoad, column: u16, line: u16) {
    let mut style = Style::new();
    if Some(node.node) == canvas.model.me() {
        style = style.patch(canvas.style(Tone::Own));
    }
    if Some(node.node) == canvas.model.selected {
        style = style.patch(canvas.style(Tone::Selected));
    }
    let text = node.node.to_string();
    match layout.width {
        ColumnWidth::Wide if layout.numbers > 0 => {
            let width = usize::from(layout.bar);
            canvas.write(column, line, &format!("{text:^width$}"), style);
        }
        // The last digits are aligned in one line.
        _ => {
            let first = usize::from(layout.numbers).saturating_sub(text.len());
            for (place, digit) in text.chars().enumerate().take(usize::from(layout.numbers)) {
                canvas.put(column, line + (first + place) as u16, digit.encode_utf8(&mut [0; 4]), style);
            }
        }
    }
}

/// Draws the marks below the numbers: a node's state and flags, and if speeds are shown, its number
/// of CPUs.
pub(super) fn marks(canvas: &mut Canvas<'_>, layout: &ScreenLayout, line: u16) {
    if layout.marks == 0 || canvas.model.nodes().is_empty() {
        return;
    }
    let (_, page) = layout.page(canvas.model);
    for (place, node) in page.into_iter().enumerate() {
        let column = AXIS_WIDTH + place as u16 * (layout.bar + layout.gap);
        let mut mark = marks_of(node, Some(node.node) == canvas.model.selected);
        let cpus = node.cpus.round();
        if canvas.model.settings.display == Display::Speed && cpus >= 2.0 {
            let sign = canvas.model.appearance.choose("×", "x");
            mark = match layout.width {
                ColumnWidth::Wide => format!("{sign}{cpus:.0}{mark}"),
                _ if cpus < 10.0 => format!("{cpus:.0}"),
                _ => "*".into(),
            };
        }
        let width = usize::from(layout.bar);
        let mark: String = mark.chars().take(width).collect();
        canvas.write(column, line, &format!("{mark:^width$}"), canvas.style(Tone::Notice));
    }
}

/// The marks of a node, the most important first, because only one may fit.
fn marks_of(node: &NodeLoad, selected: bool) -> String {
    let flags = node.flags;
    let known = [
        (selected, '^'),
        (node.state == NodeState::Suspect, '?'),
        (flags.block, 'b'),
        (flags.stay, 's'),
        (flags.lstay, 'l'),
        (flags.quiet, 'q'),
    ];
    known.into_iter().filter_map(|(set, mark)| set.then_some(mark)).collect()
}
