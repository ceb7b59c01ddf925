//! `tern/guests`: the control group of all guests on a node, and of commands that other nodes have
//! placed on it. It exists in each version 2 hierarchy and in each version 1 hierarchy with one of
//! the controllers used here. Through it the node's owner can measure, limit, freeze or kill its
//! members all at once.
//!
//! The group `tern` is created in the daemon's own group, or in the parent of that group if the
//! daemon is in a leaf group named `main` (in version 2 only then can controllers be enabled for
//! child groups). Shims and the processes that run placed commands inherit the daemon's group, and
//! so find the same location. A limit on the group that contains `tern`, such as a lab node's
//! speed, applies to the guests as well.
//!
//! Several of these processes use the group at a time. Each process creates the group when needed,
//! and tries to remove it when members of the group have ended; the kernel refuses to remove a
//! group that has members. If another process removes the group between its creation and the entry
//! of the first member, the group is created again.

use crate::hierarchy::{self, Hierarchy};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The controllers that are used.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuacct", "memory", "freezer"];
/// The period of a CPU quota, in microseconds.
const QUOTA_PERIOD_US: u32 = 100_000;
/// Maximum number of attempts to create and enter the group.
const MAX_ATTEMPTS: usize = 20;

/// The location of `tern/guests` in one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestGroup {
    /// Those of `CONTROLLERS` that this hierarchy has. Version 2 always counts as having `freezer`:
    /// even without controllers, its groups count CPU time, and can be frozen and killed.
    pub controllers: Vec<&'static str>,
    /// Whether the hierarchy is of version 2.
    pub unified: bool,
    /// The group in which `tern` is, or would be created.
    parent: PathBuf,
}

/// The locations where the group is, or would be created.
///
/// # Errors
/// If /proc cannot be read.
pub fn groups() -> io::Result<Vec<GuestGroup>> {
    let own = fs::read_to_string("/proc/self/cgroup")?;
    Ok(Hierarchy::all()?.iter().filter_map(|one| guest_group(one, &own)).collect())
}

fn guest_group(hierarchy: &Hierarchy, own: &str) -> Option<GuestGroup> {
    let mut controllers: Vec<_> = CONTROLLERS.into_iter().filter(|one| hierarchy.has(one)).collect();
    if hierarchy.unified {
        // Every group of version 2 can be frozen.
        controllers.push("freezer");
    }
    let mut parent = hierarchy.group_of(own)?;
    if parent != hierarchy.mount && parent.ends_with("main") {
        parent.pop();
    }
    (!controllers.is_empty()).then_some(GuestGroup { controllers, unified: hierarchy.unified, parent })
}

impl GuestGroup {
    fn path(&self) -> PathBuf {
        self.parent.join("tern/guests")
    }

    /// Checks that the group could be created.
    ///
    /// # Errors
    /// The kernel's error, for example if the hierarchy is mounted read-only or owned by another
    /// user.
    pub fn check_writable(&self) -> io::Result<()> {
        Ok(rustix::fs::access(&self.parent, rustix::fs::Access::WRITE_OK)?)
    }

    fn enter(&self, pid: i32, cpus: Option<f64>) -> io::Result<()> {
        let group = self.path();
        let mut entered = Ok(());
        for _ in 0..MAX_ATTEMPTS {
            fs::create_dir_all(&group)?;
            if self.unified {
                enable_controllers(&self.parent);
            }
            entered = fs::write(group.join("cgroup.procs"), pid.to_string());
            match &entered {
                Err(e) if matches!(e.raw_os_error(), Some(ENOENT | ENODEV)) => {}
                _ => break,
            }
        }
        // The group has a member now, so it is not removed.
        entered.and_then(|()| self.limit(cpus))
    }

    /// Limits the group to this many CPUs, if this hierarchy has the `cpu` controller.
    fn limit(&self, cpus: Option<f64>) -> io::Result<()> {
        let Some(cpus) = cpus.filter(|_| self.controllers.contains(&"cpu")) else { return Ok(()) };
        let quota = (cpus * f64::from(QUOTA_PERIOD_US)) as u64;
        if self.unified {
            return fs::write(self.path().join("cpu.max"), format!("{quota} {QUOTA_PERIOD_US}"));
        }
        fs::write(self.path().join("cpu.cfs_period_us"), QUOTA_PERIOD_US.to_string())?;
        fs::write(self.path().join("cpu.cfs_quota_us"), quota.to_string())
    }

    fn remove_if_empty(&self) {
        let timeout = Duration::from_millis(200);
        let group = self.path();
        let empty = fs::read(group.join("cgroup.procs")).is_ok_and(|members| members.is_empty());
        if empty && hierarchy::remove(&group, timeout).is_ok() {
            // Fails if `tern` has other groups.
            let _stays = fs::remove_dir(self.parent.join("tern"));
        }
    }
}

