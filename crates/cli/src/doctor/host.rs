//! System features: load figures, cgroups, file systems, time.
#![expect(unsafe_code, reason = "mount and adjtimex have no safe form without a capability crate")]

use super::Finding;
use super::child::{checked, in_child};
use crate::output::error_text;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Maximum error of a destination's clock, in milliseconds.
const MAX_CLOCK_ERROR_MS: f64 = 50.0;

pub(super) fn probe() -> Vec<Finding> {
    vec![pressure(), cgroup(), guest_cgroup(), fuse(), overlay(), clock()]
}

fn pressure() -> Finding {
    let name = "pressure stall information";
    match std::fs::read_to_string("/proc/pressure/cpu") {
        Ok(_) => Finding::ok(name, "readable"),
        Err(error) => Finding::limited(
            name,
            error_text(&error),
            "load is measured only from runnable threads; boot with psi=1 for better figures",
        ),
    }
}

fn cgroup() -> Finding {
    let mounts = tern_control::procfs::read_text("/proc/self/mounts").unwrap_or_default();
    let name = "cgroup cpu controller";
    let follows = "the CPU time of guests and the speed of tern lab's nodes cannot be limited; mount the controller writable";
    let Some((version, dir)) = cpu_controller(&mounts, |dir| {
        std::fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default()
    }) else {
        return Finding::limited(name, "not mounted", follows);
    };
    let found = format!("{version} at {}", dir.display());
    match rustix::fs::access(&dir, rustix::fs::Access::WRITE_OK) {
        Ok(()) => Finding::ok(name, found),
        Err(error) => {
            Finding::limited(name, format!("{found}, not writable ({})", error_text(&error.into())), follows)
        }
    }
}

/// Whether guests can have a cgroup of their own, as seen from this process; ternd may be in
/// another cgroup.
fn guest_cgroup() -> Finding {
    let places = tern_cgroup::guests::groups().unwrap_or_default();
    let usable = places
        .iter()
        .map(|place| (place.controllers.clone(), place.check_writable().map_err(|e| error_text(&e))));
    guest_cgroup_finding(&usable.collect::<Vec<_>>())
}

fn guest_cgroup_finding(places: &[(Vec<&str>, Result<(), String>)]) -> Finding {
    let name = "control group for guests";
    let mut found: Vec<&str> =
        places.iter().filter(|(_, usable)| usable.is_ok()).flat_map(|(all, _)| all.clone()).collect();
    found.sort_unstable();
    found.dedup();
    let refused = places.iter().find_map(|(_, usable)| usable.as_ref().err());
    let follows = "guests run in ternd's cgroup, and cannot be limited or frozen together";
    match (found.is_empty(), refused) {
        (true, Some(why)) => Finding::limited(name, format!("not writable ({why})"), follows),
        (true, None) => Finding::limited(name, "no cgroup hierarchy is mounted", follows),
        (false, _) if ["cpu", "memory"].iter().all(|one| found.contains(one)) => {
            Finding::ok(name, format!("tern/guests, with {}", found.join(", ")))
        }
        (false, _) => Finding::limited(
            name,
            format!("tern/guests, with {}", found.join(", ")),
            "guests have a cgroup of their own, but their CPU time and memory cannot both be limited",
        ),
    }
}

/// The version and the mount point of the cgroup hierarchy with the cpu controller, v2 preferred.
fn cpu_controller(mounts: &str, controllers: impl Fn(&Path) -> String) -> Option<(&'static str, PathBuf)> {
    let mounts_of_cgroup = || {
        mounts.lines().filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            Some((PathBuf::from(fields.next()?), fields.next()?, fields.next()?))
        })
    };
    let v2 = mounts_of_cgroup().find(|(dir, kind, _)| {
        *kind == "cgroup2" && controllers(dir).split_whitespace().any(|one| one == "cpu")
    });
    let v1 = || {
        mounts_of_cgroup()
            .find(|(_, kind, options)| *kind == "cgroup" && options.split(',').any(|one| one == "cpu"))
    };
    v2.map(|tree| ("v2", tree.0)).or_else(|| v1().map(|tree| ("v1", tree.0)))
}

fn fuse() -> Finding {
    let name = "fuse";
    match std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => Finding::ok(name, "/dev/fuse opens"),
        Err(error) => Finding::limited(
            name,
            format!("/dev/fuse: {}", error_text(&error)),
            "this user cannot mount /mfs; modprobe fuse, or check the permissions of /dev/fuse",
        ),
    }
}

