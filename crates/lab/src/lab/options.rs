//! The options of a lab, checked before anything is created.

use crate::error::{LabError, Result};
use crate::network::link_spec::LinkSpec;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Maximum number of nodes in a lab.
const MAX_NODES: u16 = 64;
/// The share of the machine's CPUs that one lab may use: 1.5 of two. The rest is for the user's
/// terminal and for forwarding packets.
const MAX_CPU_SHARE: f64 = 0.75;

/// The name of a lab: 1 to 40 letters, digits and hyphens. Labs with different names can run at the
/// same time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LabName(String);

impl LabName {
    /// A name unique on this machine: the prefix, the process id and a counter.
    ///
    /// # Errors
    /// The prefix is not a valid name, or too long.
    pub fn unique(prefix: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        format!("{prefix}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)).parse()
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for LabName {
    fn default() -> Self {
        Self("lab".to_owned())
    }
}

impl fmt::Display for LabName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for LabName {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self> {
        let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if text.is_empty() || text.len() > 40 || !text.bytes().all(good) {
            return Err(LabError::BadOption(format!(
                "a lab's name is 1 to 40 letters, digits and hyphens, which {text:?} is not"
            )));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for LabName {
    type Error = LabError;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<LabName> for String {
    fn from(name: LabName) -> Self {
        name.0
    }
}

/// The options of a lab.
#[derive(Debug, Clone)]
pub struct LabOptions {
    /// The lab's name, by which other processes find it.
    pub name: LabName,
    /// Number of nodes, 1 to 64 (with point-to-point cables: 16).
    pub nodes: u16,
    /// The speed of each node in CPUs of this machine. Empty: all nodes equal; one value: for all
    /// nodes; else one value per node. All are scaled down if they add up to more than three
    /// quarters of the machine.
    pub speeds: Vec<f64>,
    /// Whether each node is limited to its speed. Without the limit all nodes compete for the
    /// machine's CPUs, and each one sees the load of the machine as its own.
    pub cpu_quotas: bool,
    /// Bytes of memory that each node has; `None`: as much as the machine.
    pub memory: Option<u64>,
    /// Directories of the machine that all nodes share, as on a shared file system.
    pub shared: Vec<PathBuf>,
    /// The links between the nodes.
    pub link: LinkSpec,
    /// Makes losses reproducible. With a seed, the link emulator is used even where the kernel has
    /// netem.
    pub seed: Option<u64>,
    /// Whether to make a Tern cluster of the nodes: configure and start ternd in each.
    pub daemon: bool,
    /// The binary to start as init; `None`: `TERN_LAB_HELPER`, or this program, or the `tern`
    /// beside it.
    pub helper: Option<PathBuf>,
}

impl Default for LabOptions {
    /// Two nodes without ternd, on an unlimited switch; the lab is named `lab`.
    fn default() -> Self {
        Self {
            name: LabName::default(),
            nodes: 2,
            speeds: Vec::new(),
            cpu_quotas: true,
            memory: None,
            shared: Vec::new(),
            link: LinkSpec::default(),
            seed: None,
            daemon: false,
            helper: None,
        }
    }
}

impl LabOptions {
    /// Two nodes without ternd, in a lab with a unique name that starts with this prefix.
    ///
    /// # Errors
    /// The prefix is not a valid name.
    pub fn unique(prefix: &str) -> Result<Self> {
        Ok(Self { name: LabName::unique(prefix)?, ..Self::default() })
    }

    pub(crate) fn check(&self) -> Result<()> {
        let max = self.link.max_nodes().min(MAX_NODES);
        if self.nodes == 0 || self.nodes > max {
            return Err(LabError::BadOption(format!(
                "a lab of this kind has 1 to {max} nodes, not {}",
                self.nodes
            )));
        }
        Ok(())
    }
}

/// The speed of each node, and whether the requested speeds were scaled down.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Speeds {
    pub(crate) per_node: Vec<f64>,
    pub(crate) scaled: bool,
}

/// Computes each node's share of a machine with this many CPUs.
pub(crate) fn scale_speeds(requested: &[f64], nodes: u16, cpus: usize) -> Result<Speeds> {
    let nodes = usize::from(nodes);
    let cpus = cpus as f64;
    if let Some(bad) = requested.iter().find(|s| !s.is_finite() || **s < 0.01 || **s > cpus) {
        return Err(LabError::BadOption(format!("a node's speed is 0.01 to {cpus} CPUs here, not {bad}")));
    }
    let mut per_node = match requested {
        [] => vec![1.0; nodes],
        [one] => vec![*one; nodes],
        many if many.len() == nodes => many.to_vec(),
        many => {
            return Err(LabError::BadOption(format!(
                "{} speeds for {nodes} nodes; give one speed, or one per node",
                many.len()
            )));
        }
    };
    let sum: f64 = per_node.iter().sum();
    let max = cpus * MAX_CPU_SHARE;
    let scaled = sum > max;
    if scaled {
        per_node.iter_mut().for_each(|s| *s *= max / sum);
    }
    Ok(Speeds { per_node, scaled: scaled && !requested.is_empty() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_as_file_names() {
        assert!("lab".parse::<LabName>().is_ok());
        for bad in ["", "..", "a/b", "a b", "é", &"x".repeat(41)] {
            assert!(bad.parse::<LabName>().is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<LabName>("\"../x\"").is_err());
        assert_ne!(LabName::unique("t").unwrap(), LabName::unique("t").unwrap());
    }

    #[test]
    fn speeds_fit_into_the_machine() {
        assert_eq!(scale_speeds(&[], 3, 2).unwrap(), Speeds { per_node: vec![0.5; 3], scaled: false });
        assert_eq!(
            scale_speeds(&[0.5, 0.25], 2, 2).unwrap(),
            Speeds { per_node: vec![0.5, 0.25], scaled: false }
        );
        let scaled = scale_speeds(&[2.0, 1.0], 2, 2).unwrap();
        assert!(scaled.scaled);
        assert_eq!(scaled.per_node, [1.0, 0.5]);
        assert!(scale_speeds(&[1.0, 1.0], 3, 2).is_err());
        assert!(scale_speeds(&[f64::NAN], 1, 2).is_err());
        assert!(scale_speeds(&[0.0], 1, 2).is_err());
    }

    #[test]
    fn node_counts_are_checked() {
        assert!(LabOptions { nodes: 0, ..LabOptions::default() }.check().is_err());
        assert!(LabOptions { nodes: 64, ..LabOptions::default() }.check().is_ok());
        let cables = "p2p".parse().unwrap();
        assert!(LabOptions { nodes: 17, link: cables, ..LabOptions::default() }.check().is_err());
    }
}