/// ENOENT and ENODEV: the group was removed before or while the file was opened.
const ENOENT: i32 = 2;
const ENODEV: i32 = 19;

/// Enables version 2's controllers for the group, one level at a time. The kernel refuses where a
/// parent group has member processes; then guests are grouped, but cannot be limited.
fn enable_controllers(parent: &Path) {
    for group in [parent.to_owned(), parent.join("tern")] {
        for controller in ["+cpu", "+memory"] {
            let _refused = fs::write(group.join("cgroup.subtree_control"), controller);
        }
    }
}

/// Moves a process into the group, where its future children will be too. All members together may
/// use `cpus` CPUs.
///
/// # Errors
/// If no mounted hierarchy can be used, or the first error of entering a group. All groups are
/// tried, so the process may have entered the others.
pub fn enter(pid: i32, cpus: Option<f64>) -> io::Result<()> {
    let groups = groups()?;
    if groups.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "no usable cgroup hierarchy is mounted; mount one with the cpu controller",
        ));
    }
    let entered: Vec<_> = groups.iter().map(|group| group.enter(pid, cpus)).collect();
    entered.into_iter().collect()
}

/// Removes the group if it has no members.
pub fn remove_if_empty() {
    for group in groups().unwrap_or_default() {
        group.remove_if_empty();
    }
}

/// Removes the group. Waits up to `timeout` for members to exit, since their parent has just ended.
pub fn remove_within(timeout: Duration) {
    let end = Instant::now() + timeout;
    let groups = groups().unwrap_or_default();
    loop {
        groups.iter().for_each(GuestGroup::remove_if_empty);
        if Instant::now() > end || !groups.iter().any(|group| group.path().exists()) {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounts::Mount;
    use std::process::{Command, Stdio};

    fn hierarchy(kind: &str, options: &[&str]) -> Hierarchy {
        let options = options.iter().map(|&o| o.to_owned()).collect();
        let mount = Mount { at: "/cg".into(), root: "/".into(), kind: kind.to_owned(), options };
        Hierarchy::from_mount(&mount).unwrap()
    }

    #[test]
    fn group_is_next_to_a_leaf_and_inside_other_groups() {
        let at = |own: &str| guest_group(&hierarchy("cgroup", &["cpu"]), own).unwrap().path();
        assert_eq!(at("3:cpu:/lab/node1/main"), Path::new("/cg/lab/node1/tern/guests"));
        assert_eq!(
            at("3:cpu:/system.slice/ternd.service"),
            Path::new("/cg/system.slice/ternd.service/tern/guests")
        );
        assert_eq!(at("3:cpu:/"), Path::new("/cg/tern/guests"));
        assert_eq!(at("3:cpu:/main"), Path::new("/cg/tern/guests"));
        assert_eq!(guest_group(&hierarchy("cgroup", &["cpuset"]), "3:cpuset:/"), None);
        let second = guest_group(&hierarchy("cgroup2", &[]), "0::/x").unwrap();
        assert_eq!((second.unified, second.controllers), (true, vec!["freezer"]));
    }

    /// In each hierarchy that this machine permits: a member keeps the group, and without members
    /// it is removed.
    #[test]
    fn group_is_removed_only_without_members() {
        let writable: Vec<GuestGroup> =
            groups().unwrap().into_iter().filter(|p| p.check_writable().is_ok()).collect();
        // Not the real name: guests may be running on this machine.
        let sandbox = format!("tern-test-{}", std::process::id());
        for group in writable {
            let group = GuestGroup { parent: group.parent.join(&sandbox), ..group };
            let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
            let entered = group.enter(child.id() as i32, Some(0.5));
            let quota =
                ["cpu.max", "cpu.cfs_quota_us"].map(|file| fs::read_to_string(group.path().join(file)));
            let members = fs::read_to_string(group.path().join("cgroup.procs")).unwrap_or_default();
            group.remove_if_empty();
            let stayed = group.path().exists();
            child.kill().unwrap();
            child.wait().unwrap();
            group.remove_if_empty();
            let left = group.parent.join("tern").exists();
            let _cleaned = hierarchy::remove(&group.parent, Duration::from_secs(1));
            entered.unwrap();
            assert_eq!(members.trim(), child.id().to_string());
            if group.controllers.contains(&"cpu") {
                assert!(quota.iter().flatten().any(|text| text.starts_with("50000")), "{quota:?}");
            }
            assert!(stayed && !left, "{group:?}: stayed {stayed}, left {left}");
        }
    }
}
