//! Draws the model into a buffer. Nothing here uses a terminal.

pub mod bars;
pub mod format;
pub mod help;
pub mod list;
pub mod scale;
pub mod status;

use crate::appearance::Tone;
use crate::layout::ScreenLayout;
use crate::model::Model;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

/// Draws everything into the buffer, which has the model's size.
pub fn draw(model: &Model, buffer: &mut Buffer) {
    let mut canvas = Canvas { model, buffer };
    if let Some(top) = model.help {
        return help::draw(&mut canvas, top);
    }
    if model.list.is_some() {
        return list::draw(&mut canvas);
    }
    let layout = ScreenLayout::new(model);
    let mut line = 0;
    let mut next = |lines: u16| {
        let first = line;
        line += lines;
        first
    };
    status::title(&mut canvas, &layout, next(1));
    bars::draw(&mut canvas, &layout, next(layout.chart));
    // `bars::draw` also draws the axis line below the bars and the numbers.
    next(u16::from(layout.numbers > 0) + layout.numbers);
    bars::marks(&mut canvas, &layout, next(layout.marks));
    status::summary(&mut canvas, next(layout.summary), layout.summary);
    status::totals(&mut canvas, next(layout.totals), layout.totals);
    status::messages(&mut canvas, next(layout.messages), layout.messages);
    if layout.keys > 0 {
        status::keys(&mut canvas, next(1), &status::BAR_KEYS);
    }
}

/// A buffer, and the model that is drawn into it.
#[derive(Debug)]
pub struct Canvas<'a> {
    /// The model.
    pub model: &'a Model,
    /// The buffer.
    pub buffer: &'a mut Buffer,
}

impl Canvas<'_> {
    /// The number of columns.
    #[must_use]
    pub fn columns(&self) -> u16 {
        self.buffer.area.width
    }

    /// The number of lines.
    #[must_use]
    pub fn lines(&self) -> u16 {
        self.buffer.area.height
    }

    /// Writes text, cut at the right edge. Returns the column after it.
    pub fn write(&mut self, column: u16, line: u16, text: &str, style: Style) -> u16 {
        let room = self.columns().saturating_sub(column);
        if line >= self.lines() || room == 0 {
            return column;
        }
        self.buffer.set_stringn(column, line, text, usize::from(room), style).0
    }

    /// Writes one character.
    pub fn put(&mut self, column: u16, line: u16, sign: &str, style: Style) {
        if let Some(cell) = self.buffer.cell_mut((column, line)) {
            cell.set_symbol(sign).set_style(style);
        }
    }

    /// Sets the style of a whole line.
    pub fn highlight(&mut self, line: u16, style: Style) {
        let line = Rect::new(0, line, self.columns(), 1).intersection(self.buffer.area);
        self.buffer.set_style(line, style);
    }

    /// The style for a tone.
    #[must_use]
    pub fn style(&self, tone: Tone) -> Style {
        self.model.appearance.style(tone)
    }
}
