//! The event log of a build: a file of JSON lines to which each tool that places a command appends
//! its events. The status line, the summary and the report read it.
//!
//! Each line is written by one write in append mode, and the lines about commands are shorter than
//! a page, so lines of several writers do not mix.

use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tern_mexec::messages::PlacementReason;

/// The environment variable that names the event log.
pub(crate) const LOG_VARIABLE: &str = "TERN_PLACED";

/// The length of a line, in bytes, above which its command line is shortened.
const MAX_LINE: usize = 4000;

/// One line. Times are in microseconds since 1970, by this node's clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum BuildEvent {
    /// A build starts.
    Build(BuildStart),
    /// A command is to be placed.
    Asked {
        /// When.
        at: u64,
        /// The placing process's pid and the time, unique in the log of a build.
        id: String,
        /// The start of its command line.
        command: String,
    },
    /// A command starts; again if its node was lost.
    Begun {
        /// When.
        at: u64,
        /// Which command.
        id: String,
        /// The node; `None` for this one.
        node: Option<u16>,
        /// Why there, in words.
        why: String,
    },
    /// A command has ended.
    Ended {
        /// When.
        at: u64,
        /// Which command.
        id: String,
        /// The exit code as in a shell: 128 plus the signal, if a signal ended it.
        exit: u8,
        /// CPU time in microseconds, including its waited-for children, if known.
        cpu: Option<u64>,
    },
    /// A sample of the load.
    Load(LoadSample),
    /// The build has ended.
    Over {
        /// When.
        at: u64,
        /// make's exit code.
        exit: u8,
    },
}

/// The start event of a build.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct BuildStart {
    /// When.
    pub(crate) at: u64,
    /// The command line.
    pub(crate) command: String,
    /// The number of jobs, if known; 0 if unlimited.
    pub(crate) jobs: Option<u32>,
    /// The node where the build started; 0 if unknown.
    pub(crate) me: u16,
    /// All nodes that were up.
    pub(crate) nodes: Vec<NodeInfo>,
}

/// A node, as it was when the build started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct NodeInfo {
    /// Its number.
    pub(crate) node: u16,
    /// Its host name or address.
    pub(crate) host: String,
    /// The number of its CPUs.
    pub(crate) cpus: f32,
    /// The speed of each CPU; 10,000 is the standard.
    pub(crate) speed: u32,
}

impl NodeInfo {
    /// The node's display name: its host name, or its number if the host has only an address.
    pub(crate) fn name(&self) -> String {
        match (&*self.host, self.node) {
            (host, node) if host.is_empty() || host.parse::<std::net::IpAddr>().is_ok() => match node {
                0 => "here".into(),
                node => format!("node {node}"),
            },
            (host, _) => crate::output::sanitize(host),
        }
    }
}

/// A sample of the load, taken once a second. Counters have arbitrary origins.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoadSample {
    /// When.
    pub(crate) at: u64,
    /// For each node, the demand for its CPUs: 1 is all of them; above 1, commands wait for CPU.
    pub(crate) busy: Vec<(u16, f32)>,
    /// Bytes that this node has received and sent, as counters.
    pub(crate) net: Option<(u64, u64)>,
    /// The speed of its fastest link, in bits per second.
    pub(crate) link: Option<u64>,
    /// The share of the time since the previous sample in which data waited on connections to other
    /// nodes.
    #[serde(default)]
    pub(crate) waits: Option<f32>,
    /// CPU time of this node's file server, in microseconds, as a counter.
    pub(crate) server: Option<u64>,
}

/// The current time in microseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Why a command runs where it does, in words.
pub(crate) fn reason_text(why: PlacementReason) -> String {
    match why {
        PlacementReason::Idle => "this node was idle".into(),
        PlacementReason::Short => "short command".into(),
        PlacementReason::Named => "asked for by name".into(),
        PlacementReason::Best => "least loaded".into(),
        PlacementReason::FirstSlot => "first with free capacity".into(),
        PlacementReason::Requeued(lost) => format!("again, since node {lost} was lost"),
    }
}

