//! Whether updatedb, which builds the database of `locate`, walks the files of all nodes. Tern does
//! not change the configuration of another package: the finding names the line to add.

use super::Finding;
use std::fs;
use std::path::Path;

/// The type of MFS trees in the mount table.
const FS_TYPE: &str = "fuse.mfs";

/// The path to check while no MFS tree is mounted.
const DEFAULT_MOUNT: &str = "/mfs";

/// The updatedb programs of plocate and mlocate, which read /etc/updatedb.conf. findutils has an
/// updatedb that does not read it.
const UPDATEDB_PROGRAMS: [&str; 4] = [
    "/usr/sbin/updatedb.plocate",
    "/usr/bin/updatedb.plocate",
    "/usr/bin/updatedb.mlocate",
    "/usr/bin/updatedb",
];

const CONFIGURATION: &str = "/etc/updatedb.conf";

pub(super) fn probe() -> Vec<Finding> {
    let is_installed = UPDATEDB_PROGRAMS.iter().any(|program| Path::new(program).exists());
    let mounts = tern_control::procfs::read_text("/proc/self/mountinfo").unwrap_or_default();
    // Without a configuration file nothing is pruned.
    let configuration = is_installed.then(|| fs::read_to_string(CONFIGURATION).unwrap_or_default());
    vec![updatedb(configuration.as_deref(), &mfs_mounts(&mounts))]
}

/// The mount points of MFS trees.
fn mfs_mounts(mounts: &str) -> Vec<String> {
    let is_mfs =
        |line: &&str| line.split_once(" - ").is_some_and(|(_, kind)| kind.split(' ').next() == Some(FS_TYPE));
    let at = |line: &str| line.split(' ').nth(4).map(str::to_owned);
    mounts.lines().filter(is_mfs).filter_map(at).collect()
}

fn updatedb(configuration: Option<&str>, trees: &[String]) -> Finding {
    let name = "updatedb";
    let Some(configuration) = configuration else {
        return Finding::ok(name, "not installed");
    };
    if variable_words(configuration, "PRUNEFS").any(|kind| kind.eq_ignore_ascii_case(FS_TYPE)) {
        return Finding::ok(name, format!("{CONFIGURATION} excludes file systems of type {FS_TYPE}"));
    }
    let is_pruned = |tree: &str| {
        variable_words(configuration, "PRUNEPATHS").any(|path| Path::new(tree).starts_with(path))
    };
    let default = [DEFAULT_MOUNT.to_owned()];
    let trees = if trees.is_empty() { &default } else { trees };
    match trees.iter().find(|tree| !is_pruned(tree)) {
        None => Finding::ok(name, format!("{CONFIGURATION} excludes {}", trees.join(", "))),
        Some(tree) => Finding::limited(
            name,
            format!("{CONFIGURATION} does not exclude {tree}"),
            format!(
                "each night it scans the files of all nodes; add {FS_TYPE} to PRUNEFS or {tree} to PRUNEPATHS"
            ),
        ),
    }
}

/// The words of a variable in updatedb.conf: `NAME = "one two"`.
fn variable_words<'a>(configuration: &'a str, variable: &'a str) -> impl Iterator<Item = &'a str> {
    let values = configuration.lines().filter_map(move |line| {
        let (name, value) = line.split_once('=')?;
        let value = value.trim().strip_prefix('"')?;
        (name.trim() == variable).then(|| value.split_once('"').map(|(value, _)| value))?
    });
    values.flat_map(str::split_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::FindingState;

    fn state(configuration: &str, trees: &[&str]) -> FindingState {
        let trees: Vec<String> = trees.iter().map(|tree| (*tree).to_owned()).collect();
        updatedb(Some(configuration), &trees).state
    }

    #[test]
    fn mfs_is_pruned_by_type_or_path() {
        // Debian's plocate configuration, shortened.
        let debian = "PRUNE_BIND_MOUNTS=\"yes\"\n# PRUNENAMES=\".git\"\nPRUNEPATHS=\"/tmp /var/spool /media\"\n\
                      PRUNEFS=\"NFS afs fuse.glusterfs fuse.mfs fuse.sshfs mfs nfs4 proc\"\n";
        assert_eq!(state(debian, &["/mfs"]), FindingState::Ok);
        assert_eq!(state("PRUNEFS = \"FUSE.MFS\" # ours\n", &["/mfs"]), FindingState::Ok);
        assert_eq!(state("PRUNEPATHS=\"/tmp /mfs\"\n", &["/mfs"]), FindingState::Ok);
        assert_eq!(state("PRUNEPATHS=\"/srv\"\n", &["/srv/all"]), FindingState::Ok);
        assert_eq!(state("PRUNEPATHS=\"/tmp /mfs\"\n", &["/mfs", "/srv/all"]), FindingState::Limited);
        // `mfs` names another file system, and a comment sets nothing.
        for others in
            ["", "PRUNEFS=\"nfs mfs fuse.sshfs\"\n", "#PRUNEFS=\"fuse.mfs\"\n", "PRUNEPATHS=\"/mfs2\"\n"]
        {
            assert_eq!(state(others, &["/mfs"]), FindingState::Limited, "{others}");
            assert_eq!(state(others, &[]), FindingState::Limited, "it may be mounted later");
        }
        assert_eq!(updatedb(None, &["/mfs".into()]).state, FindingState::Ok);
    }

    #[test]
    fn mfs_mounts_are_found_by_type() {
        let mounts = "24 1 0:22 / / rw - ext4 /dev/vda rw\n90 24 0:50 / /mfs rw,nosuid shared:1 - fuse.mfs mymfs rw\n\
                      91 24 0:51 / /far rw - fuse.sshfs a:/ rw\n";
        assert_eq!(mfs_mounts(mounts), ["/mfs"]);
    }
}
