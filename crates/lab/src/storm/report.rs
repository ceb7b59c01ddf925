//! The result of a storm, as text and as JSON.

use super::difference::Difference;
use super::mover::{MoveStats, ProgramMoves};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// Maximum number of differences printed; all are counted.
const MAX_SHOWN_DIFFERENCES: usize = 10;

/// The result of `tern lab storm`, as `--json` prints it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StormReport {
    /// The command that was run.
    pub command: String,
    /// The seed of the first run, for pauses and destinations. Each later run uses the next number.
    pub seed: u64,
    /// Number of runs in the storm.
    pub runs: u32,
    /// How the native run ended.
    pub status: String,
    /// Duration of the native run in seconds.
    pub native_s: f64,
    /// Duration of each run in the storm, in seconds.
    pub storm_s: Vec<f64>,
    /// The moves of all runs together.
    #[serde(flatten)]
    pub moves: MoveStats,
    /// Requested number of moves.
    #[serde(rename = "wanted")]
    pub requested_moves: u64,
    /// Differences between the last run and the native one. A run that differs is the last.
    pub differences: Vec<Difference>,
    /// Two native runs differ as well, so the differences do not indicate a fault of Tern.
    #[serde(rename = "unsteady")]
    pub nondeterministic: bool,
}

impl StormReport {
    /// 0: nothing differs; 1: something differs; 3: nothing differs, but there were too few moves.
    pub(super) fn exit_code(&self) -> u8 {
        match () {
            () if !self.differences.is_empty() => 1,
            () if self.moves.moves < self.requested_moves => 3,
            () => 0,
        }
    }

    /// The report as text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.command);
        let mean = self.storm_s.iter().sum::<f64>() / self.storm_s.len().max(1) as f64;
        let runs = if self.runs == 1 { String::new() } else { format!(", the mean of {} runs", self.runs) };
        let MoveStats { moves, processes, moved, too_late, refused, failures, programs } = &self.moves;
        let _ = writeln!(text, "time         native {:.2} s, storm {mean:.2} s{runs}", self.native_s);
        let _ = writeln!(
            text,
            "moves        {moves}, of {moved} processes out of {processes}; seed {}",
            self.seed
        );
        for (program, ProgramMoves { moves, refused }) in programs {
            let _ = writeln!(text, "{moves:>11}  of {}, and {refused} refused", printable(program));
        }
        if *too_late > 0 {
            let _ = writeln!(text, "too late     {too_late}: the process had ended");
        }
        let all: u64 = refused.values().sum();
        let _ = writeln!(text, "refused      {all}");
        let mut rows: Vec<_> = refused.iter().collect();
        rows.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        for (reason, count) in rows {
            let _ = writeln!(text, "{count:>11}  {}", printable(reason));
        }
        for failure in failures {
            let _ = writeln!(text, "tern failed  {}", printable(failure));
        }
        let _ = writeln!(text, "differences  {}", self.differences.len());
        for Difference { what, how } in self.differences.iter().take(MAX_SHOWN_DIFFERENCES) {
            let _ = writeln!(text, "── {}", printable(what));
            for line in how.lines() {
                let _ = writeln!(text, "{line}");
            }
        }
        if self.nondeterministic {
            text += "two native runs differ as well, so the differences do not indicate a fault of tern\n";
        }
        if self.exit_code() == 3 {
            let _ = writeln!(
                text,
                "moved only {moves} times instead of {}; the command may be too quick",
                self.requested_moves
            );
        }
        text
    }
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> StormReport {
        StormReport {
            command: "make".into(),
            seed: 7,
            runs: 2,
            status: "exit 0".into(),
            native_s: 1.0,
            storm_s: vec![3.0, 5.0],
            moves: MoveStats {
                moves: 12,
                processes: 9,
                moved: 4,
                too_late: 1,
                refused: [("busy".to_owned(), 1), ("threads: it has # threads".to_owned(), 20)].into(),
                failures: vec![],
                programs: [("cc".to_owned(), ProgramMoves { moves: 12, refused: 21 })].into(),
            },
            requested_moves: 10,
            ..StormReport::default()
        }
    }

    #[test]
    fn text_has_all_lines() {
        let text = report().text();
        for line in [
            "time         native 1.00 s, storm 4.00 s, the mean of 2 runs",
            "moves        12, of 4 processes out of 9; seed 7",
            "         12  of cc, and 21 refused",
            "refused      21",
            "         20  threads: it has # threads\n          1  busy",
            "differences  0",
        ] {
            assert!(text.contains(line), "{line:?} is not in:\n{text}");
        }
    }

    #[test]
    fn exit_code_reflects_the_result() {
        let good = report();
        assert_eq!(good.exit_code(), 0);
        assert_eq!(StormReport { requested_moves: 13, ..good.clone() }.exit_code(), 3);
        let differs = StormReport { differences: vec![Difference::new("status", "signal 9")], ..good };
        assert_eq!(differs.exit_code(), 1);
        assert!(differs.text().contains("── status\nsignal 9\n"));
    }

    #[test]
    fn json_has_the_promised_keys() {
        let json = serde_json::to_value(report()).unwrap();
        for key in ["moves", "native_s", "seed", "runs"] {
            assert!(json[key].is_number(), "{key}");
        }
        assert!(json["refused"].is_object() && json["differences"].is_array() && json["broken"].is_array());
    }
}
