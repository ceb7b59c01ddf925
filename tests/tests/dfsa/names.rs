//! What a guest asks of names is answered where it runs, and it is as if home had been asked.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::breaking::{self, until};
use tern_tests::cluster::Cluster;
use tern_tests::told::Told;

const PATIENCE: Duration = Duration::from_secs(30);
/// Times that it looks for 50 names, on a machine where who looks for them at home gets no processor.
const MANY: u32 = 500;

/// A directory of node 1 with so many files of three bytes, as we see it.
fn directory(cluster: &Cluster, files: u32) -> Result<PathBuf> {
    let at = cluster.lab().node(1).path("/tmp/named")?;
    fs::create_dir_all(&at)?;
    for name in 0..files {
        fs::write(at.join(name.to_string()), "abc")?;
    }
    // What has just been written may be written just now: that home is asked for.
    let age = || fs::metadata(at.join("0")).and_then(|file| file.modified());
    until("they are old enough", PATIENCE, || {
        age().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > Duration::from_millis(2100)))
    })?;
    Ok(at)
}

/// The calls that home has made for it.
fn calls(told: &Told<'_>, cluster: &Cluster) -> Result<u64> {
    let rows = cluster.processes(1)?;
    let row = rows.iter().find(|row| row.pid.0 == told.running.pid).context("it is not there")?;
    Ok(row.usage.calls)
}

/// Has it look up so many names there that home lets it know them; whether it has, by and by.
fn knows(told: &mut Told<'_>, cluster: &Cluster, at: &str, turns: u32) -> Result<bool> {
    for _ in 0..turns {
        let before = calls(told, cluster)?;
        told.tell(&format!("absent {at} 50"), "absent 50")?;
        if calls(told, cluster)? - before < 25 {
            return Ok(true);
        }
    }
    Ok(false)
}

#[test]
fn many_names_take_few_calls() -> Result<()> {
    let cluster = Cluster::with_nodes("named", 3)?;
    directory(&cluster, 300)?;
    let mut told = Told::start(&cluster, &[])?;
    for node in ["2", "3", "home", "2"] {
        if told.told > 1 {
            let moved = cluster.migrate(told.running.pid, node);
            moved.map_err(|refused| anyhow::anyhow!("{node}: {}", refused.message))?;
        }
        let before = calls(&told, &cluster).unwrap_or_default();
        told.tell("each /tmp/named 300", "each 900")?;
        told.tell("absent /tmp/named 300", "absent 300")?;
        told.tell("goto /tmp", "goto")?;
        told.tell("each named 300", "each 900")?;
        told.tell("goto /", "goto")?;
        if node == "home" {
            continue;
        }
        let made = calls(&told, &cluster)? - before;
        ensure!(made < 500, "on {node} home made {made} calls for 900 names");
    }
    told.ends()
}

/// Whatever is changed at home, who is told of that looks and finds it.
#[test]
fn who_hears_of_a_change_finds_it() -> Result<()> {
    let cluster = Cluster::up("namechange")?;
    let at = directory(&cluster, 20)?;
    let mut told = Told::start(&cluster, &[])?;
    for turn in 0..60 {
        if turn % 6 == 0 {
            ensure!(knows(&mut told, &cluster, "/tmp/named", MANY)?, "turn {turn}");
        }
        changes(&mut told, &at, turn).with_context(|| format!("turn {turn}: {}", told.running.so_far()))?;
    }
    told.ends()
}

fn changes(told: &mut Told<'_>, at: &Path, turn: usize) -> Result<()> {
    let (new, newer) = (format!("n{turn}"), format!("m{turn}"));
    let like = |name: &str| format!("like /tmp/named/{name}");
    let gone = format!("like {}", libc::ENOENT);
    told.tell(&like(&new), &gone)?;
    fs::write(at.join(&new), "1234")?;
    told.tell(&like(&new), "like 100644 4")?;
    fs::write(at.join("5"), "x".repeat(turn))?;
    told.tell(&like("5"), &format!("like 100644 {turn}"))?;
    let rights = 0o600 + turn as u32 % 8;
    fs::set_permissions(at.join("6"), PermissionsExt::from_mode(rights))?;
    told.tell(&like("6"), &format!("like 100{rights:o} 3"))?;
    fs::rename(at.join(&new), at.join(&newer))?;
    told.tell(&like(&new), &gone)?;
    told.tell(&like(&newer), "like 100644 4")?;
    fs::remove_file(at.join(&newer))?;
    told.tell(&like(&newer), &gone)?;
    symlink(format!("to{turn}"), at.join("link"))?;
    told.tell("leads /tmp/named/link", &format!("leads to{turn}"))?;
    fs::remove_file(at.join("link"))?;
    told.tell("leads /tmp/named/link", &format!("leads {}", libc::ENOENT))
}

/// It has another name by its own doing, of which no directory is told.
#[test]
fn who_gives_a_file_another_name_finds_that_it_has_two() -> Result<()> {
    let cluster = Cluster::up("namelink")?;
    directory(&cluster, 20)?;
    let mut told = Told::start(&cluster, &[])?;
    for name in 3..6 {
        ensure!(knows(&mut told, &cluster, "/tmp/named", MANY)?, "it does not know them");
        told.tell(&format!("names /tmp/named/{name}"), "names 1")?;
        told.tell(&format!("link /tmp/named/{name} /tmp/other{name}"), "link 2")?;
    }
    told.ends()
}

