//! Tern itself on this node: its daemon, its identity, its port.

use super::Finding;
use crate::client;
use crate::output::reason;
use std::io;
use std::net::{Ipv6Addr, TcpListener};
use std::path::Path;
use tern_control::{Reply, Request};
use tern_node::config::{Config, config_dir};
use tern_node::map::PORT;
use tern_wire::{Identity, IdentityError};

pub(super) fn examine() -> Vec<Finding> {
    let (ternd, runs) = ternd();
    let config = config_dir().and_then(|dir| Config::load(&dir));
    let (configured, identified, wanted) = match config {
        Ok(config) => {
            let identified = identity(&config.config_dir);
            (
                Finding::ok("configuration", config.config_dir.display().to_string()),
                identified,
                config.file.port,
            )
        }
        Err(error) => (
            Finding::missing("configuration", error.to_string(), "ternd does not start; correct the file"),
            Finding::limited("identity", "not looked for", "the configuration must be readable first"),
            None,
        ),
    };
    vec![configured, identified, ternd, port(wanted.unwrap_or(PORT), runs)]
}

fn ternd() -> (Finding, bool) {
    let name = "ternd";
    let own = env!("CARGO_PKG_VERSION");
    let finding = match client::ask(&Request::Status) {
        Ok(Reply::Status(report)) if report.version == own => {
            Finding::ok(name, format!("node {} of cluster {}, version {own}", report.node, report.cluster))
        }
        Ok(Reply::Status(report)) => Finding::limited(
            name,
            format!("version {}, but this tool is {own}", report.version),
            "restart ternd; migrated processes do not notice",
        ),
        Ok(_) => {
            Finding::missing(name, "answers, but not the question", "it is of another version; restart it")
        }
        Err(failure) => {
            let hint = failure.hint.map(|hint| format!("; {hint}")).unwrap_or_default();
            let finding = Finding::limited(name, failure.message, format!("nothing can be moved{hint}"));
            return (finding, false);
        }
    };
    (finding, true)
}

/// Key and certificates, as ternd reads them when it starts.
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
                "this node is in no cluster; tern init founds one, tern join enters one",
            )
        }
        Err(IdentityError::Read { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            Finding::limited(name, "not readable by this user", "run tern doctor as the user who runs ternd")
        }
        Err(error) => Finding::missing(
            name,
            error.to_string(),
            "ternd does not start; tern join --force makes a new one",
        ),
    }
}

fn port(port: u16, taken_by_ternd: bool) -> Finding {
    let name = "port";
    if taken_by_ternd {
        return Finding::ok(name, format!("{port}, which ternd has"));
    }
    // IPv6's any-address is IPv4's too, where IPv6 is there at all.
    let bound = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
        io::ErrorKind::AddrInUse => Err(error),
        _ => TcpListener::bind(("0.0.0.0", port)),
    });
    match bound {
        Ok(_) => Finding::ok(name, format!("{port} is free")),
        Err(error) => Finding::limited(
            name,
            format!("{port}: {}", reason(&error)),
            "ternd does not start; stop the program that has the port, or set another in ternd.toml",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_port_in_use_is_noticed() {
        let other = TcpListener::bind("0.0.0.0:0").unwrap();
        let taken = other.local_addr().unwrap().port();
        assert_eq!(port(taken, false).state, State::Limited);
        assert_eq!(port(taken, true).state, State::Ok);
    }

    #[test]
    fn no_identity_is_no_fault() {
        let finding = identity(Path::new("/nonexistent"));
        assert_eq!((finding.state, &*finding.found), (State::Limited, "none"));
    }
}
