//! What a node offers to Tern. Each probe tries the thing itself, in a child process where trying it would
//! leave a mark on this one; nothing on the node is changed.
//!
//! A probe is a function that returns findings; they are printed in the order of `examine`.

mod child;
mod cpu;
mod files;
mod host;
mod kernel;
mod memory;
mod namespaces;
mod node;
mod seccomp;
mod tracing;
mod walkers;

use serde::{Deserialize, Serialize};

/// How well a thing works here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// As Tern needs it.
    Ok,
    /// Tern works without it, or with it as it is, but does less.
    Limited,
    /// Something that Tern promises cannot be done on this node.
    Missing,
}

/// The result of one probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was looked at.
    pub name: String,
    /// How well it works.
    pub state: State,
    /// What was seen.
    pub found: String,
    /// What that means for Tern, and what to do; empty if all is well.
    pub follows: String,
}

impl Finding {
    /// All is well.
    pub fn ok(name: &str, found: impl Into<String>) -> Self {
        Self { name: name.into(), state: State::Ok, found: found.into(), follows: String::new() }
    }

    /// Less than it could be.
    pub fn limited(name: &str, found: impl Into<String>, follows: impl Into<String>) -> Self {
        Self { name: name.into(), state: State::Limited, found: found.into(), follows: follows.into() }
    }

    /// Something cannot be done.
    pub fn missing(name: &str, found: impl Into<String>, follows: impl Into<String>) -> Self {
        Self { name: name.into(), state: State::Missing, found: found.into(), follows: follows.into() }
    }
}

/// Probes everything. Takes about a tenth of a second.
pub fn examine() -> Vec<Finding> {
    [
        kernel::examine(),
        seccomp::examine(),
        tracing::examine(),
        memory::examine(),
        namespaces::examine(),
        cpu::examine(),
        files::examine(),
        walkers::examine(),
        host::examine(),
        node::examine(),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_says_what_was_found_and_what_is_wrong_says_what_follows() {
        let findings = examine();
        for finding in &findings {
            assert!(!finding.found.is_empty(), "{finding:?}");
            assert_eq!(finding.follows.is_empty(), finding.state == State::Ok, "{finding:?}");
        }
        let mut names: Vec<_> = findings.iter().map(|finding| &finding.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), findings.len(), "two findings of one name");
    }
}