fn overlay() -> Finding {
    let name = "overlayfs";
    let follows = "tern lab does not work on this node; modprobe overlay";
    if !rustix::process::geteuid().is_root() {
        let kinds = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        return match kinds.split_whitespace().any(|kind| kind == "overlay") {
            true => Finding::ok(name, "in this kernel (not tried, because that needs root)"),
            false => Finding::limited(name, "not in this kernel, or not loaded", follows),
        };
    }
    let dir = std::env::temp_dir().join(format!("tern-doctor-{}", std::process::id()));
    let tried = std::fs::create_dir(&dir).and_then(|()| in_child(|| mount_overlay(&dir)));
    // The mounts were in the child's own mount namespace and are gone with it.
    let _ = std::fs::remove_dir(&dir);
    match tried {
        Ok(_) => Finding::ok(name, "mounts"),
        Err(error) => Finding::limited(name, error_text(&error), follows),
    }
}

/// In a child process with its own mount namespace: mounts an overlay on a tmpfs.
fn mount_overlay(dir: &Path) -> io::Result<u64> {
    // SAFETY: runs in a probe's child, which shares nothing that this could affect.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNS) }.into())?;
    mount(None, Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE, "")?;
    mount(Some(c"tmpfs"), dir, Some(c"tmpfs"), 0, "")?;
    for part in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir(dir.join(part))?;
    }
    let at = dir.display();
    let options = format!("lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work");
    mount(Some(c"overlay"), &dir.join("merged"), Some(c"overlay"), 0, &options)
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
    let as_ptr = |text: Option<&std::ffi::CStr>| text.map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    // SAFETY: all strings are terminated and outlive the call; source and type may be null.
    checked(
        unsafe { libc::mount(as_ptr(source), target.as_ptr(), as_ptr(kind), flags, options.as_ptr().cast()) }
            .into(),
    )
}

fn clock() -> Finding {
    // SAFETY: all zeros is a valid timex; with modes 0 the call only reads.
    let mut time: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills in the structure and keeps no pointer to it.
    let state = unsafe { libc::adjtimex(&raw mut time) };
    let synchronised = state >= 0 && state != libc::TIME_ERROR && time.status & libc::STA_UNSYNC == 0;
    // maxerror is in microseconds, and grows while no program corrects the clock.
    clock_quality(synchronised, time.maxerror as f64 / 1000.0)
}

fn clock_quality(synchronised: bool, error_ms: f64) -> Finding {
    let name = "clock";
    let follows =
        "a node whose clock is more than 50 ms off takes no guests; run chrony or systemd-timesyncd";
    if !synchronised {
        Finding::limited(name, "not synchronised, according to the kernel", follows)
    } else if error_ms > MAX_CLOCK_ERROR_MS {
        Finding::limited(name, format!("synchronised, at most {error_ms:.0} ms off"), follows)
    } else {
        Finding::ok(name, format!("synchronised, at most {error_ms:.1} ms off"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::FindingState;

    #[test]
    fn cpu_controller_is_found_in_v2_and_v1() {
        let both = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n\
                    cgroup /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let find = |controllers: &str| cpu_controller(both, |_| controllers.to_owned());
        assert_eq!(find("memory cpu pids"), Some(("v2", "/sys/fs/cgroup/unified".into())));
        assert_eq!(find("cpuset memory"), Some(("v1", "/sys/fs/cgroup/cpu".into())));
        assert_eq!(cpu_controller("proc /proc proc rw,cpu 0 0\nodd\n", |_| "cpu".into()), None);
    }

    #[test]
    fn guest_cgroup_needs_a_writable_hierarchy() {
        let (cpu, memory) = ((vec!["cpu"], Ok(())), (vec!["memory"], Ok(())));
        assert_eq!(guest_cgroup_finding(&[cpu.clone(), memory]).state, FindingState::Ok);
        assert_eq!(guest_cgroup_finding(&[cpu]).state, FindingState::Limited);
        let read_only = guest_cgroup_finding(&[(vec!["cpu", "memory"], Err("read-only".into()))]);
        assert_eq!((read_only.state, &*read_only.found), (FindingState::Limited, "not writable (read-only)"));
        assert_eq!(guest_cgroup_finding(&[]).found, "no cgroup hierarchy is mounted");
    }

    #[test]
    fn clock_must_be_synchronised_and_exact() {
        assert_eq!(clock_quality(true, 3.0).state, FindingState::Ok);
        assert_eq!(clock_quality(true, 80.0).state, FindingState::Limited);
        assert_eq!(clock_quality(false, 0.0).state, FindingState::Limited);
    }

    #[test]
    fn probe_leaves_no_mount_or_directory() {
        overlay();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains("tern-doctor"), "{mounts}");
        assert!(!std::env::temp_dir().join(format!("tern-doctor-{}", std::process::id())).exists());
    }
}
