//! The control groups of a lab: `tern-lab/NAME/{switch,node1,node2,…}` in every hierarchy that the
//! lab uses.
//!
//! They limit and count CPU time, and they identify a lab's processes: each process is in them from
//! its creation on, so that a lab can be found and killed. A node's processes are in the leaf
//! `main` of the node's group, so that under cgroup v2 the node's daemon can create further groups
//! beside that leaf.

use crate::error::{LabError, Result, WithContext};
use crate::lab::options::LabName;
use rustix::mount::{UnmountFlags, unmount};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use tern_cgroup::hierarchy::{self, Hierarchy, walk};

/// CFS period, 5 ms. With the kernel's default of 100 ms a node that has used up its quota replies
/// 69 ms late.
const CFS_PERIOD_US: u64 = 5_000;
/// The smallest quota that the kernel accepts. Slower nodes get longer periods.
const MIN_QUOTA_US: u64 = 1_000;
const ROOT_GROUP: &str = "tern-lab";

/// The hierarchies of this machine that a lab uses: version 1's cpu and cpuacct, and version 2.
/// Memory and freezer are included so that the groups that nodes create for guests are inside the
/// nodes' groups and removed with them.
#[derive(Debug, Clone)]
pub(crate) struct Hierarchies(Vec<Hierarchy>);

impl Hierarchies {
    /// Finds the mounted hierarchies.
    pub(crate) fn find() -> Result<Self> {
        let mut all = Hierarchy::all().with_context(|| "read /proc/self/mountinfo".to_owned())?;
        all.retain(is_used);
        if !all.iter().any(|h| h.has("cpu")) {
            return Err(LabError::Unsupported(
                "no mounted control group hierarchy has the cpu controller; mount one, as with: \
                 mount -t cgroup -o cpu none /sys/fs/cgroup/cpu"
                    .to_owned(),
            ));
        }
        Ok(Self(all))
    }

    /// The groups of a whole lab.
    pub(crate) fn lab_group(&self, lab: &LabName) -> Group {
        Group { hierarchies: self.0.clone(), path: Path::new(ROOT_GROUP).join(lab.as_str()) }
    }

    /// The groups of the switch and the link emulator.
    pub(crate) fn switch_group(&self, lab: &LabName) -> Group {
        self.subgroup(lab, "switch")
    }

    /// The groups of one node.
    pub(crate) fn node_group(&self, lab: &LabName, node: u16) -> Group {
        self.subgroup(lab, &format!("node{node}"))
    }

    /// Unmounts the hierarchies in which this node has no group. Otherwise, programs in the node
    /// could create groups there that are outside of the lab's groups. The caller must be in the
    /// node's mount namespace.
    pub(crate) fn hide_unused(&self, lab: &LabName, node: u16) -> Result<()> {
        let group = self.node_group(lab, node);
        for (hierarchy, directory) in group.directories() {
            if only_divides_cpu_time(hierarchy) && !directory.exists() {
                unmount(&hierarchy.mount, UnmountFlags::DETACH)
                    .with_context(|| format!("unmount {}", hierarchy.mount.display()))?;
            }
        }
        Ok(())
    }

    fn subgroup(&self, lab: &LabName, name: &str) -> Group {
        Group { hierarchies: self.0.clone(), path: Path::new(ROOT_GROUP).join(lab.as_str()).join(name) }
    }
}

fn is_used(hierarchy: &Hierarchy) -> bool {
    hierarchy.unified || ["cpu", "cpuacct", "memory", "freezer"].iter().any(|one| hierarchy.has(one))
}

/// Whether the group of a node is needed in this hierarchy only to limit the node's CPU time.
fn only_divides_cpu_time(hierarchy: &Hierarchy) -> bool {
    !hierarchy.unified && hierarchy.has("cpu") && !hierarchy.has("cpuacct")
}

/// One control group, in all hierarchies.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    hierarchies: Vec<Hierarchy>,
    path: PathBuf,
}