/// What comes back to a node where it had known names knows none of them.
#[test]
fn who_is_sent_back_and_forth_finds_what_has_changed_meanwhile() -> Result<()> {
    let cluster = Cluster::with_nodes("nameback", 3)?;
    let at = directory(&cluster, 20)?;
    let mut told = Told::start(&cluster, &[])?;
    for turn in 0..4 {
        for (to, from) in [("3", "2"), ("2", "3")] {
            let name = format!("{turn}{to}");
            ensure!(knows(&mut told, &cluster, "/tmp/named", MANY)?, "it does not know them");
            let moved = cluster.migrate(told.running.pid, to);
            moved.map_err(|refused| anyhow::anyhow!("{from} to {to}: {}", refused.message))?;
            symlink("back", at.join(format!("none{name}")))?;
            told.tell(&format!("leads /tmp/named/none{name}"), "leads back")?;
            fs::remove_file(at.join(format!("none{name}")))?;
        }
    }
    told.ends()
}

/// The directory itself, and what leads to it, may become another.
#[test]
fn another_directory_on_the_way_is_found() -> Result<()> {
    let cluster = Cluster::up("nameway")?;
    let at = directory(&cluster, 20)?;
    let tmp = at.parent().context("it has a parent")?.to_owned();
    let mut told = Told::start(&cluster, &[])?;
    let gone = format!("like {}", libc::ENOENT);
    let asks = ["like /tmp/named/3", "like /tmp/way/3", "like 3"];
    told.tell("goto /tmp/named", "goto")?;
    symlink("named", tmp.join("way"))?;
    let know = |told: &mut Told<'_>| -> Result<()> {
        for at in ["/tmp/named", "/tmp/way", "."] {
            ensure!(knows(told, &cluster, at, MANY)?, "{at}");
        }
        asks.iter().try_for_each(|ask| told.tell(ask, "like 100644 3"))
    };
    know(&mut told)?;
    fs::rename(&at, tmp.join("other"))?;
    for (ask, is) in asks.iter().zip([gone.as_str(), gone.as_str(), "like 100644 3"]) {
        told.tell(ask, is)?;
    }
    fs::rename(tmp.join("other"), &at)?;
    know(&mut told)?;
    fs::remove_file(tmp.join("way"))?;
    told.tell(asks[1], &gone)?;
    symlink("named", tmp.join("way"))?;
    know(&mut told)?;
    cluster.run(1, &["mount", "-t", "tmpfs", "none", "/tmp/named"])?;
    for (ask, is) in asks.iter().zip([gone.as_str(), gone.as_str(), "like 100644 3"]) {
        told.tell(ask, is)?;
    }
    cluster.run(1, &["umount", "/tmp/named"])?;
    know(&mut told)?;
    told.tell("goto /", "goto")?;
    told.tell("like 3", &gone)?;
    told.ends()
}

/// Threads hear of each other's calls by their memory, and of nothing else.
#[test]
fn threads_find_what_others_have_changed() -> Result<()> {
    let cluster = Cluster::up("namethreads")?;
    directory(&cluster, 20)?;
    let mut told = Told::start(&cluster, &[])?;
    ensure!(knows(&mut told, &cluster, "/tmp/named", MANY)?, "it does not know them");
    told.tell("threads /tmp/named 150", "threads 0")?;
    told.ends()
}

/// A directory that may not be searched any more, or only by who it was.
#[test]
fn who_may_not_look_any_more_is_told_so() -> Result<()> {
    let cluster = Cluster::up("nameshut")?;
    let at = directory(&cluster, 20)?;
    fs::set_permissions(&at, PermissionsExt::from_mode(0o700))?;
    let mut told = Told::start(&cluster, &[])?;
    ensure!(knows(&mut told, &cluster, "/tmp/named", MANY)?, "it does not know them");
    told.tell("like /tmp/named/3", "like 100644 3")?;
    told.tell("drop", "drop")?;
    let refused = format!("like {}", libc::EACCES);
    told.tell("like /tmp/named/3", &refused)?;
    fs::set_permissions(&at, PermissionsExt::from_mode(0o755))?;
    ensure!(knows(&mut told, &cluster, "/tmp/named", MANY)?, "it does not know them");
    told.tell("like /tmp/named/3", "like 100644 3")?;
    fs::set_permissions(&at, PermissionsExt::from_mode(0o700))?;
    told.tell("like /tmp/named/3", &refused)?;
    fs::set_permissions(&at, PermissionsExt::from_mode(0o711))?;
    ensure!(!knows(&mut told, &cluster, "/tmp/named", 8)?, "it may not list it");
    told.tell("like /tmp/named/3", "like 100644 3")?;
    told.ends()
}

/// What happens while it cannot hear is found when it can.
#[test]
fn what_changes_while_the_link_is_cut_is_found() -> Result<()> {
    let cluster = Cluster::up("namecut")?;
    breaking::set_patience(&cluster, 1, 60)?;
    let at = directory(&cluster, 20)?;
    let mut told = Told::start(&cluster, &[])?;
    for turn in 0..3 {
        ensure!(knows(&mut told, &cluster, "/tmp/named", MANY)?, "it does not know them");
        cluster.lab().cut(Cable::Node(2))?;
        let state = || cluster.processes(2).unwrap_or_default().first().map(|row| row.state.clone());
        until("it stands still", PATIENCE, || state().as_deref() == Some("suspended"))?;
        fs::write(at.join("5"), "x".repeat(turn))?;
        fs::remove_file(at.join((turn + 8).to_string()))?;
        symlink("new", at.join(format!("new{turn}")))?;
        cluster.lab().heal(Cable::Node(2))?;
        // Of this it knows that it is not there.
        told.tell(&format!("leads /tmp/named/new{turn}"), "leads new")?;
        told.tell("like /tmp/named/5", &format!("like 100644 {turn}"))?;
        told.tell(&format!("like /tmp/named/{}", turn + 8), &format!("like {}", libc::ENOENT))?;
    }
    told.ends()
}
