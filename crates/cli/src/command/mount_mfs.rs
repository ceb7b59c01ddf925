//! `mount.mfs`: what `mount -t mfs mymfs /mfs`, and a line in /etc/fstab, call.

use crate::tool::Call;
use crate::{Failure, help};
use clap::{Args, Command};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command as Program, Stdio};

/// Ended with by mount(8) and its helpers when nothing was mounted.
const NOT_MOUNTED: u8 = 32;

/// The tree's own program, beside this one.
const SERVER: &str = "tern-mfs";

/// Options that are for mount, fstab and systemd to know, or say what is so anyway.
const OTHERS: [&str; 17] = [
    "defaults", "rw", "auto", "noauto", "user", "nouser", "users", "owner", "_netdev", "nofail", "nosuid",
    "nodev", "exec", "relatime", "async", "dev", "suid",
];

/// What its words say.
#[derive(Debug, Args)]
pub struct Options {
    /// What `df` and `mount` show as its source; any word
    source: String,
    /// Where
    directory: PathBuf,
    /// Options, with commas between: ro, timeout=SECONDS, config=DIRECTORY, dfsa=0|1; those of fstab
    #[arg(short, value_name = "OPTIONS", value_delimiter = ',')]
    options: Vec<String>,
    /// Change nothing through it; the same as -o ro
    #[arg(short = 'r')]
    read_only: bool,
    /// Accepted from mount: write nothing to /etc/mtab
    #[arg(short)]
    no_mtab: bool,
    /// Accepted from mount: overlook unknown options
    #[arg(short)]
    sloppy: bool,
    /// Accepted from mount
    #[arg(short)]
    verbose: bool,
    /// Only check the words
    #[arg(short)]
    fake: bool,
}

/// What the options come to.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    read_only: bool,
    timeout: Option<u64>,
    config: Option<PathBuf>,
    dfsa: bool,
}

/// The command line.
pub fn describe() -> Command {
    Options::augment_args(help::command("mount.mfs"))
        .about("Mount the files of all nodes as one tree")
        .long_about(
            "Mount the files of all nodes as one tree: /mfs/2/etc/motd is /etc/motd on node 2. Below the directory each \
             node has its number; here is the node where the calling process runs, home its home, 0 this node, and the \
             names of the cluster's map work too. selected is the node that was written to its file of that name \
             (/run/mosix/proc/self/selected), lastexec the one where it has executed its program. magic is where it \
             runs to what makes a file, and where it has made the last one to all else: for temporary files. It goes on without ternd, and ends when it is unmounted.\n\nWith \
             dfsa=1, which is so unless it is said, a process that runs on the node of a file which it has open reads and writes that there. \
             With dfsa=0 its home does it, as for other files.\n\nIn \
             /etc/fstab:\n\n  mymfs /mfs mfs defaults,nofail 0 0",
        )
        .after_help(help::closing(
            "  mount -t mfs mymfs /mfs\n  mount.mfs mymfs /mfs -o ro,timeout=5\n  cp *.wav /mfs/2/root/musictest\n  \
             umount /mfs",
            "As mount(8): 32 if nothing was mounted.",
        ))
}

/// `mount.mfs …`.
///
/// # Errors
/// If the words are wrong, or nothing could be mounted.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), call)? else {
        return Ok(());
    };
    let wanted = read(&options).map_err(|message| Failure::usage(call.tool, message))?;
    if options.fake {
        return Ok(());
    }
    let failed = |message: String| Failure { code: NOT_MOUNTED, message, hint: None };
    let own = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
    let mut program = Program::new(own.with_file_name(SERVER));
    if let Some(config) = &wanted.config {
        program.arg("--config").arg(config);
    }
    // From the root, since it goes there.
    let directory = std::path::absolute(&options.directory).map_err(|e| failed(e.to_string()))?;
    program.arg("mount").arg(directory).arg("--source").arg(&options.source);
    if wanted.read_only {
        program.arg("--read-only");
    }
    if !wanted.dfsa {
        program.args(["--dfsa", "0"]);
    }
    if let Some(timeout) = wanted.timeout {
        program.args(["--timeout", &timeout.to_string()]);
    }
    // It outlives us, the terminal and whoever waits for our output; what it says goes to standard output until it is up.
    program
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .current_dir("/")
        .process_group(0);
    let mut child = program.spawn().map_err(|e| failed(format!("cannot start {SERVER}: {e}")))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(|e| failed(e.to_string()))?;
    }
    match line.trim_end() {
        "ready" => Ok(()),
        "" => Err(failed(format!("{SERVER} has ended at once"))),
        said => Err(failed(said.strip_prefix("failed ").unwrap_or(said).to_owned())),
    }
}

fn read(options: &Options) -> Result<Wanted, String> {
    let mut wanted = Wanted { read_only: options.read_only, timeout: None, config: None, dfsa: true };
    for option in options.options.iter().filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            None if option == "ro" => wanted.read_only = true,
            Some(("timeout", seconds)) => {
                let seconds = seconds.parse().ok().filter(|seconds| (1..=3600).contains(seconds));
                wanted.timeout = Some(seconds.ok_or("timeout is 1 to 3600 seconds")?);
            }
            Some(("config", directory)) => wanted.config = Some(directory.into()),
            Some(("dfsa", "0")) => wanted.dfsa = false,
            Some(("dfsa", "1")) => wanted.dfsa = true,
            Some(("dfsa", _)) => return Err("dfsa is 0 or 1".into()),
            _ if OTHERS.contains(&&**option) || option.starts_with("x-") || options.sloppy => {}
            _ => return Err(format!("there is no option {option}")),
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn words(line: &str) -> Result<Wanted, String> {
        let args: Vec<OsString> = line.split(' ').map(Into::into).collect();
        let options = help::parse::<Options>(describe(), &Call { tool: "mount.mfs", args: &args });
        read(&options.map_err(|failure| failure.message)?.unwrap())
    }

    #[test]
    fn the_line_of_the_seeds_is_understood() {
        let plain = Wanted { read_only: false, timeout: None, config: None, dfsa: true };
        assert_eq!(words("mymfs /mfs"), Ok(plain));
        assert!(words("mymfs /mfs -o defaults,nofail,x-systemd.automount,dfsa=0").is_ok());
        assert_eq!(words("mymfs /mfs -n -o ro,timeout=5").unwrap().timeout, Some(5));
        assert!(words("mymfs /mfs -o defaults,dfsa=1").unwrap().dfsa);
        assert!(!words("mymfs /mfs -o dfsa=0").unwrap().dfsa);
        assert!(words("mymfs /mfs -r").unwrap().read_only);
    }

    #[test]
    fn mistakes_are_named() {
        for (line, part) in [
            ("a /mfs -o fast", "no option fast"),
            ("a /mfs -o timeout=0", "1 to 3600"),
            ("a /mfs -o dfsa=2", "dfsa is 0 or 1"),
        ] {
            assert!(words(line).unwrap_err().contains(part), "{line}");
        }
        assert!(words("a /mfs -s -o fast").is_ok());
    }
}
