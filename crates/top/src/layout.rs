//! Which lines there is room for, how wide a node is, and which nodes are on the page.

use crate::model::{Model, Width};
use tern_control::NodeLoad;

/// Columns left of the bars: the scale's labels, and its line.
pub const AXIS: u16 = 7;
/// Columns of a bar with its value above it.
const WIDE_BAR: u16 = 4;

/// Where things are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// How wide a node is; never `Auto`.
    pub width: Width,
    /// Columns of a bar.
    pub bar: u16,
    /// Columns between two.
    pub gap: u16,
    /// Nodes on a page.
    pub per_page: usize,
    /// Lines of the bars.
    pub chart: u16,
    /// Lines of the nodes' numbers.
    pub numbers: u16,
    /// Lines of marks below the numbers.
    pub marks: u16,
    /// Lines about one node.
    pub about: u16,
    /// Lines of totals.
    pub totals: u16,
    /// Lines of migrations and messages.
    pub news: u16,
    /// Lines that name keys, or hold what is typed.
    pub keys: u16,
}

impl Layout {
    /// That of the bars.
    #[must_use]
    pub fn of(model: &Model) -> Self {
        let shown = model.shown();
        let (columns, lines) = model.size;
        let room = columns.saturating_sub(AXIS);
        let most = shown.iter().map(|node| digits(node)).max().unwrap_or(1);
        let fits = |width| usize::from(room / column(width, most)) >= shown.len();
        let width = match model.settings.width {
            Width::Auto => {
                let roomy = [Width::Wide, Width::Vertical].into_iter().find(|width| fits(*width));
                roomy.unwrap_or(Width::Tight)
            }
            width => width,
        };
        let gap = if width == Width::Tight { 0 } else { 1 + u16::from(width == Width::Wide) };
        let bar = column(width, most) - gap;
        let per_page = usize::from(room / (bar + gap)).max(1);
        let mut page = shown;
        window(&mut page, model, per_page);
        let numbers =
            if width == Width::Wide { 1 } else { page.iter().map(|node| digits(node)).max().unwrap_or(1) };

        // What matters most gets a line first; bars get what is left.
        let mut left = lines.saturating_sub(1);
        let mut give = |wanted: u16, least: u16| {
            let given = if left >= least + wanted { wanted } else { 0 };
            left -= given;
            given
        };
        let numbers = give(numbers + 1, 2).saturating_sub(1);
        let keys = give(1, 3);
        let marks = give(1, 3);
        let news = give(1, 3);
        let totals = give(u16::from(model.settings.totals), 4);
        let about = give(1, 6);
        let news = news + give(2, 20);
        Self { width, bar, gap, per_page, chart: left, numbers, marks, about, totals, news, keys }
    }

    /// The nodes of the page, and how many are before it.
    #[must_use]
    pub fn page<'a>(&self, model: &'a Model) -> (usize, Vec<&'a NodeLoad>) {
        let mut shown = model.shown();
        let before = window(&mut shown, model, self.per_page);
        (before, shown)
    }
}

/// Leaves of all nodes those of the page. Returns how many are before it.
fn window(shown: &mut Vec<&NodeLoad>, model: &Model, per_page: usize) -> usize {
    let wanted = model.settings.first.map_or(0, |first| shown.partition_point(|node| node.node < first));
    // The last page is a full one.
    let before = wanted.min(shown.len().saturating_sub(per_page));
    shown.drain(..before);
    shown.truncate(per_page);
    before
}

fn digits(node: &NodeLoad) -> u16 {
    node.node.0.checked_ilog10().map_or(1, |most| most as u16 + 1)
}

/// Columns of a node, and of the space after it.
fn column(width: Width, digits: u16) -> u16 {
    match width {
        Width::Auto | Width::Wide => digits.max(WIDE_BAR) + 2,
        Width::Vertical => 2,
        Width::Tight => 1,
    }
}

/// Lines of processes in a list.
#[must_use]
pub fn list_lines(model: &Model) -> usize {
    // Title, headings, a message and keys are around them.
    usize::from(model.size.1.saturating_sub(4))
}
