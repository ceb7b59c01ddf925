//! Prints what a sample and a scan cost, in CPU time of this thread: `cost [PROCESSES [ROUNDS]]`. It starts as many
//! sleeping processes.
#![allow(clippy::print_stdout, reason = "it is what it is for")]

use rustix::time::{ClockId, clock_gettime};
use std::process::{Child, Command};
use std::time::Duration;
use tern_load::{Processes, Sampler, Which};

fn own_time() -> f64 {
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
    let (mut sampler, mut all, mut these) = (Sampler::new(10_000), Processes::new(), Processes::new());
    for round in 0..number(2).unwrap_or(8) {
        let start = own_time();
        let sample = sampler.sample();
        let sampled = own_time();
        let found = all.scan(Which::All).len();
        let scanned = own_time();
        these.scan(Which::These(&pids));
        let named = own_time();
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
