//! What a user says of a program that he starts (`mosrun`).

use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// What is said of a program and, unless said otherwise, holds for its children. What was not said is as its caller
/// has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Advice {
    /// `-c`, `-i`: what it does most.
    pub habit: Option<Habit>,
    /// `-n`, `-s`, `-f`, `-d`: how fast its habits are forgotten.
    pub forget: Option<Forget>,
    /// `-m`: bytes of memory that it will need.
    pub memory: Option<u64>,
    /// `-J`: a number by which several programs are found together.
    pub job: Option<u32>,
    /// `--only`: the nodes where it may run, besides its home.
    pub only: Option<Vec<NodeId>>,
    /// `--not`: the nodes where it may not.
    pub not: Vec<NodeId>,
}

/// What a program does most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Habit {
    /// It computes: its system calls do not count (`cpujob`).
    Cpu,
    /// It reads and writes: it belongs where its files are (`iojob`).
    Io,
}

/// How fast a program's habits are forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Forget {
    /// Never (`nodecay`).
    Never,
    /// At the node's slow rate (`slowdecay`), which is also the default.
    Slow,
    /// At its fast one (`fastdecay`).
    Fast,
    /// So many parts of a thousand stay each interval, at most 1000.
    Keep(u16),
}

impl Advice {
    /// This, and what it does not say as `other` does.
    #[must_use]
    pub fn or(self, other: &Self) -> Self {
        Self {
            habit: self.habit.or(other.habit),
            forget: self.forget.or(other.forget),
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
    fn what_is_said_holds_and_the_rest_is_inherited() {
        let caller =
            Advice { job: Some(7), memory: Some(1 << 20), not: vec![NodeId(3)], ..Advice::default() };
        let own = Advice { habit: Some(Habit::Io), memory: Some(5), ..Advice::default() };
        let both = own.or(&caller);
        assert_eq!((both.job, both.memory, both.habit), (Some(7), Some(5), Some(Habit::Io)));
        assert_eq!(both.not, [NodeId(3)]);
    }
}
