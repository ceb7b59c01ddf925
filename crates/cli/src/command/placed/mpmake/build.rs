//! A build, as reconstructed from its event log: its commands, where and when each ran, and on
//! which lane of its node.

use super::event_log::{self, BuildEvent, BuildStart, LoadSample, NodeInfo, RECURSIVE_MAKE};
use super::recipe::{self, Kind};
use std::collections::{BTreeMap, HashMap};

/// One command.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Command {
    /// The start of its command line.
    pub(super) text: String,
    /// The kind of work, judged by its command line.
    pub(super) kind: Kind,
    /// When it was to be placed, in microseconds since the start of the build.
    pub(super) requested_at: u64,
    /// When it started, likewise; `None` if it waits or never ran.
    pub(super) started_at: Option<u64>,
    /// When it ended, likewise; `None` if it runs or its end was not recorded.
    pub(super) ended_at: Option<u64>,
    /// The node where it ran last.
    pub(super) node: u16,
    /// Why it ran there.
    pub(super) why: String,
    /// The exit code as in a shell.
    pub(super) exit: u8,
    /// CPU time in microseconds, if known.
    pub(super) cpu: Option<u64>,
    /// The lane: the lowest row of its node in the chart that was free at its start.
    pub(super) lane: usize,
}

impl Command {
    /// The microseconds that it ran; 0 if unknown.
    pub(super) fn run_time(&self) -> u64 {
        self.started_at.zip(self.ended_at).map_or(0, |(start, end)| end.saturating_sub(start))
    }
}

/// A build, finished or running.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Build {
    pub(super) start: BuildStart,
    /// Microseconds from its start to its end or to the last event.
    pub(super) elapsed: u64,
    /// make's exit code, if it has ended.
    pub(super) exit: Option<u8>,
    /// In the order in which they were requested.
    pub(super) commands: Vec<Command>,
    /// The number of recursive makes, which are not in `commands`.
    pub(super) makes: usize,
    /// In order of time; their times are relative to the start of the build.
    pub(super) loads: Vec<LoadSample>,
}

impl Build {
    /// Reads an event log. If the file has several builds, the last is read; without a start event
    /// all commands belong to one build.
    pub(super) fn read(text: &[u8]) -> Self {
        let all: Vec<BuildEvent> = text.split(|byte| *byte == b'\n').filter_map(event_log::parse).collect();
        let from = all.iter().rposition(|event| matches!(event, BuildEvent::Build(_))).unwrap_or(0);
        let mut build = Self::default();
        let times = all[from..].iter().map(time);
        let start = times.clone().min().unwrap_or(0);
        build.start.at = start;
        build.elapsed = times.max().unwrap_or(0) - start;
        let (mut indices, mut makes) = (HashMap::new(), Vec::new());
        let since = |time: u64| time.saturating_sub(start);
        for event in all.into_iter().skip(from) {
            match event {
                BuildEvent::Build(start) => build.start = start,
                BuildEvent::Asked { at: time, id, command } => {
                    indices.insert(id, build.commands.len());
                    let kind = recipe::kind(&command);
                    let requested_at = since(time);
                    build.commands.push(Command { text: command, kind, requested_at, ..Command::default() });
                }
                BuildEvent::Begun { at: time, id, node, why } => {
                    let Some(index) = indices.get(&id) else { continue };
                    let me = build.start.me;
                    let command = &mut build.commands[*index];
                    if why == RECURSIVE_MAKE {
                        makes.push(*index);
                    }
                    (command.started_at, command.node, command.why) =
                        (Some(since(time)), node.unwrap_or(me), why);
                }
                BuildEvent::Ended { at: time, id, exit, cpu } => {
                    let Some(index) = indices.get(&id) else { continue };
                    let command = &mut build.commands[*index];
                    (command.ended_at, command.exit, command.cpu) = (Some(since(time)), exit, cpu);
                }
                BuildEvent::Load(load) => build.loads.push(LoadSample { at: since(load.at), ..load }),
                BuildEvent::Over { exit, .. } => build.exit = Some(exit),
            }
        }
        build.makes = makes.len();
        for index in makes.into_iter().rev() {
            build.commands.remove(index);
        }
        build.assign_lanes();
        build
    }

