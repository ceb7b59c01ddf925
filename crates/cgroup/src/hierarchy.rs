//! The control group hierarchies mounted on this machine.

use crate::mounts::{self, Mount};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// A mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub mount: PathBuf,
    /// The group that is mounted there; in a container, not the root of the hierarchy.
    pub root: PathBuf,
    /// Whether it is of version 2, the single hierarchy of all controllers.
    pub unified: bool,
    /// Its controllers; for version 1, all mount options, which include them.
    controllers: Vec<String>,
}

impl Hierarchy {
    /// All mounted hierarchies.
    ///
    /// # Errors
    /// If the mount table cannot be read.
    pub fn all() -> io::Result<Vec<Self>> {
        Ok(mounts::table()?.iter().filter_map(Self::from_mount).collect())
    }

    /// The hierarchy of a mount, or `None` if it is not a cgroup mount.
    #[must_use]
    pub fn from_mount(mount: &Mount) -> Option<Self> {
        let controllers = match mount.kind.as_str() {
            "cgroup" => mount.options.clone(),
            "cgroup2" => {
                let offered = fs::read_to_string(mount.at.join("cgroup.controllers")).unwrap_or_default();
                offered.split_whitespace().map(str::to_owned).collect()
            }
            _ => return None,
        };
        let unified = mount.kind == "cgroup2";
        Some(Self { mount: mount.at.clone(), root: mount.root.clone(), unified, controllers })
    }

    /// Whether it has this controller.
    #[must_use]
    pub fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|one| one == controller)
    }

    /// The directory of a process's group, given the text of its `/proc/PID/cgroup`. `None` if that
    /// group is not in the mounted part of the hierarchy.
    #[must_use]
    pub fn group_of(&self, proc_cgroup: &str) -> Option<PathBuf> {
        // Lines are NUMBER:CONTROLLERS:PATH; version 2 has no controllers.
        let path = proc_cgroup.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let ours = match self.unified {
                true => controllers.is_empty(),
                false => !controllers.is_empty() && controllers.split(',').all(|one| self.has(one)),
            };
            ours.then_some(path)
        })?;
        let below = Path::new(path).strip_prefix(&self.root).ok()?;
        Some(self.mount.join(below).components().collect())
    }
}

/// Visits a group and all its descendants, innermost first.
pub fn walk(group: &Path, visit: &mut impl FnMut(&Path)) {
    let Ok(entries) = fs::read_dir(group) else { return };
    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        walk(&entry.path(), visit);
    }
    visit(group);
}

/// Removes a group and its descendants, which must have no members. Succeeds if the group does not
/// exist. A group stays busy for a moment after its last process has died.
///
/// # Errors
/// The kernel's error if a group cannot be removed within `timeout`, for example because it has
/// members.
pub fn remove(group: &Path, timeout: Duration) -> io::Result<()> {
    let end = Instant::now() + timeout;
    loop {
        let mut result = Ok(());
        walk(group, &mut |group| {
            if let Err(error) = fs::remove_dir(group)
                && error.kind() != io::ErrorKind::NotFound
            {
                result = Err(error);
            }
        });
        if result.is_ok() || Instant::now() > end {
            return result;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(kind: &str, root: &str, options: &[&str]) -> Hierarchy {
        let options = options.iter().map(|&o| o.to_owned()).collect();
        let mount = Mount { at: "/cg".into(), root: root.into(), kind: kind.to_owned(), options };
        Hierarchy::from_mount(&mount).unwrap()
    }

    #[test]
    fn groups_are_found_in_every_kind_of_hierarchy() {
        let of = "5:memory:/user\n4:cpu,cpuacct:/a/main\n1:name=systemd:/x\n0::/b/main\n";
        let at = |kind, root, options: &[&str]| mount(kind, root, options).group_of(of);
        assert_eq!(at("cgroup", "/", &["rw", "cpu", "cpuacct"]), Some("/cg/a/main".into()));
        assert_eq!(at("cgroup", "/", &["rw", "memory"]), Some("/cg/user".into()));
        assert_eq!(at("cgroup", "/", &["rw", "freezer"]), None);
        assert_eq!(at("cgroup", "/a", &["cpu", "cpuacct"]), Some("/cg/main".into()), "a container");
        assert_eq!(at("cgroup", "/elsewhere", &["cpu", "cpuacct"]), None);
        assert_eq!(at("cgroup2", "/b/main", &[]), Some("/cg".into()));
        let other = Mount { at: "/".into(), root: "/".into(), kind: "ext4".into(), options: vec![] };
        assert_eq!(Hierarchy::from_mount(&other), None);
    }
}
