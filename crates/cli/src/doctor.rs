//! Checks whether this node has what Tern needs. Each probe tries the feature itself. If the
//! attempt would change the caller permanently, it is made in a child process. Nothing on the node
//! is changed.
//!
//! A probe is a function that returns findings; they are printed in the order of `probe`.

mod child;
mod connections;
mod cpu;
mod files;
mod host;
mod kernel;
mod memory;
mod namespaces;
mod node;
mod seccomp;
mod tracing;
mod updatedb;

use serde::{Deserialize, Serialize};

/// How well a feature works on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FindingState {
    /// It works as Tern needs it.
    Ok,
    /// Tern works, but does less or runs more slowly.
    Limited,
    /// Something that Tern promises cannot be done on this node.
    Missing,
}

/// The result of one probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finding {
    /// The feature that was probed.
    pub(crate) name: String,
    /// How well it works.
    pub(crate) state: FindingState,
    /// The observation.
    pub(crate) found: String,
    /// The consequence for Tern and the remedy; empty if `state` is `Ok`.
    pub(crate) follows: String,
}

impl Finding {
    /// A feature that works as needed.
    pub(crate) fn ok(name: &str, found: impl Into<String>) -> Self {
        Self { name: name.into(), state: FindingState::Ok, found: found.into(), follows: String::new() }
    }

    /// A feature that works less well than it could.
    pub(crate) fn limited(name: &str, found: impl Into<String>, follows: impl Into<String>) -> Self {
        Self { name: name.into(), state: FindingState::Limited, found: found.into(), follows: follows.into() }
    }

    /// A feature without which Tern cannot keep a promise on this node.
    pub(crate) fn missing(name: &str, found: impl Into<String>, follows: impl Into<String>) -> Self {
        Self { name: name.into(), state: FindingState::Missing, found: found.into(), follows: follows.into() }
    }
}

/// Runs all probes, in about 0.1 s.
pub(crate) fn probe() -> Vec<Finding> {
    [
        kernel::probe(),
        seccomp::probe(),
        tracing::probe(),
        memory::probe(),
        namespaces::probe(),
        connections::probe(),
        cpu::probe(),
        files::probe(),
        updatedb::probe(),
        host::probe(),
        node::probe(),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_has_text_and_every_fault_a_consequence() {
        let findings = probe();
        for finding in &findings {
            assert!(!finding.found.is_empty(), "{finding:?}");
            assert_eq!(finding.follows.is_empty(), finding.state == FindingState::Ok, "{finding:?}");
        }
        let mut names: Vec<_> = findings.iter().map(|finding| &finding.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), findings.len(), "two findings of one name");
    }
}
