//! What the system offers besides processes: load figures, limits, files, time.
#![expect(unsafe_code, reason = "mount and adjtimex have no safe form without a capability crate")]

use super::Finding;
use super::child::{checked, in_child};
use crate::output::reason;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Nodes whose clocks differ by more are no destinations for each other.
const MOST_CLOCK_ERROR_MS: f64 = 50.0;

pub(super) fn examine() -> Vec<Finding> {
    vec![pressure(), cgroup(), guests_group(), fuse(), overlay(), clock()]
}

fn pressure() -> Finding {
    let name = "pressure stall information";
    match std::fs::read_to_string("/proc/pressure/cpu") {
        Ok(_) => Finding::ok(name, "readable"),
        Err(error) => Finding::limited(
            name,
            reason(&error),
            "load is measured from runnable threads alone; boot with psi=1 for better figures",
        ),
    }
}

fn cgroup() -> Finding {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let name = "cgroup cpu controller";
    let follows = "guests cannot be kept from taking all CPU time, and tern lab cannot slow its nodes down";
    let Some((version, dir)) = cpu_controller(&mounts, |dir| {
        std::fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default()
    }) else {
        return Finding::limited(name, "not mounted", follows);
    };
    let found = format!("{version} at {}", dir.display());
    match rustix::fs::access(&dir, rustix::fs::Access::WRITE_OK) {
        Ok(()) => Finding::ok(name, found),
        Err(error) => {
            Finding::limited(name, format!("{found}, not writable ({})", reason(&error.into())), follows)
        }
    }
}

/// Whether guests can be put into a control group of their own. As seen from here: ternd may be in another place.
fn guests_group() -> Finding {
    let places = tern_cgroup::guests::places().unwrap_or_default();
    let usable =
        places.iter().map(|place| (place.controllers.clone(), place.usable().map_err(|e| reason(&e))));
    grouping(&usable.collect::<Vec<_>>())
}

fn grouping(places: &[(Vec<&str>, Result<(), String>)]) -> Finding {
    let name = "control group for guests";
    let mut found: Vec<&str> =
        places.iter().filter(|(_, usable)| usable.is_ok()).flat_map(|(all, _)| all.clone()).collect();
    found.sort_unstable();
    found.dedup();
    let refused = places.iter().find_map(|(_, usable)| usable.as_ref().err());
    let follows = "guests run in the group of ternd's, and cannot be limited or frozen together";
    match (found.is_empty(), refused) {
        (true, Some(why)) => Finding::limited(name, format!("not writable ({why})"), follows),
        (true, None) => Finding::limited(name, "no hierarchy is mounted", follows),
        (false, _) if ["cpu", "memory"].iter().all(|one| found.contains(one)) => {
            Finding::ok(name, format!("tern/guests, with {}", found.join(", ")))
        }
        (false, _) => Finding::limited(
            name,
            format!("tern/guests, with {}", found.join(", ")),
            "guests are in a group of their own, but their CPU time and memory cannot both be limited",
        ),
    }
}

/// Where the cpu controller is: in v2's tree if that has it, else in one of v1's.
fn cpu_controller(mounts: &str, controllers: impl Fn(&Path) -> String) -> Option<(&'static str, PathBuf)> {
    let trees = || {
        mounts.lines().filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            Some((PathBuf::from(fields.next()?), fields.next()?, fields.next()?))
        })
    };
    let v2 = trees().find(|(dir, kind, _)| {
        *kind == "cgroup2" && controllers(dir).split_whitespace().any(|one| one == "cpu")
    });
    let v1 =
        || trees().find(|(_, kind, options)| *kind == "cgroup" && options.split(',').any(|one| one == "cpu"));
    v2.map(|tree| ("v2", tree.0)).or_else(|| v1().map(|tree| ("v1", tree.0)))
}

fn fuse() -> Finding {
    let name = "fuse";
    match std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => Finding::ok(name, "/dev/fuse opens"),
        Err(error) => Finding::limited(
            name,
            format!("/dev/fuse: {}", reason(&error)),
            "no /mfs for this user, or on this node; modprobe fuse",
        ),
    }
}

