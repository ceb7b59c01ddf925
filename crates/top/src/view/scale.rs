//! Converts values to heights.

use super::format;
use crate::model::Display;
use tern_control::NodeLoad;

/// Converts values to heights.
#[derive(Debug, Clone, PartialEq)]
pub struct Scale {
    display: Display,
    /// The value at the top of the scale.
    pub top: f64,
    /// The labelled values, the lowest first.
    pub ticks: Vec<f64>,
}

impl Scale {
    /// A scale that covers these nodes, with a label on at most every third line.
    #[must_use]
    pub fn of(display: Display, nodes: &[&NodeLoad], lines: u16) -> Self {
        let minimum = match display {
            Display::Load | Display::LogLoad => 1.0,
            Display::Utilisability => 100.0,
            Display::Speed => 10_000.0,
            Display::Memory | Display::RawMemory => 1e6,
        };
        // NaN or infinity received from a node must not hide the other nodes.
        let values = nodes.iter().map(|node| total(display, node)).filter(|value| value.is_finite());
        let max = values.fold(minimum, f64::max);
        let labels = f64::from((lines / 3).max(1));
        if display == Display::LogLoad {
            return Self::logarithmic(max, labels);
        }
        let step = round_step(max / labels);
        let count = (max / step).ceil();
        let ticks = (0..=count as u32).map(|tick| f64::from(tick) * step).collect();
        Self { display, top: count * step, ticks }
    }

    fn logarithmic(max: f64, labels: f64) -> Self {
        let doublings = max.log2().ceil().max(1.0);
        let step = (doublings / labels).ceil().max(1.0);
        let top = (doublings / step).ceil() * step;
        let powers = (0..=(top / step) as i32).map(|power| 2f64.powf(f64::from(power) * step));
        let mut ticks = vec![0.0];
        ticks.extend(powers);
        Self { display: Display::LogLoad, top: 2f64.powf(top), ticks }
    }

    /// The height of a value on a scale of `lines` lines, in eighths of a line.
    #[must_use]
    pub fn eighths(&self, value: f64, lines: u16) -> u32 {
        let part = match self.display {
            Display::LogLoad => (1.0 + value.max(0.0)).log2() / (1.0 + self.top).log2(),
            _ => value / self.top,
        };
        let height = f64::from(lines) * 8.0;
        // The cast of NaN gives 0.
        (part * height).round().clamp(0.0, height) as u32
    }

    /// The label of a tick.
    #[must_use]
    pub fn label(&self, tick: f64) -> String {
        match self.display {
            Display::Load if self.ticks.get(1).is_some_and(|step| step.fract() > 0.0) => format!("{tick:.1}"),
            Display::Load | Display::LogLoad | Display::Speed => format!("{tick:.0}"),
            Display::Utilisability => format!("{tick:.0}%"),
            Display::Memory | Display::RawMemory => format::short_bytes(tick as u64),
        }
    }
}

/// The smallest number of the form 1, 2 or 5 times a power of ten that is not below `least`.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|n| n * power)
        .into_iter()
        .find(|step| *step >= least * 0.999_999)
        .unwrap_or(least)
}

/// The value that a bar shows; for memory, the part in use.
#[must_use]
pub fn value(display: Display, node: &NodeLoad) -> f64 {
    match display {
        Display::Load | Display::LogLoad => f64::from(node.load) / 100.0,
        Display::Speed => f64::from(node.speed),
        Display::Memory => node.mem_total.saturating_sub(node.mem_free) as f64,
        Display::RawMemory => node.mem_total.saturating_sub(node.mem_raw_free) as f64,
        Display::Utilisability => f64::from(node.utilisability),
    }
}

/// The value at the top of a bar, including free memory.
#[must_use]
pub fn total(display: Display, node: &NodeLoad) -> f64 {
    match display {
        Display::Memory | Display::RawMemory => node.mem_total as f64,
        _ => value(display, node),
    }
}

/// The text above a bar, in at most five columns.
#[must_use]
pub fn value_text(display: Display, node: &NodeLoad) -> String {
    let value = value(display, node);
    match display {
        Display::Load | Display::LogLoad => format::four_columns(value),
        Display::Speed => format!("{}", node.speed),
        Display::Memory | Display::RawMemory => format::short_bytes(value as u64),
        Display::Utilisability => format!("{value:.0}%"),
    }
}
