//! Which crate may depend on which. A crate in the table may depend only on crates above it:
//!
//! ```text
//!  ids                       identifiers; any crate may depend on it
//!  cgroup                    the machine's control groups
//!  balancer                  decides where processes run; pure, so it depends only on ids
//!  gossip                    membership of the cluster
//!  syscall  control  wire    the protocols
//!  readiness                 files that only report readiness
//!  redirect                  the kernel's rules and namespaces for connections that move
//!  load                      a node's resources and load; reads its limits through cgroup, and
//!                            processes through control
//!  tracee ─ image            the state of a process
//!  tcp                       the state of a TCP connection
//!  migrate                   the migration protocol
//!  guest    deputy           the two halves of a process, independent of each other
//!  shim                      the program that runs one of the halves
//!  node                      starts shims as programs, so it depends only on cgroup, control, wire
//!                            and the crates for decisions: load, gossip, balancer
//!  mfs                       all nodes' files as one tree; reads the node's map and identity
//!  mexec                     runs commands on other nodes; reads the node's map and identity
//!  admin                     the node as files; queries ternd, and reads its configuration
//!  sim                       simulates a cluster of gossip and balancer only
//!  lab                       starts nodes, as programs
//!  top                       displays the cluster, which it queries through control
//!  cli                       queries the cluster through control, runs commands through mexec, and
//!                            sets clusters up and reads their configuration with node; its doctor
//!                            reads the node's identity, which is in wire
//! ```

use anyhow::{Context, Result};
use serde_json::Value;
use std::process::Command;

/// Each crate, and the crates of this project that it may depend on besides ids.
const ARROWS: [(&str, &[&str]); 28] = [
    ("tern-ids", &[]),
    ("tern-cgroup", &[]),
    ("tern-balancer", &[]),
    ("tern-syscall", &[]),
    ("tern-control", &[]),
    ("tern-load", &["tern-cgroup", "tern-control"]),
    ("tern-gossip", &[]),
    ("tern-sim", &["tern-balancer", "tern-gossip"]),
    ("tern-wire", &[]),
    ("tern-readiness", &[]),
    ("tern-redirect", &[]),
    ("tern-tracee", &[]),
    ("tern-image", &["tern-tracee"]),
    ("tern-tcp", &[]),
    ("tern-migrate", &["tern-image", "tern-wire", "tern-syscall", "tern-tracee"]),
    ("tern-guest", AWAY),
    ("tern-deputy", HALF),
    ("tern-shim", &["tern-guest", "tern-deputy", "tern-control", "tern-wire", "tern-migrate", "tern-tracee"]),
    ("tern-node", &["tern-cgroup", "tern-control", "tern-wire", "tern-load", "tern-gossip", "tern-balancer"]),
    ("tern-mfs", &["tern-control", "tern-wire", "tern-node"]),
    ("tern-net", &["tern-control", "tern-wire", "tern-node", "tern-tcp", "tern-readiness", "tern-redirect"]),
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
            "tern-redirect",
        ],
    ),
    ("tern-tests", &["tern-control", "tern-lab"]),
    ("xtask", &["tern-syscall"]),
];

/// The away half also uses cgroup, to put guests into the control groups that the node's owner can
/// limit.
const AWAY: &[&str] = &[
    "tern-cgroup",
    "tern-tracee",
    "tern-image",
    "tern-wire",
    "tern-syscall",
    "tern-migrate",
    "tern-control",
    "tern-readiness",
];

/// The allowed dependencies of a half of a process. The other half is not among them.
const HALF: &[&str] =
    &["tern-tracee", "tern-image", "tern-wire", "tern-syscall", "tern-migrate", "tern-control"];

/// One violation per dependency that is not in the table, and per crate that is not in it.
///
/// # Errors
/// cargo cannot describe the workspace.
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
            breaches.push(format!(
                "{name}: a new crate; add it and its dependencies to xtask/src/tidy/arrows.rs"
            ));
            continue;
        };
        // Dependencies of tests only (kind "dev") are not checked.
        let built = list(&package["dependencies"]).filter(|dependency| dependency["kind"] != "dev");
        for other in built.filter_map(|dependency| dependency["name"].as_str()) {
            let ours = ARROWS.iter().any(|(known, _)| *known == other);
            if ours && other != "tern-ids" && !allowed.contains(&other) {
                breaches.push(format!("{name} must not depend on {other}"));
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
        assert_eq!(breaches[0], "tern-guest must not depend on tern-deputy");
        assert_eq!(breaches[1], "tern-shim must not depend on tern-node");
    }

    #[test]
    fn the_table_has_no_circle() {
        // Each crate may depend only on those above it.
        for (place, (name, allowed)) in ARROWS.iter().enumerate() {
            for other in *allowed {
                let above = ARROWS.iter().position(|(known, _)| known == other);
                assert!(above.is_some_and(|above| above < place), "{name} → {other}");
            }
        }
    }
}
