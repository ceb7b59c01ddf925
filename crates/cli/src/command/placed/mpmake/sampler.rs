//! Samples the load once a second during a build with a report: the CPU use of the nodes, and the
//! traffic and the file server of this node. The send backlog changes faster, so it is polled
//! between samples.

use super::event_log::{self, BuildEvent, LoadSample};
use crate::client;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use tern_control::{ClusterReport, NodeState, Reply, Request};
use tern_node::config::{Config, config_dir};
use tern_node::map::PORT;

/// How often the send backlog is polled.
const BACKLOG_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The number of polls between two samples.
const POLLS_PER_SAMPLE: u32 = 10;

/// A backlog of this many bytes means that the network is the bottleneck. A single reply that is
/// being sent is smaller.
const MIN_BACKLOG: u64 = 64 << 10;

/// The program that serves this node's files.
const FILE_SERVER: &str = "tern-mfs";

/// Samples until it is dropped; no event is recorded after that.
#[derive(Debug)]
pub(super) struct Sampler(Arc<(Mutex<bool>, Condvar)>);

impl Sampler {
    /// Starts sampling. If no thread can be created, the report has no samples.
    pub(super) fn start(file: PathBuf) -> Self {
        let stopped = Arc::new((Mutex::new(false), Condvar::new()));
        let shared = stopped.clone();
        let run = move || {
            let config = config_dir().and_then(|dir| Config::load(&dir));
            let port = config.ok().and_then(|config| config.file.port).unwrap_or(PORT);
            let mut backlog_share = None;
            loop {
                let load = sample(backlog_share);
                let stopped = lock_stopped(&shared);
                if *stopped || event_log::append(&file, &BuildEvent::Load(load)).is_err() {
                    return;
                }
                drop(stopped);
                let mut polls = Vec::new();
                for _ in 0..POLLS_PER_SAMPLE {
                    let wakeup = &shared.1;
                    let waited =
                        wakeup.wait_timeout_while(lock_stopped(&shared), BACKLOG_POLL_INTERVAL, |stopped| {
                            !*stopped
                        });
                    if waited.map_or(true, |(stopped, _)| *stopped) {
                        return;
                    }
                    polls.extend(backlog(port).map(|bytes| bytes >= MIN_BACKLOG));
                }
                let full = polls.iter().filter(|full| **full).count();
                backlog_share = (!polls.is_empty()).then(|| full as f32 / polls.len() as f32);
            }
        };
        let _none = thread::Builder::new().name("sampler".into()).spawn(run);
        Self(stopped)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        *lock_stopped(&self.0) = true;
        self.0.1.notify_all();
    }
}

fn lock_stopped(shared: &(Mutex<bool>, Condvar)) -> MutexGuard<'_, bool> {
    shared.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a sample.
fn sample(backlog_share: Option<f32>) -> LoadSample {
    let busy = match client::request(&Request::Cluster) {
        Ok(Reply::Cluster(report)) => busy(&report),
        _ => Vec::new(),
    };
    let counters = fs::read_to_string("/proc/net/dev").ok().map(|text| traffic(&text, is_physical));
    LoadSample {
        at: event_log::now(),
        busy,
        net: counters.as_ref().map(|(received, sent, _)| (*received, *sent)),
        link: counters.and_then(|(.., links)| links.iter().filter_map(|link| speed(link)).max()),
        waits: backlog_share,
        server: file_server_cpu(),
    }
}

/// The demand for the CPUs of each node.
fn busy(report: &ClusterReport) -> Vec<(u16, f32)> {
    let up = report.nodes.iter().filter(|node| node.node == report.me || node.state == NodeState::Alive);
    up.map(|node| (node.node.0, share(node.load, node.speed))).collect()
}

/// The share of a node's CPUs that a load keeps busy. On a node whose CPUs have the standard speed,
/// load 100 is a demand for all of them (docs/design/load.md).
fn share(load: f32, speed: u32) -> f32 {
    load / 100.0 * (speed as f32 / 10_000.0)
}

/// Bytes received and sent over all links but loopback, and the names of the links. If the machine
/// has physical links (`is_physical`), only these count, because traffic of a bridge or bond passes
/// through one of them.
fn traffic(text: &str, is_physical: impl Fn(&str) -> bool) -> (u64, u64, Vec<String>) {
    let (mut received, mut sent, mut links) = (0, 0, Vec::new());
    let names = || text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim()));
    let has_physical = names().any(&is_physical);
    for (name, counters) in text.lines().filter_map(|line| line.split_once(':')) {
        let counters: Vec<u64> = counters.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let (name, Some(into), Some(out)) = (name.trim(), counters.first(), counters.get(8)) else {
            continue;
        };
        if name != "lo" && (!has_physical || is_physical(name)) {
            received += into;
            sent += out;
            links.push(name.to_owned());
        }
    }
    (received, sent, links)
}

/// Bytes that wait to be sent on all connections from or to this port.
fn backlog(port: u16) -> Option<u64> {
    let tables = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/net/{table}")).ok());
    tables.into_iter().flatten().map(|table| backlog_in(&table, port)).reduce(|one, other| one + other)
}

/// The sum of the send queues of established connections to other machines, from one of the
/// kernel's socket tables (proc_pid_net(5)).
fn backlog_in(table: &str, port: u16) -> u64 {
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

/// Whether a link is a physical device.
fn is_physical(link: &str) -> bool {
    fs::metadata(format!("/sys/class/net/{link}/device")).is_ok()
}

/// A link's speed in bits per second, if it reports one.
fn speed(link: &str) -> Option<u64> {
    // The speed that a virtual link reports is meaningless.
    if !is_physical(link) {
        return None;
    }
    let text = fs::read_to_string(format!("/sys/class/net/{link}/speed")).ok()?;
    let megabits = text.trim().parse::<i64>().ok().filter(|speed| *speed > 0)?;
    Some(megabits.cast_unsigned() * 1_000_000)
}

/// CPU time of all file servers of this node, in microseconds.
fn file_server_cpu() -> Option<u64> {
    let ticks: u64 = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            path.file_name()?.to_str()?.parse::<u32>().ok()?;
            let stat = fs::read_to_string(path.join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            if name != FILE_SERVER {
                return None;
            }
            // Fields are numbered as in proc_pid_stat(5), where the state is field 3.
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
    fn link_traffic_is_summed() {
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
    fn load_is_a_share_of_the_nodes_cpus() {
        // One thread on each CPU, however many there are: CPUs of standard speed, and of half the
        // speed.
        assert!((share(100.0, 10_000) - 1.0).abs() < 0.01 && (share(200.0, 5_000) - 1.0).abs() < 0.01);
    }

    #[test]
    fn backlog_of_connections_to_nodes_is_summed() {
        let line = |local, remote, state, sends| {
            format!(
                "   0: {local} {remote} {state} {sends}:00000007 01:00000014 00000000     0        0 1 1 0 20 4 30 10 -1\n"
            )
        };
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let lines = [
            line("0100000A:1BBD", "0200000A:C350", "01", "00000100"),
            line("0100000A:C351", "0200000A:1BBD", "01", "00000023"),
            // Another port, a listener, and a connection within this machine.
            line("0100000A:0016", "0200000A:C352", "01", "00001000"),
            line("0100000A:1BBD", "00000000:0000", "0A", "00001000"),
            line("0100000A:1BBD", "0100000A:C353", "01", "00001000"),
        ];
        assert_eq!(backlog_in(&(head.to_owned() + &lines.concat()), 7101), 0x123);
        assert_eq!(backlog_in("nothing", 7101), 0);
    }
}
