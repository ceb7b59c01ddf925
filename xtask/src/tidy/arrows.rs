//! Which crate may know which. What is above does not know what is below:
//!
//! ```text
//!  ids                       identifiers; everything may know them
//!  cgroup                    the machine's control groups
//!  balancer                  who should run where; pure, and so a leaf
//!  load                      what a node has and how busy it is; asks cgroup for its limits
//!  gossip                    who else is there
//!  syscall  control  wire    what is said
//!  tracee ─ image            what is held
//!  migrate                   a journey
//!  guest    deputy           the two halves, which never see each other
//!  shim                      holds one of them
//!  node                      starts shims as programs, and so knows none of the above but control, wire
//!                            and what decides: load, gossip, balancer
//!  mfs                       all nodes' files as one tree; reads the node's map and identity
//!  mexec                     commands that are placed; reads the node's map and identity
//!  admin                     the node as files; asks ternd, and reads its configuration
//!  sim                       a cluster of nothing but gossip and balancer
//!  lab                       starts nodes, as programs
//!  top                       shows the cluster, which it asks for in control's words
//!  cli                       reaches the cluster through control, and places commands in mexec's words; founds and joins with node; its doctor reads
//!                            the node's identity, which is wire's
//! ```

use anyhow::{Context, Result};
use serde_json::Value;
use std::process::Command;

/// Each crate, and the crates of ours that it may depend on besides ids.
const ARROWS: [(&str, &[&str]); 24] = [
    ("tern-ids", &[]),
    ("tern-cgroup", &[]),
    ("tern-balancer", &[]),
    ("tern-load", &["tern-cgroup"]),
    ("tern-syscall", &[]),
    ("tern-control", &[]),
    ("tern-gossip", &[]),
    ("tern-sim", &["tern-balancer", "tern-gossip"]),
    ("tern-wire", &[]),
    ("tern-tracee", &[]),
    ("tern-image", &["tern-tracee"]),
    ("tern-migrate", &["tern-image", "tern-wire", "tern-syscall", "tern-tracee"]),
    ("tern-guest", AWAY),
    ("tern-deputy", HALF),
    ("tern-shim", &["tern-guest", "tern-deputy", "tern-control", "tern-wire", "tern-migrate", "tern-tracee"]),
    ("tern-node", &["tern-cgroup", "tern-control", "tern-wire", "tern-load", "tern-gossip", "tern-balancer"]),
    ("tern-mfs", &["tern-control", "tern-wire", "tern-node"]),
    ("tern-mexec", &["tern-cgroup", "tern-control", "tern-wire", "tern-node"]),
    ("tern-admin", &["tern-control", "tern-node"]),
    ("tern-lab", &["tern-cgroup", "tern-control"]),
    ("tern-top", &["tern-control"]),
    (
        "tern-cli",
        &[
            "tern-cgroup",
            "tern-control",
            "tern-wire",
            "tern-node",
            "tern-lab",
            "tern-sim",
            "tern-top",
            "tern-mexec",
        ],
    ),
    ("tern-tests", &["tern-control", "tern-lab"]),
    ("xtask", &["tern-syscall"]),
];

/// The away half also puts its guests where the owner of the node can limit them.
const AWAY: &[&str] = &[
    "tern-cgroup",
    "tern-tracee",
    "tern-image",
    "tern-wire",
    "tern-syscall",
    "tern-migrate",
    "tern-control",
];

/// What a half of a process may know: everything but the other half.
const HALF: &[&str] =
    &["tern-tracee", "tern-image", "tern-wire", "tern-syscall", "tern-migrate", "tern-control"];

/// One breach per dependency that the table does not have, and per crate that is not in it.
///
/// # Errors
/// If cargo does not describe the workspace.
pub(super) fn check() -> Result<Vec<String>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let args = ["metadata", "--no-deps", "--format-version", "1"];
    let output = Command::new(cargo).args(args).output().context("cannot run cargo")?;
    let metadata = serde_json::from_slice(&output.stdout).context("cargo metadata is not JSON")?;
    Ok(breaches(&metadata))
}

fn breaches(metadata: &Value) -> Vec<String> {
    let mut breaches = Vec::new();
    for package in list(&metadata["packages"]) {
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
            breaches.push(format!("{name}: a new crate; say in xtask/src/tidy/arrows.rs what it may know"));
            continue;
        };
        // What only tests need (kind "dev") is no part of the structure.
        let built = list(&package["dependencies"]).filter(|dependency| dependency["kind"] != "dev");
        for other in built.filter_map(|dependency| dependency["name"].as_str()) {
            let ours = ARROWS.iter().any(|(known, _)| *known == other);
            if ours && other != "tern-ids" && !allowed.contains(&other) {
                breaches.push(format!("{name} must not know {other}"));
            }
        }
    }
    breaches
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arrows_point_one_way() {
        let package = |name: &str, dependency: &str, kind: Value| json!({"name": name, "dependencies": [{"name": dependency, "kind": kind}]});
        let metadata = json!({"packages": [
            package("tern-guest", "tern-deputy", Value::Null),
            package("tern-guest", "tern-deputy", "dev".into()),
            package("tern-image", "tern-ids", Value::Null),
            package("tern-shim", "tern-node", "build".into()),
            package("tern-new", "serde", Value::Null),
        ]});
        let breaches = breaches(&metadata);
        assert_eq!(breaches.len(), 3, "{breaches:?}");
        assert_eq!(breaches[0], "tern-guest must not know tern-deputy");
        assert_eq!(breaches[1], "tern-shim must not know tern-node");
    }

    #[test]
    fn the_table_has_no_circle() {
        // Each crate may know only those above it.
        for (place, (name, allowed)) in ARROWS.iter().enumerate() {
            for other in *allowed {
                let above = ARROWS.iter().position(|(known, _)| known == other);
                assert!(above.is_some_and(|above| above < place), "{name} → {other}");
            }
        }
    }
}
