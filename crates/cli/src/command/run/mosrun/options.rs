//! The command line of mosrun in MOSIX's syntax, which clap cannot parse: `-3` is a node, `-j1-3,5`
//! a list of nodes. Options end at the first argument that is not an option, or at `--`; the rest
//! belongs to the program.

use super::replace_process::argv_of;
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, Hasher};
use tern_control::{Advice, DecayClass, Lock, Workload};
use tern_ids::NodeId;

/// A parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CommandLine<'a> {
    /// `--help`.
    Help,
    /// `--version`.
    Version,
    /// Run a program.
    Launch(Launch<'a>),
}

/// A program to run, and how.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Launch<'a> {
    /// Where it starts.
    pub(crate) target: LaunchTarget,
    /// `-F`: run it at home if the node is unavailable.
    pub(crate) fallback: bool,
    /// Whether the cluster may move it afterwards.
    pub(crate) lock: Lock,
    /// Neither it nor its children ever migrate (`nomig`).
    pub(crate) never_migrates: bool,
    /// Hints to the balancer.
    pub(crate) advice: Advice,
    /// The program file.
    pub(crate) program: &'a OsStr,
    /// Its argv, argv\[0\] included.
    pub(crate) arguments: Vec<&'a OsStr>,
}

/// Where a program starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LaunchTarget {
    /// Here by default; ternd must register it, so that it can be moved.
    Here,
    /// Here, locked.
    HereLocked,
    /// On the best node.
    Best,
    /// On the first of these nodes that accepts it.
    Nodes(Vec<NodeId>),
}

/// Parses the arguments of mosrun.
///
/// # Errors
/// A sentence about the first argument that is invalid.
pub(crate) fn parse(args: &[OsString]) -> Result<CommandLine<'_>, String> {
    let mut parsed = Parsed::default();
    let mut rest = args;
    while let Some((word, after)) = rest.split_first() {
        let Some(text) = word.to_str().filter(|text| text.len() > 1 && text.starts_with('-')) else {
            break;
        };
        rest = after;
        match text {
            "--" => break,
            "--help" => return Ok(CommandLine::Help),
            "--version" => return Ok(CommandLine::Version),
            _ => rest = parsed.parse_option(&text[1..], rest)?,
        }
    }
    let Some((program, args)) = rest.split_first() else {
        return Err("no program was given".into());
    };
    let arguments = if parsed.argv0 && !args.is_empty() {
        args.iter().map(OsString::as_os_str).collect()
    } else {
        argv_of(program, args)
    };
    // A named node implies a lock. Without one the program is balanced, unless the caller of mosrun
    // is locked (MOSIX-2; openMosix also locked a plain `mosrun`).
    let lock = parsed.lock.unwrap_or(match parsed.target {
        None | Some(LaunchTarget::Here | LaunchTarget::Best) => Lock::Keep,
        Some(LaunchTarget::HereLocked | LaunchTarget::Nodes(_)) => Lock::Locked,
    });
    let (target, fallback, advice) =
        (parsed.target.unwrap_or(LaunchTarget::Here), parsed.fallback, parsed.advice);
    Ok(CommandLine::Launch(Launch {
        target,
        fallback,
        lock,
        never_migrates: false,
        advice,
        program,
        arguments,
    }))
}

/// The options parsed so far.
#[derive(Default)]
struct Parsed {
    target: Option<LaunchTarget>,
    fallback: bool,
    lock: Option<Lock>,
    argv0: bool,
    advice: Advice,
}

