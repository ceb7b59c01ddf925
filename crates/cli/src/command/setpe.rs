//! `setpe`: load, check, print or leave the cluster's map, with MOSIX's words.

use crate::tool::Call;
use crate::{Failure, client, help, output};
use clap::{Arg, ArgAction, Command};
use std::ffi::{OsStr, OsString};
use std::io::Read;
use tern_control::{RefusalKind, Reply, Request};
use tern_ids::NodeId;
use tern_node::map::{MOST_TEXT, Map};

/// More bytes than any map has.
const LONGEST_MAP: u64 = MOST_TEXT as u64;

/// The command line. It is read by `read`; this is for people.
pub fn describe() -> Command {
    let flag = |name: &'static str, letter| Arg::new(name).short(letter).action(ArgAction::SetTrue);
    help::command("setpe")
        .about("Set or show the map of the cluster")
        .long_about(
            "Set or show the map of the cluster: which nodes there are, as in /etc/mosix.map. Each line is \
             'ID HOST COUNT', for COUNT nodes from ID on, or 'ID HOST ALIAS'; # begins a comment.\n\nA new \
             map is checked first and then replaces the old one as a whole, or not at all.",
        )
        .override_usage(
            "setpe {-w | -W | -c} [-p ID] [-f FILE]\n       setpe -r [-f FILE]\n       setpe -off",
        )
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(flag("set", 'w').help("Load a map, from standard input if no file is given"))
        .arg(flag("set-too", 'W').help("The same"))
        .arg(flag("check", 'c').help("Only check it"))
        .arg(flag("read", 'r').help("Print the map in use, or save it to FILE"))
        .arg(Arg::new("off").value_name("-off").help("Leave the cluster: forget the map"))
        .arg(Arg::new("file").short('f').value_name("FILE").help("The file; - is standard input or output"))
        .arg(Arg::new("id").short('p').value_name("ID").help("Fail if the map does not have this node in it"))
        .arg(Arg::new("gateways").short('g').value_name("N").help("Accepted as in MOSIX; without effect"))
        .arg(Arg::new("help").long("help").action(ArgAction::SetTrue).help("Print this help"))
        .arg(Arg::new("version").long("version").action(ArgAction::SetTrue).help("Print the version"))
        .after_help(help::closing(
            "  setpe -w -f /etc/mosix.map\n  setpe -c -f new.map && setpe -w -f new.map\n  setpe -r\n  setpe -off",
            "",
        ))
}

/// What the words ask for.
#[derive(Debug, PartialEq, Eq)]
enum Words {
    Help,
    Version,
    Load { file: OsString, node: Option<NodeId>, check_only: bool },
    Show { file: OsString },
    Off,
}

/// `setpe …`.
///
/// # Errors
/// If the map is wrong (exit code 2, nothing changed) or ternd refuses it.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    match read(call.args).map_err(|message| Failure::usage(call.tool, message))? {
        Words::Help => help::print(describe(), call),
        Words::Version => help::print_version(call),
        Words::Load { file, node, check_only } => {
            let text = take(&file)?;
            check(&text, node)?;
            if check_only { Ok(()) } else { done(&Request::SetMap { text }) }
        }
        Words::Show { file } => match client::ask(&Request::GetMap)? {
            Reply::Map(text) if file == "-" => output::print(&text),
            Reply::Map(text) => std::fs::write(&file, text).map_err(|error| at(&file, &error)),
            other => Err(client::unexpected(&other)),
        },
        Words::Off => done(&Request::MapOff),
    }
}

fn done(request: &Request) -> Result<(), Failure> {
    match client::ask(request)? {
        Reply::Done => Ok(()),
        other => Err(client::unexpected(&other)),
    }
}