impl Group {
    fn directories(&self) -> impl Iterator<Item = (&Hierarchy, PathBuf)> {
        self.hierarchies.iter().map(|h| (h, h.mount.join(&self.path)))
    }

    /// Creates the group with its leaf `main`. `speed` limits it to this many CPUs.
    ///
    /// A group without that limit is in no hierarchy that only divides CPU time, since its programs
    /// could starve all others. Measured on Linux 6.18 with two CPUs and two pairs of programs; the
    /// two programs of a pair wake each other after 20 µs of work. With each program of a pair in a
    /// group two or three levels deep, a compute-bound program outside of these groups got no CPU
    /// for 2 to 5 s. With all programs in the root group, it waited 21 ms at most. A home shim and
    /// a guest shim are such a pair.
    pub(crate) fn create(&self, speed: Option<f64>) -> Result<()> {
        for (hierarchy, directory) in self.directories() {
            if speed.is_none() && only_divides_cpu_time(hierarchy) {
                continue;
            }
            let leaf = directory.join("main");
            // Another lab that goes down may remove the empty parent while the directories below it
            // are created.
            let mut created = fs::create_dir_all(&leaf);
            for _ in 0..10 {
                if created.is_ok() {
                    break;
                }
                created = fs::create_dir_all(&leaf);
            }
            created.with_context(|| format!("make the control group {}", leaf.display()))?;
            if let Some(speed) = speed.filter(|_| hierarchy.has("cpu")) {
                limit_cpu(hierarchy, &self.path, speed)?;
            }
        }
        Ok(())
    }

    /// Limits the memory of all processes in the group, caches included.
    pub(crate) fn limit_memory(&self, bytes: u64) -> Result<()> {
        let Some((hierarchy, directory)) = self.directories().find(|(h, _)| h.has("memory")) else {
            return Err(LabError::Unsupported(
                "no mounted control group hierarchy has the memory controller".to_owned(),
            ));
        };
        let file = if hierarchy.unified {
            enable_controller(hierarchy, &self.path, "+memory")?;
            directory.join("memory.max")
        } else {
            directory.join("memory.limit_in_bytes")
        };
        write_file(&file, &bytes.to_string())
    }

    /// `cgroup.procs` of the leaf in each hierarchy that the group is in. A process that writes 0
    /// there becomes a member.
    pub(crate) fn open_procs_files(&self) -> Result<Vec<OwnedFd>> {
        self.directories()
            .filter(|(hierarchy, directory)| !only_divides_cpu_time(hierarchy) || directory.exists())
            .map(|(_, directory)| {
                let file = directory.join("main/cgroup.procs");
                let opened = fs::OpenOptions::new().write(true).open(&file);
                Ok(opened.with_context(|| format!("open {}", file.display()))?.into())
            })
            .collect()
    }

    /// Moves this process into the group.
    pub(crate) fn join(&self) -> Result<()> {
        for file in self.open_procs_files()? {
            rustix::io::write(file, b"0")
                .with_context(|| format!("join the control group {}", self.path.display()))?;
        }
        Ok(())
    }

