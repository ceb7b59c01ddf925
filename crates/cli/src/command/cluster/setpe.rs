//! `setpe`: loads, checks or prints the cluster's map, or leaves the cluster, with MOSIX's options.

use crate::tool::Invocation;
use crate::{Failure, client, help, output};
use clap::{Arg, ArgAction, Command};
use std::ffi::{OsStr, OsString};
use std::io::Read;
use tern_control::{RefusalKind, Reply, Request};
use tern_ids::NodeId;
use tern_node::map::{MAX_TEXT_LEN, Map};

/// The maximum size of a map, in bytes.
const MAX_MAP_SIZE: u64 = MAX_TEXT_LEN as u64;

/// Describes the command line for the help; `parse` parses it.
pub(crate) fn describe() -> Command {
    let flag = |name: &'static str, letter| Arg::new(name).short(letter).action(ArgAction::SetTrue);
    help::command("setpe")
        .about("Set or show the map of the cluster")
        .long_about(
            "Set or show the map of the cluster: its nodes, as in /etc/mosix.map. Each line is 'ID HOST COUNT', \
             for COUNT nodes from ID on, or 'ID HOST ALIAS'; # starts a comment.\n\nA new map is checked \
             first; then it replaces the old map as a whole, or not at all.",
        )
        .override_usage(
            "setpe {-w | -W | -c} [-p ID] [-f FILE]\n       setpe -r [-f FILE]\n       setpe -off",
        )
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(flag("set", 'w').help("Load a map, from standard input if no file is given"))
        .arg(flag("set-too", 'W').help("The same as -w"))
        .arg(flag("check", 'c').help("Only check the map"))
        .arg(flag("read", 'r').help("Print the map in use, or save it to FILE"))
        .arg(Arg::new("off").value_name("-off").help("Leave the cluster: discard the map"))
        .arg(Arg::new("file").short('f').value_name("FILE").help("The file; - is standard input or output"))
        .arg(Arg::new("id").short('p').value_name("ID").help("Fail if the map does not contain this node"))
        .arg(Arg::new("gateways").short('g').value_name("N").help("Accepted as in MOSIX; has no effect"))
        .arg(Arg::new("help").long("help").action(ArgAction::SetTrue).help("Print this help"))
        .arg(Arg::new("version").long("version").action(ArgAction::SetTrue).help("Print the version"))
        .after_help(help::after_help(
            "  setpe -w -f /etc/mosix.map\n  setpe -c -f new.map && setpe -w -f new.map\n  setpe -r\n  setpe -off",
            "",
        ))
}

/// A parsed command line.
#[derive(Debug, PartialEq, Eq)]
enum CommandLine {
    Help,
    Version,
    Load { file: OsString, node: Option<NodeId>, check_only: bool },
    Show { file: OsString },
    Off,
}

/// `setpe …`.
///
/// # Errors
/// If the map is invalid (exit code 2, nothing changed) or ternd refuses it.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    match parse(invocation.args).map_err(|message| Failure::usage(invocation.tool, message))? {
        CommandLine::Help => help::print(describe(), invocation),
        CommandLine::Version => help::print_version(invocation),
        CommandLine::Load { file, node, check_only } => {
            let text = read_map(&file)?;
            check(&text, node)?;
            if check_only { Ok(()) } else { send(&Request::SetMap { text }) }
        }
        CommandLine::Show { file } => match client::request(&Request::GetMap)? {
            Reply::Map(text) if file == "-" => output::print(&text),
            Reply::Map(text) => std::fs::write(&file, text).map_err(|error| file_failure(&file, &error)),
            other => Err(client::unexpected_reply(&other)),
        },
        CommandLine::Off => send(&Request::MapOff),
    }
}

