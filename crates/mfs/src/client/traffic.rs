//! Counts each process's reads and writes per node, and reports them to ternd once a second for the
//! balancer (docs/design/balancing.md). Only requests are counted: neither reads that the kernel
//! serves from its cache, nor write-back.

use crate::client::caller::{ask_ternd, process_of};
use crate::client::tree::Tree;
use crate::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use tern_control::{FileTraffic, Request};
use tern_ids::{HomePid, NodeId};

/// How long traffic is accumulated before it is reported.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Threads counted per interval. With more than this none stands out.
const MAX_THREADS: usize = 4096;

/// Number of calls and bytes.
type Sum = (u64, u64);

/// Traffic not reported yet.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    /// A thread reports it.
    is_reported: AtomicBool,
    threads: Mutex<BTreeMap<(u32, NodeId), Sum>>,
    is_nonempty: Condvar,
}

impl Traffic {
    /// Counts a call of a thread that has read or written this many bytes.
    pub(crate) fn count(&self, tid: u32, on: NodeId, bytes: usize) {
        // The tid is 0 for write-back.
        if tid == 0 || !self.is_reported.load(Ordering::Relaxed) {
            return;
        }
        let mut threads = lock(&self.threads);
        if threads.is_empty() {
            self.is_nonempty.notify_one();
        }
        if threads.len() < MAX_THREADS || threads.contains_key(&(tid, on)) {
            let (calls, sum) = threads.entry((tid, on)).or_default();
            *calls += 1;
            *sum += bytes as u64;
        }
    }

    /// Waits until there is traffic, then takes what has accumulated after one interval.
    fn take(&self) -> BTreeMap<(u32, NodeId), Sum> {
        let waiting = self.is_nonempty.wait_while(lock(&self.threads), |threads| threads.is_empty());
        drop(waiting);
        std::thread::sleep(REPORT_INTERVAL);
        std::mem::take(&mut lock(&self.threads))
    }
}

/// Starts the thread that reports traffic to ternd. A failed report is lost; the next follows in a
/// second.
pub(crate) fn start_reporting(tree: &Arc<Tree>) {
    let tree = Arc::clone(tree);
    tree.traffic.is_reported.store(true, Ordering::Relaxed);
    let report = move || {
        loop {
            let all = by_process(tree.traffic.take(), process_of);
            if let Err(error) = ask_ternd(&tree.run_dir, &Request::FileTraffic(all)) {
                tracing::debug!(%error, "cannot report file traffic to ternd");
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("traffic".into()).spawn(report) {
        tracing::warn!(%error, "cannot start a thread to report file traffic");
    }
}

fn by_process(
    threads: BTreeMap<(u32, NodeId), Sum>,
    process_of: impl Fn(u32) -> Option<HomePid>,
) -> Vec<FileTraffic> {
    let mut sums: BTreeMap<(HomePid, NodeId), Sum> = BTreeMap::new();
    for ((tid, node), (calls, bytes)) in threads {
        // Traffic of threads that have exited is dropped.
        let Some(pid) = process_of(tid) else { continue };
        let sum = sums.entry((pid, node)).or_default();
        *sum = (sum.0 + calls, sum.1 + bytes);
    }
    sums.into_iter().map(|((pid, node), (calls, bytes))| FileTraffic { pid, node, calls, bytes }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_is_summed_by_process() {
        let traffic = Traffic { is_reported: true.into(), ..Traffic::default() };
        for (tid, on, bytes) in [(8, 2, 100), (9, 2, 11), (8, 3, 5), (0, 2, 7), (10, 2, 1)] {
            traffic.count(tid, NodeId(on), bytes);
        }
        // Thread 10 has exited.
        let reported = by_process(traffic.take(), |tid| (tid < 10).then_some(HomePid(8)));
        let one = |node, calls, bytes| FileTraffic { pid: HomePid(8), node: NodeId(node), calls, bytes };
        assert_eq!(reported, [one(2, 2, 111), one(3, 1, 5)]);
    }
}
