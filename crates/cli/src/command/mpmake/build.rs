//! A build, as its notes tell it: its commands, where and when each ran, and on which lane of its node.

use super::notes::{self, Begin, Load, Node, Note, RECURSIVE};
use super::recipe::{self, Kind};
use std::collections::{BTreeMap, HashMap};

/// One command.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Command {
    /// The beginning of its command line.
    pub(super) text: String,
    /// What it does.
    pub(super) kind: Kind,
    /// Microseconds from the build's begin to when it was to be placed.
    pub(super) asked: u64,
    /// To when it ran; none: it waits, or never did.
    pub(super) begun: Option<u64>,
    /// To its end; none: it runs, or nobody has noted it.
    pub(super) ended: Option<u64>,
    /// The node that it ran on last.
    pub(super) node: u16,
    /// Why there.
    pub(super) why: String,
    /// As a shell has it.
    pub(super) exit: u8,
    /// Microseconds of CPU time, if known.
    pub(super) cpu: Option<u64>,
    /// Of the lanes of its node, the first that was free.
    pub(super) lane: usize,
}

impl Command {
    /// Microseconds that it ran; 0 if nobody knows.
    pub(super) fn ran(&self) -> u64 {
        self.begun.zip(self.ended).map_or(0, |(begun, ended)| ended.saturating_sub(begun))
    }
}

/// A build, over or under way.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Build {
    pub(super) begin: Begin,
    /// Microseconds from its begin to its end, or to the last that is known of it.
    pub(super) elapsed: u64,
    /// make's status, if it is over.
    pub(super) exit: Option<u8>,
    /// In the order in which they were asked for.
    pub(super) commands: Vec<Command>,
    /// Recursive makes, which are no commands.
    pub(super) makes: usize,
    /// In the order of time, which is that of the build.
    pub(super) loads: Vec<Load>,
}

impl Build {
    /// Reads notes. Of several builds in one file it is the last; without any begin, all commands are of one.
    pub(super) fn read(text: &[u8]) -> Self {
        let all: Vec<Note> = text.split(|byte| *byte == b'\n').filter_map(notes::read).collect();
        let from = all.iter().rposition(|note| matches!(note, Note::Build(_))).unwrap_or(0);
        let mut build = Self::default();
        let times = all[from..].iter().map(time);
        let start = times.clone().min().unwrap_or(0);
        build.begin.at = start;
        build.elapsed = times.max().unwrap_or(0) - start;
        let (mut at, mut makes) = (HashMap::new(), Vec::new());
        let since = |time: u64| time.saturating_sub(start);
        for note in all.into_iter().skip(from) {
            match note {
                Note::Build(begin) => build.begin = begin,
                Note::Asked { at: time, id, command } => {
                    at.insert(id, build.commands.len());
                    let kind = recipe::kind(&command);
                    let asked = since(time);
                    build.commands.push(Command { text: command, kind, asked, ..Command::default() });
                }
                Note::Begun { at: time, id, node, why } => {
                    let Some(at) = at.get(&id) else { continue };
                    let me = build.begin.me;
                    let command = &mut build.commands[*at];
                    if why == RECURSIVE {
                        makes.push(*at);
                    }
                    (command.begun, command.node, command.why) = (Some(since(time)), node.unwrap_or(me), why);
                }
                Note::Ended { at: time, id, exit, cpu } => {
                    let Some(at) = at.get(&id) else { continue };
                    let command = &mut build.commands[*at];
                    (command.ended, command.exit, command.cpu) = (Some(since(time)), exit, cpu);
                }
                Note::Load(load) => build.loads.push(Load { at: since(load.at), ..load }),
                Note::Over { exit, .. } => build.exit = Some(exit),
            }
        }
        build.makes = makes.len();
        for at in makes.into_iter().rev() {
            build.commands.remove(at);
        }
        build.give_lanes();
        build
    }

    /// Each gets the first lane of its node on which nothing runs at its begin.
    fn give_lanes(&mut self) {
        let mut order: Vec<usize> = (0..self.commands.len()).collect();
        order.sort_by_key(|at| self.commands[*at].begun);
        let mut lanes: BTreeMap<u16, Vec<u64>> = BTreeMap::new();
        for at in order {
            let command = &mut self.commands[at];
            let Some(begun) = command.begun else { continue };
            let free = lanes.entry(command.node).or_default();
            let lane = free.iter().position(|until| *until <= begun).unwrap_or_else(|| {
                free.push(0);
                free.len() - 1
            });
            free[lane] = command.ended.unwrap_or(u64::MAX);
            command.lane = lane;
        }
    }

