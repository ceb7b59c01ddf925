//! What of a build runs now, as its notes tell it: they are read on while they grow.

use super::notes::{self, Begin, Node, Note, RECURSIVE};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// What is known at a moment.
#[derive(Debug, Default)]
pub(super) struct Running {
    file: Option<File>,
    /// The beginning of a line whose end has not come.
    rest: Vec<u8>,
    begin: Begin,
    done: usize,
    failed: usize,
    /// By their ids, those that wait (on no node) or run; the order is that of their coming.
    under_way: HashMap<String, (u64, Option<u16>, String)>,
    next: u64,
}

impl Running {
    /// That of these notes.
    pub(super) fn of(file: &Path) -> Self {
        Self { file: File::open(file).ok(), ..Self::default() }
    }

    /// Reads what has come.
    pub(super) fn read_on(&mut self) {
        let Some(file) = &mut self.file else { return };
        let _so_far = file.read_to_end(&mut self.rest);
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else { return };
        let lines: Vec<u8> = self.rest.drain(..=end).collect();
        for note in lines.split(|byte| *byte == b'\n').filter_map(notes::read) {
            self.hear(note);
        }
    }

    fn hear(&mut self, note: Note) {
        match note {
            Note::Build(begin) => {
                let (file, rest) = (self.file.take(), std::mem::take(&mut self.rest));
                *self = Self { file, rest, begin, ..Self::default() };
            }
            Note::Asked { id, command, .. } => {
                self.under_way.insert(id, (self.next, None, command));
                self.next += 1;
            }
            Note::Begun { id, why, .. } if why == RECURSIVE => {
                self.under_way.remove(&id);
            }
            Note::Begun { id, node, .. } => {
                if let Some(command) = self.under_way.get_mut(&id) {
                    command.1 = Some(node.unwrap_or(self.begin.me));
                }
            }
            Note::Ended { id, exit, .. } => {
                if self.under_way.remove(&id).is_some() {
                    self.done += 1;
                    self.failed += usize::from(exit != 0);
                }
            }
            Note::Load(_) | Note::Over { .. } => {}
        }
    }

    /// One line, of at most so many characters: how many are done, what runs where, how many wait.
    pub(super) fn line(&self, columns: usize) -> String {
        let mut parts = vec![format!("{} done", self.done)];
        if self.failed > 0 {
            parts[0] += &format!(", {} failed", self.failed);
        }
        let mut nodes: BTreeMap<u16, (usize, u64, &str)> = BTreeMap::new();
        for (order, node, command) in self.under_way.values() {
            let Some(node) = node else { continue };
            let (count, newest, shown) = nodes.entry(*node).or_insert((0, 0, ""));
            *count += 1;
            if *order >= *newest {
                (*newest, *shown) = (*order, command);
            }
        }
        let waiting = self.under_way.values().filter(|(_, node, _)| node.is_none()).count();
        // Of what is left of the line, each node gets as much for the command that it began last.
        let taken: usize = nodes.keys().map(|node| self.name(*node).chars().count() + 11).sum::<usize>() + 40;
        let each = columns.saturating_sub(taken) / nodes.len().max(1);
        for (node, (count, _, command)) in nodes {
            let shown: String =
                command.chars().map(|c| if c.is_control() { ' ' } else { c }).take(each).collect();
            let shown = if each < 8 { "" } else { shown.trim() };
            let colon = if shown.is_empty() { "" } else { ": " };
            let on = if node == self.begin.me { "" } else { "on " };
            parts.push(format!("{count} {on}{}{colon}{shown}", self.name(node)));
        }
        if waiting > 0 {
            parts.push(format!("{waiting} waiting"));
        }
        let line = format!("mpmake: {}", parts.join(" | "));
        line.chars().take(columns).collect()
    }

    fn name(&self, node: u16) -> String {
        if node == self.begin.me {
            return "here".into();
        }
        let known = self.begin.nodes.iter().find(|one| one.node == node);
        known.map_or_else(|| format!("node {node}"), Node::name)
    }
}

#[cfg(test)]
mod tests {
    use super::super::build::tests::NOTES;
    use super::*;

    fn after(lines: usize) -> Running {
        let mut running = Running::default();
        NOTES
            .lines()
            .take(lines)
            .filter_map(|line| notes::read(line.as_bytes()))
            .for_each(|n| running.hear(n));
        running
    }

    #[test]
    fn the_line_says_what_runs_where() {
        assert_eq!(after(3).line(80), "mpmake: 0 done | 1 here: ./configure </script><b>&");
        assert_eq!(after(9).line(80), "mpmake: 1 done | 1 on away: gcc -c a.c | 1 waiting");
        assert_eq!(after(10).line(80), "mpmake: 1 done | 2 on away: gcc -c b.c");
        assert_eq!(after(10).line(50), "mpmake: 1 done | 2 on away");
        assert_eq!(after(20).line(80), "mpmake: 4 done, 1 failed");
        assert_eq!(after(10).line(12), "mpmake: 1 do");
    }

    #[test]
    fn lines_are_read_when_they_are_whole() {
        let path = std::env::temp_dir().join(format!("tern-running-{}", std::process::id()));
        let (first, second) = NOTES.split_at(NOTES.find("configure").unwrap());
        std::fs::write(&path, first).unwrap();
        let mut running = Running::of(&path);
        running.read_on();
        assert_eq!(running.line(80), "mpmake: 0 done");
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut file, second.as_bytes()).unwrap();
        running.read_on();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(running.line(80), "mpmake: 4 done, 1 failed");
    }
}
