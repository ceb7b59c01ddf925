//! In a container with half a CPU and its own processes, demand equals the number of busy loops,
//! whatever else this machine does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tern_cgroup::{Hierarchy, hierarchy};
use tern_load::{Sample, Sampler};

const QUOTA_US: u32 = 10_000;
const PERIOD_US: u32 = 20_000;
/// Environment variable that marks the test process inside the container.
const INSIDE: &str = "TERN_LOAD_INSIDE";

/// This test's groups, in all hierarchies that limit or account CPU time.
struct Groups(Vec<PathBuf>);

impl Groups {
    /// Creates groups limited to half a CPU.
    fn make() -> Self {
        let name = format!("tern-load-test-{}", std::process::id());
        let is_useful = |h: &Hierarchy| h.unified || h.has("cpu") || h.has("cpuacct");
        let all: Vec<Hierarchy> = Hierarchy::all().unwrap().into_iter().filter(is_useful).collect();
        let groups = Self(all.iter().map(|h| h.mount.join(&name)).collect());
        for (one, group) in all.iter().zip(&groups.0) {
            fs::create_dir(group).unwrap();
            if one.unified && one.has("cpu") {
                fs::write(one.mount.join("cgroup.subtree_control"), "+cpu").unwrap();
                fs::write(group.join("cpu.max"), format!("{QUOTA_US} {PERIOD_US}")).unwrap();
            } else if one.has("cpu") {
                fs::write(group.join("cpu.cfs_period_us"), PERIOD_US.to_string()).unwrap();
                fs::write(group.join("cpu.cfs_quota_us"), QUOTA_US.to_string()).unwrap();
            }
        }
        groups
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for group in &self.0 {
            let _ = hierarchy::remove(group, Duration::from_secs(10));
        }
    }
}

#[test]
fn container_demand_is_that_of_its_own_threads() {
    assert!(rustix::process::geteuid().is_root(), "namespaces and control groups need root");
    let groups = Groups::make();
    let script = "for group; do echo 0 > $group/cgroup.procs; done; \
                  exec unshare --pid --fork --kill-child --mount-proc $0 --exact inside --ignored --nocapture";
    let status = Command::new("sh")
        .args(["-euc", script])
        .arg(env::current_exe().unwrap())
        .args(&groups.0)
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
}

/// Processes that are killed when this is dropped.
struct Loops(Vec<Child>);

impl Loops {
    fn start(number: usize, script: &str) -> Self {
        let shell = || Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap();
        Self((0..number).map(|_| shell()).collect())
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Samples once a second until `holds` is true of two samples in a row.
fn until(sampler: &mut Sampler, what: &str, holds: impl Fn(&Sample) -> bool) -> Sample {
    let end = Instant::now() + Duration::from_secs(60);
    let mut row = 0;
    loop {
        thread::sleep(Duration::from_secs(1));
        let sample = sampler.sample();
        println!("{what}: load {} of {:.2} threads", sample.load, sample.demand);
        row = if holds(&sample) { row + 1 } else { 0 };
        if row == 2 {
            return sample;
        }
        assert!(Instant::now() < end, "{what}: {sample:?}");
    }
}

#[test]
#[ignore = "runs inside the container that the other test makes"]
fn inside() {
    if env::var_os(INSIDE).is_none() {
        return;
    }
    let mut sampler = Sampler::new(20_000);
    let first = sampler.sample();
    assert_eq!(
        (first.load, first.speed, first.cpus),
        (0, 10_000, 1.0),
        "half of a CPU of twice the standard speed"
    );
    assert_eq!(first.quota, Some(0.5));

    // At half of 20,000, a busy thread causes a load of 100, and a sleeping process none.
    let sleepers = Loops::start(30, "exec sleep 1000");
    until(&mut sampler, "asleep", |s| s.load < 5);
    for number in [1_usize, 4] {
        let loops = Loops::start(number, "while :; do :; done");
        let near = |s: &Sample| s.load.abs_diff(number as u32 * 100) <= 12 * number as u32;
        until(&mut sampler, &format!("{number} loops"), near);
        drop(loops);
        until(&mut sampler, "asleep again", |s| s.load < 5);
    }
    drop(sleepers);

    // Threads count like processes.
    let go_on = Arc::new(AtomicBool::new(true));
    let busy = || {
        let go_on = Arc::clone(&go_on);
        thread::spawn(move || while go_on.load(Ordering::Relaxed) {})
    };
    let threads = [busy(), busy(), busy()];
    until(&mut sampler, "3 threads", |s| s.load.abs_diff(300) <= 36);
    go_on.store(false, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    until(&mut sampler, "no threads", |s| s.load < 5);

    // Processes that end before they are read also count. The counters that can be read would alone
    // give a load of 7.
    let short = Loops::start(1, "while :; do timeout 0.1 sh -c 'while :; do :; done'; done");
    until(&mut sampler, "short lives", |s| (60..=200).contains(&s.load));
    drop(short);
}