fn send(request: &Request) -> Result<(), Failure> {
    match client::request(request)? {
        Reply::Done => Ok(()),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// Parses the arguments. clap cannot, because it would read `-off` as `-o -f f`.
fn parse(args: &[OsString]) -> Result<CommandLine, String> {
    let (mut load, mut check_only, mut show, mut off) = (false, false, false, false);
    let (mut file, mut node) = (None, None);
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let text = word.to_str().unwrap_or_default();
        let mut value = |attached: &str| match attached {
            "" => words.next().cloned().ok_or_else(|| format!("{text} needs a value")),
            attached => Ok(attached.into()),
        };
        match text {
            "--help" => return Ok(CommandLine::Help),
            "--version" => return Ok(CommandLine::Version),
            "-off" => off = true,
            "-w" | "-W" => load = true,
            "-c" => check_only = true,
            "-r" => show = true,
            _ if text.starts_with("-f") => file = Some(value(&text[2..])?),
            _ if text.starts_with("-p") => {
                node = Some(crate::command::run::mosrun::options::parse_node(
                    &value(&text[2..])?.to_string_lossy(),
                )?);
            }
            _ if text.starts_with("-g") => drop(value(&text[2..])?),
            _ => return Err(format!("unexpected argument '{}'", word.to_string_lossy())),
        }
    }
    let file = file.unwrap_or_else(|| "-".into());
    // -c may accompany -w, as in MOSIX; the map is then only checked.
    match (load || check_only, show, off) {
        (true, false, false) => Ok(CommandLine::Load { file, node, check_only }),
        (false, true, false) => Ok(CommandLine::Show { file }),
        (false, false, true) => Ok(CommandLine::Off),
        (false, false, false) => Err("one of -w, -W, -c, -r and -off is required".into()),
        _ => Err("only one of -w, -r and -off can be given".into()),
    }
}

/// Reads the text of a map from a file or from standard input.
fn read_map(file: &OsStr) -> Result<String, Failure> {
    let mut text = String::new();
    let length = if file == "-" {
        std::io::stdin().take(MAX_MAP_SIZE + 1).read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|file| file.take(MAX_MAP_SIZE + 1).read_to_string(&mut text))
    };
    let length = length.map_err(|error| file_failure(file, &error))?;
    if length as u64 > MAX_MAP_SIZE {
        return Err(file_failure(file, &std::io::Error::other("the file is larger than any map")));
    }
    Ok(text)
}

fn file_failure(file: &OsStr, error: &std::io::Error) -> Failure {
    let kind = match error.kind() {
        std::io::ErrorKind::NotFound => RefusalKind::NotFound,
        std::io::ErrorKind::PermissionDenied => RefusalKind::NotAllowed,
        _ => RefusalKind::BadRequest,
    };
    Failure::new(kind, format!("{}: {error}", file.to_string_lossy()))
}

/// Checks that the text is a map and contains the node.
fn check(text: &str, node: Option<NodeId>) -> Result<(), Failure> {
    let invalid = |message: String| Failure::new(RefusalKind::BadRequest, message);
    let map = Map::parse(text).map_err(|error| invalid(error.to_string()))?;
    match node {
        Some(node) if !map.contains(node) => {
            Err(invalid(format!("the map is valid, but node {node} is not in it")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<CommandLine, String> {
        parse(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn mosix_options_are_parsed() {
        let load = |file: &str, node: Option<u16>, check_only| {
            Ok(CommandLine::Load { file: file.into(), node: node.map(NodeId), check_only })
        };
        assert_eq!(parse_line("-w -f /etc/mosix.map"), load("/etc/mosix.map", None, false));
        assert_eq!(parse_line("-W -p 3 -g 1 -f -"), load("-", Some(3), false));
        assert_eq!(parse_line("-w -c -fmap"), load("map", None, true));
        assert_eq!(parse_line("-c"), load("-", None, true));
        assert_eq!(parse_line("-r -f saved"), Ok(CommandLine::Show { file: "saved".into() }));
        assert_eq!(parse_line("-off"), Ok(CommandLine::Off));
    }

    #[test]
    fn invalid_arguments_are_named() {
        assert_eq!(parse_line("").unwrap_err(), "one of -w, -W, -c, -r and -off is required");
        assert_eq!(parse_line("-w -off").unwrap_err(), "only one of -w, -r and -off can be given");
        assert_eq!(parse_line("-w -p 0").unwrap_err(), "'0' is not a node: nodes are 1 to 65535");
        assert_eq!(parse_line("-w -f").unwrap_err(), "-f needs a value");
        assert_eq!(parse_line("-w map").unwrap_err(), "unexpected argument 'map'");
    }

    #[test]
    fn maps_are_checked_before_ternd_is_asked() {
        let map = "1 alpha 2\n7 beta 1\n";
        assert!(check(map, Some(NodeId(2))).is_ok());
        let failure = check(map, Some(NodeId(3))).unwrap_err();
        assert_eq!((failure.code, &*failure.message), (2, "the map is valid, but node 3 is not in it"));
        assert_eq!(check("1 alpha many\n", None).unwrap_err().code, 2);
    }
}
