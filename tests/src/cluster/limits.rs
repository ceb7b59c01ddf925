//! Limits of control groups of version 1 on processes of a cluster.

use crate::cluster::Cluster;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Where the limit on the number of tasks is.
const PIDS_CONTROLLER: &str = "/sys/fs/cgroup/pids";

/// Where the limit on memory is.
const MEMORY_CONTROLLER: &str = "/sys/fs/cgroup/memory";

/// Pids, in this machine's numbering, of the shims of a node and their sandbox helpers.
///
/// # Errors
/// If /proc cannot be read.
pub fn shims(cluster: &Cluster, node: u16) -> Result<Vec<i32>> {
    processes(cluster, node, |comm, _| comm.trim() == "tern-shim")
}

/// Pids, in this machine's numbering, of the guests on a node.
///
/// # Errors
/// If /proc cannot be read.
pub fn guests(cluster: &Cluster, node: u16) -> Result<Vec<i32>> {
    processes(cluster, node, |_, title| title.starts_with("tern:"))
}

/// Pids, in this machine's numbering, of the processes of a node whose names and titles `is_wanted`
/// accepts.
fn processes(cluster: &Cluster, node: u16, is_wanted: impl Fn(&str, &str) -> bool) -> Result<Vec<i32>> {
    let group = format!("/tern-lab/{}/node{node}/", cluster.lab().name().as_str());
    let matches = |process: &PathBuf| {
        let read = |file: &str| fs::read_to_string(process.join(file)).unwrap_or_default();
        read("cgroup").contains(&group) && is_wanted(&read("comm"), &read("cmdline"))
    };
    let processes = fs::read_dir("/proc")?.flatten().map(|process| process.path()).filter(matches);
    Ok(processes.filter_map(|process| process.file_name()?.to_str()?.parse().ok()).collect())
}

/// A control group whose processes can create no thread, until it is dropped.
#[derive(Debug)]
pub struct PidsLimit {
    group: PathBuf,
}

impl PidsLimit {
    /// Whether the pids controller of version 1 is mounted.
    pub fn is_supported() -> bool {
        Path::new(PIDS_CONTROLLER).exists()
    }

    /// Limits processes, in this machine's numbering, to the tasks that they have together. With
    /// `max`, to this number. `None` if none of the processes exists.
    ///
    /// # Errors
    /// If the control group cannot be created or limited.
    pub fn set(cluster: &Cluster, limited: &[i32], max: Option<u64>) -> Result<Option<Self>> {
        let name = format!("tern-test-{}", cluster.lab().name().as_str());
        let limit = Self { group: Path::new(PIDS_CONTROLLER).join(name) };
        fs::create_dir(&limit.group)?;
        // One may have ended.
        let enter = |pid: &&i32| fs::write(limit.group.join("cgroup.procs"), pid.to_string()).is_ok();
        if limited.iter().filter(enter).count() == 0 {
            return Ok(None);
        }
        let max = match max {
            Some(max) => max,
            None => number(&limit.group.join("pids.current"))?,
        };
        fs::write(limit.group.join("pids.max"), max.to_string())?;
        Ok(Some(limit))
    }

    /// How often the kernel has refused a task because of the limit.
    ///
    /// # Errors
    /// If the group has no such counter.
    pub fn refused(&self) -> Result<u64> {
        let events = fs::read_to_string(self.group.join("pids.events"))?;
        let refused = events.lines().find_map(|line| line.strip_prefix("max ")).context("no such event")?;
        Ok(refused.parse()?)
    }
}

impl Drop for PidsLimit {
    fn drop(&mut self) {
        let _ = fs::write(self.group.join("pids.max"), "max");
        let root = self.group.parent().map(|root| root.join("cgroup.procs")).unwrap_or_default();
        // A process that is created while the others are moved needs a second attempt.
        for _ in 0..100 {
            for pid in fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default().lines() {
                let _has_ended = fs::write(&root, pid);
            }
            if fs::remove_dir(&self.group).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A memory limit of the guests of a node, until it is dropped.
#[derive(Debug)]
pub struct MemoryLimit {
    group: PathBuf,
}

impl MemoryLimit {
    /// Whether the memory controller of version 1 is mounted, and the kernel's log can be read.
    pub fn is_supported() -> bool {
        Path::new(MEMORY_CONTROLLER).exists()
            && Command::new("dmesg").output().is_ok_and(|log| log.status.success())
    }

    /// Lets the guests of a node use this many bytes more than now. `None` if the node has no
    /// guests, or if their use has grown beyond that meanwhile.
    ///
    /// # Errors
    /// If the group's use cannot be parsed.
    pub fn set(cluster: &Cluster, node: u16, more: u64) -> Result<Option<Self>> {
        let group = guests_group(cluster, node);
        let group = Path::new(MEMORY_CONTROLLER).join(group.trim_start_matches('/'));
        if !group.exists() {
            return Ok(None);
        }
        let used = number(&group.join("memory.usage_in_bytes"))?;
        let limit = Self { group };
        // The kernel refuses a limit below the present use; it kills no process for that.
        let is_set = fs::write(limit.group.join("memory.limit_in_bytes"), (used + more).to_string());
        Ok(is_set.is_ok().then_some(limit))
    }
}

impl Drop for MemoryLimit {
    /// The write fails if the group was removed with its last guest.
    fn drop(&mut self) {
        let _was_removed = fs::write(self.group.join("memory.limit_in_bytes"), "-1");
    }
}

/// The path of the control group of a node's guests, in each hierarchy.
fn guests_group(cluster: &Cluster, node: u16) -> String {
    format!("/tern-lab/{}/node{node}/tern/guests", cluster.lab().name().as_str())
}

/// When the kernel has killed a guest of this node because of a memory limit: seconds since boot, in
/// ascending order. The log holds the last kills only.
///
/// # Errors
/// If the kernel's log cannot be read.
pub fn killed_for_memory(cluster: &Cluster, node: u16) -> Result<Vec<f64>> {
    let log = Command::new("dmesg").output()?;
    ensure!(log.status.success(), "dmesg: {}", String::from_utf8_lossy(&log.stderr).trim());
    let group = format!(",task_memcg={},", guests_group(cluster, node));
    let log = String::from_utf8_lossy(&log.stdout).into_owned();
    // "[60981.717933] oom-kill:constraint=…"
    let time = |line: &str| line.strip_prefix('[')?.split_once(']')?.0.trim().parse().ok();
    let kills = log.lines().filter(|line| line.contains("oom-kill:") && line.contains(&group));
    kills.map(|line| time(line).with_context(|| format!("no time in {line:?}"))).collect()
}

fn number(file: &Path) -> Result<u64> {
    let text = fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
    Ok(text.trim().parse()?)
}
