//! Collects many runs into one verdict that reports every failure, not only the first.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Number of hung runs after which the remaining runs are skipped.
const MAX_HUNG_RUNS: usize = 6;

/// The failure text of skipped runs.
const NOT_RUN: &str = "skipped";

/// A failed run.
#[derive(Debug)]
struct Failure {
    what: String,
    why: String,
}

/// The outcomes of runs.
#[derive(Debug, Default)]
pub struct Verdict {
    runs: usize,
    failures: Vec<Failure>,
    notes: Vec<String>,
}

impl Verdict {
    /// Performs each run, `concurrency` in parallel. A run returns remarks, or the reason why it
    /// failed.
    pub fn each<T: Send>(
        &mut self,
        runs: impl IntoIterator<Item = (String, T)>,
        concurrency: usize,
        run: impl Fn(T) -> Result<Vec<String>, String> + Sync,
    ) {
        let queue: Mutex<VecDeque<(String, T)>> = Mutex::new(runs.into_iter().collect());
        let verdict = Mutex::new(self);
        thread::scope(|scope| {
            for _ in 0..concurrency {
                scope.spawn(|| {
                    loop {
                        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                        let Some((what, item)) = next else { return };
                        let hung = verdict.lock().unwrap_or_else(PoisonError::into_inner).hung();
                        let end = if hung >= MAX_HUNG_RUNS { Err(NOT_RUN.into()) } else { run(item) };
                        let mut verdict = verdict.lock().unwrap_or_else(PoisonError::into_inner);
                        verdict.runs += 1;
                        match end {
                            Ok(notes) => {
                                verdict.notes.extend(notes.into_iter().map(|note| format!("{what}: {note}")));
                            }
                            Err(why) => {
                                if why != NOT_RUN {
                                    eprintln!("✗ {what}: {}", why.lines().next().unwrap_or_default());
                                }
                                verdict.failures.push(Failure { what, why });
                            }
                        }
                    }
                });
            }
        });
    }

    fn hung(&self) -> usize {
        let hangs =
            |why: &str| ["not ended within", "no answer within"].iter().any(|words| why.contains(words));
        self.failures.iter().filter(|failure| hangs(&failure.why)).count()
    }

    /// The table, and whether all runs passed.
    pub fn table(&self) -> (String, bool) {
        let mut text = String::new();
        for note in &self.notes {
            let _ = writeln!(text, "  {note}");
        }
        let (not_run, failures): (Vec<_>, Vec<_>) = self.failures.iter().partition(|f| f.why == NOT_RUN);
        for Failure { what, why } in &failures {
            let _ = writeln!(text, "──── {what}\n{why}");
        }
        let _ = write!(text, "{} runs, {} failed", self.runs - not_run.len(), failures.len());
        if !not_run.is_empty() {
            let _ = write!(text, ", {} not run, since too many hung", not_run.len());
        }
        text.push('\n');
        for Failure { what, why } in failures {
            let _ = writeln!(text, "  ✗ {what:32} {}", why.lines().next().unwrap_or_default());
        }
        (text, self.failures.is_empty())
    }

    /// Prints the table, and ends the test.
    ///
    /// # Panics
    /// If a run failed, or there was none.
    #[allow(clippy::panic, reason = "this is how a test fails")]
    pub fn conclude(&self) {
        let (text, good) = self.table();
        eprint!("{text}");
        if !good || self.runs == 0 {
            panic!("{} of {} runs failed", self.failures.len(), self.runs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_is_reported() {
        let mut verdict = Verdict::default();
        let runs = (0..10).map(|n| (format!("run {n}"), n));
        verdict.each(runs, 3, |n| if n % 4 == 3 { Err(format!("{n} is bad\nbadly")) } else { Ok(vec![]) });
        let (text, good) = verdict.table();
        assert!(!good);
        assert!(text.contains("10 runs, 2 failed") && text.contains("3 is bad") && text.contains("7 is bad"));
    }

    #[test]
    fn too_many_hung_runs_skip_the_rest() {
        let mut verdict = Verdict::default();
        let runs = (0..20).map(|n| (n.to_string(), ()));
        verdict.each(runs, 1, |()| Err("it has not ended within 60 s".into()));
        assert_eq!(verdict.hung(), MAX_HUNG_RUNS);
    }
}
