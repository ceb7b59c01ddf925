//! The table, printed row by row as Markdown, so that rows measured before a failure are kept.

use anyhow::{Result, ensure};
use std::io::{Write, stdout};
use std::time::Instant;

/// The table being printed.
#[derive(Debug)]
pub(crate) struct Table {
    begun: Instant,
    missed: usize,
    aims: usize,
}

/// The target of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Aim {
    /// No more than this.
    AtMost(f64),
    /// No less than this.
    AtLeast(f64),
    /// No target.
    None,
}

impl Table {
    /// Prints the head.
    ///
    /// # Errors
    /// If standard output cannot be written.
    pub(crate) fn begin() -> Result<Self> {
        let file = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = file.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown");
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let busy = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let busy = busy.split(' ').next().unwrap_or("?").to_owned();
        let mut out = stdout();
        writeln!(
            out,
            "Linux {}, {cpus} CPUs ({}), load average {busy} before.",
            kernel.trim(),
            model.trim_matches([' ', '\t', ':'])
        )?;
        writeln!(
            out,
            "Nodes are namespaces of this machine. With two nodes, each has half of three quarters of its CPUs, by"
        )?;
        writeln!(
            out,
            "quota, and shares them with packet processing: absolute figures are those of slow nodes. Both sides"
        )?;
        writeln!(
            out,
            "of a ratio had the same shares, in turns. Medians; in brackets the minimum and the maximum.\n"
        )?;
        writeln!(out, "| measured | Tern | against | it has | ratio | aim |")?;
        writeln!(out, "|---|--:|---|--:|--:|--:|")?;
        Ok(Self { begun: Instant::now(), missed: 0, aims: 0 })
    }

    /// Adds a row with a ratio.
    ///
    /// # Errors
    /// As `begin`; also if the ratio is not finite.
    pub(crate) fn compare(
        &mut self,
        what: &str,
        tern: &str,
        against: &str,
        other: &str,
        ratio: f64,
        aim: Aim,
    ) -> Result<()> {
        ensure!(ratio.is_finite(), "{what}: one side was not measured");
        let verdict = self.check_target(ratio, aim, "×");
        let digits = if ratio < 0.1 { 5 } else { 3 };
        writeln!(stdout(), "| {what} | {tern} | {against} | {other} | {ratio:.digits$} | {verdict} |")?;
        Ok(())
    }

    /// Adds a row with a difference.
    ///
    /// # Errors
    /// As `begin`.
    pub(crate) fn compare_difference(
        &mut self,
        what: &str,
        tern: &str,
        against: &str,
        other: &str,
        by: (f64, &str),
        aim: f64,
    ) -> Result<()> {
        let verdict = self.check_target(by.0, Aim::AtMost(aim), by.1);
        writeln!(stdout(), "| {what} | {tern} | {against} | {other} | +{:.2}{} | {verdict} |", by.0, by.1)?;
        Ok(())
    }

    /// Adds a row without a comparison.
    ///
    /// # Errors
    /// As `begin`.
    pub(crate) fn row(&mut self, what: &str, tern: &str, note: &str) -> Result<()> {
        writeln!(stdout(), "| {what} | {tern} | {note} | | | |")?;
        Ok(())
    }

    /// Adds a row for a measurement that failed.
    ///
    /// # Errors
    /// As `begin`.
    pub(crate) fn failed(&mut self, what: &str, error: &anyhow::Error) -> Result<()> {
        writeln!(stdout(), "| {what} | **failed** | {} | | | |", format!("{error:#}").replace('\n', " "))?;
        Ok(())
    }

    /// Prints the foot.
    ///
    /// # Errors
    /// As `begin`.
    pub(crate) fn end(self) -> Result<()> {
        let (met, all, took) = (self.aims - self.missed, self.aims, self.begun.elapsed().as_secs());
        writeln!(stdout(), "\n{met} of {all} aims met; {took} s.")?;
        Ok(())
    }

    fn check_target(&mut self, value: f64, aim: Aim, unit: &str) -> String {
        let (good, text) = match aim {
            Aim::AtMost(most) => (value <= most, format!("≤ {most}{unit}")),
            Aim::AtLeast(least) => (value >= least, format!("≥ {least}{unit}")),
            Aim::None => return String::new(),
        };
        self.aims += 1;
        self.missed += usize::from(!good);
        if good { text } else { format!("{text} **missed**") }
    }
}

/// Repeated measurements of one quantity.
#[derive(Debug, Default, Clone)]
pub(crate) struct Series(Vec<f64>);

impl Series {
    /// Adds a value.
    pub(crate) fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Adds values.
    pub(crate) fn extend(&mut self, values: impl IntoIterator<Item = f64>) {
        self.0.extend(values);
    }

    /// All values multiplied by a factor.
    pub(crate) fn times(&self, factor: f64) -> Self {
        Self(self.0.iter().map(|value| value * factor).collect())
    }

    /// The median; NaN, which meets no target, if there are no values.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// The median and the extremes, with this unit.
    pub(crate) fn text(&self, unit: &str) -> String {
        let least = self.0.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let digits = if most < 10.0 { 2 } else { 1 };
        format!("{:.digits$}{unit} [{least:.digits$}–{most:.digits$}]", self.median())
    }
}