fn overlay() -> Finding {
    let name = "overlayfs";
    let follows = "no tern lab on this node; modprobe overlay";
    if !rustix::process::geteuid().is_root() {
        let kinds = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        return match kinds.split_whitespace().any(|kind| kind == "overlay") {
            true => Finding::ok(name, "in this kernel (not tried, which takes root)"),
            false => Finding::limited(name, "not in this kernel, or not loaded", follows),
        };
    }
    let place = std::env::temp_dir().join(format!("tern-doctor-{}", std::process::id()));
    let tried = std::fs::create_dir(&place).and_then(|()| in_child(|| mount_overlay(&place)));
    // The mounts were in the child's own namespace and are gone with it.
    let _ = std::fs::remove_dir(&place);
    match tried {
        Ok(_) => Finding::ok(name, "mounts"),
        Err(error) => Finding::limited(name, reason(&error), follows),
    }
}

/// In a child, in a mount namespace of its own: an overlay on a tmpfs.
fn mount_overlay(place: &Path) -> io::Result<u64> {
    // SAFETY: in a probe's child, which has nothing to share.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNS) }.into())?;
    mount(None, Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE, "")?;
    mount(Some(c"tmpfs"), place, Some(c"tmpfs"), 0, "")?;
    for part in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir(place.join(part))?;
    }
    let at = place.display();
    let options = format!("lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work");
    mount(Some(c"overlay"), &place.join("merged"), Some(c"overlay"), 0, &options)
}

fn mount(
    source: Option<&std::ffi::CStr>,
    target: &Path,
    kind: Option<&std::ffi::CStr>,
    flags: libc::c_ulong,
    options: &str,
) -> io::Result<u64> {
    let target = CString::new(target.as_os_str().as_bytes())?;
    let options = CString::new(options)?;
    let pointer = |text: Option<&std::ffi::CStr>| text.map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    // SAFETY: all strings are terminated and outlive the call; null is allowed for source and type.
    checked(
        unsafe {
            libc::mount(pointer(source), target.as_ptr(), pointer(kind), flags, options.as_ptr().cast())
        }
        .into(),
    )
}

fn clock() -> Finding {
    // SAFETY: all zeros is a valid timex, and with modes 0 a question.
    let mut time: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills in the structure and keeps no pointer to it.
    let state = unsafe { libc::adjtimex(&raw mut time) };
    let synchronised = state >= 0 && state != libc::TIME_ERROR && time.status & libc::STA_UNSYNC == 0;
    // maxerror is in microseconds and grows while nobody corrects the clock.
    clock_quality(synchronised, time.maxerror as f64 / 1000.0)
}

fn clock_quality(synchronised: bool, error_ms: f64) -> Finding {
    let name = "clock";
    let follows =
        "a node whose clock is more than 50 ms off takes no guests; run chrony or systemd-timesyncd";
    if !synchronised {
        Finding::limited(name, "not synchronised, says the kernel", follows)
    } else if error_ms > MOST_CLOCK_ERROR_MS {
        Finding::limited(name, format!("synchronised, at most {error_ms:.0} ms off"), follows)
    } else {
        Finding::ok(name, format!("synchronised, at most {error_ms:.1} ms off"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn the_controller_is_found_in_either_tree() {
        let both = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n\
                    cgroup /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let find = |controllers: &str| cpu_controller(both, |_| controllers.to_owned());
        assert_eq!(find("memory cpu pids"), Some(("v2", "/sys/fs/cgroup/unified".into())));
        assert_eq!(find("cpuset memory"), Some(("v1", "/sys/fs/cgroup/cpu".into())));
        assert_eq!(cpu_controller("proc /proc proc rw,cpu 0 0\nodd\n", |_| "cpu".into()), None);
    }

    #[test]
    fn guests_can_be_grouped_where_a_hierarchy_lets_us() {
        let (cpu, memory) = ((vec!["cpu"], Ok(())), (vec!["memory"], Ok(())));
        assert_eq!(grouping(&[cpu.clone(), memory]).state, State::Ok);
        assert_eq!(grouping(&[cpu]).state, State::Limited);
        let read_only = grouping(&[(vec!["cpu", "memory"], Err("read-only".into()))]);
        assert_eq!((read_only.state, &*read_only.found), (State::Limited, "not writable (read-only)"));
        assert_eq!(grouping(&[]).found, "no hierarchy is mounted");
    }

    #[test]
    fn clocks_need_someone_who_sets_them() {
        assert_eq!(clock_quality(true, 3.0).state, State::Ok);
        assert_eq!(clock_quality(true, 80.0).state, State::Limited);
        assert_eq!(clock_quality(false, 0.0).state, State::Limited);
    }

    #[test]
    fn nothing_stays_mounted_or_lying_about() {
        overlay();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains("tern-doctor"), "{mounts}");
        assert!(!std::env::temp_dir().join(format!("tern-doctor-{}", std::process::id())).exists());
    }
}
