//! A guest reads files of a file system that the nodes share where it is: here a directory of the machine that is in all nodes.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tern_tests::breaking::{configure, until};
use tern_tests::cluster::Cluster;
use tern_tests::mover;
use tern_tests::told::Told;

/// What all nodes have.
struct Shared(PathBuf);

impl Shared {
    fn new(name: &str) -> Result<Self> {
        let at = std::env::temp_dir().join(format!("tern-{name}-{}", std::process::id()));
        std::fs::create_dir(&at)?;
        std::fs::set_permissions(&at, std::os::unix::fs::PermissionsExt::from_mode(0o777))?;
        Ok(Self(at))
    }

    /// A file that is long enough to be worth it, of lines of 16 bytes.
    fn fill(&self, name: &str) -> Result<String> {
        let at = self.0.join(name);
        let lines: String = (0..8192).map(|line| format!("{line:015}\n")).collect();
        std::fs::write(&at, lines)?;
        std::fs::set_permissions(&at, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
        Ok(at.to_str().context("a strange name")?.to_owned())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// So many nodes have the directory, and these declare it.
fn cluster(name: &str, shared: &Shared, nodes: u16, declare: &[u16]) -> Result<Cluster> {
    let cluster = Cluster::with_shared(name, nodes, &shared.0)?;
    for node in declare {
        configure(&cluster, *node, &format!("shared = [{:?}]", shared.0))?;
    }
    let all_up = || cluster.run(1, &["mosctl", "whois", "2"]).is_ok();
    until("all nodes to be there", Duration::from_secs(20), all_up)?;
    Ok(cluster)
}

/// Reads its first line until guests have the file open on node 2.
fn read_until_open(told: &mut Told<'_>, path: &str) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(20);
    while !told.open_there()?.contains(path) {
        ensure!(Instant::now() < end, "{path} is not open there: {}", told.running.so_far());
        read_first(told)?;
    }
    Ok(())
}

fn read_first(told: &mut Told<'_>) -> Result<()> {
    told.tell("seek 0 0", "seek 0")?;
    told.tell("read 16", "read 000000000000000")
}

/// Reads its first line until the shim on node 2 has said that it cannot be opened there.
fn read_until_refused(told: &mut Told<'_>, cluster: &Cluster, times: usize) -> Result<String> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        read_first(told)?;
        let look = "grep -h 'through home that could be here' /run/tern/shims/*.log || true";
        let said = String::from_utf8_lossy(&cluster.run(2, &["sh", "-c", look])?).into_owned();
        if said.lines().count() >= times {
            return Ok(said);
        }
        ensure!(Instant::now() < end, "nothing was refused: {said}");
    }
}

fn end(mut told: Told<'_>) -> Result<()> {
    told.running.close_input();
    ensure!(told.running.finish(Duration::from_secs(20))?.status == 0);
    Ok(())
}

#[test]
fn a_guest_reads_a_shared_file_where_it_is() -> Result<()> {
    let shared = Shared::new("sharedread")?;
    let cluster = cluster("sharedread", &shared, 2, &[1, 2])?;
    let path = shared.fill("a")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell(&format!("open {path} O_RDONLY"), "open ")?;
    read_until_open(&mut told, &path)?;
    read_first(&mut told)?;
    told.tell("read 16", "read 000000000000001")?;
    told.tell("seek -16 2", "seek 131056")?;
    told.tell("read 99", "read 000000000008191")?;
    told.tell("seek 32 0", "seek 32")?;
    // Who is born has the same offset, and nobody has the file there any more.
    told.tell("born 16", "born 0")?;
    told.tell("seek 0 1", "seek 48")?;
    ensure!(!told.open_there()?.contains(&path), "it is open there, and shared");
    told.tell("close", "close")?;
    // Where it goes its offset goes too.
    told.tell(&format!("open {path} O_RDONLY"), "open ")?;
    read_until_open(&mut told, &path)?;
    told.tell("seek 160 0", "seek 160")?;
    told.tell("read 16", "read 000000000000010")?;
    ensure!(cluster.migrate(told.running.pid, "home").is_ok());
    told.tell("read 16", "read 000000000000011")?;
    end(told)
}

#[test]
fn what_somebody_else_changes_is_read_at_home_until_it_stays() -> Result<()> {
    let shared = Shared::new("sharedchange")?;
    let cluster = cluster("sharedchange", &shared, 2, &[1, 2])?;
    let path = shared.fill("a")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell(&format!("open {path} O_RDONLY"), "open ")?;
    read_until_open(&mut told, &path)?;
    told.tell("seek 16 0", "seek 16")?;
    let change = format!("printf 00changed | dd of={path} bs=1 seek=32 conv=notrunc status=none");
    cluster.run(1, &["sh", "-c", &change])?;
    told.tell("read 16", "read 000000000000001")?;
    told.tell("read 16", "read 00changed000002")?;
    told.tell("seek 0 1", "seek 48")?;
    ensure!(!told.open_there()?.contains(&path), "it is read there though it changes");
    read_until_open(&mut told, &path)?;
    end(told)
}

#[test]
fn who_takes_a_lock_or_writes_does_so_at_home() -> Result<()> {
    let shared = Shared::new("sharedlock")?;
    let cluster = cluster("sharedlock", &shared, 2, &[1, 2])?;
    let path = shared.fill("a")?;
    let mut told = Told::start(&cluster, &[])?;
    // What is written is not even offered; what is written there was written at home.
    told.tell(&format!("open {path} O_RDWR"), "open ")?;
    for _ in 0..20 {
        read_first(&mut told)?;
    }
    told.tell("write ----", "write 4")?;
    ensure!(!told.open_there()?.contains(&path), "it is written there");
    ensure!(std::fs::read(&path)?.get(16..20) == Some(&b"----"[..]));
    told.tell("close", "close")?;
    told.tell(&format!("open {path} O_RDONLY"), "open ")?;
    read_until_open(&mut told, &path)?;
    told.tell("look", "look")?;
    read_first(&mut told)?;
    ensure!(!told.open_there()?.contains(&path), "it is read there under a lock");
    end(told)
}

#[test]
fn it_is_that_file_or_none_and_under_the_same_rights() -> Result<()> {
    let shared = Shared::new("sharedrights")?;
    let cluster = cluster("sharedrights", &shared, 2, &[1, 2])?;
    let who = ["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"];
    let mut told = Told::start(&cluster, &who)?;
    let [taken, covered, removed] = ["taken", "covered", "removed"].map(|name| shared.fill(name));
    let (taken, covered, removed) = (taken?, covered?, removed?);
    // Before it is settled enough to be offered.
    told.tell(&format!("open {taken} O_RDONLY"), "open ")?;
    cluster.run(1, &["chmod", "0", &taken])?;
    let said = read_until_refused(&mut told, &cluster, 1)?;
    ensure!(said.contains("Permission denied"), "{said}");
    told.tell("close", "close")?;
    // On that node there is another mount in its place.
    cluster.run(2, &["mount", "--bind", "/etc/passwd", &covered])?;
    told.tell(&format!("open {covered} O_RDONLY"), "open ")?;
    let said = read_until_refused(&mut told, &cluster, 2)?;
    ensure!(said.contains("cross-device"), "{said}");
    told.tell("close", "close")?;
    cluster.run(2, &["umount", &covered])?;
    told.tell(&format!("open {removed} O_RDONLY"), "open ")?;
    std::fs::remove_file(&removed)?;
    let said = read_until_refused(&mut told, &cluster, 3)?;
    ensure!(said.contains("No such file"), "{said}");
    told.tell("close", "close")?;
    // What the node has there is not what home has: all of it the same but the file.
    let root = shared.0.to_str().context("a strange name")?;
    cluster.run(2, &["umount", root])?;
    told.tell(&format!("open {covered} O_RDONLY"), "open ")?;
    let said = read_until_refused(&mut told, &cluster, 4)?;
    ensure!(said.contains("Stale file handle"), "{said}");
    ensure!(!told.open_there()?.contains(root), "something is open there");
    end(told)
}

#[test]
fn a_node_that_does_not_declare_it_has_it_through_home() -> Result<()> {
    let shared = Shared::new("sharednot")?;
    let cluster = cluster("sharednot", &shared, 3, &[1, 3])?;
    let path = shared.fill("a")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell(&format!("open {path} O_RDONLY"), "open ")?;
    for _ in 0..100 {
        read_first(&mut told)?;
    }
    ensure!(!told.open_there()?.contains(&path), "it is open there");
    end(told)
}

#[test]
fn what_it_reads_and_writes_is_the_same_wherever_it_goes() -> Result<()> {
    goes_about("inhand", "sharedmoves")
}

#[test]
fn what_is_called_very_often_is_the_same_wherever_it_goes() -> Result<()> {
    goes_about("hotcalls", "sharedhot")
}

#[test]
fn what_is_called_on_files_is_the_same_wherever_it_goes() -> Result<()> {
    goes_about("file", "sharedfile")
}

/// A program whose files are on it is moved all the time.
fn goes_about(program: &str, name: &str) -> Result<()> {
    let shared = Shared::new(name)?;
    let cluster = cluster(name, &shared, 3, &[1, 2, 3])?;
    mover::goes_about(&cluster, program, at(&shared.0)?)?;
    ensure!(std::fs::read_dir(&shared.0)?.next().is_none(), "it has left something");
    Ok(())
}

fn at(path: &Path) -> Result<&str> {
    path.to_str().context("a strange name")
}
