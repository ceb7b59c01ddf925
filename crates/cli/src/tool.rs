//! The table of tools, and the dispatch from a name to one of them.
//!
//! Each tool runs as `tern NAME …`; tools that MOSIX users know also run under their own name.
//! Help, manual pages and completions are generated from the same `describe` that parses the
//! command line. Tools whose MOSIX syntax clap cannot parse (`mosrun -3`, `setpe -off`) have their
//! own parser and use `describe` only for the help.

use crate::command::cluster::{init, join, mosctl, outside, remove, setpe, token, tune};
use crate::command::files::mount_mfs;
use crate::command::placed::{mexec, mpmake};
use crate::command::process::{migrate, moskillall, mosps, mps};
use crate::command::run::{bestnode, mosrun, nomig, presets, runhome, runon};
use crate::command::tools::{completions, doctor, lab, man, sim};
use crate::command::watch::{mon, mtop, status};
use crate::{Failure, help};
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// One tool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tool {
    /// The subcommand of `tern`, and the tool's own name if `standalone`.
    pub(crate) name: &'static str,
    /// Whether the tool also runs under its own name.
    pub(crate) standalone: bool,
    /// Describes the command line.
    pub(crate) describe: fn() -> clap::Command,
    /// Runs the tool.
    pub(crate) run: fn(&Invocation<'_>) -> Result<(), Failure>,
}

/// The name and arguments that a tool was called with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Invocation<'a> {
    /// The name as the user knows it: `migrate`, `tern status`.
    pub(crate) tool: &'a str,
    /// The arguments after the name.
    pub(crate) args: &'a [OsString],
}

/// All tools, in the order of `tern --help`.
pub(crate) const TOOLS: [Tool; 35] = [
    Tool { name: "mosrun", standalone: true, describe: mosrun::describe, run: mosrun::run },
    Tool { name: "runon", standalone: true, describe: runon::describe, run: runon::run },
    Tool { name: "runhome", standalone: true, describe: runhome::describe, run: runhome::run },
    Tool { name: "nomig", standalone: true, describe: nomig::describe, run: nomig::run },
    Tool { name: "cpujob", standalone: true, describe: presets::describe_cpujob, run: presets::run },
    Tool { name: "iojob", standalone: true, describe: presets::describe_iojob, run: presets::run },
    Tool { name: "nodecay", standalone: true, describe: presets::describe_nodecay, run: presets::run },
    Tool { name: "slowdecay", standalone: true, describe: presets::describe_slowdecay, run: presets::run },
    Tool { name: "fastdecay", standalone: true, describe: presets::describe_fastdecay, run: presets::run },
    Tool { name: "bestnode", standalone: true, describe: bestnode::describe, run: bestnode::run },
    Tool { name: "mexec", standalone: true, describe: mexec::describe, run: mexec::run },
    Tool { name: "mpmake", standalone: true, describe: mpmake::describe, run: mpmake::run },
    Tool { name: "mpsh", standalone: true, describe: mpmake::describe_shell, run: mpmake::run_shell },
    Tool { name: "migrate", standalone: true, describe: migrate::describe, run: migrate::run },
    Tool { name: "moskillall", standalone: true, describe: moskillall::describe, run: moskillall::run },
    Tool { name: "mps", standalone: true, describe: mps::describe, run: mps::run },
    Tool { name: "mosps", standalone: true, describe: mosps::describe, run: mosps::run },
    Tool { name: "mon", standalone: true, describe: mon::describe, run: mon::run },
    Tool { name: "mosmon", standalone: true, describe: mon::describe_mosmon, run: mon::run },
    Tool { name: "mtop", standalone: true, describe: mtop::describe, run: mtop::run },
    Tool { name: "mosctl", standalone: true, describe: mosctl::describe, run: mosctl::run },
    Tool { name: "tune", standalone: true, describe: tune::describe, run: tune::run },
    Tool { name: "setpe", standalone: true, describe: setpe::describe, run: setpe::run },
    Tool { name: "mount.mfs", standalone: true, describe: mount_mfs::describe, run: mount_mfs::run },
    Tool { name: "init", standalone: false, describe: init::describe, run: init::run },
    Tool { name: "join", standalone: false, describe: join::describe, run: join::run },
    Tool { name: "token", standalone: false, describe: token::describe, run: token::run },
    Tool { name: "remove", standalone: false, describe: remove::describe, run: remove::run },
    Tool { name: "outside", standalone: false, describe: outside::describe, run: outside::run },
    Tool { name: "status", standalone: false, describe: status::describe, run: status::run },
    Tool { name: "doctor", standalone: false, describe: doctor::describe, run: doctor::run },
    Tool { name: "lab", standalone: false, describe: lab::describe, run: lab::run },
    Tool { name: "sim", standalone: false, describe: sim::describe, run: sim::run },
    Tool { name: "completions", standalone: false, describe: completions::describe, run: completions::run },
    Tool { name: "man", standalone: false, describe: man::describe, run: man::run },
];

/// Runs the tool that the name and the arguments select; `program` is argv\[0\]. Returns the exit
/// code.
///
/// `mosrun` and its variants do not return when they succeed, because the program replaces this
/// process. So nothing that the program would inherit is changed before a tool is called.
pub fn main(program: &OsStr, args: &[OsString]) -> u8 {
    let program = Path::new(program).file_name().unwrap_or(program);
    if program == "tern-lab-init" {
        return lab::init();
    }
    if tune::is_probe(program, args) {
        return tune::run_probe();
    }
    if let Some(tool) = TOOLS.iter().find(|t| t.standalone && program == t.name) {
        return exit_code(tool.name, (tool.run)(&Invocation { tool: tool.name, args }));
    }
    if let Some((first, rest)) = args.split_first()
        && let Some(tool) = TOOLS.iter().find(|t| first == t.name)
    {
        let display_name = if tool.standalone { tool.name.to_owned() } else { format!("tern {}", tool.name) };
        return exit_code(&display_name, (tool.run)(&Invocation { tool: &display_name, args: rest }));
    }
    // No tool has this name: --help, --version, help TOOL, and errors remain.
    exit_code("tern", help::run_without_tool(args))
}

fn exit_code(tool: &str, result: Result<(), Failure>) -> u8 {
    match result {
        Ok(()) => 0,
        Err(failure) => {
            failure.report(tool);
            failure.code
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_of_every_tool_has_examples_and_exit_codes() {
        for tool in TOOLS {
            let mut command = (tool.describe)();
            assert_eq!(command.get_name(), tool.name);
            let help = command.render_long_help().to_string();
            assert!(help.contains("Examples:"), "{} has no examples", tool.name);
            assert!(help.contains("Exit status:"), "{} does not document its exit status", tool.name);
            assert!(help.lines().all(|l| l.chars().count() <= 100), "{}: a line is too long", tool.name);
            command.debug_assert();
        }
    }

    #[test]
    fn invalid_arguments_are_usage_errors() {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        assert_eq!(main(OsStr::new("/usr/bin/tern"), &words(&["fly"])), 2);
        assert_eq!(main(OsStr::new("tern"), &[]), 2);
        assert_eq!(main(OsStr::new("migrate"), &words(&["x", "home"])), 2);
        assert_eq!(main(OsStr::new("mosrun"), &words(&["-j"])), 2);
    }
}
