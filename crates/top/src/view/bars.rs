//! The bars, their scale, and the nodes' numbers below.

use super::Canvas;
use super::scale::{self, Scale};
use crate::appearance::Tone;
use crate::layout::{AXIS, Layout};
use crate::model::{Display, Width};
use ratatui::style::Style;
use tern_control::{NodeLoad, NodeState};

/// Parts of a full cell, the least first.
const EIGHTHS: [&str; 7] = ["▁", "▂", "▃", "▄", "▅", "▆", "▇"];

/// Draws scale, bars and numbers; the bars begin below `top`.
pub(super) fn draw(canvas: &mut Canvas<'_>, layout: &Layout, top: u16) {
    if canvas.model.nodes().is_empty() {
        return super::status::why_empty(canvas, top, layout.chart);
    }
    let display = canvas.model.settings.display;
    // The scale is that of all nodes, so that turning pages does not change it.
    let scale = Scale::of(display, &canvas.model.shown(), layout.chart);
    axis(canvas, layout, top, &scale);
    let (_, page) = layout.page(canvas.model);
    for (place, node) in page.into_iter().enumerate() {
        let column = AXIS + place as u16 * (layout.bar + layout.gap);
        let bar = Bar { node, column, width: layout.bar, top, lines: layout.chart };
        bar.draw(canvas, &scale, layout.width == Width::Wide);
        number(canvas, layout, node, column, top + layout.chart + 1);
    }
}

fn axis(canvas: &mut Canvas<'_>, layout: &Layout, top: u16, scale: &Scale) {
    let appearance = canvas.model.appearance;
    let faint = canvas.style(Tone::Faint);
    let foot = top + layout.chart;
    for line in top..foot {
        canvas.sign(AXIS - 1, line, appearance.sign("│", "|"), faint);
    }
    if layout.numbers > 0 {
        canvas.sign(AXIS - 1, foot, appearance.sign("└", "+"), faint);
        for column in AXIS..canvas.columns() {
            canvas.sign(column, foot, appearance.sign("─", "-"), faint);
        }
    }
    for tick in &scale.ticks {
        let line = foot - (scale.eighths(*tick, layout.chart) / 8) as u16;
        if line == foot && layout.numbers == 0 {
            continue;
        }
        let width = usize::from(AXIS) - 1;
        let label = scale.label(*tick);
        canvas.write(0, line.max(top), &format!("{label:>width$}"), faint);
        let sign = if line == foot { appearance.sign("└", "+") } else { appearance.sign("┤", "+") };
        canvas.sign(AXIS - 1, line.max(top), sign, faint);
    }
}

/// Where one node's bar goes.
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
            NodeState::Dead => return self.downwards(canvas, "DEAD", "X", canvas.style(Tone::Bad)),
            NodeState::NeverHeard => {
                return self.downwards(canvas, "UNHEARD", "?", canvas.style(Tone::Notice));
            }
            NodeState::Alive | NodeState::Suspect => {}
        }
        let appearance = canvas.model.appearance;
        let display = canvas.model.settings.display;
        let used = scale.eighths(scale::value(display, self.node), self.lines);
        let whole = scale.eighths(scale::whole(display, self.node), self.lines);
        let style = canvas.style(tone(display, self.node));
        let free = matches!(display, Display::Memory | Display::RawMemory);
        for height in 0..self.lines {
            let below = u32::from(height) * 8;
            let sign = match used.saturating_sub(below) {
                8.. => appearance.sign("█", "#"),
                // Half a cell is a whole one where there are no parts of it, and where what is free goes on top.
                part if free || !appearance.unicode => match (part >= 4, whole.saturating_sub(below) >= 4) {
                    (true, _) => appearance.sign("█", "#"),
                    (false, true) if free => "+",
                    _ => break,
                },
                0 => break,
                part => EIGHTHS[part as usize - 1],
            };
            self.across(canvas, height, sign, style);
        }
        // As high as what has been drawn.
        let most = whole.max(used);
        let height = if free || !appearance.unicode { (most + 4) / 8 } else { most.div_ceil(8) } as u16;
        if with_value && self.lines > 0 {
            let text = scale::written(display, self.node);
            // Where the bar reaches the top, its value is on it, in reverse.
            let (line, style) = if height < self.lines {
                (self.line(height), canvas.style(Tone::Own))
            } else {
                (self.top, style.patch(canvas.style(Tone::Chosen)))
            };
            let room = usize::from(self.width) + 1;
            canvas.write(self.column, line, &text.chars().take(room).collect::<String>(), style);
        }
    }

    fn line(&self, height: u16) -> u16 {
        self.top + self.lines - 1 - height
    }

    fn across(&self, canvas: &mut Canvas<'_>, height: u16, sign: &str, style: Style) {
        for column in self.column..self.column + self.width {
            canvas.sign(column, self.line(height), sign, style);
        }
    }

    /// A word that stands on the line, or a sign where there is no room for it.
    fn downwards(&self, canvas: &mut Canvas<'_>, word: &str, sign: &str, style: Style) {
        let word = if word.len() > usize::from(self.lines) { sign } else { word };
        let column = self.column + self.width / 2;
        for (height, letter) in word.chars().rev().enumerate().take(usize::from(self.lines)) {
            canvas.sign(column, self.line(height as u16), letter.encode_utf8(&mut [0; 4]), style);
        }
    }
}