    /// The nodes that are known of the build, and those that ran something of it, by number.
    pub(super) fn nodes(&self) -> Vec<Node> {
        let mut nodes: BTreeMap<u16, Node> =
            self.begin.nodes.iter().map(|node| (node.node, node.clone())).collect();
        for command in self.commands.iter().filter(|command| command.begun.is_some()) {
            let unknown = || Node { node: command.node, ..Node::default() };
            nodes.entry(command.node).or_insert_with(unknown);
        }
        nodes.into_values().collect()
    }
}

fn time(note: &Note) -> u64 {
    match note {
        Note::Build(begin) => begin.at,
        Note::Load(load) => load.at,
        Note::Asked { at, .. } | Note::Begun { at, .. } | Note::Ended { at, .. } | Note::Over { at, .. } => {
            *at
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Two nodes and four commands in ten seconds: one is alone at the begin, two run together, one fails at the end; one is a make.
    pub(in super::super) const NOTES: &str = r#"{"event":"build","at":1000000,"command":"mpmake -j4 all","jobs":4,"me":1,"nodes":[{"node":1,"host":"home","cpus":1.0,"speed":10000},{"node":2,"host":"away","cpus":2.0,"speed":10000}]}
{"event":"asked","at":1000000,"id":"1-1","command":"./configure </script><b>&"}
{"event":"begun","at":1000000,"id":"1-1","node":null,"why":"this node had nothing to do"}
{"event":"ended","at":3000000,"id":"1-1","exit":0,"cpu":1500000}
{"event":"asked","at":3000000,"id":"2-1","command":"make -C sub"}
{"event":"begun","at":3000000,"id":"2-1","node":null,"why":"a recursive make"}
{"event":"asked","at":3000000,"id":"3-1","command":"gcc -c a.c"}
{"event":"begun","at":3500000,"id":"3-1","node":2,"why":"least loaded"}
{"event":"asked","at":3000000,"id":"4-1","command":"gcc -c b.c"}
{"event":"begun","at":4000000,"id":"4-1","node":2,"why":"first to have room"}
{"event":"ended","at":7000000,"id":"3-1","exit":0,"cpu":3000000}
{"event":"ended","at":8000000,"id":"4-1","exit":0,"cpu":3500000}
{"event":"asked","at":8000000,"id":"5-1","command":"gcc -o all a.o b.o"}
not of ours
{"event":"begun","at":8000000,"id":"5-1","node":null,"why":"this node had nothing to do"}
{"event":"ended","at":11000000,"id":"5-1","exit":1,"cpu":2000000}
{"event":"over","at":11000000,"exit":2}
"#;

    #[test]
    fn notes_become_commands_on_lanes() {
        let build = Build::read(NOTES.as_bytes());
        assert_eq!((build.elapsed, build.exit, build.makes), (10_000_000, Some(2), 1));
        let seen: Vec<_> =
            build.commands.iter().map(|c| (c.asked, c.begun, c.ended, c.node, c.lane)).collect();
        let s = 1_000_000;
        let expected = [
            (0, Some(0), Some(2 * s), 1, 0),
            (2 * s, Some(5 * s / 2), Some(6 * s), 2, 0),
            (2 * s, Some(3 * s), Some(7 * s), 2, 1),
            (7 * s, Some(7 * s), Some(10 * s), 1, 0),
        ];
        assert_eq!(seen, expected);
        assert_eq!(build.commands[3].kind, Kind::Link);
        assert_eq!(build.nodes().len(), 2);
    }

    #[test]
    fn of_what_has_not_ended_that_is_known() {
        let half: Vec<_> = NOTES.lines().take(10).collect();
        let build = Build::read(half.join("\n").as_bytes());
        assert_eq!((build.exit, build.commands.len(), build.commands[1].ended), (None, 3, None));
        assert_eq!(build.commands[2].lane, 1, "the lane of who runs is not free");
        assert_eq!(Build::read(b""), Build::default());
    }
}