    /// The processes of the group and of the groups below it; empty if the group does not exist.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let mut all = BTreeSet::new();
        for (_, directory) in self.directories() {
            walk(&directory, &mut |group| {
                let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
                all.extend(text.lines().filter_map(|l| l.parse::<i32>().ok()).filter(|p| *p > 0));
            });
        }
        all.into_iter().collect()
    }

    /// Whether the group has any process, visible from this pid namespace or not.
    pub(crate) fn has_processes(&self) -> bool {
        let mut has_processes = false;
        for (_, directory) in self.directories() {
            walk(&directory, &mut |group| {
                has_processes |= fs::read(group.join("cgroup.procs")).is_ok_and(|text| !text.is_empty());
            });
        }
        has_processes
    }

    /// Kills all processes of the group and waits until they are gone; returns those still alive
    /// after `timeout`.
    pub(crate) fn kill(&self, timeout: Duration) -> std::result::Result<(), Vec<i32>> {
        let end = Instant::now() + timeout;
        loop {
            for (_, directory) in self.directories().filter(|(h, _)| h.unified) {
                // Kills all at once without a race, since kernel 5.14. On older kernels the loop
                // below does it.
                let _ = fs::write(directory.join("cgroup.kill"), "1");
            }
            let remaining = self.processes();
            if remaining.is_empty() {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(remaining);
            }
            for pid in remaining.iter().filter_map(|p| rustix::process::Pid::from_raw(*p)) {
                // It may have ended already.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Removes the group and the groups below it, which must be empty, then each parent that is
    /// empty. Succeeds if the group does not exist.
    pub(crate) fn remove(&self, timeout: Duration) -> io::Result<()> {
        let end = Instant::now() + timeout;
        for (hierarchy, directory) in self.directories() {
            hierarchy::remove(&directory, end.saturating_duration_since(Instant::now()))?;
            let top = hierarchy.mount.join(ROOT_GROUP);
            for parent in directory.ancestors().skip(1).take_while(|p| p.starts_with(&top)) {
                // Fails while the parent holds other labs' groups.
                if fs::remove_dir(parent).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// CPU time used by the group's processes, including ended ones, since the group was created.
    pub(crate) fn cpu_time(&self) -> Result<Duration> {
        for (hierarchy, directory) in self.directories() {
            if hierarchy.unified {
                let text = fs::read_to_string(directory.join("cpu.stat")).unwrap_or_default();
                let used = text.lines().find_map(|l| l.strip_prefix("usage_usec "));
                if let Some(micros) = used.and_then(|u| u.trim().parse().ok()) {
                    return Ok(Duration::from_micros(micros));
                }
            } else if hierarchy.has("cpuacct") {
                let text = fs::read_to_string(directory.join("cpuacct.usage")).unwrap_or_default();
                if let Ok(nanos) = text.trim().parse() {
                    return Ok(Duration::from_nanos(nanos));
                }
            }
        }
        Err(LabError::Unsupported(format!("no control group counts the CPU time of {}", self.path.display())))
    }
}

/// Quota and period, in µs, for this many CPUs.
fn quota(speed: f64) -> (u64, u64) {
    let quota = (speed * CFS_PERIOD_US as f64).round() as u64;
    if quota >= MIN_QUOTA_US {
        (quota, CFS_PERIOD_US)
    } else {
        (MIN_QUOTA_US, (MIN_QUOTA_US as f64 / speed).round() as u64)
    }
}

fn limit_cpu(hierarchy: &Hierarchy, path: &Path, speed: f64) -> Result<()> {
    let (quota, period) = quota(speed);
    let directory = hierarchy.mount.join(path);
    if hierarchy.unified {
        enable_controller(hierarchy, path, "+cpu")?;
        write_file(&directory.join("cpu.max"), &format!("{quota} {period}"))
    } else {
        // The period goes first: the kernel checks a quota against the current period.
        write_file(&directory.join("cpu.cfs_period_us"), &period.to_string())?;
        write_file(&directory.join("cpu.cfs_quota_us"), &quota.to_string())
    }
}

/// Enables a controller on each level of the path: version 2 delegates it one level at a time.
fn enable_controller(hierarchy: &Hierarchy, path: &Path, controller: &str) -> Result<()> {
    let mut above = hierarchy.mount.clone();
    for part in path.components() {
        write_file(&above.join("cgroup.subtree_control"), controller)?;
        above.push(part);
    }
    Ok(())
}

fn write_file(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("write to {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_short_unless_the_node_is_very_slow() {
        assert_eq!(quota(1.0), (5_000, 5_000));
        assert_eq!(quota(0.72), (3_600, 5_000));
        assert_eq!(quota(1.5), (7_500, 5_000));
        assert_eq!(quota(0.1), (1_000, 10_000));
        assert_eq!(quota(0.01), (1_000, 100_000));
    }
}
