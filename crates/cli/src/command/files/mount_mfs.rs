//! `mount.mfs`: called by `mount -t mfs mymfs /mfs`, also for a line in /etc/fstab.

use crate::tool::Invocation;
use crate::{Failure, help};
use clap::{Args, Command};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command as Program, Stdio};

/// The exit code of mount(8) and its helpers when nothing was mounted.
const NOT_MOUNTED: u8 = 32;

/// The FUSE server's program, in the directory of this one.
const SERVER: &str = "tern-mfs";

/// Options that have no effect on the server: mount(8), fstab or systemd evaluate them, the server
/// does what they request anyway, or (`dev`, `suid`) the server cannot grant them.
const IGNORED_OPTIONS: [&str; 17] = [
    "defaults", "rw", "auto", "noauto", "user", "nouser", "users", "owner", "_netdev", "nofail", "nosuid",
    "nodev", "exec", "relatime", "async", "dev", "suid",
];

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The source shown by `df` and `mount`; any word
    source: String,
    /// The mount point
    directory: PathBuf,
    /// Comma-separated options: ro, timeout=SECONDS, config=DIRECTORY, dfsa=0|1, those of fstab
    #[arg(short, value_name = "OPTIONS", value_delimiter = ',')]
    options: Vec<String>,
    /// Mount read-only; the same as -o ro
    #[arg(short = 'r')]
    read_only: bool,
    /// Accepted for mount(8): do not write /etc/mtab
    #[arg(short)]
    no_mtab: bool,
    /// Ignore unknown options
    #[arg(short)]
    sloppy: bool,
    /// Accepted for mount(8); has no effect
    #[arg(short)]
    verbose: bool,
    /// Only check the arguments
    #[arg(short)]
    fake: bool,
}

/// The effective options.
#[derive(Debug, PartialEq, Eq)]
struct MountOptions {
    read_only: bool,
    timeout: Option<u64>,
    config: Option<PathBuf>,
    dfsa: bool,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("mount.mfs"))
        .about("Mount the files of all nodes as one tree")
        .long_about(
            "Mount the files of all nodes as one tree: /mfs/2/etc/motd is /etc/motd on node 2. Each node \
             has a directory with its number, and one with each of its names in the cluster's map. There \
             are further directories. /mfs/here is the node where the calling process runs, /mfs/home its \
             home, and /mfs/0 this node, whose own number is a link to /. /mfs/selected is the node whose \
             number the process has written to /run/mosix/proc/self/selected, /mfs/lastexec the node where \
             it executed its program. /mfs/magic is for temporary files: a file is created on the node \
             where the process runs, and all other calls go to the node where the process last created a \
             file there. The tree keeps working if this node's ternd stops, except for home, selected, lastexec and magic.\n\nWith dfsa=1, the \
             default, a process that runs on the node of an open file reads and writes the file there. With \
             dfsa=0 its home does that, as for other files.\n\nIn /etc/fstab:\n\n  mymfs /mfs mfs defaults,nofail 0 0",
        )
        .after_help(help::after_help(
            "  mount -t mfs mymfs /mfs\n  mount.mfs mymfs /mfs -o ro,timeout=5\n  cp *.wav /mfs/2/root/musictest\n  \
             umount /mfs",
            "As mount(8): 32 if nothing was mounted",
        ))
}

/// `mount.mfs …`.
///
/// # Errors
/// If the options are invalid, or nothing could be mounted.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    let mount = parse(&options).map_err(|message| Failure::usage(invocation.tool, message))?;
    if options.fake {
        return Ok(());
    }
    let failure = |message: String| Failure::with_code(NOT_MOUNTED, message);
    let own_path = std::env::current_exe().map_err(|e| failure(e.to_string()))?;
    let mut program = Program::new(own_path.with_file_name(SERVER));
    if let Some(config) = &mount.config {
        // Absolute, like the mount point: the server starts in the root directory.
        program.arg("--config").arg(std::path::absolute(config).map_err(|e| failure(e.to_string()))?);
    }
    // Absolute, because the server changes to the root directory.
    let directory = std::path::absolute(&options.directory).map_err(|e| failure(e.to_string()))?;
    program.arg("mount").arg(directory).arg("--source").arg(&options.source);
    if mount.read_only {
        program.arg("--read-only");
    }
    if !mount.dfsa {
        program.args(["--dfsa", "0"]);
    }
    if let Some(timeout) = mount.timeout {
        program.args(["--timeout", &timeout.to_string()]);
    }
    // The server outlives this process and the terminal. It writes one line to a pipe when it is
    // ready or has failed. It does not inherit this tool's standard output, because a caller that
    // reads this output to its end would wait for the server.
    program
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .current_dir("/")
        .process_group(0);
    let mut child = program.spawn().map_err(|e| failure(format!("cannot start {SERVER}: {e}")))?;
    let mut report = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut report).map_err(|e| failure(e.to_string()))?;
    }
    match report.trim_end() {
        "ready" => Ok(()),
        "" => Err(failure(format!("{SERVER} has ended without mounting anything"))),
        message => Err(failure(message.strip_prefix("failed ").unwrap_or(message).to_owned())),
    }
}

fn parse(options: &Options) -> Result<MountOptions, String> {
    let mut mount = MountOptions { read_only: options.read_only, timeout: None, config: None, dfsa: true };
    for option in options.options.iter().filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            None if option == "ro" => mount.read_only = true,
            Some(("timeout", seconds)) => {
                let seconds = seconds.parse().ok().filter(|seconds| (1..=3600).contains(seconds));
                mount.timeout = Some(seconds.ok_or("timeout must be 1 to 3600 seconds")?);
            }
            Some(("config", directory)) => mount.config = Some(directory.into()),
            Some(("dfsa", "0")) => mount.dfsa = false,
            Some(("dfsa", "1")) => mount.dfsa = true,
            Some(("dfsa", _)) => return Err("dfsa must be 0 or 1".into()),
            _ if IGNORED_OPTIONS.contains(&&**option) || option.starts_with("x-") || options.sloppy => {}
            _ => return Err(format!("there is no option {option}")),
        }
    }
    Ok(mount)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn words(line: &str) -> Result<MountOptions, String> {
        let args: Vec<OsString> = line.split(' ').map(Into::into).collect();
        let options = help::parse::<Options>(describe(), &Invocation { tool: "mount.mfs", args: &args });
        parse(&options.map_err(|failure| failure.message)?.unwrap())
    }

    #[test]
    fn fstab_options_are_parsed() {
        let plain = MountOptions { read_only: false, timeout: None, config: None, dfsa: true };
        assert_eq!(words("mymfs /mfs"), Ok(plain));
        assert!(words("mymfs /mfs -o defaults,nofail,x-systemd.automount,dfsa=0").is_ok());
        assert_eq!(words("mymfs /mfs -n -o ro,timeout=5").unwrap().timeout, Some(5));
        assert!(words("mymfs /mfs -o defaults,dfsa=1").unwrap().dfsa);
        assert!(!words("mymfs /mfs -o dfsa=0").unwrap().dfsa);
        assert!(words("mymfs /mfs -r").unwrap().read_only);
    }

    #[test]
    fn invalid_options_are_named() {
        for (line, part) in [
            ("a /mfs -o fast", "no option fast"),
            ("a /mfs -o timeout=0", "1 to 3600"),
            ("a /mfs -o dfsa=2", "dfsa must be 0 or 1"),
        ] {
            assert!(words(line).unwrap_err().contains(part), "{line}");
        }
        assert!(words("a /mfs -s -o fast").is_ok());
    }
}
