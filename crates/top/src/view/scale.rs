//! From values to heights.

use super::figures;
use crate::model::Display;
use tern_control::NodeLoad;

/// How a value becomes a height.
#[derive(Debug, Clone, PartialEq)]
pub struct Scale {
    display: Display,
    /// The value at the top.
    pub top: f64,
    /// Values that are written beside the line, the lowest first.
    pub ticks: Vec<f64>,
}

impl Scale {
    /// One that has room for these nodes, with a label on each third line at most.
    #[must_use]
    pub fn of(display: Display, nodes: &[&NodeLoad], lines: u16) -> Self {
        let least = match display {
            Display::Load | Display::LogLoad => 1.0,
            Display::Utilisability => 100.0,
            Display::Speed => 10_000.0,
            Display::Memory | Display::RawMemory => 1e6,
        };
        // What is no number, or endless, came over the network and must not rule out the others.
        let values = nodes.iter().map(|node| whole(display, node)).filter(|value| value.is_finite());
        let most = values.fold(least, f64::max);
        let labels = f64::from((lines / 3).max(1));
        if display == Display::LogLoad {
            return Self::logarithmic(most, labels);
        }
        let step = round_step(most / labels);
        let count = (most / step).ceil();
        let ticks = (0..=count as u32).map(|tick| f64::from(tick) * step).collect();
        Self { display, top: count * step, ticks }
    }

    fn logarithmic(most: f64, labels: f64) -> Self {
        let doublings = most.log2().ceil().max(1.0);
        let step = (doublings / labels).ceil().max(1.0);
        let top = (doublings / step).ceil() * step;
        let powers = (0..=(top / step) as i32).map(|power| 2f64.powf(f64::from(power) * step));
        let mut ticks = vec![0.0];
        ticks.extend(powers);
        Self { display: Display::LogLoad, top: 2f64.powf(top), ticks }
    }

    /// How many of so many lines a value is high, in eighths.
    #[must_use]
    pub fn eighths(&self, value: f64, lines: u16) -> u32 {
        let part = match self.display {
            Display::LogLoad => (1.0 + value.max(0.0)).log2() / (1.0 + self.top).log2(),
            _ => value / self.top,
        };
        let most = f64::from(lines) * 8.0;
        // A conversion of what is no number gives 0.
        (part * most).round().clamp(0.0, most) as u32
    }

    /// What is written beside the line.
    #[must_use]
    pub fn label(&self, tick: f64) -> String {
        match self.display {
            Display::Load if self.ticks.get(1).is_some_and(|step| step.fract() > 0.0) => format!("{tick:.1}"),
            Display::Load | Display::LogLoad | Display::Speed => format!("{tick:.0}"),
            Display::Utilisability => format!("{tick:.0}%"),
            Display::Memory | Display::RawMemory => figures::short_bytes(tick as u64),
        }
    }
}

/// The least of 1, 2 and 5, and their tenfolds, that is not below.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|n| n * power)
        .into_iter()
        .find(|step| *step >= least * 0.999_999)
        .unwrap_or(least)
}

/// What a bar shows: of memory, that in use.
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

/// How high a bar is with what is free on top.
#[must_use]
pub fn whole(display: Display, node: &NodeLoad) -> f64 {
    match display {
        Display::Memory | Display::RawMemory => node.mem_total as f64,
        _ => value(display, node),
    }
}

/// A value as it is written above its bar, in at most five columns.
#[must_use]
pub fn written(display: Display, node: &NodeLoad) -> String {
    let value = value(display, node);
    match display {
        Display::Load | Display::LogLoad => figures::four(value),
        Display::Speed => format!("{}", node.speed),
        Display::Memory | Display::RawMemory => figures::short_bytes(value as u64),
        Display::Utilisability => format!("{value:.0}%"),
    }
}