/// Reads the words: `-off` first, since -o, -f and another -f would read it otherwise.
fn read(words: &[OsString]) -> Result<Words, String> {
    let (mut load, mut check_only, mut show, mut off) = (false, false, false, false);
    let (mut file, mut node) = (None, None);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let text = word.to_str().unwrap_or_default();
        let mut value = |attached: &str| match attached {
            "" => words.next().cloned().ok_or_else(|| format!("{text} needs a value")),
            attached => Ok(attached.into()),
        };
        match text {
            "--help" => return Ok(Words::Help),
            "--version" => return Ok(Words::Version),
            "-off" => off = true,
            "-w" | "-W" => load = true,
            "-c" => check_only = true,
            "-r" => show = true,
            _ if text.starts_with("-f") => file = Some(value(&text[2..])?),
            _ if text.starts_with("-p") => {
                node = Some(super::mosrun::options::node(&value(&text[2..])?.to_string_lossy())?);
            }
            _ if text.starts_with("-g") => drop(value(&text[2..])?),
            _ => return Err(format!("unknown word '{}'", word.to_string_lossy())),
        }
    }
    let file = file.unwrap_or_else(|| "-".into());
    // -c goes with -w, as in MOSIX, where it takes the loading away from it.
    match (load || check_only, show, off) {
        (true, false, false) => Ok(Words::Load { file, node, check_only }),
        (false, true, false) => Ok(Words::Show { file }),
        (false, false, true) => Ok(Words::Off),
        (false, false, false) => Err("nothing to do was given".into()),
        _ => Err("only one of -w, -r and -off can be given".into()),
    }
}

/// The text of a map, from a file or standard input.
fn take(file: &OsStr) -> Result<String, Failure> {
    let mut text = String::new();
    let taken = if file == "-" {
        std::io::stdin().take(LONGEST_MAP + 1).read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|file| file.take(LONGEST_MAP + 1).read_to_string(&mut text))
    };
    let length = taken.map_err(|error| at(file, &error))?;
    if length as u64 > LONGEST_MAP {
        return Err(at(file, &std::io::Error::other("longer than any map")));
    }
    Ok(text)
}

fn at(file: &OsStr, error: &std::io::Error) -> Failure {
    let kind = match error.kind() {
        std::io::ErrorKind::NotFound => RefusalKind::NotFound,
        std::io::ErrorKind::PermissionDenied => RefusalKind::NotAllowed,
        _ => RefusalKind::BadRequest,
    };
    Failure::new(kind, format!("{}: {error}", file.to_string_lossy()))
}

/// Whether this is a map, and has the node in it.
fn check(text: &str, node: Option<NodeId>) -> Result<(), Failure> {
    let wrong = |message: String| Failure::new(RefusalKind::BadRequest, message);
    let map = Map::parse(text).map_err(|error| wrong(error.to_string()))?;
    match node {
        Some(node) if !map.contains(node) => {
            Err(wrong(format!("the map is well formed, but node {node} is not in it")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_line(line: &str) -> Result<Words, String> {
        read(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_words_of_mosix_are_read() {
        let load = |file: &str, node: Option<u16>, check_only| {
            Ok(Words::Load { file: file.into(), node: node.map(NodeId), check_only })
        };
        assert_eq!(read_line("-w -f /etc/mosix.map"), load("/etc/mosix.map", None, false));
        assert_eq!(read_line("-W -p 3 -g 1 -f -"), load("-", Some(3), false));
        assert_eq!(read_line("-w -c -fmap"), load("map", None, true));
        assert_eq!(read_line("-c"), load("-", None, true));
        assert_eq!(read_line("-r -f saved"), Ok(Words::Show { file: "saved".into() }));
        assert_eq!(read_line("-off"), Ok(Words::Off));
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(read_line("").unwrap_err(), "nothing to do was given");
        assert_eq!(read_line("-w -off").unwrap_err(), "only one of -w, -r and -off can be given");
        assert_eq!(read_line("-w -p 0").unwrap_err(), "'0' is not a node: nodes are 1 to 65535");
        assert_eq!(read_line("-w -f").unwrap_err(), "-f needs a value");
        assert_eq!(read_line("-w map").unwrap_err(), "unknown word 'map'");
    }

    #[test]
    fn maps_are_checked_before_anything_is_asked() {
        let map = "1 alpha 2\n7 beta 1\n";
        assert!(check(map, Some(NodeId(2))).is_ok());
        let failure = check(map, Some(NodeId(3))).unwrap_err();
        assert_eq!((failure.code, &*failure.message), (2, "the map is well formed, but node 3 is not in it"));
        assert_eq!(check("1 alpha many\n", None).unwrap_err().code, 2);
    }
}
