//! Whether TCP connections can move to and from this node.

use super::Finding;
use tern_control::shim::net_socket;
use tern_node::config::{Config, config_dir};

const NAME: &str = "moving connections";

pub(super) fn probe() -> Vec<Finding> {
    if !rustix::process::geteuid().is_root() {
        return vec![Finding::ok(NAME, "not checked; they need root")];
    }
    let config = config_dir().and_then(|dir| Config::load(&dir)).ok();
    let is_on = config.as_ref().is_some_and(|config| config.file.connections == Some(true));
    let runs = config.is_some_and(|config| net_socket(&config.run_dir).exists());
    // TCP_REPAIR needs CAP_NET_ADMIN, which is one of the findings, and no option of the kernel.
    vec![finding(is_on, runs, &tern_redirect::probe())]
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
