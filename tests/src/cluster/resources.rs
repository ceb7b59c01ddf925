//! Counts the resources of a cluster's nodes (processes, descriptors, memory and others), to find
//! leaks.

use crate::cluster::Cluster;
use anyhow::Result;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// Number of seconds that are measured to find the CPU time of an idle one.
const IDLE_SAMPLES: u32 = 20;

/// Counts the resources of a node: a line of name and number for each, memory in KiB. `$1` is the
/// pattern of program names to examine.
const COUNT_SCRIPT: &str = r#"
echo processes $(ps -e --no-headers | grep -vc ' \(ps\|sh\|grep\)$')
echo zombies $(ps -eo stat= | grep -c '^Z')
for pid in $(pgrep -x "$1"); do
  name=$(cat /proc/$pid/comm)
  echo $name.descriptors $(ls /proc/$pid/fd | wc -l)
  echo $name.threads $(ls /proc/$pid/task | wc -l)
  cat /proc/$pid/task/*/comm | sort | uniq -c | while read -r count thread; do echo "$name.threads.$thread $count"; done
  echo $name.mappings $(wc -l < /proc/$pid/maps)
  echo $name.mounts $(wc -l < /proc/$pid/mounts)
  echo $name.kib $(awk '/^VmRSS/ { print $2 }' /proc/$pid/status)
  echo $name.dirty.kib $(awk '/^Private_Dirty/ { print $2 }' /proc/$pid/smaps_rollup)
done 2> /dev/null
echo connections $(ss -Hton state established | wc -l)
echo files $(find /run/tern -xdev ! -name slow-turns | wc -l)
echo mounts $(wc -l < /proc/self/mounts)
echo namespaces $(ls -l /proc/[0-9]*/ns/ 2> /dev/null | grep -o '[a-z]*:\[[0-9]*\]' | sort -u | wc -l)
"#;

/// Names the descriptors and files of a node, without their numbers and ids, and counts each name.
const NAME_SCRIPT: &str = r#"
for pid in $(pgrep -x "$1"); do
  ls -l /proc/$pid/fd | sed -n "s|.* -> |$(cat /proc/$pid/comm) has open |p"
done 2> /dev/null | sed 's/[0-9a-f]\{32\}/ID/g; s/[0-9]\+/N/g' | sort | uniq -c | awk '{ n = $1; $1 = ""; print substr($0, 2), n }'
find /run/tern -xdev ! -name slow-turns | sed 's/[0-9a-f]\{32\}/ID/g; s/[0-9]\+/N/g' | sort | uniq -c | awk '{ print "file " $2, $1 }'
"#;

/// Counts by `node N: resource`.
pub type Counts = BTreeMap<String, u64>;

/// The examined programs of a cluster, and how much growth is tolerated.
#[derive(Debug, Clone, Copy)]
pub struct ResourceCheck<'a> {
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The programs whose processes are examined: `ternd|tern-shim`.
    pub programs: &'a str,
    /// The growth that is not a leak, by the last word of the resource's name, such as `kib`.
    pub slack: fn(&str) -> u64,
}

impl ResourceCheck<'_> {
    /// Counts the resources now.
    ///
    /// # Errors
    /// If a node cannot be examined.
    pub fn count(&self) -> Result<Counts> {
        let mut all = self.run_on_nodes(COUNT_SCRIPT)?;
        // Counted on the machine, since a node does not see its own control groups.
        let lab = self.cluster.lab().name().as_str();
        let groups = format!("find /sys/fs/cgroup -type d -path '*/tern-lab/{lab}/*' | wc -l");
        let groups = Command::new("sh").args(["-c", &groups]).output()?;
        all.insert("control groups".into(), String::from_utf8_lossy(&groups.stdout).trim().parse()?);
        Ok(all)
    }

    /// Counts the descriptors of the programs and the files by their names, to find out what has
    /// grown.
    ///
    /// # Errors
    /// As `count`.
    pub fn count_by_name(&self) -> Result<Counts> {
        self.run_on_nodes(NAME_SCRIPT)
    }

    fn run_on_nodes(&self, script: &str) -> Result<Counts> {
        let mut all = Counts::new();
        for node in self.cluster.lab().nodes().map(|node| node.number()) {
            let text = self.cluster.run(node, &["sh", "-c", script, "sh", self.programs])?;
            for line in String::from_utf8_lossy(&text).lines() {
                // The name of a thread may have spaces.
                let Some((what, number)) = line.rsplit_once(' ') else { continue };
                // The number is missing for a process that has ended meanwhile.
                let Ok(number) = number.parse::<u64>() else { continue };
                // If several processes have one name, the largest value counts.
                let entry = all.entry(format!("node {node}: {what}")).or_insert(0);
                *entry = number.max(*entry);
            }
        }
        Ok(all)
    }

    /// The CPU time in microseconds that each of the programs uses in an idle second, in which no
    /// process is moved and no command runs. The result is the minimum of several seconds: other
    /// programs of the machine only add to it.
    ///
    /// # Errors
    /// If a node's processes cannot be listed.
    pub fn idle_cpu(&self) -> Result<Counts> {
        let mut least = Counts::new();
        for _ in 0..IDLE_SAMPLES {
            let (before, begun) = (self.cpu_times()?, Instant::now());
            std::thread::sleep(Duration::from_secs(1));
            let (after, elapsed) = (self.cpu_times()?, begun.elapsed());
            for (what, now) in after {
                let Some(before) = before.get(&what) else { continue };
                let used = (now.saturating_sub(*before) as f64 / elapsed.as_secs_f64() / 1e3) as u64;
                let entry = least.entry(what).or_insert(used);
                *entry = used.min(*entry);
            }
        }
        Ok(least)
    }

    /// The CPU time in nanoseconds that the programs' living threads have used.
    fn cpu_times(&self) -> Result<Counts> {
        let mut all = Counts::new();
        for node in self.cluster.lab().nodes() {
            for pid in node.processes()? {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let Some(name) = self.programs.split('|').find(|program| *program == name.trim()) else {
                    continue;
                };
                let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
                let used = threads.filter_map(|thread| {
                    let stat = fs::read_to_string(thread.path().join("schedstat")).ok()?;
                    stat.split(' ').next()?.parse::<u64>().ok()
                });
                *all.entry(format!("node {}: {name}.idle", node.number())).or_insert(0) += used.sum::<u64>();
            }
        }
        Ok(all)
    }

    /// Waits until nothing has grown since `before`; without `before`, until two counts are the
    /// same. 20 s at most.
    ///
    /// # Errors
    /// As `count`.
    pub fn stable_count(&self, before: Option<&Counts>) -> Result<Counts> {
        let mut last = self.count()?;
        for _ in 0..40 {
            std::thread::sleep(Duration::from_millis(500));
            let now = self.count()?;
            let done = before.map_or(now == last, |before| self.growth(before, &now).is_empty());
            last = now;
            if done {
                break;
            }
        }
        Ok(last)
    }

    /// The resources that have grown by more than the tolerance.
    pub fn growth(&self, before: &Counts, after: &Counts) -> Vec<String> {
        let growth = after.iter().filter_map(|(what, now)| {
            let before = before.get(what).copied().unwrap_or(0);
            let name = what.rsplit([' ', '.']).next().unwrap_or(what);
            (*now > before + (self.slack)(name)).then(|| format!("{what}: {before}, then {now}"))
        });
        growth.collect()
    }
}

/// Prints all counts.
pub fn show(before: &Counts, after: &Counts) {
    for (what, now) in after {
        println!("  {what}: {}, then {now}", before.get(what).copied().unwrap_or(0));
    }
}
