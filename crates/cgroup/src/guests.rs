//! `tern/guests`: the group of all guests that a node holds, and of the commands that others have placed on it, in every
//! hierarchy in which groups can be of use to who owns the node. There it can be seen what they use together, and be
//! limited, frozen or ended at once.
//!
//! It is made beside the daemon: in the group that the daemon is in, or in the one above, if the daemon has made
//! room by being in a leaf of the name `main` (only then version 2 gives controllers to groups). Shims and what runs
//! placed commands are children of the daemon and find the same place. So a limit of the daemon's own group, as a lab node's speed, binds its
//! guests as well.
//!
//! Several of them use it at a time. Each makes it when it needs it, and removes it when it goes; the kernel refuses
//! that as long as somebody is in it. Between being made and being entered it may be removed by another: then it is
//! made again.

use crate::hierarchy::{self, Hierarchy};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The controllers that are of use.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuacct", "memory", "freezer"];
/// Microseconds over which a quota of CPU time counts.
const PERIOD: u32 = 100_000;
/// How often it is made again.
const TRIES: usize = 20;

/// What stands at one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The controllers of this hierarchy that are of use; none if it is one of version 2 without controllers, which
    /// counts CPU time, freezes and kills all the same.
    pub controllers: Vec<&'static str>,
    /// Version 2.
    pub unified: bool,
    /// The group in which `tern` is or would be.
    above: PathBuf,
}

/// Where it is, or would be.
///
/// # Errors
/// If /proc does not say.
pub fn places() -> io::Result<Vec<Place>> {
    let own = fs::read_to_string("/proc/self/cgroup")?;
    Ok(Hierarchy::all()?.iter().filter_map(|one| place(one, &own)).collect())
}

fn place(hierarchy: &Hierarchy, own: &str) -> Option<Place> {
    let mut controllers: Vec<_> = CONTROLLERS.into_iter().filter(|one| hierarchy.has(one)).collect();
    if hierarchy.unified {
        // Every group of version 2 can be frozen.
        controllers.push("freezer");
    }
    let mut above = hierarchy.group_of(own)?;
    if above != hierarchy.mount && above.ends_with("main") {
        above.pop();
    }
    (!controllers.is_empty()).then_some(Place { controllers, unified: hierarchy.unified, above })
}

impl Place {
    fn group(&self) -> PathBuf {
        self.above.join("tern/guests")
    }

    /// Whether it could be made.
    ///
    /// # Errors
    /// With what the kernel says: it is mounted read-only, or somebody else's.
    pub fn usable(&self) -> io::Result<()> {
        Ok(rustix::fs::access(&self.above, rustix::fs::Access::WRITE_OK)?)
    }

    fn enter(&self, pid: i32, cpus: Option<f64>) -> io::Result<()> {
        let group = self.group();
        let mut entered = Ok(());
        for _ in 0..TRIES {
            fs::create_dir_all(&group)?;
            if self.unified {
                hand_down(&self.above);
            }
            entered = fs::write(group.join("cgroup.procs"), pid.to_string());
            match &entered {
                Err(e) if matches!(e.raw_os_error(), Some(GONE_BEFORE | GONE_WHILE_OPEN)) => {}
                _ => break,
            }
        }
        // Somebody is in it, so it stays.
        entered.and_then(|()| self.limit(cpus))
    }

    /// So many CPUs at most, where this hierarchy has that controller.
    fn limit(&self, cpus: Option<f64>) -> io::Result<()> {
        let Some(cpus) = cpus.filter(|_| self.controllers.contains(&"cpu")) else { return Ok(()) };
        let quota = (cpus * f64::from(PERIOD)) as u64;
        if self.unified {
            return fs::write(self.group().join("cpu.max"), format!("{quota} {PERIOD}"));
        }
        fs::write(self.group().join("cpu.cfs_period_us"), PERIOD.to_string())?;
        fs::write(self.group().join("cpu.cfs_quota_us"), quota.to_string())
    }

