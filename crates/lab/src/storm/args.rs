//! The arguments of `tern lab storm`.

use super::pause::PauseRange;
use crate::lab::options::LabName;
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;

/// The options of a storm.
#[derive(Debug, Args)]
pub struct StormArgs {
    /// The lab to use; if none of that name is up, one is created and taken down again.
    #[arg(long, value_name = "NAME")]
    pub(super) lab: Option<LabName>,
    /// Number of nodes if a lab is created; default 3.
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=64))]
    pub(super) nodes: Option<u16>,
    /// Pause between two moves of a process.
    #[arg(long, value_name = "MS..MS", default_value_t)]
    pub(super) every: PauseRange,
    /// Seed for pauses and destinations. The command's own timing still makes runs differ.
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<u64>,
    /// Run the command again until this many moves have been made.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) moves: u64,
    /// Begin each run in a copy of this folder instead of an empty one.
    #[arg(long, value_name = "DIR")]
    pub(super) copy: Option<PathBuf>,
    /// Seconds after which a run counts as hung and is killed.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) limit: u64,
    /// Print the result as one line of JSON.
    #[arg(long)]
    pub(super) json: bool,
    /// Run the part of the storm that is inside the node.
    #[arg(long, hide = true)]
    pub(super) inside: bool,
    /// The command to run.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(super) command: Vec<OsString>,
}

impl StormArgs {
    /// The command line for the part in the node.
    pub(super) fn inner_command(&self, nodes: u16, copy: Option<PathBuf>) -> Vec<OsString> {
        let mut words: Vec<OsString> = ["tern", "lab", "storm", "--inside"].map(OsString::from).into();
        let mut option = |name: &str, value: String| words.extend([name.into(), value.into()]);
        option("--nodes", nodes.to_string());
        option("--every", self.every.to_string());
        option("--moves", self.moves.to_string());
        option("--limit", self.limit.to_string());
        if let Some(seed) = self.seed {
            option("--seed", seed.to_string());
        }
        if let Some(copy) = copy {
            words.extend(["--copy".into(), copy.into_os_string()]);
        }
        if self.json {
            words.push("--json".into());
        }
        words.push("--".into());
        words.extend_from_slice(&self.command);
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        storm: StormArgs,
    }

    #[test]
    fn inner_command_receives_all_options() {
        let given =
            ["storm", "--seed", "7", "--every", "5..9ms", "--moves", "40", "--limit", "9", "--json", "--"];
        let read = |words: &[OsString]| Line::try_parse_from(words).unwrap().storm;
        let words: Vec<OsString> = given.into_iter().chain(["sh", "-c", "--nodes"]).map(Into::into).collect();
        let inside = read(&read(&words).inner_command(4, Some("/a b".into()))[2..]);
        assert!(inside.inside && inside.json);
        assert_eq!((inside.nodes, inside.seed, inside.moves, inside.limit), (Some(4), Some(7), 40, 9));
        assert_eq!(inside.every, "5..9ms".parse().unwrap());
        assert_eq!(inside.copy, Some("/a b".into()));
        assert_eq!(inside.command, ["sh", "-c", "--nodes"]);
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        for bad in [
            &["storm"][..],
            &["storm", "--nodes", "1", "--", "x"],
            &["storm", "--every", "9..5ms", "--", "x"],
        ] {
            assert!(Line::try_parse_from(bad).is_err(), "{bad:?}");
        }
    }
}
