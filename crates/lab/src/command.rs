//! `tern lab …`: the command line of the lab.

use crate::enter::{self, How};
use crate::error::LabError;
use crate::faults::Cable;
use crate::lab::{self, Lab};
use crate::link::Link;
use crate::options::{Name, Options};
use crate::signals::{self, Received};
use crate::storm::{self, StormArgs};
use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

/// Time that a command has to exit after a terminating signal.
const LAST_WISHES: Duration = Duration::from_secs(5);

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
        storm: 0 nothing differs, 1 something does, 2 wrong command line, 3 moved too seldom, 125 as above\n  \
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
        shape: LabShape,
        /// The lab's name.
        #[command(flatten)]
        which: Which,
    },
    /// Create a cluster, run a command on node 1, then take the cluster down; exits with the
    /// command's status.
    Run {
        /// The lab's options.
        #[command(flatten)]
        shape: LabShape,
        /// The lab's name; without it, a unique name.
        #[arg(long, value_name = "NAME")]
        lab: Option<Name>,
        /// The command to run.
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Run a command on a node; exits with the command's status.
    Exec {
        /// The lab's name.
        #[command(flatten)]
        which: Which,
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
        which: Which,
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
        which: Which,
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
        which: Which,
        /// The node's number.
        node: u16,
    },
    /// Reboot a node; its files are kept.
    Restart {
        /// The lab's name.
        #[command(flatten)]
        which: Which,
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
        which: Which,
    },
}

/// The options of a lab.
#[derive(Debug, Args)]
pub struct LabShape {
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
    pub link: Link,
    /// Seed for frame loss: the same seed loses the same frames.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Create bare nodes: start no ternd.
    #[arg(long)]
    pub bare: bool,
}

/// Selects a lab.
#[derive(Debug, Args)]
pub struct Which {
    /// The lab's name.
    #[arg(long, default_value = "lab", value_name = "NAME")]
    pub lab: Name,
}

impl LabShape {
    fn options(self, name: Name) -> Options {
        let by_speed = u16::try_from(self.speed.len()).ok().filter(|n| *n > 1);
        Options {
            name,
            nodes: self.nodes.or(by_speed).unwrap_or(2),
            speeds: self.speed,
            memory: self.memory.map(|mebibytes| mebibytes.saturating_mul(1 << 20)),
            shared: self.shared,
            link: self.link,
            seed: self.seed,
            daemon: !self.bare,
            helper: None,
        }
    }
}

/// Runs a `tern lab` command. If the command of `run` or `exec` died by a signal, this process dies
/// by the same signal instead of returning. The caller must be single-threaded.
///
/// # Errors
/// Those of [`LabError`]. For `run` and `exec` this function prints the error and returns exit code
/// 125.
pub fn run(command: LabCommand) -> Result<ExitCode> {
    match command {
        LabCommand::Up { shape, which } => up(shape.options(which.lab)),
        LabCommand::Run { shape, lab, command } => {
            let name = lab.map_or_else(|| Name::unique("run"), Ok)?;
            or_125(run_in(&shape.options(name), &command))
        }
        LabCommand::Exec { which, node, command } => {
            signals::expect_children();
            let (program, arguments) = split(&command)?;
            let opened = Lab::open(&which.lab);
            or_125(opened.and_then(|lab| enter::enter(lab.name(), node, How::Attached, program, arguments)))
        }
        LabCommand::Storm(args) => match storm::start(&args) {
            Err(error @ LabError::BadOption(_)) => {
                let _ = writeln!(std::io::stderr(), "tern lab storm: {error}");
                Ok(2.into())
            }
            end => or_125(end),
        },
        LabCommand::Cut { which, node, other, one_way } => {
            done(Lab::open(&which.lab)?.cut(cable(node, other, one_way)))
        }
        LabCommand::Heal { which, node, other, one_way } => {
            let lab = Lab::open(&which.lab)?;
            done(node.map_or_else(|| lab.heal_all(), |node| lab.heal(cable(node, other, one_way))))
        }
        LabCommand::Kill { which, node } => done(Lab::open(&which.lab)?.kill(node)),
        LabCommand::Restart { which, node, daemon_only } => {
            let lab = Lab::open(&which.lab)?;
            done(if daemon_only { lab.restart_daemon(node) } else { lab.restart(node) })
        }
        LabCommand::Down { which } => done(lab::down(&which.lab)),
    }
}

fn done(result: Result<(), LabError>) -> Result<ExitCode> {
    result?;
    Ok(ExitCode::SUCCESS)
}

fn or_125(result: Result<u8, LabError>) -> Result<ExitCode> {
    match result {
        Ok(code) => Ok(code.into()),
        Err(error) => {
            die_if_interrupted(&error);
            let _ = writeln!(std::io::stderr(), "tern lab: {error}");
            Ok(125.into())
        }
    }
}

/// An interrupt also ends the programs that the lab runs. Their failure is then not the cause to
/// report.
fn die_if_interrupted(error: &LabError) {
    if let LabError::Interrupted(signal) = error {
        signals::die_of(*signal);
    }
    if let Some(received) = signals::noted() {
        signals::die_of(received.signal);
    }
}

