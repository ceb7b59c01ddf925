//! Handles keys while a prompt is shown, and evaluates the answer.

use super::bars;
use crate::event::{Effect, Query};
use crate::model::Model;
use crate::model::prompt::{MAX_ANSWER_LEN, Prompt, PromptKind};
use crate::request::TopError;
use ratatui::crossterm::event::KeyCode;
use signal_hook::consts::signal;
use tern_control::Destination;
use tern_ids::NodeId;

/// Handles a key.
pub(super) fn handle_key(model: &mut Model, code: KeyCode) -> Vec<Effect> {
    let Some(prompt) = &mut model.prompt else { return Vec::new() };
    match code {
        KeyCode::Esc => model.prompt = None,
        // With nothing left to delete, Backspace closes the prompt.
        KeyCode::Backspace if prompt.typed.pop().is_none() => model.prompt = None,
        KeyCode::Char(letter) if prompt.typed.len() < MAX_ANSWER_LEN && is_allowed(&prompt.kind, letter) => {
            prompt.typed.push(letter);
            return open_if_unambiguous(model);
        }
        KeyCode::Enter => {
            if let Some(prompt) = model.prompt.take() {
                return submit(model, prompt).unwrap_or_else(|error| {
                    model.show_error(&error);
                    Vec::new()
                });
            }
        }
        _ => {}
    }
    Vec::new()
}

fn is_allowed(kind: &PromptKind, letter: char) -> bool {
    match kind {
        PromptKind::Node => letter.is_ascii_digit(),
        PromptKind::Move { .. } | PromptKind::Signal { .. } => letter.is_ascii_graphic(),
    }
}

/// Opens a node as soon as the typed number can belong to no other.
fn open_if_unambiguous(model: &mut Model) -> Vec<Effect> {
    let Some(Prompt { kind: PromptKind::Node, typed }) = &model.prompt else { return Vec::new() };
    let mut matching = model.nodes().iter().filter(|node| node.node.to_string().starts_with(typed.as_str()));
    match (matching.next(), matching.next()) {
        (Some(node), None) if node.node.to_string() == *typed => {
            let node = node.node;
            model.prompt = None;
            bars::open_node(model, node)
        }
        _ => Vec::new(),
    }
}

fn submit(model: &mut Model, prompt: Prompt) -> Result<Vec<Effect>, TopError> {
    let typed = prompt.typed.trim();
    match prompt.kind {
        PromptKind::Node if typed.is_empty() => Ok(Vec::new()),
        PromptKind::Node => {
            let known = typed.parse().ok().map(NodeId).filter(|node| model.node(*node).is_some());
            known.map(|node| bars::open_node(model, node)).ok_or_else(|| unknown_node(typed))
        }
        PromptKind::Move { .. } if typed.is_empty() => Ok(Vec::new()),
        PromptKind::Move { pid, command } => {
            let to = destination(model, typed)?;
            model.show_message(format!("moving {pid} {command} to {typed}"));
            Ok(vec![Effect::Query(Query::Move { pid, command, to })])
        }
        PromptKind::Signal { pid, command } => {
            let signal = signal_named(typed).ok_or_else(|| {
                TopError::new(2, format!("unknown signal {typed}")).hint("a number, or a name such as TERM")
            })?;
            Ok(vec![Effect::Signal { pid, command, signal }])
        }
    }
}

fn unknown_node(typed: &str) -> TopError {
    TopError::new(1, format!("no node {typed} in the cluster")).hint("tern status, to list the nodes")
}

fn destination(model: &Model, typed: &str) -> Result<Destination, TopError> {
    let by_name = || model.nodes().iter().find(|node| node.host == typed).map(|node| node.node);
    match typed {
        "home" => Ok(Destination::Home),
        "balance" => Ok(Destination::Balance),
        // ternd refuses an unknown number with a better message.
        _ => match typed.parse() {
            Ok(number) => Ok(Destination::Node(NodeId(number))),
            Err(_) => by_name().map(Destination::Node).ok_or_else(|| unknown_node(typed)),
        },
    }
}

/// The signal with this number or name; `SIGTERM` for an empty text.
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
    fn signals_are_parsed_by_number_and_name() {
        let read = ["", "9", "kill", "SIGHUP", "0", "-1", "fly"].map(signal_named);
        assert_eq!(read, [Some(15), Some(9), Some(9), Some(1), None, None, None]);
    }
}
