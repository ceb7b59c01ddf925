//! `tern completions SHELL`: prints completions for tern and for each tool with a name of its own.

use crate::tool::{Invocation, TOOLS};
use crate::{Failure, help, output};
use clap::{Args, Command};
use clap_complete::Shell;

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("completions"))
        .about("Print completions for a shell")
        .long_about(
            "Print completions for a shell, for tern and for mosrun, migrate, mps and the other tools.",
        )
        .after_help(help::after_help(
            "  tern completions bash > /etc/bash_completion.d/tern\n  source <(tern completions zsh)",
            "",
        ))
}

/// `tern completions …`.
///
/// # Errors
/// If standard output cannot be written.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let mut text = Vec::new();
    clap_complete::generate(options.shell, &mut help::tern(), "tern", &mut text);
    for tool in TOOLS.iter().filter(|tool| tool.standalone) {
        clap_complete::generate(options.shell, &mut (tool.describe)(), tool.name, &mut text);
    }
    output::print(&String::from_utf8_lossy(&text))
}