    fn tidy(&self) {
        let patience = Duration::from_millis(200);
        let group = self.group();
        let empty = fs::read(group.join("cgroup.procs")).is_ok_and(|members| members.is_empty());
        if empty && hierarchy::remove(&group, patience).is_ok() {
            // Somebody else's groups may be in it.
            let _stays = fs::remove_dir(self.above.join("tern"));
        }
    }
}

/// ENOENT and ENODEV, by which a removal shows itself.
const GONE_BEFORE: i32 = 2;
const GONE_WHILE_OPEN: i32 = 19;

/// Lets version 2's controllers reach the group, one level at a time. Where processes are in a group themselves it
/// refuses; then guests are grouped, and cannot be limited.
fn hand_down(above: &Path) {
    for group in [above.to_owned(), above.join("tern")] {
        for controller in ["+cpu", "+memory"] {
            let _refused = fs::write(group.join("cgroup.subtree_control"), controller);
        }
    }
}

/// Puts a process there, and so all that it forks. All that are there may use so many CPUs together.
///
/// # Errors
/// If there is no such place, or the first where it could not be put. It is in the others all the same.
pub fn enter(pid: i32, cpus: Option<f64>) -> io::Result<()> {
    let places = places()?;
    if places.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "no hierarchy of control groups is of use"));
    }
    let entered: Vec<_> = places.iter().map(|place| place.enter(pid, cpus)).collect();
    entered.into_iter().collect()
}

/// Removes the group where nobody is in it.
pub fn tidy() {
    for place in places().unwrap_or_default() {
        place.tidy();
    }
}

/// The same, after somebody has ended whose processes end with him: waits so long for them.
pub fn tidy_within(patience: Duration) {
    let end = Instant::now() + patience;
    let places = places().unwrap_or_default();
    loop {
        places.iter().for_each(Place::tidy);
        if Instant::now() > end || !places.iter().any(|place| place.group().exists()) {
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
        Hierarchy::of_mount(&mount).unwrap()
    }

    #[test]
    fn it_is_beside_a_leaf_and_in_everything_else() {
        let at = |own: &str| place(&hierarchy("cgroup", &["cpu"]), own).unwrap().group();
        assert_eq!(at("3:cpu:/lab/node1/main"), Path::new("/cg/lab/node1/tern/guests"));
        assert_eq!(
            at("3:cpu:/system.slice/ternd.service"),
            Path::new("/cg/system.slice/ternd.service/tern/guests")
        );
        assert_eq!(at("3:cpu:/"), Path::new("/cg/tern/guests"));
        assert_eq!(at("3:cpu:/main"), Path::new("/cg/tern/guests"));
        assert_eq!(place(&hierarchy("cgroup", &["cpuset"]), "3:cpuset:/"), None);
        let second = place(&hierarchy("cgroup2", &[]), "0::/x").unwrap();
        assert_eq!((second.unified, second.controllers), (true, vec!["freezer"]));
    }

    /// Where this machine lets us: a process is put there, the group stays as long as it lives, and is then gone.
    #[test]
    fn who_is_in_it_keeps_it() {
        let usable: Vec<Place> = places().unwrap().into_iter().filter(|p| p.usable().is_ok()).collect();
        // Another name than the real one: guests may be on this machine.
        let sandbox = format!("tern-test-{}", std::process::id());
        for place in usable {
            let place = Place { above: place.above.join(&sandbox), ..place };
            let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
            let entered = place.enter(child.id() as i32, Some(0.5));
            let quota =
                ["cpu.max", "cpu.cfs_quota_us"].map(|file| fs::read_to_string(place.group().join(file)));
            let members = fs::read_to_string(place.group().join("cgroup.procs")).unwrap_or_default();
            place.tidy();
            let stayed = place.group().exists();
            child.kill().unwrap();
            child.wait().unwrap();
            place.tidy();
            let left = place.above.join("tern").exists();
            let _cleaned = hierarchy::remove(&place.above, Duration::from_secs(1));
            entered.unwrap();
            assert_eq!(members.trim(), child.id().to_string());
            if place.controllers.contains(&"cpu") {
                assert!(quota.iter().flatten().any(|text| text.starts_with("50000")), "{quota:?}");
            }
            assert!(stayed && !left, "{place:?}: stayed {stayed}, left {left}");
        }
    }
}