    /// Gives each command the lowest lane of its node that is free when it starts.
    fn assign_lanes(&mut self) {
        let mut order: Vec<usize> = (0..self.commands.len()).collect();
        order.sort_by_key(|index| self.commands[*index].started_at);
        let mut lanes: BTreeMap<u16, Vec<u64>> = BTreeMap::new();
        for index in order {
            let command = &mut self.commands[index];
            let Some(start) = command.started_at else { continue };
            let free = lanes.entry(command.node).or_default();
            let lane = free.iter().position(|until| *until <= start).unwrap_or_else(|| {
                free.push(0);
                free.len() - 1
            });
            free[lane] = command.ended_at.unwrap_or(u64::MAX);
            command.lane = lane;
        }
    }

    /// The nodes recorded at the start of the build and those that ran a command, by number.
    pub(super) fn nodes(&self) -> Vec<NodeInfo> {
        let mut nodes: BTreeMap<u16, NodeInfo> =
            self.start.nodes.iter().map(|node| (node.node, node.clone())).collect();
        for command in self.commands.iter().filter(|command| command.started_at.is_some()) {
            let unknown = || NodeInfo { node: command.node, ..NodeInfo::default() };
            nodes.entry(command.node).or_insert_with(unknown);
        }
        nodes.into_values().collect()
    }
}

fn time(event: &BuildEvent) -> u64 {
    match event {
        BuildEvent::Build(start) => start.at,
        BuildEvent::Load(load) => load.at,
        BuildEvent::Asked { at, .. }
        | BuildEvent::Begun { at, .. }
        | BuildEvent::Ended { at, .. }
        | BuildEvent::Over { at, .. } => *at,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Two nodes and four commands in ten seconds: one runs alone at the start, two run together,
    /// one fails at the end; a fifth entry is a recursive make.
    pub(in super::super) const EVENTS: &str = r#"{"event":"build","at":1000000,"command":"mpmake -j4 all","jobs":4,"me":1,"nodes":[{"node":1,"host":"home","cpus":1.0,"speed":10000},{"node":2,"host":"away","cpus":2.0,"speed":10000}]}
{"event":"asked","at":1000000,"id":"1-1","command":"./configure </script><b>&"}
{"event":"begun","at":1000000,"id":"1-1","node":null,"why":"this node was idle"}
{"event":"ended","at":3000000,"id":"1-1","exit":0,"cpu":1500000}
{"event":"asked","at":3000000,"id":"2-1","command":"make -C sub"}
{"event":"begun","at":3000000,"id":"2-1","node":null,"why":"a recursive make"}
{"event":"asked","at":3000000,"id":"3-1","command":"gcc -c a.c"}
{"event":"begun","at":3500000,"id":"3-1","node":2,"why":"least loaded"}
{"event":"asked","at":3000000,"id":"4-1","command":"gcc -c b.c"}
{"event":"begun","at":4000000,"id":"4-1","node":2,"why":"first with free capacity"}
{"event":"ended","at":7000000,"id":"3-1","exit":0,"cpu":3000000}
{"event":"ended","at":8000000,"id":"4-1","exit":0,"cpu":3500000}
{"event":"asked","at":8000000,"id":"5-1","command":"gcc -o all a.o b.o"}
not of ours
{"event":"begun","at":8000000,"id":"5-1","node":null,"why":"this node was idle"}
{"event":"ended","at":11000000,"id":"5-1","exit":1,"cpu":2000000}
{"event":"over","at":11000000,"exit":2}
"#;

    #[test]
    fn events_become_commands_on_lanes() {
        let build = Build::read(EVENTS.as_bytes());
        assert_eq!((build.elapsed, build.exit, build.makes), (10_000_000, Some(2), 1));
        let seen: Vec<_> = build
            .commands
            .iter()
            .map(|c| (c.requested_at, c.started_at, c.ended_at, c.node, c.lane))
            .collect();
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
    fn unfinished_build_has_what_is_known() {
        let half: Vec<_> = EVENTS.lines().take(10).collect();
        let build = Build::read(half.join("\n").as_bytes());
        assert_eq!((build.exit, build.commands.len(), build.commands[1].ended_at), (None, 3, None));
        assert_eq!(build.commands[2].lane, 1, "the lane of a running command is occupied");
        assert_eq!(Build::read(b""), Build::default());
    }
}
