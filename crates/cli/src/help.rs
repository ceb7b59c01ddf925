//! Help, versions and wrong command lines, the same for all tools.

use crate::Failure;
use crate::output;
use crate::tool::{Call, TOOLS};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches};
use std::ffi::OsString;

/// What the tools' exit codes mean; each appends what is its own.
pub const EXIT_STATUS: &str = "\
Exit status:
  0  done
  1  no such process, node or file     4  the process cannot be moved
  2  wrong command line                5  the node or its ternd is unavailable
  3  not allowed                       6  this kernel lacks something
                                      70  Tern failed";

/// The closing part of a tool's help: its examples, then the exit status.
pub fn closing(examples: &str, own_codes: &str) -> String {
    let mut text = format!("Examples:\n{examples}\n\n{EXIT_STATUS}");
    if !own_codes.is_empty() {
        text.push('\n');
        text.push_str(own_codes);
    }
    text
}

/// A command with the settings that all share.
pub fn command(name: &'static str) -> Command {
    Command::new(name).version(env!("CARGO_PKG_VERSION")).max_term_width(96)
}

/// `tern` with everything in it.
pub fn tern() -> Command {
    let about = "Live migration of ordinary processes between Linux machines";
    command("tern")
        .about(about)
        .long_about(format!(
            "{about}.\n\nStart a program with mosrun in front of it, or none at all, and move it with migrate; \
             it keeps its pid, terminal, files, sockets and signals."
        ))
        .subcommand_required(true)
        .subcommands(TOOLS.map(|tool| (tool.describe)()))
        .after_help(closing(
            "  tern init                          found a cluster on this node\n  \
               tern lab run --nodes 3 -- bash     a cluster inside this machine, to try things in\n  \
               tern doctor                        what this kernel offers, what follows if it does not",
            "",
        ))
}

/// `tern --help`, `tern help TOOL`, `tern --version`, or words that name no tool.
///
/// # Errors
/// Exit code 2 in the last case.
pub fn top(args: &[OsString]) -> Result<(), Failure> {
    matches(tern(), &Call { tool: "tern", args }).map(|_| ())
}

/// Reads a tool's command line; `None` if it asked for help or the version, which have been printed.
///
/// # Errors
/// Exit code 2 with clap's message in our form.
pub fn parse<T: FromArgMatches>(command: Command, call: &Call<'_>) -> Result<Option<T>, Failure> {
    let Some(matches) = matches(command, call)? else {
        return Ok(None);
    };
    let read = T::from_arg_matches(&matches);
    read.map(Some).map_err(|error| Failure::usage(call.tool, sentence(&error)))
}

/// Prints the help that `command` describes.
///
/// # Errors
/// If standard output does not take it.
pub fn print(command: Command, call: &Call<'_>) -> Result<(), Failure> {
    let mut command = command.bin_name(call.tool.to_owned());
    output::print(&command.render_long_help().to_string())
}

/// Prints `TOOL VERSION`.
///
/// # Errors
/// As `print`.
pub fn print_version(call: &Call<'_>) -> Result<(), Failure> {
    output::print(&format!("{} {}\n", call.tool, env!("CARGO_PKG_VERSION")))
}

fn matches(command: Command, call: &Call<'_>) -> Result<Option<ArgMatches>, Failure> {
    let words = std::iter::once(OsString::from(call.tool)).chain(call.args.iter().cloned());
    match command.bin_name(call.tool.to_owned()).try_get_matches_from(words) {
        Ok(matches) => Ok(Some(matches)),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp => {
                // Not `Error::print`: it writes past our handling of a closed pipe.
                output::print(&error.render().to_string()).map(|()| None)
            }
            ErrorKind::MissingSubcommand => Err(Failure::usage(call.tool, "no command was given")),
            ErrorKind::DisplayVersion => print_version(call).map(|()| None),
            _ => Err(Failure::usage(call.tool, sentence(&error))),
        },
    }
}

/// Clap's message without its prefix, its usage lines and its line breaks.
fn sentence(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let first = first.trim_start_matches("error: ");
    first.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Every command that has a man page: `tern`, and each tool under the name it is called by.
pub fn pages() -> Vec<(String, Command)> {
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
    fn mistakes_are_one_sentence_with_a_way_out() {
        let args = [OsString::from("--fly")];
        let call = Call { tool: "mps", args: &args };
        let failure = parse::<command::mps::Options>(command::mps::describe(), &call).unwrap_err();
        assert_eq!(failure.message, "unexpected argument '--fly' found");
        assert_eq!(failure.hint.as_deref(), Some("mps --help"));
        assert_eq!(failure.code, 2);
    }

    #[test]
    fn what_is_missing_is_named() {
        let failure = parse::<command::migrate::Options>(
            command::migrate::describe(),
            &Call { tool: "migrate", args: &[] },
        )
        .unwrap_err();
        assert!(failure.message.contains("<PID> <NODE>"), "{}", failure.message);
    }
}
