//! This node as control groups show it: its CPU quota, its memory and swap limits, and the CPU time
//! that it has used. Version 1, version 2, and both at the same time are supported.
//!
//! Limits are those of the daemon's own group and of all visible groups above it. The group of
//! guests is created in the daemon's own group, or in the parent of that group if the daemon is in
//! a leaf `main`. So these limits apply to an arriving guest too, except a limit on `main`, which
//! is counted all the same. For a container, the CPU time of the whole node is that of the group of
//! its first process; for a machine, it is read from `/proc/stat` ([`crate::demand`]).

use crate::task::number_after;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tern_cgroup::Hierarchy;

/// The groups of one hierarchy that contain this node, innermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
struct GroupChain {
    unified: bool,
    groups: Vec<PathBuf>,
}

/// The groups that contain this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Groups {
    cpu: Vec<GroupChain>,
    memory: Vec<GroupChain>,
    /// The group of everything in this container, in each hierarchy that accounts its CPU time.
    container: Vec<GroupChain>,
}

/// A memory limit set by control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryLimit {
    /// Bytes that may be used in total.
    pub total: u64,
    /// Bytes that may still be used, if caches are dropped.
    pub free: u64,
}

/// Memory and swap limits set by control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Limit of memory.
    pub memory: Option<MemoryLimit>,
    /// Limit of swap.
    pub swap: Option<MemoryLimit>,
}

impl Groups {
    /// Finds the groups of this process. Where there are none, or they cannot be read, there are no
    /// limits.
    #[must_use]
    pub fn of_this_process() -> Self {
        let all = Hierarchy::all().unwrap_or_default();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let first = fs::read_to_string("/proc/1/cgroup").unwrap_or_default();
        Self::find(&all, &own, in_container().then_some(first.as_str()))
    }

    /// The groups of a process with the `/proc/PID/cgroup` text `own`, in a container whose first
    /// process has the text `first`.
    fn find(all: &[Hierarchy], own: &str, first: Option<&str>) -> Self {
        let mut found = Self::default();
        for hierarchy in all {
            if let Some(group) = hierarchy.group_of(own) {
                let chain = GroupChain::from(hierarchy, &group);
                // In version 2 both controllers may be enabled for this group; its files show
                // whether they are.
                if hierarchy.has("cpu") || hierarchy.unified {
                    found.cpu.push(chain.clone());
                }
                if hierarchy.has("memory") || hierarchy.unified {
                    found.memory.push(chain);
                }
            }
            let counts = hierarchy.has("cpuacct") || hierarchy.unified;
            if let Some(mut group) = first.filter(|_| counts).and_then(|text| hierarchy.group_of(text)) {
                // The first process may be in a leaf group `main`, as in a lab, with other groups
                // beside it. The container's group is then the parent.
                if group != hierarchy.mount && group.ends_with("main") {
                    group.pop();
                }
                // The root group is the machine's, and does not account this container.
                if !is_root_group(&group, hierarchy.unified) {
                    found.container.push(GroupChain { unified: hierarchy.unified, groups: vec![group] });
                }
            }
        }
        found
    }

    /// The smallest CPU quota of the groups, in CPUs, if there is one.
    #[must_use]
    pub fn quota(&self) -> Option<f64> {
        let quotas = self.cpu.iter().flat_map(|chain| {
            chain.groups.iter().filter_map(|group| match chain.unified {
                true => quota_from_v2(&read(group, "cpu.max")?),
                false => quota_from_v1(&read(group, "cpu.cfs_quota_us")?, &read(group, "cpu.cfs_period_us")?),
            })
        });
        quotas.min_by(f64::total_cmp)
    }

    /// The smallest memory and swap limits of the groups.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        for chain in &self.memory {
            for group in &chain.groups {
                let one = if chain.unified { limits_v2(group) } else { limits_v1(group) };
                limits.memory = min_limit(limits.memory, one.memory);
                limits.swap = min_limit(limits.swap, one.swap);
            }
        }
        limits
    }

    /// CPU time used by everything in this container, including ended processes. `None` on a
    /// machine, or where no group accounts it.
    #[must_use]
    pub fn cpu_time_used(&self) -> Option<Duration> {
        self.container.iter().find_map(|chain| {
            let group = chain.groups.first()?;
            match chain.unified {
                true => Some(Duration::from_micros(number_after(&read(group, "cpu.stat")?, "usage_usec ")?)),
                false => Some(Duration::from_nanos(read(group, "cpuacct.usage")?.trim().parse().ok()?)),
            }
        })
    }

    /// The version 2 group with this container's own pressure files.
    #[must_use]
    pub fn pressure_group(&self) -> Option<&Path> {
        let group = self.container.iter().find(|chain| chain.unified)?.groups.first()?;
        group.join("cpu.pressure").exists().then_some(group)
    }
}

impl GroupChain {
    fn from(hierarchy: &Hierarchy, group: &Path) -> Self {
        let groups = group.ancestors().take_while(|above| above.starts_with(&hierarchy.mount));
        Self { unified: hierarchy.unified, groups: groups.map(Path::to_owned).collect() }
    }
}

