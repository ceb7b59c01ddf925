//! What each process reads and writes of which node's files. The balancer goes by it (docs/design/balancing.md), so ternd is told
//! once a second. What the kernel here answers by itself is no trip and not counted, nor is what it writes by itself.

use super::people::{ask, process};
use super::tree::Tree;
use crate::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use tern_control::{FileTraffic, Request};
use tern_ids::{HomePid, NodeId};

/// How long is counted before it is told.
const WHILE: Duration = Duration::from_secs(1);

/// So many threads are counted meanwhile; with more than that no one's habits matter.
const MOST: usize = 4096;

/// Calls and bytes.
type Sum = (u64, u64);

/// What was not told yet.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    /// Somebody tells it.
    told: AtomicBool,
    threads: Mutex<BTreeMap<(u32, NodeId), Sum>>,
    begins: Condvar,
}

impl Traffic {
    /// A thread has read or written so much with one call.
    pub(crate) fn count(&self, tid: u32, on: NodeId, bytes: usize) {
        // The kernel says nobody where it writes by itself.
        if tid == 0 || !self.told.load(Ordering::Relaxed) {
            return;
        }
        let mut threads = lock(&self.threads);
        if threads.is_empty() {
            self.begins.notify_one();
        }
        if threads.len() < MOST || threads.contains_key(&(tid, on)) {
            let (calls, sum) = threads.entry((tid, on)).or_default();
            *calls += 1;
            *sum += bytes as u64;
        }
    }

    /// Waits until there is something, and takes what there is after a while.
    fn take(&self) -> BTreeMap<(u32, NodeId), Sum> {
        let waiting = self.begins.wait_while(lock(&self.threads), |threads| threads.is_empty());
        drop(waiting);
        std::thread::sleep(WHILE);
        std::mem::take(&mut lock(&self.threads))
    }
}

/// Tells ternd of it for ever. Of what it was not told nothing follows, and a second later there is more.
pub(crate) fn tell(tree: &Arc<Tree>) {
    let tree = Arc::clone(tree);
    tree.traffic.told.store(true, Ordering::Relaxed);
    let tell = move || {
        loop {
            let all = by_process(tree.traffic.take(), process);
            if let Err(error) = ask(&tree.run_dir, &Request::FileTraffic(all)) {
                tracing::debug!(%error, "ternd is not told who works on which files");
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("traffic".into()).spawn(tell) {
        tracing::warn!(%error, "no thread to tell who works on which files");
    }
}

fn by_process(
    threads: BTreeMap<(u32, NodeId), Sum>,
    process: impl Fn(u32) -> Option<HomePid>,
) -> Vec<FileTraffic> {
    let mut sums: BTreeMap<(HomePid, NodeId), Sum> = BTreeMap::new();
    for ((tid, node), (calls, bytes)) in threads {
        // One that has ended has nowhere to go.
        let Some(pid) = process(tid) else { continue };
        let sum = sums.entry((pid, node)).or_default();
        *sum = (sum.0 + calls, sum.1 + bytes);
    }
    sums.into_iter().map(|((pid, node), (calls, bytes))| FileTraffic { pid, node, calls, bytes }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted_for_their_process() {
        let traffic = Traffic { told: true.into(), ..Traffic::default() };
        for (tid, on, bytes) in [(8, 2, 100), (9, 2, 11), (8, 3, 5), (0, 2, 7), (10, 2, 1)] {
            traffic.count(tid, NodeId(on), bytes);
        }
        // Nobody knows the tenth any more.
        let told = by_process(traffic.take(), |tid| (tid < 10).then_some(HomePid(8)));
        let one = |node, calls, bytes| FileTraffic { pid: HomePid(8), node: NodeId(node), calls, bytes };
        assert_eq!(told, [one(2, 2, 111), one(3, 1, 5)]);
    }
}
