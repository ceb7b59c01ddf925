//! Renders a single picture as text.

use crate::model::Model;
use crate::view;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Span;

/// The picture without the line of keys, which cannot be pressed.
#[must_use]
pub fn render(model: &Model) -> String {
    let mut model = model.clone();
    model.size.1 = model.size.1.saturating_add(1);
    model.is_interactive = false;
    let mut buffer = Buffer::empty(Rect::new(0, 0, model.size.0, model.size.1));
    view::draw(&model, &mut buffer);
    let lines = buffer_lines(&buffer);
    let lines = lines.split_last().map_or(&lines[..], |(_, rest)| rest);
    let used = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    lines[..used].iter().fold(String::new(), |text, line| text + line + "\n")
}

/// The lines of a buffer without trailing spaces.
#[must_use]
pub fn buffer_lines(buffer: &Buffer) -> Vec<String> {
    let Rect { width, height, .. } = buffer.area;
    let line = |line: u16| {
        let mut text = String::new();
        let mut column = 0;
        while let Some(cell) = buffer.cell((column, line)).filter(|_| column < width) {
            text.push_str(cell.symbol());
            // A character of two columns hides the cell after it.
            column += (Span::raw(cell.symbol()).width() as u16).max(1);
        }
        text.trim_end().to_owned()
    };
    (0..height).map(line).collect()
}
