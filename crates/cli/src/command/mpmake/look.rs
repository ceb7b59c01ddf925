//! A look at everything, once a second while a build runs that is to be reported: how busy the nodes are, what this node's links and its
//! server of files do.

use super::notes::{self, Load, Note};
use crate::client;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use tern_control::{ClusterReport, NodeState, Reply, Request};

/// How often.
const OFTEN: Duration = Duration::from_secs(1);

/// The program that serves this node's files.
const SERVER: &str = "tern-mfs";

/// Looks, until this is dropped: nothing is noted after that.
#[derive(Debug)]
pub(super) struct Looking(Arc<(Mutex<bool>, Condvar)>);

impl Looking {
    /// Begins to. A machine that has no thread left has other worries than a report.
    pub(super) fn begin(file: PathBuf) -> Self {
        let over = Arc::new((Mutex::new(false), Condvar::new()));
        let shared = over.clone();
        let look = move || {
            loop {
                let load = look();
                let (is_over, ends) = &*shared;
                let held = is_over.lock().unwrap_or_else(PoisonError::into_inner);
                if *held || notes::add(&file, &Note::Load(load)).is_err() {
                    return;
                }
                let waited = ends.wait_timeout_while(held, OFTEN, |over| !*over);
                if waited.map_or(true, |(over, _)| *over) {
                    return;
                }
            }
        };
        let _none = thread::Builder::new().name("look".into()).spawn(look);
        Self(over)
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }
}

fn look() -> Load {
    let busy = match client::ask(&Request::Cluster) {
        Ok(Reply::Cluster(report)) => busy(&report),
        _ => Vec::new(),
    };
    let counters = fs::read_to_string("/proc/net/dev").ok().map(|text| traffic(&text));
    Load {
        at: notes::now(),
        busy,
        net: counters.as_ref().map(|(received, sent, _)| (*received, *sent)),
        link: counters.and_then(|(.., links)| links.iter().filter_map(|link| speed(link)).max()),
        server: server(),
    }
}

/// Which share of its CPUs each node needs.
fn busy(report: &ClusterReport) -> Vec<(u16, f32)> {
    let up = report.nodes.iter().filter(|node| node.node == report.me || node.state == NodeState::Alive);
    let share =
        |load: f32, speed: u32, cpus: f32| load / 100.0 / (speed.max(1) as f32 / 10_000.0) / cpus.max(0.1);
    up.map(|node| (node.node.0, share(node.load, node.speed, node.cpus))).collect()
}

/// Bytes received and sent over all links but the one to itself, and these links' names.
fn traffic(text: &str) -> (u64, u64, Vec<String>) {
    let (mut received, mut sent, mut links) = (0, 0, Vec::new());
    for (name, counters) in text.lines().filter_map(|line| line.split_once(':')) {
        let counters: Vec<u64> = counters.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let (name, Some(into), Some(out)) = (name.trim(), counters.first(), counters.get(8)) else {
            continue;
        };
        if name != "lo" {
            received += into;
            sent += out;
            links.push(name.to_owned());
        }
    }
    (received, sent, links)
}

/// A link's bits per second, if it is one that knows.
fn speed(link: &str) -> Option<u64> {
    // A link inside of the machine has a speed, too, which means nothing.
    fs::metadata(format!("/sys/class/net/{link}/device")).ok()?;
    let text = fs::read_to_string(format!("/sys/class/net/{link}/speed")).ok()?;
    let megabits = text.trim().parse::<i64>().ok().filter(|speed| *speed > 0)?;
    Some(megabits.cast_unsigned() * 1_000_000)
}

/// Microseconds of CPU time of all servers of this node's files.
fn server() -> Option<u64> {
    let ticks: u64 = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            path.file_name()?.to_str()?.parse::<u32>().ok()?;
            let stat = fs::read_to_string(path.join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            if name != SERVER {
                return None;
            }
            // As proc_pid_stat(5) counts: the state is the third.
            let number = |at: usize| rest.split_whitespace().nth(at - 3)?.parse::<u64>().ok();
            Some(number(14)? + number(15)?)
        })
        .sum();
    Some(ticks * 1_000_000 / rustix::param::clock_ticks_per_second().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_added_up() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
            lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n  \
            eth0: 100 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n\
            eth1:1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n";
        assert_eq!(traffic(text), (101, 9, vec!["eth0".into(), "eth1".into()]));
        assert_eq!(traffic("nothing"), (0, 0, Vec::new()));
    }
}