/// How a bar is coloured: above a load of 1, processes wait for each other; above 2 they do so a lot.
fn tone(display: Display, node: &NodeLoad) -> Tone {
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

fn number(canvas: &mut Canvas<'_>, layout: &Layout, node: &NodeLoad, column: u16, line: u16) {
    let mut style = Style::new();
    if Some(node.node) == canvas.model.me() {
        style = style.patch(canvas.style(Tone::Own));
    }
    if Some(node.node) == canvas.model.chosen {
        style = style.patch(canvas.style(Tone::Chosen));
    }
    let text = node.node.to_string();
    match layout.width {
        Width::Wide if layout.numbers > 0 => {
            let width = usize::from(layout.bar);
            canvas.write(column, line, &format!("{text:^width$}"), style);
        }
        // The last digits are in one line.
        _ => {
            let first = usize::from(layout.numbers).saturating_sub(text.len());
            for (place, digit) in text.chars().enumerate().take(usize::from(layout.numbers)) {
                canvas.sign(column, line + (first + place) as u16, digit.encode_utf8(&mut [0; 4]), style);
            }
        }
    }
}

/// A mark below the numbers for what else there is to say of a node, and the number of its CPUs with its speed.
pub(super) fn marks(canvas: &mut Canvas<'_>, layout: &Layout, line: u16) {
    if layout.marks == 0 || canvas.model.nodes().is_empty() {
        return;
    }
    let (_, page) = layout.page(canvas.model);
    for (place, node) in page.into_iter().enumerate() {
        let column = AXIS + place as u16 * (layout.bar + layout.gap);
        let mut mark = mark(node, Some(node.node) == canvas.model.chosen);
        let cpus = node.cpus.round();
        if canvas.model.settings.display == Display::Speed && cpus >= 2.0 {
            let sign = canvas.model.appearance.sign("×", "x");
            mark = match layout.width {
                Width::Wide => format!("{sign}{cpus:.0}{mark}"),
                _ if cpus < 10.0 => format!("{cpus:.0}"),
                _ => "*".into(),
            };
        }
        let width = usize::from(layout.bar);
        let mark: String = mark.chars().take(width).collect();
        canvas.write(column, line, &format!("{mark:^width$}"), canvas.style(Tone::Notice));
    }
}

/// In the order of what matters more, for there may be room for one only.
fn mark(node: &NodeLoad, chosen: bool) -> String {
    let flags = node.flags;
    let known = [
        (chosen, '^'),
        (node.state == NodeState::Suspect, '?'),
        (flags.block, 'b'),
        (flags.stay, 's'),
        (flags.lstay, 'l'),
        (flags.quiet, 'q'),
    ];
    known.into_iter().filter_map(|(set, mark)| set.then_some(mark)).collect()
}
