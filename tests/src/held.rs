//! What the nodes of a cluster hold: processes, descriptors, memory and such; for tests after which nothing of it may have grown.

use crate::cluster::Cluster;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

/// What a node holds, as its own shell counts it: how many of each, and memory in KiB. `$1` names the programs that are looked into.
const COUNT: &str = r#"
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

/// How many of each there are, by node.
pub type Counts = BTreeMap<String, u64>;

/// What is looked at in a cluster, and how much of each may come to it.
#[derive(Debug, Clone, Copy)]
pub struct Held<'a> {
    /// Where.
    pub cluster: &'a Cluster,
    /// The programs whose processes are looked into: `ternd|tern-shim`.
    pub programs: &'a str,
    /// By its name, as `kib`, how many more of something are no leak.
    pub slack: fn(&str) -> u64,
}

impl Held<'_> {
    /// As it is now.
    ///
    /// # Errors
    /// If a node cannot be asked.
    pub fn count(&self) -> Result<Counts> {
        let mut all = Counts::new();
        for node in self.cluster.lab().nodes().map(|node| node.number()) {
            let text = self.cluster.run(node, &["sh", "-c", COUNT, "sh", self.programs])?;
            for line in String::from_utf8_lossy(&text).lines() {
                // Without a number: of a process that has ended meanwhile.
                let Some((what, number)) = line.split_once(' ').filter(|(_, number)| !number.is_empty())
                else {
                    continue;
                };
                // Of several of a name the largest counts.
                let entry = all.entry(format!("node {node}: {what}")).or_insert(0);
                *entry = number.trim().parse::<u64>().with_context(|| line.to_owned())?.max(*entry);
            }
        }
        // Of the machine, since a node does not see its own.
        let lab = self.cluster.lab().name().as_str();
        let groups = format!("find /sys/fs/cgroup -type d -path '*/tern-lab/{lab}/*' | wc -l");
        let groups = Command::new("sh").args(["-c", &groups]).output()?;
        all.insert("control groups".into(), String::from_utf8_lossy(&groups.stdout).trim().parse()?);
        Ok(all)
    }

    /// Waits until nothing has grown, or all that is over has gone and nothing changes any more.
    ///
    /// # Errors
    /// As `count`.
    pub fn settled(&self, than: Option<&Counts>) -> Result<Counts> {
        let mut last = self.count()?;
        for _ in 0..40 {
            std::thread::sleep(Duration::from_millis(500));
            let now = self.count()?;
            let done = than.map_or(now == last, |before| self.grown(before, &now).is_empty());
            last = now;
            if done {
                break;
            }
        }
        Ok(last)
    }

    /// Of what there is more, by more than may be.
    pub fn grown(&self, before: &Counts, after: &Counts) -> Vec<String> {
        let grown = after.iter().filter_map(|(what, now)| {
            let before = before.get(what).copied().unwrap_or(0);
            let name = what.rsplit([' ', '.']).next().unwrap_or(what);
            (*now > before + (self.slack)(name)).then(|| format!("{what}: {before}, then {now}"))
        });
        grown.collect()
    }
}

/// Says all of it.
pub fn show(before: &Counts, after: &Counts) {
    for (what, now) in after {
        println!("  {what}: {}, then {now}", before.get(what).copied().unwrap_or(0));
    }
}
