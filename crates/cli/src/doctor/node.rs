//! Tern itself on this node: its configuration, its identity, its daemon, its port.

use super::Finding;
use crate::client;
use crate::output::error_text;
use std::io;
use std::net::{Ipv6Addr, TcpListener};
use std::path::Path;
use tern_control::{Reply, Request};
use tern_node::config::{Config, config_dir};
use tern_node::map::PORT;
use tern_wire::{Identity, IdentityError};

pub(super) fn probe() -> Vec<Finding> {
    let (ternd, is_running) = ternd();
    let config = config_dir().and_then(|dir| Config::load(&dir));
    let (configuration, identity_finding, configured_port) = match config {
        Ok(config) => {
            let finding = identity(&config.config_dir);
            (Finding::ok("configuration", config.config_dir.display().to_string()), finding, config.file.port)
        }
        Err(error) => (
            Finding::missing("configuration", error.to_string(), "ternd does not start; correct the file"),
            Finding::limited("identity", "not checked", "correct the configuration first"),
            None,
        ),
    };
    vec![configuration, identity_finding, ternd, port(configured_port.unwrap_or(PORT), is_running)]
}

fn ternd() -> (Finding, bool) {
    let name = "ternd";
    let own = env!("CARGO_PKG_VERSION");
    let finding = match client::request(&Request::Status) {
        Ok(Reply::Status(report)) if report.version == own => {
            Finding::ok(name, format!("node {} of cluster {}, version {own}", report.node, report.cluster))
        }
        Ok(Reply::Status(report)) => Finding::limited(
            name,
            format!("version {}, but this tool is {own}", report.version),
            "restart ternd; migrated processes are not affected",
        ),
        Ok(_) => Finding::missing(name, "sent an unexpected reply", "ternd has another version; restart it"),
        Err(failure) => {
            let hint = failure.hint.map(|hint| format!("; {hint}")).unwrap_or_default();
            let finding = Finding::limited(name, failure.message, format!("no process can be moved{hint}"));
            return (finding, false);
        }
    };
    (finding, true)
}

/// The key and certificates that ternd loads at its start.
fn identity(dir: &Path) -> Finding {
    let name = "identity";
    match Identity::load(dir) {
        Ok(identity) => {
            Finding::ok(name, format!("node {} of cluster {}", identity.node(), identity.cluster()))
        }
        Err(IdentityError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Finding::limited(
                name,
                "none",
                "this node is not in a cluster; tern init founds one, tern join joins one",
            )
        }
        Err(IdentityError::Read { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            Finding::limited(name, "not readable by this user", "run tern doctor as the user who runs ternd")
        }
        Err(error) => Finding::missing(
            name,
            error.to_string(),
            "ternd does not start; tern join --force creates a new identity",
        ),
    }
}

fn port(port: u16, used_by_ternd: bool) -> Finding {
    let name = "port";
    if used_by_ternd {
        return Finding::ok(name, format!("{port}, used by ternd"));
    }
    // The IPv6 wildcard address covers IPv4 as well; without IPv6, IPv4's is tried.
    let bound = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
        io::ErrorKind::AddrInUse => Err(error),
        _ => TcpListener::bind(("0.0.0.0", port)),
    });
    match bound {
        Ok(_) => Finding::ok(name, format!("{port} is free")),
        Err(error) => Finding::limited(
            name,
            format!("{port}: {}", error_text(&error)),
            "ternd does not start; stop the program that uses the port, or set another port in ternd.toml",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::FindingState;

    #[test]
    fn port_in_use_is_reported() {
        let other = TcpListener::bind("0.0.0.0:0").unwrap();
        let used = other.local_addr().unwrap().port();
        assert_eq!(port(used, false).state, FindingState::Limited);
        assert_eq!(port(used, true).state, FindingState::Ok);
    }

    #[test]
    fn missing_identity_is_limited() {
        let finding = identity(Path::new("/nonexistent"));
        assert_eq!((finding.state, &*finding.found), (FindingState::Limited, "none"));
    }
}
