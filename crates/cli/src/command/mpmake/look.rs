//! A look at everything, once a second while a build runs that is to be reported: how busy the nodes are, what this node's links and its
//! server of files do. What waits for the network changes faster, and is looked at in between.

use super::notes::{self, Load, Note};
use crate::client;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use tern_control::{ClusterReport, NodeState, Reply, Request};
use tern_node::config::{Config, config_dir};
use tern_node::map::PORT;

/// How often something is looked at that waits for the network.
const OFTEN: Duration = Duration::from_millis(100);

/// So many of these looks, and it is time for one at everything.
const LOOKS: u32 = 10;

/// So many bytes wait to be sent where the network is what is slow: more than one answer that happens to be on its way.
const BACKLOG: u64 = 64 << 10;

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
            let config = config_dir().and_then(|dir| Config::load(&dir));
            let port = config.ok().and_then(|config| config.file.port).unwrap_or(PORT);
            let mut waits = None;
            loop {
                let load = look(waits);
                let over = is_over(&shared);
                if *over || notes::add(&file, &Note::Load(load)).is_err() {
                    return;
                }
                drop(over);
                let mut seen = Vec::new();
                for _ in 0..LOOKS {
                    let ends = &shared.1;
                    let waited = ends.wait_timeout_while(is_over(&shared), OFTEN, |over| !*over);
                    if waited.map_or(true, |(over, _)| *over) {
                        return;
                    }
                    seen.extend(waiting(port).map(|bytes| bytes >= BACKLOG));
                }
                let full = seen.iter().filter(|full| **full).count();
                waits = (!seen.is_empty()).then(|| full as f32 / seen.len() as f32);
            }
        };
        let _none = thread::Builder::new().name("look".into()).spawn(look);
        Self(over)
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        *is_over(&self.0) = true;
        self.0.1.notify_all();
    }
}

fn is_over(shared: &(Mutex<bool>, Condvar)) -> MutexGuard<'_, bool> {
    shared.0.lock().unwrap_or_else(PoisonError::into_inner)
}

fn look(waits: Option<f32>) -> Load {
    let busy = match client::ask(&Request::Cluster) {
        Ok(Reply::Cluster(report)) => busy(&report),
        _ => Vec::new(),
    };
    let counters = fs::read_to_string("/proc/net/dev").ok().map(|text| traffic(&text, is_real));
    Load {
        at: notes::now(),
        busy,
        net: counters.as_ref().map(|(received, sent, _)| (*received, *sent)),
        link: counters.and_then(|(.., links)| links.iter().filter_map(|link| speed(link)).max()),
        waits,
        server: server(),
    }
}

/// Which share of its CPUs each node needs.
fn busy(report: &ClusterReport) -> Vec<(u16, f32)> {
    let up = report.nodes.iter().filter(|node| node.node == report.me || node.state == NodeState::Alive);
    up.map(|node| (node.node.0, share(node.load, node.speed))).collect()
}

/// Of a load of so much, whose unit is what keeps all CPUs of a node of standard CPUs busy (docs/design/load.md).
fn share(load: f32, speed: u32) -> f32 {
    load / 100.0 * (speed as f32 / 10_000.0)
}

/// Bytes received and sent over all links but the one to itself, and these links' names. Of a machine with links of its own (`is_real`) these
/// alone count: what goes through a bridge or a bond goes over one of them.
fn traffic(text: &str, is_real: impl Fn(&str) -> bool) -> (u64, u64, Vec<String>) {
    let (mut received, mut sent, mut links) = (0, 0, Vec::new());
    let names = || text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim()));
    let some_real = names().any(&is_real);
    for (name, counters) in text.lines().filter_map(|line| line.split_once(':')) {
        let counters: Vec<u64> = counters.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let (name, Some(into), Some(out)) = (name.trim(), counters.first(), counters.get(8)) else {
            continue;
        };
        if name != "lo" && (!some_real || is_real(name)) {
            received += into;
            sent += out;
            links.push(name.to_owned());
        }
    }
    (received, sent, links)
}

/// Bytes that wait to be sent on all connections from or to this port.
fn waiting(port: u16) -> Option<u64> {
    let tables = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/net/{table}")).ok());
    tables.into_iter().flatten().map(|table| queued(&table, port)).reduce(|one, other| one + other)
}

/// Of one of the kernel's tables of sockets (proc_pid_net(5)): those that are connected, and not within this machine.
fn queued(table: &str, port: u16) -> u64 {
    let one = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (local, remote) = (words.next()?.rsplit_once(':')?, words.next()?.rsplit_once(':')?);
        let is_ours = [local.1, remote.1].iter().any(|at| u16::from_str_radix(at, 16) == Ok(port));
        let is_up = words.next()? == "01";
        let (sends, _) = words.next()?.split_once(':')?;
        (is_ours && is_up && local.0 != remote.0).then(|| u64::from_str_radix(sends, 16).ok()).flatten()
    };
    table.lines().filter_map(one).sum()
}

/// Whether a link leads out of the machine.
fn is_real(link: &str) -> bool {
    fs::metadata(format!("/sys/class/net/{link}/device")).is_ok()
}

/// A link's bits per second, if it is one that knows.
fn speed(link: &str) -> Option<u64> {
    // A link inside of the machine has a speed, too, which means nothing.
    if !is_real(link) {
        return None;
    }
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
        assert_eq!(traffic(text, |_| false), (101, 9, vec!["eth0".into(), "eth1".into()]));
        assert_eq!(traffic(text, |name| name == "eth1"), (1, 2, vec!["eth1".into()]));
        assert_eq!(traffic("nothing", |_| true), (0, 0, Vec::new()));
    }

    #[test]
    fn a_load_is_a_share_of_the_nodes_own_processors() {
        // One thread on each of its CPUs, however many these are; and one on a CPU of half the speed.
        assert!((share(100.0, 10_000) - 1.0).abs() < 0.01 && (share(200.0, 5_000) - 1.0).abs() < 0.01);
    }

    #[test]
    fn what_waits_on_connections_to_other_nodes_is_added_up() {
        let line = |local, remote, state, sends| {
            format!(
                "   0: {local} {remote} {state} {sends}:00000007 01:00000014 00000000     0        0 1 1 0 20 4 30 10 -1\n"
            )
        };
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let lines = [
            line("0100000A:1BBD", "0200000A:C350", "01", "00000100"),
            line("0100000A:C351", "0200000A:1BBD", "01", "00000023"),
            // Another port, a listener, and itself.
            line("0100000A:0016", "0200000A:C352", "01", "00001000"),
            line("0100000A:1BBD", "00000000:0000", "0A", "00001000"),
            line("0100000A:1BBD", "0100000A:C353", "01", "00001000"),
        ];
        assert_eq!(queued(&(head.to_owned() + &lines.concat()), 7101), 0x123);
        assert_eq!(queued("nothing", 7101), 0);
    }
}
