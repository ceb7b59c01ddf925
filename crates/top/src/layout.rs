//! Divides the screen: which lines fit, the width of a node's column, and the nodes on the page.

use crate::model::{ColumnWidth, Model};
use tern_control::NodeLoad;

/// The columns left of the bars: the labels and the line of the scale.
pub const AXIS_WIDTH: u16 = 7;
/// The columns of a bar that has its value above it.
const WIDE_BAR: u16 = 4;

/// The sizes of the parts of the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScreenLayout {
    /// The width of a node's column; never `Auto`.
    pub width: ColumnWidth,
    /// The columns of a bar.
    pub bar: u16,
    /// The columns between two bars.
    pub gap: u16,
    /// The number of nodes on a page.
    pub per_page: usize,
    /// The lines of the bars.
    pub chart: u16,
    /// The lines of the nodes' numbers.
    pub numbers: u16,
    /// The lines of marks below the numbers.
    pub marks: u16,
    /// The lines about the selected node.
    pub summary: u16,
    /// The lines of totals.
    pub totals: u16,
    /// The lines of migrations and messages.
    pub messages: u16,
    /// The lines of keys, or of the prompt.
    pub keys: u16,
}

impl ScreenLayout {
    /// The layout of the bars.
    #[must_use]
    pub fn new(model: &Model) -> Self {
        let shown = model.shown();
        let (columns, lines) = model.size;
        let available = columns.saturating_sub(AXIS_WIDTH);
        let max_digits = shown.iter().map(|node| digits(node)).max().unwrap_or(1);
        let fits = |width| usize::from(available / column_width(width, max_digits)) >= shown.len();
        let width = match model.settings.width {
            ColumnWidth::Auto => {
                let fitting =
                    [ColumnWidth::Wide, ColumnWidth::Vertical].into_iter().find(|width| fits(*width));
                fitting.unwrap_or(ColumnWidth::Tight)
            }
            width => width,
        };
        let gap = if width == ColumnWidth::Tight { 0 } else { 1 + u16::from(width == ColumnWidth::Wide) };
        let bar = column_width(width, max_digits) - gap;
        let per_page = usize::from(available / (bar + gap)).max(1);
        let mut page = shown;
        trim_to_page(&mut page, model, per_page);
        let numbers = if width == ColumnWidth::Wide {
            1
        } else {
            page.iter().map(|node| digits(node)).max().unwrap_or(1)
        };

        // Lines are granted in order of importance; the bars get the rest.
        let mut left = lines.saturating_sub(1);
        let mut grant = |wanted: u16, reserved: u16| {
            let granted = if left >= reserved + wanted { wanted } else { 0 };
            left -= granted;
            granted
        };
        let numbers = grant(numbers + 1, 2).saturating_sub(1);
        let keys = grant(1, 3);
        let marks = grant(1, 3);
        let messages = grant(1, 3);
        let totals = grant(u16::from(model.settings.totals), 4);
        let summary = grant(1, 6);
        let messages = messages + grant(2, 20);
        Self { width, bar, gap, per_page, chart: left, numbers, marks, summary, totals, messages, keys }
    }

    /// The nodes on the page, and how many precede it.
    #[must_use]
    pub fn page<'a>(&self, model: &'a Model) -> (usize, Vec<&'a NodeLoad>) {
        let mut shown = model.shown();
        let before = trim_to_page(&mut shown, model, self.per_page);
        (before, shown)
    }
}

/// Reduces `shown` to the nodes on the page. Returns how many precede it.
fn trim_to_page(shown: &mut Vec<&NodeLoad>, model: &Model, per_page: usize) -> usize {
    let wanted = model.settings.first.map_or(0, |first| shown.partition_point(|node| node.node < first));
    // The last page is full.
    let before = wanted.min(shown.len().saturating_sub(per_page));
    shown.drain(..before);
    shown.truncate(per_page);
    before
}

fn digits(node: &NodeLoad) -> u16 {
    node.node.0.checked_ilog10().map_or(1, |log| log as u16 + 1)
}

/// The columns of a node, with the space after it.
fn column_width(width: ColumnWidth, digits: u16) -> u16 {
    match width {
        ColumnWidth::Auto | ColumnWidth::Wide => digits.max(WIDE_BAR) + 2,
        ColumnWidth::Vertical => 2,
        ColumnWidth::Tight => 1,
    }
}

/// The lines of processes in a list.
#[must_use]
pub fn list_lines(model: &Model) -> usize {
    // The other lines are the title, the headings, a message and the keys.
    usize::from(model.size.1.saturating_sub(4))
}
