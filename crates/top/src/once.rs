//! A single picture, as text.

use crate::model::Model;
use crate::view;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Span;

/// The picture, without the line of keys, which nobody can press.
#[must_use]
pub fn picture(model: &Model) -> String {
    let mut model = model.clone();
    model.size.1 = model.size.1.saturating_add(1);
    model.keys = false;
    let mut buffer = Buffer::empty(Rect::new(0, 0, model.size.0, model.size.1));
    view::draw(&model, &mut buffer);
    let lines = text(&buffer);
    let lines = lines.split_last().map_or(&lines[..], |(_, rest)| rest);
    let used = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    lines[..used].iter().fold(String::new(), |text, line| text + line + "\n")
}

/// The lines of a buffer, without the spaces at their ends.
#[must_use]
pub fn text(buffer: &Buffer) -> Vec<String> {
    let Rect { width, height, .. } = buffer.area;
    let line = |line: u16| {
        let mut text = String::new();
        let mut column = 0;
        while let Some(cell) = buffer.cell((column, line)).filter(|_| column < width) {
            text.push_str(cell.symbol());
            // A sign of two columns hides the cell after it.
            column += (Span::raw(cell.symbol()).width() as u16).max(1);
        }
        text.trim_end().to_owned()
    };
    (0..height).map(line).collect()
}
