//! What is typed, and what it means.

use super::bars;
use crate::ask::Trouble;
use crate::event::{Effect, Question};
use crate::model::Model;
use crate::model::prompt::{About, MOST, Prompt};
use ratatui::crossterm::event::KeyCode;
use signal_hook::consts::signal;
use tern_control::Destination;
use tern_ids::NodeId;

/// A key was pressed.
pub(super) fn pressed(model: &mut Model, code: KeyCode) -> Vec<Effect> {
    let Some(prompt) = &mut model.prompt else { return Vec::new() };
    match code {
        KeyCode::Esc => model.prompt = None,
        // Nothing is left to be taken back but the question.
        KeyCode::Backspace if prompt.typed.pop().is_none() => model.prompt = None,
        KeyCode::Char(letter) if prompt.typed.len() < MOST && is_answer(&prompt.about, letter) => {
            prompt.typed.push(letter);
            return only_one(model);
        }
        KeyCode::Enter => {
            if let Some(prompt) = model.prompt.take() {
                return said(model, prompt).unwrap_or_else(|trouble| {
                    model.complain(&trouble);
                    Vec::new()
                });
            }
        }
        _ => {}
    }
    Vec::new()
}

fn is_answer(about: &About, letter: char) -> bool {
    match about {
        About::Node => letter.is_ascii_digit(),
        About::Move { .. } | About::Signal { .. } => letter.is_ascii_graphic(),
    }
}

/// Goes to a node as soon as what is typed can be no other's number.
fn only_one(model: &mut Model) -> Vec<Effect> {
    let Some(Prompt { about: About::Node, typed }) = &model.prompt else { return Vec::new() };
    let mut begun = model.nodes().iter().filter(|node| node.node.to_string().starts_with(typed.as_str()));
    match (begun.next(), begun.next()) {
        (Some(node), None) if node.node.to_string() == *typed => {
            let node = node.node;
            model.prompt = None;
            bars::open(model, node)
        }
        _ => Vec::new(),
    }
}

fn said(model: &mut Model, prompt: Prompt) -> Result<Vec<Effect>, Trouble> {
    let typed = prompt.typed.trim();
    match prompt.about {
        About::Node if typed.is_empty() => Ok(Vec::new()),
        About::Node => {
            let known = typed.parse().ok().map(NodeId).filter(|node| model.node(*node).is_some());
            known.map(|node| bars::open(model, node)).ok_or_else(|| no_node(typed))
        }
        About::Move { .. } if typed.is_empty() => Ok(Vec::new()),
        About::Move { pid, command } => {
            let to = destination(model, typed)?;
            model.say(format!("moving {pid} {command} to {typed}"));
            Ok(vec![Effect::Ask(Question::Move { pid, command, to })])
        }
        About::Signal { pid, command } => {
            let signal = signal_named(typed).ok_or_else(|| {
                Trouble::new(2, format!("there is no signal {typed}"))
                    .hint("a number, or a name such as TERM")
            })?;
            Ok(vec![Effect::Signal { pid, command, signal }])
        }
    }
}

fn no_node(typed: &str) -> Trouble {
    Trouble::new(1, format!("no node {typed} in the cluster"))
}

fn destination(model: &Model, typed: &str) -> Result<Destination, Trouble> {
    let by_name = || model.nodes().iter().find(|node| node.host == typed).map(|node| node.node);
    match typed {
        "home" => Ok(Destination::Home),
        "balance" => Ok(Destination::Balance),
        // A number that is in no map the daemon refuses, in better words.
        _ => match typed.parse() {
            Ok(number) => Ok(Destination::Node(NodeId(number))),
            Err(_) => by_name().map(Destination::Node).ok_or_else(|| no_node(typed)),
        },
    }
}

/// The signal of a number or name; `TERM` of nothing.
fn signal_named(typed: &str) -> Option<i32> {
    const NAMES: [(&str, i32); 12] = [
        ("HUP", signal::SIGHUP),
        ("INT", signal::SIGINT),
        ("QUIT", signal::SIGQUIT),
        ("ABRT", signal::SIGABRT),
        ("KILL", signal::SIGKILL),
        ("USR1", signal::SIGUSR1),
        ("USR2", signal::SIGUSR2),
        ("ALRM", signal::SIGALRM),
        ("TERM", signal::SIGTERM),
        ("CONT", signal::SIGCONT),
        ("STOP", signal::SIGSTOP),
        ("TSTP", signal::SIGTSTP),
    ];
    if typed.is_empty() {
        return Some(signal::SIGTERM);
    }
    if let Ok(number) = typed.parse::<i32>() {
        return NAMES.iter().map(|(_, signal)| *signal).find(|signal| *signal == number);
    }
    let upper = typed.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, signal)| *signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_numbers_and_names() {
        let read = ["", "9", "kill", "SIGHUP", "0", "-1", "fly"].map(signal_named);
        assert_eq!(read, [Some(15), Some(9), Some(9), Some(1), None, None, None]);
    }
}
