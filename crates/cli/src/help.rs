//! Help texts, versions and command-line errors, in one form for all tools.

use crate::Failure;
use crate::output;
use crate::tool::{Invocation, TOOLS};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches};
use std::ffi::OsString;

/// The exit codes that all tools share; each tool appends its own.
pub(crate) const EXIT_CODES: &str = "\
Exit status:
  0  success
  1  no such process, node or file     4  the process cannot be moved
  2  invalid command line              5  the node or its ternd is unavailable
  3  permission denied                 6  the kernel lacks a feature
                                      70  internal error in Tern";

/// The end of a tool's help: its examples, then its exit codes.
pub(crate) fn after_help(examples: &str, tool_codes: &str) -> String {
    let mut text = format!("Examples:\n{examples}\n\n{EXIT_CODES}");
    if !tool_codes.is_empty() {
        text.push('\n');
        text.push_str(tool_codes);
    }
    text
}

/// A clap command with the settings that all tools share.
pub(crate) fn command(name: &'static str) -> Command {
    Command::new(name).version(env!("CARGO_PKG_VERSION")).max_term_width(96)
}

/// The `tern` command with all tools as subcommands.
pub(crate) fn tern() -> Command {
    let about = "Live migration of ordinary processes between Linux machines";
    command("tern")
        .about(about)
        .long_about(format!(
            "{about}.\n\nStart a program with mosrun, or in the usual way, and move it with migrate; it keeps \
             its pid, terminal, files, sockets and signals."
        ))
        .subcommand_required(true)
        .subcommands(TOOLS.map(|tool| (tool.describe)()))
        .after_help(after_help(
            "  tern init                          found a cluster on this node\n  \
               tern lab run --nodes 3 -- bash     a cluster inside this machine, for experiments\n  \
               tern doctor                        check this node, and show how to fix problems",
            "",
        ))
}

/// Handles `tern --help`, `tern help TOOL`, `tern --version`, and arguments that name no tool.
///
/// # Errors
/// Exit code 2 if the arguments name no tool.
pub(crate) fn run_without_tool(args: &[OsString]) -> Result<(), Failure> {
    matches(tern(), &Invocation { tool: "tern", args }).map(|_| ())
}

/// Parses a tool's command line. Returns `None` after printing the help or the version, if either
/// was asked for.
///
/// # Errors
/// Exit code 2 with clap's message as one sentence.
pub(crate) fn parse<T: FromArgMatches>(
    command: Command,
    invocation: &Invocation<'_>,
) -> Result<Option<T>, Failure> {
    let Some(matches) = matches(command, invocation)? else {
        return Ok(None);
    };
    let parsed = T::from_arg_matches(&matches);
    parsed.map(Some).map_err(|error| Failure::usage(invocation.tool, sentence(&error)))
}

/// Prints the long help of `command`.
///
/// # Errors
/// If standard output cannot be written.
pub(crate) fn print(command: Command, invocation: &Invocation<'_>) -> Result<(), Failure> {
    let mut command = command.bin_name(invocation.tool.to_owned());
    output::print(&command.render_long_help().to_string())
}

/// Prints `TOOL VERSION`.
///
/// # Errors
/// As [`print`].
pub(crate) fn print_version(invocation: &Invocation<'_>) -> Result<(), Failure> {
    output::print(&format!("{} {}\n", invocation.tool, env!("CARGO_PKG_VERSION")))
}

fn matches(command: Command, invocation: &Invocation<'_>) -> Result<Option<ArgMatches>, Failure> {
    let argv = std::iter::once(OsString::from(invocation.tool)).chain(invocation.args.iter().cloned());
    match command.bin_name(invocation.tool.to_owned()).try_get_matches_from(argv) {
        Ok(matches) => Ok(Some(matches)),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp => {
                // Not `Error::print`: it bypasses our handling of a closed pipe.
                output::print(&error.render().to_string()).map(|()| None)
            }
            ErrorKind::MissingSubcommand => Err(Failure::usage(invocation.tool, "no command was given")),
            ErrorKind::DisplayVersion => print_version(invocation).map(|()| None),
            _ => Err(Failure::usage(invocation.tool, sentence(&error))),
        },
    }
}

/// Clap's message without its prefix, usage lines and line breaks.
fn sentence(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let first = first.trim_start_matches("error: ");
    first.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// All commands that have a manual page: `tern`, and each tool under the name it is called by.
pub(crate) fn pages() -> Vec<(String, Command)> {
    let mut pages = vec![("tern".to_owned(), tern())];
    for tool in TOOLS {
        let name = if tool.standalone { tool.name.to_owned() } else { format!("tern-{}", tool.name) };
        pages.push((name, (tool.describe)()));
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command;

    #[test]
    fn usage_error_is_one_sentence_with_a_hint() {
        let args = [OsString::from("--fly")];
        let invocation = Invocation { tool: "mps", args: &args };
        let failure = parse::<command::process::mps::Options>(command::process::mps::describe(), &invocation)
            .unwrap_err();
        assert_eq!(failure.message, "unexpected argument '--fly' found");
        assert_eq!(failure.hint.as_deref(), Some("mps --help"));
        assert_eq!(failure.code, 2);
    }

    #[test]
    fn missing_arguments_are_named() {
        let failure = parse::<command::process::migrate::Options>(
            command::process::migrate::describe(),
            &Invocation { tool: "migrate", args: &[] },
        )
        .unwrap_err();
        assert!(failure.message.contains("<PID> <NODE>"), "{}", failure.message);
    }
}