/// The reason for a recipe that runs here without being placed.
pub(crate) const TRIVIAL: &str = "trivial command";

/// The reason for a recursive make, which runs here for the whole time and does no work itself.
pub(crate) const RECURSIVE_MAKE: &str = "a recursive make";

/// Records the events of one command.
#[derive(Debug, Clone)]
pub(crate) struct CommandRecord {
    file: PathBuf,
    id: String,
}

impl CommandRecord {
    /// Records that a command is to be placed. `None` if no log is named, or it cannot be written.
    pub(crate) fn requested(command: &str) -> Option<Self> {
        let file = PathBuf::from(std::env::var_os(LOG_VARIABLE).filter(|name| !name.is_empty())?);
        let at = now();
        let id = format!("{}-{at}", std::process::id());
        append(&file, &BuildEvent::Asked { at, id: id.clone(), command: command.to_owned() }).ok()?;
        Some(Self { file, id })
    }

    /// Records where the command runs; `None` is this node.
    pub(crate) fn started(&self, node: Option<u16>, why: &str) {
        let _disk_full =
            append(&self.file, &BuildEvent::Begun { at: now(), id: self.id.clone(), node, why: why.into() });
    }

    /// Records its end, with its status as of wait(2).
    pub(crate) fn ended(&self, status: i32, cpu: Option<u64>) {
        let code =
            if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
        let exit = u8::try_from(code).unwrap_or(u8::MAX);
        let _disk_full = append(&self.file, &BuildEvent::Ended { at: now(), id: self.id.clone(), exit, cpu });
    }

    /// Records the exit code of a command that was not run, or whose end is unknown.
    pub(crate) fn failed(&self, code: u8) {
        self.ended(i32::from(code) << 8, None);
    }
}

/// Appends a line. A command line that is too long is shortened.
///
/// # Errors
/// If the file cannot be opened or written.
pub(crate) fn append(file: &Path, event: &BuildEvent) -> io::Result<()> {
    let mut event = event.clone();
    let mut line = serde_json::to_string(&event)?;
    while line.len() > MAX_LINE
        && let BuildEvent::Asked { command, .. } | BuildEvent::Build(BuildStart { command, .. }) = &mut event
        && !command.is_empty()
    {
        *command = command.chars().take(command.chars().count() / 2).collect();
        line = serde_json::to_string(&event)?;
    }
    line.push('\n');
    // Only the first event of a build or a command creates the file, so a late event cannot
    // recreate a log that was read and removed.
    let creates = matches!(event, BuildEvent::Asked { .. } | BuildEvent::Build(_));
    OpenOptions::new().append(true).create(creates).open(file)?.write_all(line.as_bytes())
}

/// Parses a line; `None` if it is not an event or is incomplete.
pub(crate) fn parse(line: &[u8]) -> Option<BuildEvent> {
    serde_json::from_slice(line).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_is_one_line_of_limited_length() {
        let file = std::env::temp_dir().join(format!("tern-notes-{}", std::process::id()));
        let _none = std::fs::remove_file(&file);
        let request = |command: String| BuildEvent::Asked { at: 1, id: "2-1".into(), command };
        append(&file, &request("\u{1}".repeat(5000))).unwrap();
        append(&file, &request("a\nb".into())).unwrap();
        let started = BuildEvent::Begun {
            at: 2,
            id: "2-1".into(),
            node: None,
            why: reason_text(PlacementReason::Requeued(tern_ids::NodeId(3))),
        };
        append(&file, &started).unwrap();
        let text = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let lines: Vec<_> = text.split(|byte| *byte == b'\n').collect();
        assert!(lines.iter().all(|line| line.len() <= MAX_LINE));
        let events: Vec<_> = lines.into_iter().filter_map(parse).collect();
        assert!(matches!(&events[0], BuildEvent::Asked { command, .. } if command.len() > 300));
        assert_eq!(events[1..], [request("a\nb".into()), started]);
        assert_eq!(parse(br#"{"event":"asked","at":1"#), None);
    }
}
