//! The command line of mosrun, in MOSIX's syntax, which no common parser reads: `-3` is a node, `-j1-3,5` a
//! list of nodes. Options end at the first word that is none, or at `--`; the rest is the program's.

use super::become_program::arguments;
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, Hasher};
use tern_control::{Advice, Forget, Habit, Lock};
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
    /// What else is said of it.
    pub advice: Advice,
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
    /// Where it will run best.
    Best,
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
    // Who names a node means it. Who names none wants to be balanced, unless what calls mosrun is locked (MOSIX-2;
    // openMosix locked a plain `mosrun` as well).
    let lock = read.lock.unwrap_or(match read.place {
        None | Some(Place::Here | Place::Best) => Lock::Keep,
        Some(Place::Home | Place::Nodes(_)) => Lock::Locked,
    });
    let (place, fallback, advice) = (read.place.unwrap_or(Place::Here), read.fallback, read.advice);
    Ok(Words::Start(Start { place, fallback, lock, never: false, advice, program, arguments }))
}

/// The options so far.
#[derive(Default)]
struct Read {
    place: Option<Place>,
    fallback: bool,
    lock: Option<Lock>,
    argv0: bool,
    advice: Advice,
}

impl Read {
    /// Reads one word after its dash, and the next word where an option takes one; returns what is left.
    fn option<'a>(&mut self, text: &str, rest: &'a [OsString]) -> Result<&'a [OsString], String> {
        if text.starts_with(|c: char| c.is_ascii_digit()) {
            self.at(Place::Nodes(vec![node(text)?]))?;
            return Ok(rest);
        }
        if let Some(name) = text.strip_prefix('-') {
            let (list, rest) = value(name, "", rest)?;
            match name {
                "only" => self.advice.only = Some(nodes(&list)?),
                "not" => self.advice.not = nodes(&list)?,
                _ => return Err(format!("unknown option '-{text}'")),
            }
            return Ok(rest);
        }
        if let Some(attached) = text.strip_prefix(['j', 't', 'd', 'm', 'J']) {
            let name = &text[..1];
            let (value, rest) = value(name, attached, rest)?;
            let number =
                || value.parse::<u32>().map_err(|_e| format!("'{value}' after -{name} is not a number"));
            match name {
                "j" => self.at(Place::Nodes(shuffled(nodes(&value)?)))?,
                "m" => self.advice.memory = Some(u64::from(number()?) << 20),
                "J" => self.advice.job = Some(number()?),
                "d" => {
                    let kept = number()?.try_into().ok().filter(|kept| *kept <= 1000);
                    self.advice.forget = Some(Forget::Keep(kept.ok_or("-d is 0 to 1000")?));
                }
                // The interval is the node's (mosctl setdecay).
                _ => drop(number()?),
            }
            return Ok(rest);
        }
        // Letters may stand together, as in -lz.
        for letter in text.chars() {
            match letter {
                'h' => self.at(Place::Home)?,
                'b' => self.at(Place::Best)?,
                'F' => self.fallback = true,
                'l' => self.lock = Some(Lock::Unlocked),
                'L' => self.lock = Some(Lock::Locked),
                'k' => self.lock = Some(Lock::Keep),
                'z' => self.argv0 = true,
                'c' => self.advice.habit = Some(Habit::Cpu),
                'i' => self.advice.habit = Some(Habit::Io),
                'n' => self.advice.forget = Some(Forget::Never),
                's' => self.advice.forget = Some(Forget::Slow),
                'f' => self.advice.forget = Some(Forget::Fast),
                _ => return Err(format!("unknown option '-{text}'")),
            }
        }
        Ok(rest)
    }

    fn at(&mut self, place: Place) -> Result<(), String> {
        if self.place.replace(place).is_some() { Err(TWO_PLACES.into()) } else { Ok(()) }
    }
}

/// What belongs to an option: what is attached to it, or the next word.
fn value<'a>(name: &str, attached: &str, rest: &'a [OsString]) -> Result<(String, &'a [OsString]), String> {
    match (attached, rest.split_first()) {
        ("", Some((next, rest))) => Ok((next.to_string_lossy().into_owned(), rest)),
        ("", None) => Err(format!("-{name} needs a value")),
        (attached, _) => Ok((attached.to_owned(), rest)),
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
///
/// # Errors
/// A sentence about what is none.
pub fn nodes(text: &str) -> Result<Vec<NodeId>, String> {
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
