//! A guest reads files of a shared file system on its own node. Here this is a directory of the
//! machine that all nodes have.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{configure, wait_until};
use tern_tests::drivers::file_guest::FileGuest;
use tern_tests::moves::random_moves;

/// The directory that all nodes have.
struct Shared(PathBuf);

impl Shared {
    fn new(name: &str) -> Result<Self> {
        let at = std::env::temp_dir().join(format!("tern-{name}-{}", std::process::id()));
        std::fs::create_dir(&at)?;
        std::fs::set_permissions(&at, std::os::unix::fs::PermissionsExt::from_mode(0o777))?;
        Ok(Self(at))
    }

    /// Creates a file of lines of 16 bytes, long enough to be opened on the guest's node.
    fn fill(&self, name: &str) -> Result<String> {
        let at = self.0.join(name);
        let lines: String = (0..8192).map(|line| format!("{line:015}\n")).collect();
        std::fs::write(&at, lines)?;
        std::fs::set_permissions(&at, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
        Ok(at.to_str().context("the path is not UTF-8")?.to_owned())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// A cluster whose nodes have the directory; those of `declare` list it in their configuration.
fn cluster(name: &str, shared: &Shared, nodes: u16, declare: &[u16]) -> Result<Cluster> {
    let cluster = Cluster::with_shared(name, nodes, &shared.0)?;
    for node in declare {
        configure(&cluster, *node, &format!("shared = [{:?}]", shared.0))?;
    }
    let all_up = || cluster.run(1, &["mosctl", "whois", "2"]).is_ok();
    wait_until("all nodes are up", Duration::from_secs(20), all_up)?;
    Ok(cluster)
}

/// Reads the first line until a guest has the file open on node 2.
fn read_until_open(guest: &mut FileGuest<'_>, path: &str) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(20);
    while !guest.open_files()?.contains(path) {
        ensure!(Instant::now() < end, "{path} is not open on node 2: {}", guest.running.output_so_far());
        read_first(guest)?;
    }
    Ok(())
}

fn read_first(guest: &mut FileGuest<'_>) -> Result<()> {
    guest.run("seek 0 0", "seek 0")?;
    guest.run("read 16", "read 000000000000000")
}

/// Reads the first line until the shim on node 2 has logged that it cannot open the file there.
fn read_until_refused(guest: &mut FileGuest<'_>, cluster: &Cluster, times: usize) -> Result<String> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        read_first(guest)?;
        let look = "grep -h 'could not be opened; it is used through home' /run/tern/shims/*.log || true";
        let said = String::from_utf8_lossy(&cluster.run(2, &["sh", "-c", look])?).into_owned();
        if said.lines().count() >= times {
            return Ok(said);
        }
        ensure!(Instant::now() < end, "nothing was refused: {said}");
    }
}

fn end(mut guest: FileGuest<'_>) -> Result<()> {
    guest.running.close_input();
    ensure!(guest.running.finish(Duration::from_secs(20))?.status == 0);
    Ok(())
}

#[test]
fn guest_reads_a_shared_file_locally() -> Result<()> {
    let shared = Shared::new("sharedread")?;
    let cluster = cluster("sharedread", &shared, 2, &[1, 2])?;
    let path = shared.fill("a")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run(&format!("open {path} O_RDONLY"), "open ")?;
    read_until_open(&mut guest, &path)?;
    read_first(&mut guest)?;
    guest.run("read 16", "read 000000000000001")?;
    guest.run("seek -16 2", "seek 131056")?;
    guest.run("read 99", "read 000000000008191")?;
    guest.run("seek 32 0", "seek 32")?;
    // A child shares the offset, so the guest's node must not have the file open any more.
    guest.run("born 16", "born 0")?;
    guest.run("seek 0 1", "seek 48")?;
    ensure!(!guest.open_files()?.contains(&path), "it is still open on node 2 though it is shared");
    guest.run("close", "close")?;
    // The guest takes the file's offset along.
    guest.run(&format!("open {path} O_RDONLY"), "open ")?;
    read_until_open(&mut guest, &path)?;
    guest.run("seek 160 0", "seek 160")?;
    guest.run("read 16", "read 000000000000010")?;
    ensure!(cluster.migrate(guest.running.pid, "home").is_ok());
    guest.run("read 16", "read 000000000000011")?;
    end(guest)
}

#[test]
fn changing_file_is_read_at_home_until_it_is_unchanged() -> Result<()> {
    let shared = Shared::new("sharedchange")?;
    let cluster = cluster("sharedchange", &shared, 2, &[1, 2])?;
    let path = shared.fill("a")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run(&format!("open {path} O_RDONLY"), "open ")?;
    read_until_open(&mut guest, &path)?;
    guest.run("seek 16 0", "seek 16")?;
    let change = format!("printf 00changed | dd of={path} bs=1 seek=32 conv=notrunc status=none");
    cluster.run(1, &["sh", "-c", &change])?;
    guest.run("read 16", "read 000000000000001")?;
    guest.run("read 16", "read 00changed000002")?;
    guest.run("seek 0 1", "seek 48")?;
    ensure!(!guest.open_files()?.contains(&path), "it is read on node 2 though it changes");
    read_until_open(&mut guest, &path)?;
    end(guest)
}

#[test]
fn locks_and_writes_are_made_at_home() -> Result<()> {
    let shared = Shared::new("sharedlock")?;
    let cluster = cluster("sharedlock", &shared, 2, &[1, 2])?;
    let path = shared.fill("a")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    // A file that is open for writing is not opened on node 2; the deputy makes its writes.
    guest.run(&format!("open {path} O_RDWR"), "open ")?;
    for _ in 0..20 {
        read_first(&mut guest)?;
    }
    guest.run("write ----", "write 4")?;
    ensure!(!guest.open_files()?.contains(&path), "it is written on node 2");
    ensure!(std::fs::read(&path)?.get(16..20) == Some(&b"----"[..]));
    guest.run("close", "close")?;
    guest.run(&format!("open {path} O_RDONLY"), "open ")?;
    read_until_open(&mut guest, &path)?;
    guest.run("look", "look")?;
    read_first(&mut guest)?;
    ensure!(!guest.open_files()?.contains(&path), "it is read on node 2 under a lock");
    end(guest)
}

#[test]
fn local_open_is_the_same_file_with_the_same_rights() -> Result<()> {
    let shared = Shared::new("sharedrights")?;
    let cluster = cluster("sharedrights", &shared, 2, &[1, 2])?;
    let as_user = ["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"];
    let mut guest = FileGuest::start(&cluster, &as_user)?;
    let [taken, covered, removed] = ["taken", "covered", "removed"].map(|name| shared.fill(name));
    let (taken, covered, removed) = (taken?, covered?, removed?);
    // The mode changes before the file has been unchanged for long enough to be offered to node 2.
    guest.run(&format!("open {taken} O_RDONLY"), "open ")?;
    cluster.run(1, &["chmod", "0", &taken])?;
    let said = read_until_refused(&mut guest, &cluster, 1)?;
    ensure!(said.contains("Permission denied"), "{said}");
    guest.run("close", "close")?;
    // On that node another mount covers the file.
    cluster.run(2, &["mount", "--bind", "/etc/passwd", &covered])?;
    guest.run(&format!("open {covered} O_RDONLY"), "open ")?;
    let said = read_until_refused(&mut guest, &cluster, 2)?;
    ensure!(said.contains("cross-device"), "{said}");
    guest.run("close", "close")?;
    cluster.run(2, &["umount", &covered])?;
    guest.run(&format!("open {removed} O_RDONLY"), "open ")?;
    std::fs::remove_file(&removed)?;
    let said = read_until_refused(&mut guest, &cluster, 3)?;
    ensure!(said.contains("No such file"), "{said}");
    guest.run("close", "close")?;
    // Node 2 now has another directory at this path: everything matches but the file.
    let root = shared.0.to_str().context("the path is not UTF-8")?;
    cluster.run(2, &["umount", root])?;
    guest.run(&format!("open {covered} O_RDONLY"), "open ")?;
    let said = read_until_refused(&mut guest, &cluster, 4)?;
    ensure!(said.contains("Stale file handle"), "{said}");
    ensure!(!guest.open_files()?.contains(root), "a file is open on node 2");
    end(guest)
}

#[test]
fn undeclared_shared_files_are_read_at_home() -> Result<()> {
    let shared = Shared::new("sharednot")?;
    let cluster = cluster("sharednot", &shared, 3, &[1, 3])?;
    let path = shared.fill("a")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run(&format!("open {path} O_RDONLY"), "open ")?;
    for _ in 0..100 {
        read_first(&mut guest)?;
    }
    ensure!(!guest.open_files()?.contains(&path), "it is open on node 2");
    end(guest)
}

#[test]
fn delegated_file_io_survives_moves() -> Result<()> {
    move_while_running("delegation", "sharedmoves")
}

#[test]
fn frequent_file_calls_survive_moves() -> Result<()> {
    move_while_running("fastpath", "sharedhot")
}

#[test]
fn file_calls_survive_moves() -> Result<()> {
    move_while_running("file", "sharedfile")
}

/// A program whose files are on the shared file system is migrated all the time.
fn move_while_running(program: &str, name: &str) -> Result<()> {
    let shared = Shared::new(name)?;
    let cluster = cluster(name, &shared, 3, &[1, 2, 3])?;
    random_moves::move_while_running(&cluster, program, at(&shared.0)?)?;
    ensure!(std::fs::read_dir(&shared.0)?.next().is_none(), "it has left files");
    Ok(())
}

fn at(path: &Path) -> Result<&str> {
    path.to_str().context("the path is not UTF-8")
}