fn cable(node: u16, other: Option<u16>, one_way: bool) -> Cable {
    match other {
        None => Cable::Node(node),
        Some(other) if one_way => Cable::OneWay(node, other),
        Some(other) => Cable::between(node, other),
    }
}

fn split(command: &[OsString]) -> Result<(&OsString, &[OsString]), LabError> {
    command.split_first().ok_or_else(|| LabError::BadOption("there is no command to run".to_owned()))
}

fn up(options: Options) -> Result<ExitCode> {
    signals::note_interrupts();
    let lab = match Lab::up(&options) {
        Ok(lab) => lab,
        Err(error) => {
            die_if_interrupted(&error);
            return Err(error.into());
        }
    };
    if let Some(signal) = signals::noted() {
        drop(lab);
        signals::die_of(signal.signal);
    }
    let mut text = format!("lab {}: {} nodes, {}\n", lab.name(), options.nodes, options.link);
    for node in lab.nodes() {
        text += &format!("node{} {} speed {:.3}\n", node.number(), node.address(), lab.speed(node.number())?);
    }
    lab.keep();
    // A failed write is ignored: the lab is up all the same.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}

/// Creates a lab, runs the command in it, takes the lab down, and returns the command's exit code.
pub(crate) fn run_in(options: &Options, command: &[OsString]) -> Result<u8, LabError> {
    signals::expect_children();
    signals::note_interrupts();
    // The nodes' inits become zombies of this process, not of the machine's init, and vanish when
    // it ends.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let (program, arguments) = split(command)?;
    let lab = Lab::up(options)?;
    if let Some(signal) = signals::noted() {
        return Err(LabError::Interrupted(signal.signal));
    }
    let io = |what: &str| {
        let what = what.to_owned();
        move |source: std::io::Error| LabError::Io { what, source }
    };
    let mut child = lab.node(1).command(program).args(arguments).spawn().map_err(io("start the command"))?;
    let end = attend(&mut child);
    lab.down()?;
    let status = match end {
        End::Ended(status) => status,
        End::Outlasted(signal) => {
            // Taking the lab down has killed it.
            let _ = child.wait();
            bury();
            return Err(LabError::Interrupted(signal));
        }
    };
    bury();
    match (status.code(), status.signal()) {
        (Some(code), _) => Ok(code as u8),
        (None, Some(signal)) => signals::die_of(signal),
        (None, None) => Ok(126),
    }
}

/// Reaps the inits that were reparented to this process. They are dead or about to die.
fn bury() {
    let end = Instant::now() + Duration::from_secs(1);
    while let Ok(ended) = rustix::process::wait(WaitOptions::NOHANG) {
        if ended.is_none() {
            if Instant::now() > end {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// How the wait for the command ended.
enum End {
    Ended(ExitStatus),
    /// The command was sent this signal and did not exit in time.
    Outlasted(i32),
}

/// Waits for the command and forwards terminating signals to it.
fn attend(child: &mut Child) -> End {
    let pidfd = Pid::from_raw(child.id() as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let mut last: Option<(Instant, i32)> = None;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return End::Ended(status);
        }
        if let Some(Received { signal, from_process }) = signals::take_noted() {
            // The terminal has already sent this signal to the command.
            if from_process
                && let Some(pidfd) = &pidfd
                && let Some(signal) = Signal::from_named_raw(signal)
            {
                let _ = pidfd_send_signal(pidfd, signal);
            }
            // A keyboard interrupt is left to the command, as a shell leaves it to its job.
            if from_process || signal != libc::SIGINT {
                last = Some((Instant::now() + LAST_WISHES, signal));
            }
        }
        if let Some((until, signal)) = last
            && Instant::now() > until
        {
            return End::Outlasted(signal);
        }
        // A signal that arrives between the check above and this wait is noticed when the wait
        // times out.
        let moment = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let mut fds: Vec<_> = pidfd.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let _ = poll(&mut fds, Some(&moment));
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
    fn the_command_line_is_sound() {
        LabArgs::command().debug_assert();
        let LabCommand::Run { shape, lab: None, command } =
            parse(&["run", "--speed", "1,0.72,0.5", "--link", "hub:10mbit", "--", "ls", "-l"])
                .unwrap()
                .command
        else {
            panic!("not run")
        };
        assert_eq!(command, ["ls", "-l"]);
        let options = shape.options(Name::default());
        assert_eq!((options.nodes, options.speeds.len(), options.daemon), (3, 3, true));
        assert!(parse(&["run"]).is_err());
        assert!(parse(&["up", "--link", "ring"]).is_err());
        assert!(parse(&["up", "--lab", "../x"]).is_err());
    }

    #[test]
    fn one_speed_says_nothing_of_the_number_of_nodes() {
        let LabCommand::Up { shape, .. } = parse(&["up", "--speed", "0.5"]).unwrap().command else {
            panic!("not up")
        };
        assert_eq!(shape.options(Name::default()).nodes, 2);
    }
}
