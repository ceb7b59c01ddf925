//! Hints that a user gives about a program when starting it (`mosrun`).

use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// Hints about a program, which its children inherit. An absent hint is inherited from the caller.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Advice {
    /// `-c`, `-i`: whether it is CPU-bound or I/O-bound.
    #[serde(rename = "habit")]
    pub workload: Option<Workload>,
    /// `-n`, `-s`, `-f`, `-d`: how fast old observations of it lose weight.
    #[serde(rename = "forget")]
    pub decay: Option<DecayClass>,
    /// `-m`: bytes of memory that it will need.
    pub memory: Option<u64>,
    /// `-J`: a number by which tools select several programs together.
    pub job: Option<u32>,
    /// `--only`: the nodes where it may run, besides its home.
    pub only: Option<Vec<NodeId>>,
    /// `--not`: the nodes where it must not run.
    pub not: Vec<NodeId>,
}

/// The kind of work that a program mostly does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// It computes: its system calls are ignored when it is placed (`cpujob`).
    Cpu,
    /// It does I/O: it belongs where its files are (`iojob`).
    Io,
}

/// How fast old observations of a program lose weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayClass {
    /// Never (`nodecay`).
    Never,
    /// At the node's slow rate (`slowdecay`), the default.
    Slow,
    /// At the node's fast rate (`fastdecay`).
    Fast,
    /// This per mille is kept after each interval, at most 1000.
    Keep(u16),
}

impl Advice {
    /// These hints; an absent hint is taken from `other`.
    #[must_use]
    pub fn or(self, other: &Self) -> Self {
        Self {
            workload: self.workload.or(other.workload),
            decay: self.decay.or(other.decay),
            memory: self.memory.or(other.memory),
            job: self.job.or(other.job),
            only: self.only.or_else(|| other.only.clone()),
            not: if self.not.is_empty() { other.not.clone() } else { self.not },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_hints_are_inherited() {
        let caller =
            Advice { job: Some(7), memory: Some(1 << 20), not: vec![NodeId(3)], ..Advice::default() };
        let own = Advice { workload: Some(Workload::Io), memory: Some(5), ..Advice::default() };
        let both = own.or(&caller);
        assert_eq!((both.job, both.memory, both.workload), (Some(7), Some(5), Some(Workload::Io)));
        assert_eq!(both.not, [NodeId(3)]);
    }
}
