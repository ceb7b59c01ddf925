//! Whether TCP connections can move to and from this node, and the paths of their packets.

use super::Finding;
use std::path::Path;
use std::time::Duration;
use tern_control::shim::net_socket;
use tern_control::{NetworkPath, PathRow, ShimReply, ShimRequest, control_socket, stream};
use tern_node::config::{Config, config_dir};

const NAME: &str = "moving connections";
const PATHS: &str = "paths of moved connections";

/// Limit for the examination of all paths.
const PATHS_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn probe() -> Vec<Finding> {
    if !rustix::process::geteuid().is_root() {
        return vec![Finding::ok(NAME, "not checked; they need root")];
    }
    let config = config_dir().and_then(|dir| Config::load(&dir)).ok();
    let is_on = config.as_ref().is_some_and(|config| config.file.connections == Some(true));
    let socket = config.map(|config| net_socket(&config.run_dir)).filter(|socket| socket.exists());
    // TCP_REPAIR needs CAP_NET_ADMIN, which is one of the findings, and no option of the kernel.
    let mut findings = vec![finding(is_on, socket.is_some(), &tern_redirect::probe())];
    if is_on && let Some(socket) = socket {
        findings.push(match paths(&socket) {
            Ok(rows) => path_finding(&rows),
            Err(error) => Finding::limited(PATHS, error.to_string(), "try again; net.log has the reason"),
        });
    }
    findings
}

/// Has tern-net examine the paths to all other nodes.
fn paths(socket: &Path) -> std::io::Result<Vec<PathRow>> {
    let mut socket = control_socket::connect(socket)?;
    socket.set_read_timeout(Some(PATHS_TIMEOUT))?;
    socket.set_write_timeout(Some(PATHS_TIMEOUT))?;
    stream::write(&mut socket, &ShimRequest::Paths)?;
    match stream::read(&mut socket)? {
        ShimReply::Paths(rows) => Ok(rows),
        ShimReply::Refused(refusal) => Err(std::io::Error::other(refusal.message)),
        _ => Err(std::io::ErrorKind::InvalidData.into()),
    }
}

fn path_finding(rows: &[PathRow]) -> Finding {
    let text = |row: &PathRow| match &row.path {
        NetworkPath::Direct if row.in_tunnel > 0 => {
            format!("node {}: direct, but a tunnel for {} of its connections", row.home, row.in_tunnel)
        }
        NetworkPath::Direct => format!("node {}: direct", row.home),
        NetworkPath::Tunnel => format!("node {}: tunnel", row.home),
        NetworkPath::Unknown(why) => format!("node {}: unknown ({why})", row.home),
    };
    let found = if rows.is_empty() {
        "there is no other node".to_owned()
    } else {
        rows.iter().map(text).collect::<Vec<_>>().join(", ")
    };
    if rows.iter().all(|row| row.path == NetworkPath::Direct && row.in_tunnel == 0) {
        return Finding::ok(PATHS, found);
    }
    let follows = "packets in a tunnel go through their home, at a third to half of the speed; connections of \
                   nodes with an unknown path stay there until it is known";
    Finding::limited(PATHS, found, follows)
}

/// `runs`: tern-net runs on this node.
fn finding(is_on: bool, runs: bool, parts: &[tern_redirect::Finding]) -> Finding {
    let lack = |optional: bool| parts.iter().find(|part| !part.possible && part.optional == optional);
    match (is_on, lack(false), lack(true)) {
        (false, None, _) => Finding::ok(NAME, "possible, but off (connections in ternd.toml)"),
        (false, Some(lack), _) => {
            Finding::ok(NAME, format!("off, and not possible here ({}: {})", lack.name, lack.explanation))
        }
        (true, Some(lack), _) => Finding::limited(
            NAME,
            format!("{}: {}", lack.name, lack.explanation),
            "connections of programs that are away stay at home, and each send and receive is a round trip",
        ),
        (true, None, _) if !runs => {
            Finding::limited(NAME, "tern-net does not run", "restart ternd; its log says why tern-net ends")
        }
        (true, None, Some(lack)) => {
            Finding::limited(NAME, format!("no {}", lack.name), lack.explanation.as_str())
        }
        (true, None, None) => Finding::ok(NAME, "on"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::FindingState;

    #[test]
    fn tunnel_limits_a_node() {
        let row = |home, path| PathRow { home: tern_ids::NodeId(home), path, in_tunnel: 0 };
        assert_eq!(path_finding(&[]).state, FindingState::Ok);
        assert_eq!(path_finding(&[row(1, NetworkPath::Direct)]).state, FindingState::Ok);
        let mixed = path_finding(&[row(1, NetworkPath::Direct), row(3, NetworkPath::Tunnel)]);
        assert_eq!(mixed.state, FindingState::Limited);
        assert_eq!(mixed.found, "node 1: direct, node 3: tunnel");
        let elsewhere = PathRow { in_tunnel: 2, ..row(1, NetworkPath::Direct) };
        assert_eq!(path_finding(&[elsewhere]).state, FindingState::Limited);
    }

    #[test]
    fn missing_part_limits_a_node_that_moves_connections() {
        let part = |possible, optional| tern_redirect::Finding {
            name: "veth",
            possible,
            optional,
            explanation: "no such device".into(),
        };
        let state = |is_on, parts: &[_]| finding(is_on, true, parts).state;
        assert_eq!(state(true, &[part(true, false), part(true, true)]), FindingState::Ok);
        assert_eq!(state(true, &[part(false, false)]), FindingState::Limited);
        assert_eq!(state(true, &[part(true, false), part(false, true)]), FindingState::Limited);
        assert_eq!(finding(true, false, &[part(true, false)]).state, FindingState::Limited);
        let off = finding(false, false, &[part(false, false)]);
        assert_eq!(off.state, FindingState::Ok);
        assert!(off.found.contains("veth: no such device"), "{}", off.found);
    }
}
