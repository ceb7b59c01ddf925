//! Ten thousand moves of one program in one run: nothing grows, on no node. TERN_MOVES=N for fewer.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::jobs::job;

/// Moves before the first look: caches have filled, and the shims that stay are there.
const WARM: u32 = 300;
/// Memory that ternd and the home shim may have gained (KiB): an allocator rounds, and logs have buffers.
const SLACK_KIB: u64 = 4 << 10;
/// Mappings that ternd may have gained: glibc's allocator makes another arena, of two mappings, when threads meet in it, up
/// to eight for a CPU.
const SLACK_MAPPINGS: u64 = 64;

/// What a node holds, as its own shell counts it: how many of each, and memory in KiB. Guest shims come and go with each
/// move, so that is looked at while the program is at home.
const COUNT: &str = r#"
echo processes $(ps -e --no-headers | grep -vc ' \(ps\|sh\|grep\)$')
echo zombies $(ps -eo stat= | grep -c '^Z')
for pid in $(pgrep -x 'ternd|tern-shim'); do
  name=$(cat /proc/$pid/comm)
  echo $name.descriptors $(ls /proc/$pid/fd | wc -l)
  echo $name.threads $(ls /proc/$pid/task | wc -l)
  cat /proc/$pid/task/*/comm | sort | uniq -c | while read -r count thread; do echo "$name.threads.$thread $count"; done
  echo $name.mappings $(wc -l < /proc/$pid/maps)
  echo $name.kib $(awk '/^VmRSS/ { print $2 }' /proc/$pid/status)
done
echo files $(find /run/tern -xdev | wc -l)
echo mounts $(wc -l < /proc/self/mounts)
"#;

fn count(cluster: &Cluster) -> Result<BTreeMap<String, u64>> {
    let mut all = BTreeMap::new();
    for node in 1..=3 {
        let text = cluster.run(node, &["sh", "-c", COUNT])?;
        for line in String::from_utf8_lossy(&text).lines() {
            // Without a number: of a shim that has ended meanwhile.
            let Some((what, number)) = line.split_once(' ').filter(|(_, number)| !number.is_empty()) else {
                continue;
            };
            // Of several of a name the largest counts.
            let entry = all.entry(format!("node {node}: {what}")).or_insert(0);
            *entry = number.trim().parse::<u64>().with_context(|| line.to_owned())?.max(*entry);
        }
    }
    // Of the machine, since a node does not see its own.
    let groups =
        std::process::Command::new("sh").args(["-c", "find /sys/fs/cgroup -type d | wc -l"]).output()?;
    all.insert("control groups".into(), String::from_utf8_lossy(&groups.stdout).trim().parse()?);
    let spaces = "ls -l /proc/[0-9]*/ns/ 2>/dev/null | grep -o '[a-z]*:\\[[0-9]*\\]' | sort -u | wc -l";
    let spaces = std::process::Command::new("sh").args(["-c", spaces]).output()?;
    all.insert("namespaces".into(), String::from_utf8_lossy(&spaces.stdout).trim().parse()?);
    Ok(all)
}

/// Waits until the counts are the lower ones that stay when all shims that are over have gone, or do not fall any more.
fn settled(cluster: &Cluster, than: Option<&BTreeMap<String, u64>>) -> Result<BTreeMap<String, u64>> {
    let mut last = count(cluster)?;
    for _ in 0..40 {
        std::thread::sleep(Duration::from_millis(500));
        let now = count(cluster)?;
        let done = than.map_or(now == last, |before| grown(before, &now).is_empty());
        last = now;
        if done {
            break;
        }
    }
    Ok(last)
}

fn grown(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> Vec<String> {
    let mut found = Vec::new();
    for (what, now) in after {
        let before = before.get(what).copied().unwrap_or(0);
        let slack = match what.rsplit_once('.') {
            Some((_, "kib")) => SLACK_KIB,
            Some((_, "mappings")) => SLACK_MAPPINGS,
            _ => 0,
        };
        if *now > before + slack {
            found.push(format!("{what}: {before}, then {now}"));
        }
    }
    found
}

fn moves(cluster: &Cluster, pid: i32, count: u32) -> Result<()> {
    for number in 0..count.next_multiple_of(3) {
        let to = ["2", "3", "home"][number as usize % 3];
        if let Err(refused) = cluster.migrate(pid, to) {
            // Its last call may still be under way at home.
            ensure!(refused.message.contains("busy"), "move {number} to {to}: {}", refused.message);
        }
    }
    cluster.migrate(pid, "2").map_err(|r| anyhow::anyhow!("{}", r.message))?;
    cluster.migrate(pid, "home").map(drop).map_err(|r| anyhow::anyhow!("{}", r.message))
}

#[test]
fn ten_thousand_moves_leave_nothing() -> Result<()> {
    let wanted = std::env::var("TERN_MOVES").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let cluster = Cluster::up("leaks")?;
    let running = job(&cluster, "")?;
    moves(&cluster, running.pid, WARM)?;
    let before = settled(&cluster, None)?;
    moves(&cluster, running.pid, wanted)?;
    let after = settled(&cluster, Some(&before))?;
    println!("{wanted} moves");
    for (what, now) in &after {
        println!("  {what}: {}, then {now}", before.get(what).copied().unwrap_or(0));
    }
    let grown = grown(&before, &after);
    ensure!(grown.is_empty(), "after {wanted} moves there is more of:\n{}", grown.join("\n"));
    Ok(())
}
