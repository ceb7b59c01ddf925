//! Whether what makes `locate`'s list walks the files of all nodes. Another package's configuration is not ours to change,
//! so it is looked at, and the way out is said.

use super::Finding;
use std::fs;
use std::path::Path;

/// The kind of our trees in the table of mounts.
const KIND: &str = "fuse.mfs";

/// Where one is looked for that is not mounted just now.
const USUAL: &str = "/mfs";

/// Programs that go by that configuration; those of findutils do not.
const PROGRAMS: [&str; 4] = [
    "/usr/sbin/updatedb.plocate",
    "/usr/bin/updatedb.plocate",
    "/usr/bin/updatedb.mlocate",
    "/usr/bin/updatedb",
];

const CONFIGURATION: &str = "/etc/updatedb.conf";

pub(super) fn examine() -> Vec<Finding> {
    let there = PROGRAMS.iter().any(|program| Path::new(program).exists());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // Without one, nothing is kept out.
    let configuration = there.then(|| fs::read_to_string(CONFIGURATION).unwrap_or_default());
    vec![updatedb(configuration.as_deref(), &mounted(&mounts))]
}

/// Where our trees are mounted.
fn mounted(mounts: &str) -> Vec<String> {
    let ours =
        |line: &&str| line.split_once(" - ").is_some_and(|(_, kind)| kind.split(' ').next() == Some(KIND));
    let at = |line: &str| line.split(' ').nth(4).map(str::to_owned);
    mounts.lines().filter(ours).filter_map(at).collect()
}

fn updatedb(configuration: Option<&str>, trees: &[String]) -> Finding {
    let name = "updatedb";
    let Some(configuration) = configuration else {
        return Finding::ok(name, "there is none, and so none that walks the files of other nodes");
    };
    if words(configuration, "PRUNEFS").any(|kind| kind.eq_ignore_ascii_case(KIND)) {
        return Finding::ok(name, format!("{CONFIGURATION} keeps it out of trees of the kind {KIND}"));
    }
    let kept_out =
        |tree: &str| words(configuration, "PRUNEPATHS").any(|path| Path::new(tree).starts_with(path));
    let usual = [USUAL.to_owned()];
    let trees = if trees.is_empty() { &usual } else { trees };
    match trees.iter().find(|tree| !kept_out(tree)) {
        None => Finding::ok(name, format!("{CONFIGURATION} keeps it out of {}", trees.join(", "))),
        Some(tree) => Finding::limited(
            name,
            format!("nothing in {CONFIGURATION} keeps it out of {tree}"),
            format!(
                "each night it walks the files of all nodes there; put {KIND} into PRUNEFS, or {tree} into PRUNEPATHS"
            ),
        ),
    }
}

/// What is said of a variable there: `NAME = "one two"`.
fn words<'a>(configuration: &'a str, variable: &'a str) -> impl Iterator<Item = &'a str> {
    let said = configuration.lines().filter_map(move |line| {
        let (name, value) = line.split_once('=')?;
        let value = value.trim().strip_prefix('"')?;
        (name.trim() == variable).then(|| value.split_once('"').map(|(value, _)| value))?
    });
    said.flat_map(str::split_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    fn state(configuration: &str, trees: &[&str]) -> State {
        let trees: Vec<String> = trees.iter().map(|tree| (*tree).to_owned()).collect();
        updatedb(Some(configuration), &trees).state
    }

    #[test]
    fn trees_are_kept_out_by_their_kind_or_their_place() {
        // As Debian's plocate has it, shortened.
        let debian = "PRUNE_BIND_MOUNTS=\"yes\"\n# PRUNENAMES=\".git\"\nPRUNEPATHS=\"/tmp /var/spool /media\"\n\
                      PRUNEFS=\"NFS afs fuse.glusterfs fuse.mfs fuse.sshfs mfs nfs4 proc\"\n";
        assert_eq!(state(debian, &["/mfs"]), State::Ok);
        assert_eq!(state("PRUNEFS = \"FUSE.MFS\" # ours\n", &["/mfs"]), State::Ok);
        assert_eq!(state("PRUNEPATHS=\"/tmp /mfs\"\n", &["/mfs"]), State::Ok);
        assert_eq!(state("PRUNEPATHS=\"/srv\"\n", &["/srv/all"]), State::Ok);
        assert_eq!(state("PRUNEPATHS=\"/tmp /mfs\"\n", &["/mfs", "/srv/all"]), State::Limited);
        // With mfs another file system is meant, and what is a comment is none.
        for others in
            ["", "PRUNEFS=\"nfs mfs fuse.sshfs\"\n", "#PRUNEFS=\"fuse.mfs\"\n", "PRUNEPATHS=\"/mfs2\"\n"]
        {
            assert_eq!(state(others, &["/mfs"]), State::Limited, "{others}");
            assert_eq!(state(others, &[]), State::Limited, "it may be mounted later");
        }
        assert_eq!(updatedb(None, &["/mfs".into()]).state, State::Ok);
    }

    #[test]
    fn our_trees_are_known_by_their_kind() {
        let mounts = "24 1 0:22 / / rw - ext4 /dev/vda rw\n90 24 0:50 / /mfs rw,nosuid shared:1 - fuse.mfs mymfs rw\n\
                      91 24 0:51 / /far rw - fuse.sshfs a:/ rw\n";
        assert_eq!(mounted(mounts), ["/mfs"]);
    }
}