/// Whether this process sees only a part of the machine's processes: its PID namespace is not the
/// initial one, whose inode is the kernel's PROC_PID_INIT_INO.
#[must_use]
pub fn in_container() -> bool {
    fs::read_link("/proc/self/ns/pid").is_ok_and(|to| to.as_os_str() != "pid:[4026531836]")
}

/// Whether a group is the root group of its hierarchy, by files that only root groups have or lack.
fn is_root_group(group: &Path, unified: bool) -> bool {
    if unified { !group.join("cgroup.type").exists() } else { group.join("release_agent").exists() }
}

fn read(group: &Path, file: &str) -> Option<String> {
    fs::read_to_string(group.join(file)).ok()
}

fn number(group: &Path, file: &str) -> Option<u64> {
    read(group, file)?.trim().parse().ok()
}

/// The quota in CPUs from `cpu.cfs_quota_us` and `cpu.cfs_period_us`; -1 is no limit.
fn quota_from_v1(quota: &str, period: &str) -> Option<f64> {
    quota_cpus(quota.trim().parse().ok()?, period.trim().parse().ok()?)
}

/// The quota in CPUs from `cpu.max`, which has the quota (or `max`) and the period.
fn quota_from_v2(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    quota_cpus(quota.parse().ok()?, period.parse().ok()?)
}