impl Parsed {
    /// Parses one option after its dash, and its value from the next argument if it takes one.
    /// Returns the remaining arguments.
    fn parse_option<'a>(&mut self, text: &str, rest: &'a [OsString]) -> Result<&'a [OsString], String> {
        if text.starts_with(|c: char| c.is_ascii_digit()) {
            self.set_target(LaunchTarget::Nodes(vec![parse_node(text)?]))?;
            return Ok(rest);
        }
        if let Some(name) = text.strip_prefix('-') {
            let (list, rest) = option_value(name, "", rest)?;
            match name {
                "only" => self.advice.only = Some(parse_nodes(&list)?),
                "not" => self.advice.not = parse_nodes(&list)?,
                _ => return Err(format!("unknown option '-{text}'")),
            }
            return Ok(rest);
        }
        if let Some(attached) = text.strip_prefix(['j', 't', 'd', 'm', 'J']) {
            let name = &text[..1];
            let (value, rest) = option_value(name, attached, rest)?;
            let number =
                || value.parse::<u32>().map_err(|_e| format!("'{value}' after -{name} is not a number"));
            match name {
                "j" => self.set_target(LaunchTarget::Nodes(shuffled(parse_nodes(&value)?)))?,
                "m" => self.advice.memory = Some(u64::from(number()?) << 20),
                "J" => self.advice.job = Some(number()?),
                "d" => {
                    let kept = number()?.try_into().ok().filter(|kept| *kept <= 1000);
                    self.advice.decay =
                        Some(DecayClass::Keep(kept.ok_or("-d needs a number from 0 to 1000")?));
                }
                // -t is accepted and ignored: the interval is set per node (mosctl setdecay).
                _ => drop(number()?),
            }
            return Ok(rest);
        }
        // Letters without values may be combined, as in -lz.
        for letter in text.chars() {
            match letter {
                'h' => self.set_target(LaunchTarget::HereLocked)?,
                'b' => self.set_target(LaunchTarget::Best)?,
                'F' => self.fallback = true,
                'l' => self.lock = Some(Lock::Unlocked),
                'L' => self.lock = Some(Lock::Locked),
                'k' => self.lock = Some(Lock::Keep),
                'z' => self.argv0 = true,
                'c' => self.advice.workload = Some(Workload::Cpu),
                'i' => self.advice.workload = Some(Workload::Io),
                'n' => self.advice.decay = Some(DecayClass::Never),
                's' => self.advice.decay = Some(DecayClass::Slow),
                'f' => self.advice.decay = Some(DecayClass::Fast),
                _ => return Err(format!("unknown option '-{text}'")),
            }
        }
        Ok(rest)
    }

    fn set_target(&mut self, target: LaunchTarget) -> Result<(), String> {
        if self.target.replace(target).is_some() { Err(CONFLICTING_TARGETS.into()) } else { Ok(()) }
    }
}

/// The value of an option: the attached text, or the next argument.
fn option_value<'a>(
    name: &str,
    attached: &str,
    rest: &'a [OsString],
) -> Result<(String, &'a [OsString]), String> {
    match (attached, rest.split_first()) {
        ("", Some((next, rest))) => Ok((next.to_string_lossy().into_owned(), rest)),
        ("", None) => Err(format!("-{name} needs a value")),
        (attached, _) => Ok((attached.to_owned(), rest)),
    }
}

const CONFLICTING_TARGETS: &str = "only one of -h, -ID, -j and -b can be given";

/// Parses a node's number.
///
/// # Errors
/// A sentence that names the invalid text.
pub(crate) fn parse_node(text: &str) -> Result<NodeId, String> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && *number > 0);
    number.map(NodeId).ok_or_else(|| format!("'{text}' is not a node: nodes are 1 to 65535"))
}

/// Parses a list of nodes such as `1-3,5`; returns each node once, in ascending order.
///
/// # Errors
/// A sentence that names the invalid part.
pub(crate) fn parse_nodes(text: &str) -> Result<Vec<NodeId>, String> {
    let mut nodes = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (NodeId(first), NodeId(last)) = (parse_node(first)?, parse_node(last)?);
        if first > last {
            return Err(format!("the range '{part}' is descending"));
        }
        nodes.extend((first..=last).map(NodeId));
        // Duplicates are removed after each part, so that many overlapping ranges need little
        // memory.
        nodes.sort_unstable();
        nodes.dedup();
    }
    Ok(nodes)
}

/// Shuffles the nodes (Fisher–Yates). The standard library's hash keys are random enough to spread
/// load.
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
