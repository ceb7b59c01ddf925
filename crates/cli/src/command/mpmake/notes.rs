//! The notes of a build: a file to which everybody who places a command of it adds a line of JSON when something becomes of that, for
//! the display while it runs, the summary, and the report.
//!
//! Each line is written at once, at the file's end, and is shorter than a page: so lines of many writers do not mix.

use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tern_mexec::words::Why;

/// The variable that names the file.
pub(crate) const PLACED: &str = "TERN_PLACED";

/// The longest line.
const LINE: usize = 4000;

/// One line. Times are microseconds since 1970, by the clock of this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum Note {
    /// A build begins.
    Build(Begin),
    /// A command is to be placed.
    Asked {
        /// When.
        at: u64,
        /// Its number and the time: in the notes of a build there is no other with both.
        id: String,
        /// The beginning of its command line.
        command: String,
    },
    /// It runs. Once more if its node was lost.
    Begun {
        /// When.
        at: u64,
        /// Which.
        id: String,
        /// Where; none: here.
        node: Option<u16>,
        /// Why there, in words.
        why: String,
    },
    /// It has ended.
    Ended {
        /// When.
        at: u64,
        /// Which.
        id: String,
        /// As a shell has it: 128 and the signal, if it died by one.
        exit: u8,
        /// Microseconds of CPU time of it and what it has waited for, if that is known.
        cpu: Option<u64>,
    },
    /// How busy everything is.
    Load(Load),
    /// The build is over.
    Over {
        /// When.
        at: u64,
        /// make's status.
        exit: u8,
    },
}

/// What is known of a build when it begins.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begin {
    /// When.
    pub(crate) at: u64,
    /// What was called.
    pub(crate) command: String,
    /// Jobs at a time, if that was chosen for it.
    pub(crate) jobs: Option<u32>,
    /// The node that it began on; 0 if that was not noted.
    pub(crate) me: u16,
    /// All that were up.
    pub(crate) nodes: Vec<Node>,
}

/// A node, as it was when the build began.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Node {
    /// Its number.
    pub(crate) node: u16,
    /// Its host.
    pub(crate) host: String,
    /// How many CPUs it has.
    pub(crate) cpus: f32,
    /// Of each; 10,000 is the standard.
    pub(crate) speed: u32,
}

impl Node {
    /// As people call it: by its host, if that has a name.
    pub(crate) fn name(&self) -> String {
        match (&*self.host, self.node) {
            (host, node) if host.is_empty() || host.parse::<std::net::IpAddr>().is_ok() => match node {
                0 => "here".into(),
                node => format!("node {node}"),
            },
            (host, _) => crate::output::plain(host),
        }
    }
}

/// A look at everything, once a second. What is counted is counted from whenever.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    /// When.
    pub(crate) at: u64,
    /// Of each node, which share of its CPUs is in use or wanted: 1 is all, more is more than there is.
    pub(crate) busy: Vec<(u16, f32)>,
    /// Bytes that this node has received and sent.
    pub(crate) net: Option<(u64, u64)>,
    /// The fastest of its links, in bits per second.
    pub(crate) link: Option<u64>,
    /// Since the look before, the share of time in which bytes waited on connections to other nodes.
    #[serde(default)]
    pub(crate) waits: Option<f32>,
    /// Microseconds of CPU time of this node's server of files.
    pub(crate) server: Option<u64>,
}

/// Now, in microseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Why a command runs where it does, in words.
pub(crate) fn words(why: Why) -> String {
    match why {
        Why::Idle => "this node had nothing to do".into(),
        Why::Short => "such commands are short".into(),
        Why::Named => "asked for by name".into(),
        Why::Best => "least loaded".into(),
        Why::Room => "first to have room".into(),
        Why::Again(lost) => format!("again, since node {lost} was lost"),
    }
}

/// Why a recipe runs here without being placed.
pub(crate) const TRIVIAL: &str = "takes no time";

/// A recursive make, which runs here all the time and is no work itself.
pub(crate) const RECURSIVE: &str = "a recursive make";

/// One command's way into the notes, if somebody wants to know of it.
#[derive(Debug, Clone)]
pub(crate) struct Noted {
    file: PathBuf,
    id: String,
}

impl Noted {
    /// Notes that a command is to be placed.
    pub(crate) fn asked(command: &str) -> Option<Self> {
        let file = PathBuf::from(std::env::var_os(PLACED).filter(|name| !name.is_empty())?);
        let at = now();
        let id = format!("{}-{at}", std::process::id());
        add(&file, &Note::Asked { at, id: id.clone(), command: command.to_owned() }).ok()?;
        Some(Self { file, id })
    }

    /// Notes where it runs; `None` is here.
    pub(crate) fn begun(&self, node: Option<u16>, why: &str) {
        let _full = add(&self.file, &Note::Begun { at: now(), id: self.id.clone(), node, why: why.into() });
    }

    /// Notes its end, by its status as wait(2) has it.
    pub(crate) fn ended(&self, status: i32, cpu: Option<u64>) {
        let code =
            if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
        let exit = u8::try_from(code).unwrap_or(u8::MAX);
        let _full = add(&self.file, &Note::Ended { at: now(), id: self.id.clone(), exit, cpu });
    }
}

impl Noted {
    /// Notes that it was not run, or that its end is not known, and what its caller is told.
    pub(crate) fn failed(&self, code: u8) {
        self.ended(i32::from(code) << 8, None);
    }
}

/// Adds a line. What would be too long of a command is left out.
///
/// # Errors
/// Those of the file.
pub(crate) fn add(file: &Path, note: &Note) -> io::Result<()> {
    let mut note = note.clone();
    let mut line = serde_json::to_string(&note)?;
    while line.len() > LINE
        && let Note::Asked { command, .. } | Note::Build(Begin { command, .. }) = &mut note
        && !command.is_empty()
    {
        *command = command.chars().take(command.chars().count() / 2).collect();
        line = serde_json::to_string(&note)?;
    }
    line.push('\n');
    // Whoever comes late to notes that are read and gone leaves none behind.
    let begins = matches!(note, Note::Asked { .. } | Note::Build(_));
    OpenOptions::new().append(true).create(begins).open(file)?.write_all(line.as_bytes())
}

/// What a line says; nothing if it is none of ours, or not whole yet.
pub(crate) fn read(line: &[u8]) -> Option<Note> {
    serde_json::from_slice(line).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_and_never_too_long() {
        let file = std::env::temp_dir().join(format!("tern-notes-{}", std::process::id()));
        let _none = std::fs::remove_file(&file);
        let asked = |command: String| Note::Asked { at: 1, id: "2-1".into(), command };
        add(&file, &asked("\u{1}".repeat(5000))).unwrap();
        add(&file, &asked("a\nb".into())).unwrap();
        let begun =
            Note::Begun { at: 2, id: "2-1".into(), node: None, why: words(Why::Again(tern_ids::NodeId(3))) };
        add(&file, &begun).unwrap();
        let text = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let lines: Vec<_> = text.split(|byte| *byte == b'\n').collect();
        assert!(lines.iter().all(|line| line.len() <= LINE));
        let notes: Vec<_> = lines.into_iter().filter_map(read).collect();
        assert!(matches!(&notes[0], Note::Asked { command, .. } if command.len() > 300));
        assert_eq!(notes[1..], [asked("a\nb".into()), begun]);
        assert_eq!(read(br#"{"event":"asked","at":1"#), None);
    }
}