fn quota_cpus(quota: i64, period: i64) -> Option<f64> {
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// Version 1 reports a limit at least this large if there is none.
const NO_LIMIT: u64 = 1 << 60;

fn limits_v1(group: &Path) -> Limits {
    let stat = read(group, "memory.stat").unwrap_or_default();
    let cached = reclaimable(&stat, &["total_inactive_file ", "total_active_file "]);
    let used = number(group, "memory.usage_in_bytes").unwrap_or(0);
    let limit = number(group, "memory.limit_in_bytes").filter(|&limit| limit < NO_LIMIT);
    // Version 1 limits memory and swap together.
    let both = number(group, "memory.memsw.limit_in_bytes").filter(|&limit| limit < NO_LIMIT);
    let swapped = number_after(&stat, "total_swap ").unwrap_or(0);
    Limits {
        memory: limit.or(both).map(|total| remaining(total, used, cached)),
        swap: both.map(|both| remaining(both.saturating_sub(limit.unwrap_or(0)), swapped, 0)),
    }
}

fn limits_v2(group: &Path) -> Limits {
    let stat = read(group, "memory.stat").unwrap_or_default();
    let cached = reclaimable(&stat, &["inactive_file ", "active_file ", "slab_reclaimable "]);
    let used = number(group, "memory.current").unwrap_or(0);
    let swapped = number(group, "memory.swap.current").unwrap_or(0);
    // `max` does not parse as a number. A group whose use is above `high` is throttled, so `high`
    // counts as a limit too.
    let of = |file| number(group, file);
    let limit = of("memory.max").into_iter().chain(of("memory.high")).min();
    Limits {
        memory: limit.map(|total| remaining(total, used, cached)),
        swap: of("memory.swap.max").map(|total| remaining(total, swapped, 0)),
    }
}

fn reclaimable(stat: &str, keys: &[&str]) -> u64 {
    keys.iter().filter_map(|key| number_after(stat, key)).fold(0, u64::saturating_add)
}

fn remaining(total: u64, used: u64, cached: u64) -> MemoryLimit {
    MemoryLimit { total, free: total.saturating_sub(used.saturating_sub(cached)) }
}

fn min_limit(a: Option<MemoryLimit>, b: Option<MemoryLimit>) -> Option<MemoryLimit> {
    match (a, b) {
        (Some(a), Some(b)) => Some(MemoryLimit { total: a.total.min(b.total), free: a.free.min(b.free) }),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tern_cgroup::mounts::Mount;

    /// A tree of files that is removed when dropped.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let top = std::env::temp_dir().join(format!("tern-load-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = top.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(top)
        }

        fn hierarchy(&self, below: &str, kind: &str, options: &[&str]) -> Hierarchy {
            let options = options.iter().map(|&o| o.to_owned()).collect();
            let mount = Mount { at: self.0.join(below), root: "/".into(), kind: kind.to_owned(), options };
            Hierarchy::from_mount(&mount).unwrap()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn lab_node_in_v1_with_an_empty_v2_hierarchy() {
        let tree = Tree::new(
            "v1",
            &[
                ("cpu/cpu.cfs_quota_us", "-1\n"),
                ("cpu/cpu.cfs_period_us", "100000\n"),
                ("cpu/tern-lab/x/node1/cpu.cfs_quota_us", "3750\n"),
                ("cpu/tern-lab/x/node1/cpu.cfs_period_us", "5000\n"),
                ("cpu/tern-lab/x/node1/main/cpu.cfs_quota_us", "-1\n"),
                ("cpu/tern-lab/x/node1/main/cpu.cfs_period_us", "100000\n"),
                ("cpuacct/release_agent", ""),
                ("cpuacct/tern-lab/x/node1/cpuacct.usage", "1500000000\n"),
                ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory/memory.usage_in_bytes", "77000\n"),
                ("memory/tern-lab/x/node1/memory.limit_in_bytes", "1000000\n"),
                ("memory/tern-lab/x/node1/memory.usage_in_bytes", "700000\n"),
                ("memory/tern-lab/x/node1/memory.memsw.limit_in_bytes", "1500000\n"),
                (
                    "memory/tern-lab/x/node1/memory.stat",
                    "cache 1\ninactive_file 7\ntotal_swap 100000\ntotal_inactive_file 131072\ntotal_active_file 8\n",
                ),
                ("unified/cgroup.controllers", ""),
                ("unified/tern-lab/x/node1/cgroup.type", "domain\n"),
                ("unified/tern-lab/x/node1/cpu.pressure", ""),
            ],
        );
        let all = [
            tree.hierarchy("cpu", "cgroup", &["rw", "cpu"]),
            tree.hierarchy("cpuacct", "cgroup", &["rw", "cpuacct"]),
            tree.hierarchy("memory", "cgroup", &["rw", "memory"]),
            tree.hierarchy("unified", "cgroup2", &["rw"]),
        ];
        let own = "4:memory:/tern-lab/x/node1/main\n2:cpuacct:/tern-lab/x/node1/main\n\
                   1:cpu:/tern-lab/x/node1/main\n0::/tern-lab/x/node1/main\n";
        let groups = Groups::find(&all, own, Some(own));
        assert_eq!(groups.quota(), Some(0.75));
        assert_eq!(groups.cpu_time_used(), Some(Duration::from_millis(1500)));
        assert_eq!(groups.pressure_group(), Some(tree.0.join("unified/tern-lab/x/node1").as_path()));
        let limits = groups.limits();
        assert_eq!(limits.memory, Some(MemoryLimit { total: 1_000_000, free: 300_000 + 131_080 }));
        assert_eq!(limits.swap, Some(MemoryLimit { total: 500_000, free: 400_000 }));

        // On the machine itself, with the daemon in the root group.
        let own = "4:memory:/\n2:cpuacct:/\n1:cpu:/\n0::/\n";
        let groups = Groups::find(&all, own, None);
        assert_eq!((groups.quota(), groups.cpu_time_used(), groups.pressure_group()), (None, None, None));
        assert_eq!(groups.limits(), Limits::default());
        // In a PID namespace without a group of its own: the machine's group is not used for it.
        assert_eq!(Groups::find(&all, own, Some(own)).cpu_time_used(), None);
    }

    #[test]
    fn container_in_v2() {
        let tree = Tree::new(
            "v2",
            &[
                ("cgroup.controllers", "cpuset cpu io memory pids\n"),
                ("cgroup.type", "domain\n"),
                ("cpu.max", "150000 100000\n"),
                ("cpu.stat", "usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n"),
                ("memory.max", "2000000\n"),
                ("memory.high", "max\n"),
                ("memory.current", "1900000\n"),
                ("memory.stat", "anon 5\ninactive_file 300000\nactive_file 1\nslab_reclaimable 99\n"),
                ("memory.swap.max", "0\n"),
                ("memory.swap.current", "0\n"),
                ("main/cpu.max", "max 100000\n"),
            ],
        );
        let all = [tree.hierarchy("", "cgroup2", &["rw"])];
        let groups = Groups::find(&all, "0::/main\n", Some("0::/\n"));
        assert_eq!(groups.quota(), Some(1.5));
        assert_eq!(groups.cpu_time_used(), Some(Duration::from_millis(2500)));
        let limits = groups.limits();
        assert_eq!(limits.memory, Some(MemoryLimit { total: 2_000_000, free: 400_100 }));
        assert_eq!(limits.swap, Some(MemoryLimit { total: 0, free: 0 }));
    }

    #[test]
    fn missing_quota_is_recognised() {
        assert_eq!(quota_from_v1("-1\n", "100000\n"), None);
        assert_eq!(quota_from_v1("1000", "0"), None);
        assert_eq!(quota_from_v2("max 100000\n"), None);
        assert_eq!(quota_from_v2("65000 100000\n"), Some(0.65));
    }

    #[test]
    fn this_machine_can_be_read() {
        let groups = Groups::of_this_process();
        assert!(groups.quota().is_none_or(|quota| quota > 0.0));
        let _ = (groups.limits(), groups.cpu_time_used());
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_harmless(a in ".{0,40}", b in "[-0-9 max]{0,30}") {
            for quota in [quota_from_v1(&a, &b), quota_from_v1(&b, &a), quota_from_v2(&a), quota_from_v2(&b)].into_iter().flatten() {
                prop_assert!(quota > 0.0 && quota.is_finite());
            }
        }

        #[test]
        fn free_memory_does_not_exceed_the_total(total: u64, used: u64, cached: u64) {
            prop_assert!(remaining(total, used, cached).free <= total);
        }
    }
}
