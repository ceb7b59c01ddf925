//! `tern doctor`: reports what this node has, what it lacks, and the consequences.

use crate::doctor::{Finding, FindingState, probe};
use crate::tool::Invocation;
use crate::{Failure, help, output};
use clap::{Args, Command};
use tern_control::RefusalKind;

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print the findings as a JSON array: name, state (ok, limited or missing), found, follows
    #[arg(long)]
    json: bool,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("doctor"))
        .about("Check whether this node has what Tern needs")
        .long_about(
            "Check whether this node has what Tern needs, and show the consequence of each lack and its remedy. \
             Kernel features are tried, in child processes or namespaces of their own, not looked up; nothing on the node is changed. Run it \
             as the user who runs ternd, because some results depend on the user.",
        )
        .after_help(help::after_help(
            "  tern doctor\n  tern doctor --json | jq '.[] | select(.state != \"ok\")'",
            "  0 also if features are limited; 6 if a feature is missing",
        ))
}

/// `tern doctor …`.
///
/// # Errors
/// Exit code 6 if something is missing.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let findings = probe();
    if options.json {
        output::print_json(&findings)?;
    } else {
        output::print(&text(&findings))?;
    }
    if findings.iter().any(|finding| finding.state == FindingState::Missing) {
        return Err(Failure::silent(RefusalKind::Unsupported.exit_code()));
    }
    Ok(())
}

/// One line per finding, and a second one for its consequence.
fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let state = match finding.state {
            FindingState::Ok => "ok     ",
            FindingState::Limited => "limited",
            FindingState::Missing => "MISSING",
        };
        text.push_str(&format!("{state}  {:width$}  {}\n", finding.name, output::sanitize(&finding.found)));
        if !finding.follows.is_empty() {
            text.push_str(&format!("{:9}{:width$}  → {}\n", "", "", output::sanitize(&finding.follows)));
        }
    }
    let count = |state| findings.iter().filter(|finding| finding.state == state).count();
    let (missing, limited) = (count(FindingState::Missing), count(FindingState::Limited));
    text.push_str(&format!("\n{} checked, {limited} limited, {missing} missing\n", findings.len()));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consequence_is_printed_below_the_finding() {
        let findings =
            [Finding::ok("seccomp", "works"), Finding::missing("ptrace", "EPERM", "no process can be moved")];
        assert_eq!(
            text(&findings),
            "ok       seccomp  works\n\
             MISSING  ptrace   EPERM\n                  → no process can be moved\n\
             \n2 checked, 0 limited, 1 missing\n"
        );
    }
}
