//! The arguments of `tern lab …`.

use crate::lab::options::{LabName, LabOptions};
use crate::network::link_spec::LinkSpec;
use crate::storm::StormArgs;
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

/// A cluster inside this machine.
///
/// Each node is a set of namespaces with its own init, writable layer, share of the CPU and link.
/// Needs root.
#[derive(Debug, Parser)]
#[command(
    name = "lab",
    after_help = "Examples:\n  \
        tern lab run -- mps                           a cluster of two, one command, nothing left\n  \
        tern lab run --nodes 3 --speed 1,0.5,0.5 -- bash\n  \
        tern lab up --link switch:1gbit,0.2ms         0.2 ms each way\n  \
        tern lab exec 2 -- hostname\n  \
        tern lab cut 2; tern lab heal 2\n  \
        tern lab storm -- make                        the same natively and while all of it is moved about?\n  \
        tern lab storm --moves 1000 --every 5..50ms --seed 7 --copy src -- sh -c 'make && ./check'\n  \
        tern lab down\n\n\
        Exit status:\n  \
        run, exec: that of the command; 125 the lab failed, 126 it cannot be run, 127 there is none\n  \
        storm: 0 nothing differs, 1 something does, 2 wrong command line, 3 too few moves, 125 as above\n  \
        others: 0 done, 1 not done, 2 wrong command line"
)]
pub struct LabArgs {
    /// The subcommand to run.
    #[command(subcommand)]
    pub command: LabCommand,
}

/// The subcommands of `tern lab`.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Create a cluster and leave it running.
    Up {
        /// The lab's options.
        #[command(flatten)]
        create: CreateArgs,
        /// The lab's name.
        #[command(flatten)]
        lab: LabNameArg,
    },
    /// Create a cluster, run a command on node 1, then take the cluster down; exits with the
    /// command's status.
    Run {
        /// The lab's options.
        #[command(flatten)]
        create: CreateArgs,
        /// The lab's name; without it, a unique name.
        #[arg(long, value_name = "NAME")]
        lab: Option<LabName>,
        /// The command to run.
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Run a command on a node; exits with the command's status.
    Exec {
        /// The lab's name.
        #[command(flatten)]
        lab: LabNameArg,
        /// The node's number.
        node: u16,
        /// The command to run.
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Run a command natively and under a storm of migrations, and compare the results.
    ///
    /// The command first runs unmodified on node 1, in an empty folder. It then runs there under
    /// mosrun, and each process that it starts is migrated from one random node to another, home
    /// included, until the process ends. The balancer does not move these processes. Standard
    /// output, standard error, exit status and the files left in the folder must be the same in
    /// both runs. Standard input is empty.
    Storm(StormArgs),
    /// Cut a node's cables, or the traffic between two nodes, without notifying either end.
    Cut {
        /// The lab's name.
        #[command(flatten)]
        lab: LabNameArg,
        /// The node's number.
        node: u16,
        /// The other node's number.
        other: Option<u16>,
        /// Cut only the direction from the first node to the second.
        #[arg(long, requires = "other")]
        one_way: bool,
    },
    /// Restore a node's cables, the traffic between two nodes, or everything that was cut.
    Heal {
        /// The lab's name.
        #[command(flatten)]
        lab: LabNameArg,
        /// The node's number; without it, everything is restored.
        node: Option<u16>,
        /// The other node's number.
        other: Option<u16>,
        /// Restore only the direction from the first node to the second.
        #[arg(long, requires = "other")]
        one_way: bool,
    },
    /// Kill a node: take down its links, then kill every process.
    Kill {
        /// The lab's name.
        #[command(flatten)]
        lab: LabNameArg,
        /// The node's number.
        node: u16,
    },
    /// Reboot a node; its files are kept.
    Restart {
        /// The lab's name.
        #[command(flatten)]
        lab: LabNameArg,
        /// The node's number.
        node: u16,
        /// Kill and start only the node's ternd.
        #[arg(long)]
        daemon_only: bool,
    },
    /// Take the lab down, also if only parts of it remain.
    Down {
        /// The lab's name.
        #[command(flatten)]
        lab: LabNameArg,
    },
}

/// The options of a lab.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Number of nodes, 1 to 64; without it, one per given speed, or 2.
    #[arg(long, short, value_name = "N")]
    pub nodes: Option<u16>,
    /// CPUs of this machine for each node, or one number for all nodes; scaled down to 3/4 of the
    /// machine.
    #[arg(long, value_name = "S,…", value_delimiter = ',')]
    pub speed: Vec<f64>,
    /// MiB of memory for each node; without it, as much as the machine has.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..))]
    pub memory: Option<u64>,
    /// Directories of this machine that all nodes share, as on a shared file system; all others are
    /// private to each node.
    #[arg(long, value_name = "DIR,…", value_delimiter = ',')]
    pub shared: Vec<PathBuf>,
    /// switch, hub or p2p, then :RATE,DELAY,LOSS, as in switch:1gbit,0.2ms,1%; the delay is one
    /// way.
    #[arg(long, default_value = "switch", value_name = "LINK")]
    pub link: LinkSpec,
    /// Seed for frame loss: the same seed loses the same frames.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Create bare nodes: start no ternd.
    #[arg(long)]
    pub bare: bool,
}

/// Selects a lab.
#[derive(Debug, Args)]
pub struct LabNameArg {
    /// The lab's name.
    #[arg(long = "lab", default_value = "lab", value_name = "NAME")]
    pub name: LabName,
}

impl CreateArgs {
    pub(super) fn options(self, name: LabName) -> LabOptions {
        let by_speed = u16::try_from(self.speed.len()).ok().filter(|n| *n > 1);
        LabOptions {
            name,
            nodes: self.nodes.or(by_speed).unwrap_or(2),
            speeds: self.speed,
            cpu_quotas: true,
            memory: self.memory.map(|mebibytes| mebibytes.saturating_mul(1 << 20)),
            shared: self.shared,
            link: self.link,
            seed: self.seed,
            daemon: !self.bare,
            helper: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(words: &[&str]) -> Result<LabArgs, clap::Error> {
        LabArgs::try_parse_from([&["lab"], words].concat())
    }

    #[test]
    fn command_line_is_parsed() {
        LabArgs::command().debug_assert();
        let LabCommand::Run { create, lab: None, command } =
            parse(&["run", "--speed", "1,0.72,0.5", "--link", "hub:10mbit", "--", "ls", "-l"])
                .unwrap()
                .command
        else {
            panic!("not run")
        };
        assert_eq!(command, ["ls", "-l"]);
        let options = create.options(LabName::default());
        assert_eq!((options.nodes, options.speeds.len(), options.daemon), (3, 3, true));
        assert!(parse(&["run"]).is_err());
        assert!(parse(&["up", "--link", "ring"]).is_err());
        assert!(parse(&["up", "--lab", "../x"]).is_err());
    }

    #[test]
    fn one_speed_does_not_set_the_number_of_nodes() {
        let LabCommand::Up { create, .. } = parse(&["up", "--speed", "0.5"]).unwrap().command else {
            panic!("not up")
        };
        assert_eq!(create.options(LabName::default()).nodes, 2);
    }
}
