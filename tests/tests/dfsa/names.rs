//! Name lookups of a guest that are answered on its node, with the same results as at home.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{self, wait_until};
use tern_tests::drivers::file_guest::FileGuest;

const EVENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of rounds of 50 lookups. It is high, because on a busy machine the scanner at
/// home may get no CPU time for a long while.
const MAX_ROUNDS: u32 = 500;

/// A directory of node 1 with this many files of three bytes; returns its path on this machine.
fn directory(cluster: &Cluster, files: u32) -> Result<PathBuf> {
    let at = cluster.lab().node(1).path("/tmp/named")?;
    fs::create_dir_all(&at)?;
    for name in 0..files {
        fs::write(at.join(name.to_string()), "abc")?;
    }
    // A file whose time is recent may still be changing, so lookups of it are sent home.
    let age = || fs::metadata(at.join("0")).and_then(|file| file.modified());
    wait_until("the files are old enough", EVENT_TIMEOUT, || {
        age().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > Duration::from_millis(2100)))
    })?;
    Ok(at)
}

/// Number of calls that the deputy has made for the guest.
fn calls(guest: &FileGuest<'_>, cluster: &Cluster) -> Result<u64> {
    let rows = cluster.processes(1)?;
    let row = rows.iter().find(|row| row.pid.0 == guest.running.pid).context("it is not there")?;
    Ok(row.usage.calls)
}

/// Looks up names until home has delegated the directory, for at most this number of turns. Returns
/// whether home has delegated it.
fn await_cached(guest: &mut FileGuest<'_>, cluster: &Cluster, at: &str, turns: u32) -> Result<bool> {
    for _ in 0..turns {
        let before = calls(guest, cluster)?;
        guest.run(&format!("absent {at} 50"), "absent 50")?;
        if calls(guest, cluster)? - before < 25 {
            return Ok(true);
        }
    }
    Ok(false)
}

#[test]
fn many_lookups_need_few_calls() -> Result<()> {
    let cluster = Cluster::with_nodes("named", 3)?;
    directory(&cluster, 300)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    for node in ["2", "3", "home", "2"] {
        if guest.sent > 1 {
            let moved = cluster.migrate(guest.running.pid, node);
            moved.map_err(|refused| anyhow::anyhow!("{node}: {}", refused.message))?;
        }
        if node != "home" {
            ensure!(await_cached(&mut guest, &cluster, "/tmp/named", MAX_ROUNDS)?, "on {node}");
        }
        let before = calls(&guest, &cluster).unwrap_or_default();
        guest.run("each /tmp/named 300", "each 900")?;
        guest.run("absent /tmp/named 300", "absent 300")?;
        guest.run("goto /tmp", "goto")?;
        guest.run("each named 300", "each 900")?;
        guest.run("goto /", "goto")?;
        if node == "home" {
            continue;
        }
        let made = calls(&guest, &cluster)? - before;
        ensure!(made < 500, "on {node} home made {made} calls for 900 names");
    }
    guest.finish()
}

/// A guest that receives input from home after a change there sees the change.
#[test]
fn lookup_after_change_at_home_sees_it() -> Result<()> {
    let cluster = Cluster::up("namechange")?;
    let at = directory(&cluster, 20)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    for turn in 0..60 {
        if turn % 6 == 0 {
            ensure!(await_cached(&mut guest, &cluster, "/tmp/named", MAX_ROUNDS)?, "turn {turn}");
        }
        changes(&mut guest, &at, turn)
            .with_context(|| format!("turn {turn}: {}", guest.running.output_so_far()))?;
    }
    guest.finish()
}

