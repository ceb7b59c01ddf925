//! Counts the resources of a cluster's nodes (processes, descriptors, memory and others), to find
//! leaks.

use crate::cluster::Cluster;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

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
done 2> /dev/null
echo connections $(ss -Hton state established | wc -l)
echo files $(find /run/tern -xdev | wc -l)
echo mounts $(wc -l < /proc/self/mounts)
echo namespaces $(ls -l /proc/[0-9]*/ns/ 2> /dev/null | grep -o '[a-z]*:\[[0-9]*\]' | sort -u | wc -l)
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
    /// For a resource by its last word, such as `kib`: the growth that is not a leak.
    pub slack: fn(&str) -> u64,
}

impl ResourceCheck<'_> {
    /// Counts the resources now.
    ///
    /// # Errors
    /// If a node cannot be examined.
    pub fn count(&self) -> Result<Counts> {
        let mut all = Counts::new();
        for node in self.cluster.lab().nodes().map(|node| node.number()) {
            let text = self.cluster.run(node, &["sh", "-c", COUNT_SCRIPT, "sh", self.programs])?;
            for line in String::from_utf8_lossy(&text).lines() {
                // The number is missing for a process that has ended meanwhile.
                let Some((what, number)) = line.split_once(' ').filter(|(_, number)| !number.is_empty())
                else {
                    continue;
                };
                // If several processes have one name, the largest value counts.
                let entry = all.entry(format!("node {node}: {what}")).or_insert(0);
                *entry = number.trim().parse::<u64>().with_context(|| line.to_owned())?.max(*entry);
            }
        }
        // Counted on the machine, since a node does not see its own control groups.
        let lab = self.cluster.lab().name().as_str();
        let groups = format!("find /sys/fs/cgroup -type d -path '*/tern-lab/{lab}/*' | wc -l");
        let groups = Command::new("sh").args(["-c", &groups]).output()?;
        all.insert("control groups".into(), String::from_utf8_lossy(&groups.stdout).trim().parse()?);
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
