//! The current state of a build, from its event log, which is read as it grows.

use super::event_log::{self, BuildEvent, BuildStart, NodeInfo, RECURSIVE_MAKE};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The state of the build.
#[derive(Debug, Default)]
pub(super) struct LiveBuild {
    file: Option<File>,
    /// The start of an incomplete line.
    partial_line: Vec<u8>,
    start: BuildStart,
    done: usize,
    failed: usize,
    /// By id, the commands that wait (no node) or run: order of arrival, node, command line.
    active: HashMap<String, (u64, Option<u16>, String)>,
    next_order: u64,
}

impl LiveBuild {
    /// The state of the build with this event log.
    pub(super) fn open(file: &Path) -> Self {
        Self { file: File::open(file).ok(), ..Self::default() }
    }

    /// Reads events added since the last call.
    pub(super) fn read_on(&mut self) {
        let Some(file) = &mut self.file else { return };
        let _partial = file.read_to_end(&mut self.partial_line);
        let Some(end) = self.partial_line.iter().rposition(|byte| *byte == b'\n') else { return };
        let lines: Vec<u8> = self.partial_line.drain(..=end).collect();
        for event in lines.split(|byte| *byte == b'\n').filter_map(event_log::parse) {
            self.apply(event);
        }
    }

    fn apply(&mut self, event: BuildEvent) {
        match event {
            BuildEvent::Build(start) => {
                let (file, partial_line) = (self.file.take(), std::mem::take(&mut self.partial_line));
                *self = Self { file, partial_line, start, ..Self::default() };
            }
            BuildEvent::Asked { id, command, .. } => {
                self.active.insert(id, (self.next_order, None, command));
                self.next_order += 1;
            }
            BuildEvent::Begun { id, why, .. } if why == RECURSIVE_MAKE => {
                self.active.remove(&id);
            }
            BuildEvent::Begun { id, node, .. } => {
                if let Some(command) = self.active.get_mut(&id) {
                    command.1 = Some(node.unwrap_or(self.start.me));
                }
            }
            BuildEvent::Ended { id, exit, .. } => {
                if self.active.remove(&id).is_some() {
                    self.done += 1;
                    self.failed += usize::from(exit != 0);
                }
            }
            BuildEvent::Load(_) | BuildEvent::Over { .. } => {}
        }
    }

    /// One line of at most `columns` characters: how many commands are done, what runs where, how
    /// many wait.
    pub(super) fn line(&self, columns: usize) -> String {
        let mut parts = vec![format!("{} done", self.done)];
        if self.failed > 0 {
            parts[0] += &format!(", {} failed", self.failed);
        }
        let mut nodes: BTreeMap<u16, (usize, u64, &str)> = BTreeMap::new();
        for (order, node, command) in self.active.values() {
            let Some(node) = node else { continue };
            let (count, newest, shown) = nodes.entry(*node).or_insert((0, 0, ""));
            *count += 1;
            if *order >= *newest {
                (*newest, *shown) = (*order, command);
            }
        }
        let waiting = self.active.values().filter(|(_, node, _)| node.is_none()).count();
        // The rest of the line is divided equally among the nodes. Each part shows the command
        // that was requested last, of those that the node runs.
        let used: usize = nodes.keys().map(|node| self.name(*node).chars().count() + 11).sum::<usize>() + 40;
        let each = columns.saturating_sub(used) / nodes.len().max(1);
        for (node, (count, _, command)) in nodes {
            let shown: String =
                command.chars().map(|c| if c.is_control() { ' ' } else { c }).take(each).collect();
            let shown = if each < 8 { "" } else { shown.trim() };
            let colon = if shown.is_empty() { "" } else { ": " };
            let on = if node == self.start.me { "" } else { "on " };
            parts.push(format!("{count} {on}{}{colon}{shown}", self.name(node)));
        }
        if waiting > 0 {
            parts.push(format!("{waiting} waiting"));
        }
        let line = format!("mpmake: {}", parts.join(" | "));
        line.chars().take(columns).collect()
    }

    fn name(&self, node: u16) -> String {
        if node == self.start.me {
            return "here".into();
        }
        let known = self.start.nodes.iter().find(|one| one.node == node);
        known.map_or_else(|| format!("node {node}"), NodeInfo::name)
    }
}

#[cfg(test)]
mod tests {
    use super::super::build::tests::EVENTS;
    use super::*;

    fn after(lines: usize) -> LiveBuild {
        let mut live = LiveBuild::default();
        EVENTS
            .lines()
            .take(lines)
            .filter_map(|line| event_log::parse(line.as_bytes()))
            .for_each(|n| live.apply(n));
        live
    }

    #[test]
    fn line_shows_what_runs_where() {
        assert_eq!(after(3).line(80), "mpmake: 0 done | 1 here: ./configure </script><b>&");
        assert_eq!(after(9).line(80), "mpmake: 1 done | 1 on away: gcc -c a.c | 1 waiting");
        assert_eq!(after(10).line(80), "mpmake: 1 done | 2 on away: gcc -c b.c");
        assert_eq!(after(10).line(50), "mpmake: 1 done | 2 on away");
        assert_eq!(after(20).line(80), "mpmake: 4 done, 1 failed");
        assert_eq!(after(10).line(12), "mpmake: 1 do");
    }

    #[test]
    fn partial_lines_are_not_applied() {
        let path = std::env::temp_dir().join(format!("tern-running-{}", std::process::id()));
        let (first, second) = EVENTS.split_at(EVENTS.find("configure").unwrap());
        std::fs::write(&path, first).unwrap();
        let mut live = LiveBuild::open(&path);
        live.read_on();
        assert_eq!(live.line(80), "mpmake: 0 done");
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut file, second.as_bytes()).unwrap();
        live.read_on();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(live.line(80), "mpmake: 4 done, 1 failed");
    }
}
