//! `tern doctor`: what this node offers, what it lacks, and what follows from that.

use crate::doctor::{Finding, State, examine};
use crate::tool::Call;
use crate::{Failure, help, output};
use clap::{Args, Command};
use tern_control::RefusalKind;

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// Print the findings as a JSON array: name, state (ok, limited or missing), found, follows
    #[arg(long)]
    json: bool,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("doctor"))
        .about("Check what this node offers, and what follows from what it lacks")
        .long_about(
            "Check what this node offers, and what follows from what it lacks. Kernel features are tried, in \
             child processes, not looked up; nothing on the node is changed. Run it as the user who runs ternd, \
             since some answers depend on that.",
        )
        .after_help(help::closing(
            "  tern doctor\n  tern doctor --json | jq '.[] | select(.state != \"ok\")'",
            "  0 also if something is limited; 6 if something is missing that Tern cannot do without",
        ))
}

/// `tern doctor …`.
///
/// # Errors
/// Exit code 6 if something is missing.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let findings = examine();
    if options.json {
        output::print_json(&findings)?;
    } else {
        output::print(&text(&findings))?;
    }
    if findings.iter().any(|finding| finding.state == State::Missing) {
        return Err(Failure::silent(RefusalKind::Unsupported.exit_code()));
    }
    Ok(())
}

/// One line a finding, and a second one for what follows.
fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let state = match finding.state {
            State::Ok => "ok     ",
            State::Limited => "limited",
            State::Missing => "MISSING",
        };
        text.push_str(&format!("{state}  {:width$}  {}\n", finding.name, output::plain(&finding.found)));
        if !finding.follows.is_empty() {
            text.push_str(&format!("{:9}{:width$}  → {}\n", "", "", output::plain(&finding.follows)));
        }
    }
    let count = |state| findings.iter().filter(|finding| finding.state == state).count();
    let (missing, limited) = (count(State::Missing), count(State::Limited));
    text.push_str(&format!("\n{} checked, {limited} limited, {missing} missing\n", findings.len()));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_stands_below_what_was_found() {
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
