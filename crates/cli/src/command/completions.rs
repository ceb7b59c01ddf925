//! `tern completions SHELL`: completions for tern and for each tool of its own name.

use crate::tool::{Call, TOOLS};
use crate::{Failure, help, output};
use clap::{Args, Command};
use clap_complete::Shell;

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// Which shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("completions"))
        .about("Print completions for a shell")
        .long_about("Print completions for a shell, for tern and for mosrun, migrate, mps and the others.")
        .after_help(help::closing(
            "  tern completions bash > /etc/bash_completion.d/tern\n  source <(tern completions zsh)",
            "",
        ))
}

/// `tern completions …`.
///
/// # Errors
/// If standard output does not take them.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let mut text = Vec::new();
    clap_complete::generate(options.shell, &mut help::tern(), "tern", &mut text);
    for tool in TOOLS.iter().filter(|tool| tool.standalone) {
        clap_complete::generate(options.shell, &mut (tool.describe)(), tool.name, &mut text);
    }
    output::print(&String::from_utf8_lossy(&text))
}
