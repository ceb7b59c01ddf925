//! The table of tools, and the way from a name to one of them.
//!
//! A tool runs as `tern NAME …`, and those that MOSIX users know also under their own name. Help, man pages
//! and completions are made from the same `describe` that parses the command line; the tools whose MOSIX
//! syntax clap cannot read (`mosrun -3`, `setpe -off`) parse it themselves, and describe it for the reader.

use crate::command::{
    advised, bestnode, completions, doctor, init, join, lab, man, mexec, migrate, mon, mosctl, moskillall,
    mosps, mosrun, mount_mfs, mpmake, mps, mtop, nomig, outside, runhome, runon, setpe, sim, status, token,
    tune,
};
use crate::{Failure, help};
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// One tool.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// The subcommand of `tern`, and its own name if it has one.
    pub name: &'static str,
    /// Whether it also runs under its own name.
    pub standalone: bool,
    /// Its command line.
    pub describe: fn() -> clap::Command,
    /// Does it.
    pub run: fn(&Call<'_>) -> Result<(), Failure>,
}

/// How a tool was called.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// As the user knows it: `migrate`, `tern status`.
    pub tool: &'a str,
    /// What follows the name.
    pub args: &'a [OsString],
}

/// All of them, in the order of `tern --help`.
pub const TOOLS: [Tool; 34] = [
    Tool { name: "mosrun", standalone: true, describe: mosrun::describe, run: mosrun::run },
    Tool { name: "runon", standalone: true, describe: runon::describe, run: runon::run },
    Tool { name: "runhome", standalone: true, describe: runhome::describe, run: runhome::run },
    Tool { name: "nomig", standalone: true, describe: nomig::describe, run: nomig::run },
    Tool { name: "cpujob", standalone: true, describe: advised::describe_cpujob, run: advised::run },
    Tool { name: "iojob", standalone: true, describe: advised::describe_iojob, run: advised::run },
    Tool { name: "nodecay", standalone: true, describe: advised::describe_nodecay, run: advised::run },
    Tool { name: "slowdecay", standalone: true, describe: advised::describe_slowdecay, run: advised::run },
    Tool { name: "fastdecay", standalone: true, describe: advised::describe_fastdecay, run: advised::run },
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
    Tool { name: "outside", standalone: false, describe: outside::describe, run: outside::run },
    Tool { name: "status", standalone: false, describe: status::describe, run: status::run },
    Tool { name: "doctor", standalone: false, describe: doctor::describe, run: doctor::run },
    Tool { name: "lab", standalone: false, describe: lab::describe, run: lab::run },
    Tool { name: "sim", standalone: false, describe: sim::describe, run: sim::run },
    Tool { name: "completions", standalone: false, describe: completions::describe, run: completions::run },
    Tool { name: "man", standalone: false, describe: man::describe, run: man::run },
];

/// Runs what these words ask for; `program` is argv\[0\]. Returns the exit code.
///
/// `mosrun` and its kin do not return when they succeed: the program has taken this process over. They are
/// found and run before anything is set up for the others.
pub fn main(program: &OsStr, args: &[OsString]) -> u8 {
    let program = Path::new(program).file_name().unwrap_or(program);
    if program == "tern-lab-init" {
        return lab::init();
    }
    if tune::is_subject(program, args) {
        return tune::subject();
    }
    if let Some(tool) = TOOLS.iter().find(|t| t.standalone && program == t.name) {
        return finish(tool.name, (tool.run)(&Call { tool: tool.name, args }));
    }
    if let Some((first, rest)) = args.split_first()
        && let Some(tool) = TOOLS.iter().find(|t| first == t.name)
    {
        let known_as = if tool.standalone { tool.name.to_owned() } else { format!("tern {}", tool.name) };
        return finish(&known_as, (tool.run)(&Call { tool: &known_as, args: rest }));
    }
    // No tool of this name: what is left is --help, --version, help TOOL and mistakes.
    finish("tern", help::top(args))
}

fn finish(tool: &str, end: Result<(), Failure>) -> u8 {
    match end {
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
    fn every_tool_describes_itself_under_its_name() {
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
    fn wrong_words_are_usage_errors() {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        assert_eq!(main(OsStr::new("/usr/bin/tern"), &words(&["fly"])), 2);
        assert_eq!(main(OsStr::new("tern"), &[]), 2);
        assert_eq!(main(OsStr::new("migrate"), &words(&["x", "home"])), 2);
        assert_eq!(main(OsStr::new("mosrun"), &words(&["-j"])), 2);
    }
}
