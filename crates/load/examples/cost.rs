//! Prints the cost of a sample and of a scan, in CPU time of this thread: `cost [PROCESSES
//! [ROUNDS]]`. Starts PROCESSES sleeping processes first.
#![allow(clippy::print_stdout, reason = "it is what it is for")]

use rustix::time::{ClockId, clock_gettime};
use std::process::{Child, Command};
use std::time::Duration;
use tern_load::{ProcessScanner, Sampler, ScanScope};

fn thread_cpu_time() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

fn main() -> std::io::Result<()> {
    let number = |at| std::env::args().nth(at).and_then(|n| n.parse::<usize>().ok());
    let children: std::io::Result<Vec<Child>> =
        (0..number(1).unwrap_or(500)).map(|_| Command::new("sleep").arg("1000").spawn()).collect();
    let mut children = children?;
    std::thread::sleep(Duration::from_secs(1));
    let pids: Vec<i32> = children.iter().map(|child| child.id() as i32).collect();
    let (mut sampler, mut all, mut these) =
        (Sampler::new(10_000), ProcessScanner::new(), ProcessScanner::new());
    for round in 0..number(2).unwrap_or(8) {
        let start = thread_cpu_time();
        let sample = sampler.sample();
        let sampled = thread_cpu_time();
        let found = all.scan(ScanScope::All).len();
        let scanned = thread_cpu_time();
        these.scan(ScanScope::Pids(&pids));
        let named = thread_cpu_time();
        println!(
            "{round}: load {:4}  sample {:5.2} ms  scan of all {found} {:5.2} ms  of {} named {:5.2} ms",
            sample.load,
            sampled - start,
            scanned - sampled,
            pids.len(),
            named - scanned
        );
        std::thread::sleep(Duration::from_secs(1));
    }
    for child in &mut children {
        child.kill()?;
        child.wait()?;
    }
    Ok(())
}
