//! The command line of mosrun, in MOSIX's syntax, which no common parser reads: `-3` is a node, `-j1-3,5` a
//! list of nodes. Options end at the first word that is none, or at `--`; the rest is the program's.

use super::become_program::arguments;
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, Hasher};
use tern_control::Lock;
use tern_ids::NodeId;

/// What the words ask for.
#[derive(Debug, PartialEq, Eq)]
pub enum Words<'a> {
    /// `--help`.
    Help,
    /// `--version`.
    Version,
    /// A program.
    Start(Start<'a>),
}

/// A program to become.
#[derive(Debug, PartialEq, Eq)]
pub struct Start<'a> {
    /// Where it starts.
    pub place: Place,
    /// `-F`: at home, rather than not at all.
    pub fallback: bool,
    /// May the cluster move it afterwards?
    pub lock: Lock,
    /// It never migrates, nor do its children (`nomig`).
    pub never: bool,
    /// Which file.
    pub program: &'a OsStr,
    /// Its argv, argv\[0\] included.
    pub arguments: Vec<&'a OsStr>,
}

/// Where a program starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Here, because nothing else was said; ternd must know of it, or it could not be moved.
    Here,
    /// Here, and it stays.
    Home,
    /// On the first of these that takes it.
    Nodes(Vec<NodeId>),
}

/// Reads mosrun's words.
///
/// # Errors
/// A sentence about the first word that cannot be understood.
pub fn read(words: &[OsString]) -> Result<Words<'_>, String> {
    let mut read = Read::default();
    let mut rest = words;
    while let Some((word, after)) = rest.split_first() {
        let Some(text) = word.to_str().filter(|text| text.len() > 1 && text.starts_with('-')) else {
            break;
        };
        rest = after;
        match text {
            "--" => break,
            "--help" => return Ok(Words::Help),
            "--version" => return Ok(Words::Version),
            _ => rest = read.option(&text[1..], rest)?,
        }
    }
    let Some((program, args)) = rest.split_first() else {
        return Err("no program was given".into());
    };
    let arguments = if read.argv0 && !args.is_empty() {
        args.iter().map(OsString::as_os_str).collect()
    } else {
        arguments(program, args)
    };
    let lock = read.lock.unwrap_or(if read.keeps_lock() { Lock::Keep } else { Lock::Locked });
    let place = read.place.unwrap_or(Place::Here);
    Ok(Words::Start(Start { place, fallback: read.fallback, lock, never: false, program, arguments }))
}

/// The options so far.
#[derive(Default)]
struct Read {
    place: Option<Place>,
    best: bool,
    fallback: bool,
    lock: Option<Lock>,
    argv0: bool,
    advice: bool,
}

impl Read {
    /// Reads one word after its dash, and the next word where an option takes one; returns what is left.
    fn option<'a>(&mut self, text: &str, rest: &'a [OsString]) -> Result<&'a [OsString], String> {
        if text.starts_with(|c: char| c.is_ascii_digit()) {
            self.at(Place::Nodes(vec![node(text)?]))?;
            return Ok(rest);
        }
        if let Some(list) = text.strip_prefix(['j', 't', 'd']) {
            let (value, rest) = match (list, rest.split_first()) {
                ("", Some((next, rest))) => (next.to_string_lossy(), rest),
                ("", None) => return Err(format!("-{text} needs a value")),
                (list, _) => (list.into(), rest),
            };
            if text.starts_with('j') {
                self.at(Place::Nodes(shuffled(nodes(&value)?)))?;
            } else if value.parse::<u32>().is_ok() {
                self.advice = true;
            } else {
                return Err(format!("'{value}' after -{} is not a number", &text[..1]));
            }
            return Ok(rest);
        }
        // Letters may stand together, as in -lz.
        for letter in text.chars() {
            match letter {
                'h' => self.at(Place::Home)?,
                'b' => self.best = true,
                'F' => self.fallback = true,
                'l' => self.lock = Some(Lock::Unlocked),
                'L' => self.lock = Some(Lock::Locked),
                'k' => self.lock = Some(Lock::Keep),
                'z' => self.argv0 = true,
                'c' | 'i' | 'n' | 's' | 'f' => self.advice = true,
                _ => return Err(format!("unknown option '-{text}'")),
            }
        }
        if self.best && self.place.is_some() { Err(TWO_PLACES.into()) } else { Ok(rest) }
    }

    fn at(&mut self, place: Place) -> Result<(), String> {
        if self.best || self.place.replace(place).is_some() { Err(TWO_PLACES.into()) } else { Ok(()) }
    }

    /// Whether the caller's lock is kept when nothing is said: openMosix locks unless decay advice is given
    /// without a place; -b, which came after it, asks to be balanced.
    fn keeps_lock(&self) -> bool {
        self.place.is_none() && (self.advice || self.best)
    }
}

const TWO_PLACES: &str = "only one of -h, -ID, -j and -b can be given";

/// A node's number.
///
/// # Errors
/// A sentence saying what it is not.
pub fn node(text: &str) -> Result<NodeId, String> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && *number > 0);
    number.map(NodeId).ok_or_else(|| format!("'{text}' is not a node: nodes are 1 to 65535"))
}

/// The nodes of a list such as `1-3,5`, each once, in rising order.
fn nodes(text: &str) -> Result<Vec<NodeId>, String> {
    let mut nodes = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (NodeId(first), NodeId(last)) = (node(first)?, node(last)?);
        if first > last {
            return Err(format!("the range '{part}' runs backwards"));
        }
        nodes.extend((first..=last).map(NodeId));
        // After each part, so that a long list of wide ranges stays short.
        nodes.sort_unstable();
        nodes.dedup();
    }
    Ok(nodes)
}

/// In random order (Fisher and Yates). The standard library's hash keys are random enough to spread load.
fn shuffled(mut nodes: Vec<NodeId>) -> Vec<NodeId> {
    let keys = std::hash::RandomState::new();
    for last in (1..nodes.len()).rev() {
        let mut hasher = keys.build_hasher();
        hasher.write_usize(last);
        nodes.swap(last, (hasher.finish() % (last as u64 + 1)) as usize);
    }
    nodes
}

#[cfg(test)]
mod tests;