fn changes(guest: &mut FileGuest<'_>, at: &Path, turn: usize) -> Result<()> {
    let (new, newer) = (format!("n{turn}"), format!("m{turn}"));
    let like = |name: &str| format!("like /tmp/named/{name}");
    let gone = format!("like {}", libc::ENOENT);
    guest.run(&like(&new), &gone)?;
    fs::write(at.join(&new), "1234")?;
    guest.run(&like(&new), "like 100644 4")?;
    fs::write(at.join("5"), "x".repeat(turn))?;
    guest.run(&like("5"), &format!("like 100644 {turn}"))?;
    let rights = 0o600 + turn as u32 % 8;
    fs::set_permissions(at.join("6"), PermissionsExt::from_mode(rights))?;
    guest.run(&like("6"), &format!("like 100{rights:o} 3"))?;
    fs::rename(at.join(&new), at.join(&newer))?;
    guest.run(&like(&new), &gone)?;
    guest.run(&like(&newer), "like 100644 4")?;
    fs::remove_file(at.join(&newer))?;
    guest.run(&like(&newer), &gone)?;
    symlink(format!("to{turn}"), at.join("link"))?;
    guest.run("leads /tmp/named/link", &format!("leads to{turn}"))?;
    fs::remove_file(at.join("link"))?;
    guest.run("leads /tmp/named/link", &format!("leads {}", libc::ENOENT))
}

/// The guest makes a hard link to a file in another directory, which causes no event in the cached
/// one.
#[test]
fn link_count_is_current_after_own_link() -> Result<()> {
    let cluster = Cluster::up("namelink")?;
    directory(&cluster, 20)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    for name in 3..6 {
        ensure!(await_cached(&mut guest, &cluster, "/tmp/named", MAX_ROUNDS)?, "the names are not cached");
        guest.run(&format!("names /tmp/named/{name}"), "names 1")?;
        guest.run(&format!("link /tmp/named/{name} /tmp/other{name}"), "link 2")?;
    }
    guest.finish()
}

/// A guest that returns to a node has no cached names from its earlier visit.
#[test]
fn returning_guest_has_no_stale_names() -> Result<()> {
    let cluster = Cluster::with_nodes("nameback", 3)?;
    let at = directory(&cluster, 20)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    for turn in 0..4 {
        for (to, from) in [("3", "2"), ("2", "3")] {
            let name = format!("{turn}{to}");
            ensure!(
                await_cached(&mut guest, &cluster, "/tmp/named", MAX_ROUNDS)?,
                "the names are not cached"
            );
            let moved = cluster.migrate(guest.running.pid, to);
            moved.map_err(|refused| anyhow::anyhow!("{from} to {to}: {}", refused.message))?;
            symlink("back", at.join(format!("none{name}")))?;
            guest.run(&format!("leads /tmp/named/none{name}"), "leads back")?;
            fs::remove_file(at.join(format!("none{name}")))?;
        }
    }
    guest.finish()
}

/// The directory itself, or one on the path to it, is replaced.
#[test]
fn replaced_path_component_is_noticed() -> Result<()> {
    let cluster = Cluster::up("nameway")?;
    let at = directory(&cluster, 20)?;
    let tmp = at.parent().context("it has a parent")?.to_owned();
    let mut guest = FileGuest::start(&cluster, &[])?;
    let gone = format!("like {}", libc::ENOENT);
    let asks = ["like /tmp/named/3", "like /tmp/way/3", "like 3"];
    guest.run("goto /tmp/named", "goto")?;
    symlink("named", tmp.join("way"))?;
    let await_all_cached = |guest: &mut FileGuest<'_>| -> Result<()> {
        for at in ["/tmp/named", "/tmp/way", "."] {
            ensure!(await_cached(guest, &cluster, at, MAX_ROUNDS)?, "{at}");
        }
        asks.iter().try_for_each(|ask| guest.run(ask, "like 100644 3"))
    };
    await_all_cached(&mut guest)?;
    fs::rename(&at, tmp.join("other"))?;
    for (ask, is) in asks.iter().zip([gone.as_str(), gone.as_str(), "like 100644 3"]) {
        guest.run(ask, is)?;
    }
    fs::rename(tmp.join("other"), &at)?;
    await_all_cached(&mut guest)?;
    fs::remove_file(tmp.join("way"))?;
    guest.run(asks[1], &gone)?;
    symlink("named", tmp.join("way"))?;
    await_all_cached(&mut guest)?;
    cluster.run(1, &["mount", "-t", "tmpfs", "none", "/tmp/named"])?;
    for (ask, is) in asks.iter().zip([gone.as_str(), gone.as_str(), "like 100644 3"]) {
        guest.run(ask, is)?;
    }
    cluster.run(1, &["umount", "/tmp/named"])?;
    await_all_cached(&mut guest)?;
    guest.run("goto /", "goto")?;
    guest.run("like 3", &gone)?;
    guest.finish()
}

