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

/// How long a command may go on after it was told to end.
const LAST_WISHES: Duration = Duration::from_secs(5);

/// A cluster inside this machine.
///
/// Each node is a set of namespaces with its own init, writable layer, share of the CPU and link. Needs root.
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
    /// What to do.
    #[command(subcommand)]
    pub command: LabCommand,
}

/// What the lab can do.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Make a cluster, and leave it up.
    Up {
        /// How it shall be.
        #[command(flatten)]
        shape: LabShape,
        /// Its name.
        #[command(flatten)]
        which: Which,
    },
    /// Make a cluster, run a command on node 1, take all down again; ends as the command ends.
    Run {
        /// How it shall be.
        #[command(flatten)]
        shape: LabShape,
        /// Its name; one of its own unless given.
        #[arg(long, value_name = "NAME")]
        lab: Option<Name>,
        /// The command.
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Run a command on a node; ends as the command ends.
    Exec {
        /// Its name.
        #[command(flatten)]
        which: Which,
        /// The node.
        node: u16,
        /// The command.
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Run a command natively and in a storm of migrations, and compare.
    ///
    /// The command runs on node 1 as it is, in an empty folder. Then it runs there with mosrun, and every process that
    /// it starts is moved to one random node after the other, home included, as long as it lives; the balancer leaves
    /// these processes alone. Standard output and error, exit status, and the files that it leaves in its folder must
    /// be the same. It gets no input.
    Storm(StormArgs),
    /// Cut a node's cables, or what goes between two nodes, silently.
    Cut {
        /// Its name.
        #[command(flatten)]
        which: Which,
        /// The node.
        node: u16,
        /// The other node.
        other: Option<u16>,
        /// Only what goes from the one to the other.
        #[arg(long, requires = "other")]
        one_way: bool,
    },
    /// Heal a node's cables, or what goes between two nodes, or all.
    Heal {
        /// Its name.
        #[command(flatten)]
        which: Which,
        /// The node.
        node: Option<u16>,
        /// The other node.
        other: Option<u16>,
        /// Only what goes from the one to the other.
        #[arg(long, requires = "other")]
        one_way: bool,
    },
    /// Kill a node: its links, then every process.
    Kill {
        /// Its name.
        #[command(flatten)]
        which: Which,
        /// The node.
        node: u16,
    },
    /// Boot a node again, its files as they are.
    Restart {
        /// Its name.
        #[command(flatten)]
        which: Which,
        /// The node.
        node: u16,
        /// Kill and start only its ternd.
        #[arg(long)]
        daemon_only: bool,
    },
    /// Take it down, whatever is left of it.
    Down {
        /// Its name.
        #[command(flatten)]
        which: Which,
    },
}

/// How a lab shall be.
#[derive(Debug, Args)]
pub struct LabShape {
    /// Nodes, 1 to 64; without it, as many as there are speeds, or 2.
    #[arg(long, short, value_name = "N")]
    pub nodes: Option<u16>,
    /// CPUs of this machine for each node, or one number for all; scaled down to 3/4 of the machine.
    #[arg(long, value_name = "S,…", value_delimiter = ',')]
    pub speed: Vec<f64>,
    /// MiB of memory for each node; without it, as much as the machine.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..))]
    pub memory: Option<u64>,
    /// Directories of this machine that are the same in all nodes, as on a shared file system; others are each node's own.
    #[arg(long, value_name = "DIR,…", value_delimiter = ',')]
    pub shared: Vec<PathBuf>,
    /// switch, hub or p2p, then :RATE,DELAY,LOSS, as in switch:1gbit,0.2ms,1%; the delay is one way.
    #[arg(long, default_value = "switch", value_name = "LINK")]
    pub link: Link,
    /// Lose the same frames each time.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Start no ternd: bare nodes.
    #[arg(long)]
    pub bare: bool,
}

/// Which lab.
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

/// Does it. For `run` and `exec` of a command that died by a signal, this process dies by the same signal
/// instead of returning. The caller has one thread.
///
/// # Errors
/// Those of [`LabError`]; a message has been written for `run` and `exec`, whose exit code is 125 then.
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

/// An interrupt also ends the programs that the lab runs: their failure is not the cause.
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
    // Whoever does not read it has the lab all the same.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}

/// Returns the command's exit code, the lab being down.
pub(crate) fn run_in(options: &Options, command: &[OsString]) -> Result<u8, LabError> {
    signals::expect_children();
    signals::note_interrupts();
    // So that the nodes' inits become our zombies, not those of the machine's init, and are gone when we are.
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
            // Going down has ended it.
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

/// Waits for the inits that have become this process's children; they are dead, or about to be.
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
    /// It was told to end by this signal, and did not.
    Outlasted(i32),
}

/// Waits for the command, passing on what ends programs.
fn attend(child: &mut Child) -> End {
    let pidfd = Pid::from_raw(child.id() as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let mut last: Option<(Instant, i32)> = None;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return End::Ended(status);
        }
        if let Some(Received { signal, from_process }) = signals::take_noted() {
            // The terminal has sent it to the command as well.
            if from_process
                && let Some(pidfd) = &pidfd
                && let Some(signal) = Signal::from_named_raw(signal)
            {
                let _ = pidfd_send_signal(pidfd, signal);
            }
            // An interrupt from the keyboard is the command's own business, as that of a shell's job is.
            if from_process || signal != libc::SIGINT {
                last = Some((Instant::now() + LAST_WISHES, signal));
            }
        }
        if let Some((until, signal)) = last
            && Instant::now() > until
        {
            return End::Outlasted(signal);
        }
        // A signal that comes between the look above and this wait is seen a little later.
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