/// Threads that communicate only through memory see each other's changes.
#[test]
fn threads_see_each_others_changes() -> Result<()> {
    let cluster = Cluster::up("namethreads")?;
    directory(&cluster, 20)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    ensure!(await_cached(&mut guest, &cluster, "/tmp/named", MAX_ROUNDS)?, "the names are not cached");
    guest.run("threads /tmp/named 150", "threads 0")?;
    guest.finish()
}

/// Lookups fail once the guest has dropped the credentials that may search the directory, and once
/// the directory's mode forbids the search.
#[test]
fn lookup_after_chmod_at_home_is_refused() -> Result<()> {
    let cluster = Cluster::up("nameshut")?;
    let at = directory(&cluster, 20)?;
    fs::set_permissions(&at, PermissionsExt::from_mode(0o700))?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    ensure!(await_cached(&mut guest, &cluster, "/tmp/named", MAX_ROUNDS)?, "the names are not cached");
    guest.run("like /tmp/named/3", "like 100644 3")?;
    guest.run("drop", "drop")?;
    let refused = format!("like {}", libc::EACCES);
    guest.run("like /tmp/named/3", &refused)?;
    fs::set_permissions(&at, PermissionsExt::from_mode(0o755))?;
    ensure!(await_cached(&mut guest, &cluster, "/tmp/named", MAX_ROUNDS)?, "the names are not cached");
    guest.run("like /tmp/named/3", "like 100644 3")?;
    fs::set_permissions(&at, PermissionsExt::from_mode(0o700))?;
    guest.run("like /tmp/named/3", &refused)?;
    fs::set_permissions(&at, PermissionsExt::from_mode(0o711))?;
    ensure!(
        !await_cached(&mut guest, &cluster, "/tmp/named", 8)?,
        "the names are cached, though it may not list the directory"
    );
    guest.run("like /tmp/named/3", "like 100644 3")?;
    guest.finish()
}

/// Changes made while the link is cut are found once it is healed.
#[test]
fn changes_during_a_cut_are_seen_afterwards() -> Result<()> {
    let cluster = Cluster::up("namecut")?;
    fault_injection::set_timeouts(&cluster, 1, 60)?;
    let at = directory(&cluster, 20)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    for turn in 0..3 {
        ensure!(await_cached(&mut guest, &cluster, "/tmp/named", MAX_ROUNDS)?, "the names are not cached");
        cluster.lab().cut(Cable::Node(2))?;
        let state = || cluster.processes(2).unwrap_or_default().first().map(|row| row.state.clone());
        wait_until("it has stopped", EVENT_TIMEOUT, || state().as_deref() == Some("suspended"))?;
        fs::write(at.join("5"), "x".repeat(turn))?;
        fs::remove_file(at.join((turn + 8).to_string()))?;
        symlink("new", at.join(format!("new{turn}")))?;
        cluster.lab().heal(Cable::Node(2))?;
        // The absence of this name was cached.
        guest.run(&format!("leads /tmp/named/new{turn}"), "leads new")?;
        guest.run("like /tmp/named/5", &format!("like 100644 {turn}"))?;
        guest.run(&format!("like /tmp/named/{}", turn + 8), &format!("like {}", libc::ENOENT))?;
    }
    guest.finish()
}
