//! A guest that runs on the node of a file opens the file locally, and the guest's calls on the
//! file are made on that node.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{await_stuck_thread, configure};
use tern_tests::drivers::file_guest::FileGuest;
use tern_tests::drivers::siblings::Siblings;
use tern_tests::moves::random_moves;

/// Limit for a run.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs each test with and without the fast path.
macro_rules! both_ways {
    ($($test:ident,)*) => {
        mod with_fast_path {$(
            #[test]
            fn $test() -> anyhow::Result<()> {
                super::$test(true)
            }
        )*}
        mod without_fast_path {$(
            #[test]
            fn $test() -> anyhow::Result<()> {
                super::$test(false)
            }
        )*}
    };
}

both_ways! {
    guest_opens_its_nodes_file_locally,
    guest_maps_its_nodes_file_locally,
    short_file_is_opened_locally_only_after_large_writes,
    local_open_is_the_same_file_with_the_same_rights,
    mount_without_dfsa_opens_nothing_locally,
    nomfs_applies_to_local_files_of_guests,
    guest_blocked_on_a_lock_can_be_moved,
    delegated_file_io_survives_moves,
    frequent_file_calls_survive_moves,
}

fn cluster(name: &str, nodes: u16, fast_path: bool) -> Result<Cluster> {
    mounted(name, nodes, "timeout=3,dfsa=1", fast_path)
}

fn mounted(name: &str, nodes: u16, options: &str, fast_path: bool) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, nodes)?;
    if !fast_path {
        (1..=nodes).try_for_each(|node| configure(&cluster, node, "fastpath = false"))?;
    }
    cluster.mount(1, options)?;
    cluster.run(2, &["mkdir", "-m", "777", "/tmp/near"])?;
    Ok(cluster)
}

fn there(cluster: &Cluster, line: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&cluster.run(2, &["sh", "-c", line])?).into_owned())
}

fn guest_opens_its_nodes_file_locally(fast_path: bool) -> Result<()> {
    let cluster = cluster("near", 2, fast_path)?;
    there(&cluster, "printf 0123456789abcdef > /tmp/near/a; printf mapped > /tmp/near/b")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("open /mfs/2/tmp/near/a O_RDWR", "open ")?;
    guest.run("read 4", "read 0123")?;
    ensure!(guest.open_files()?.contains("/tmp/near/a"), "it is not open on node 2");
    // The guest's writes there invalidate no cache: no file has a fanotify mark that reports each
    // write.
    let marks = "cat /proc/[0-9]*/fdinfo/* 2>/dev/null | grep 'fanotify ino:.* mask:c06 '; true";
    ensure!(there(&cluster, marks)?.is_empty(), "its writes cause fanotify events");
    // Writes of a local program are visible at once, and the other way round.
    there(&cluster, "printf XYZ | dd of=/tmp/near/a bs=1 seek=4 conv=notrunc status=none")?;
    guest.run("read 4", "read XYZ7")?;
    guest.run("write ----", "write 4")?;
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123XYZ7----cdef");
    guest.run("map /mfs/2/tmp/near/b", "map mapp")?;
    guest.run("seek -2 2", "seek 14")?;
    // A child shares the offset, so the guest's node must not have the file open any more.
    guest.run("fork +++", "fork 0")?;
    guest.run("seek 0 1", "seek 17")?;
    ensure!(!guest.open_files()?.contains("/tmp/near/a"), "it is still open on node 2 though it is shared");
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123XYZ7----cd+++");
    guest.run("close", "close")?;
    // The guest takes the file's offset along.
    there(&cluster, "truncate -s 100K /tmp/near/a")?;
    guest.run("open /mfs/2/tmp/near/a O_RDONLY", "open ")?;
    guest.run("read 5", "read 0123X")?;
    ensure!(guest.open_files()?.contains("/tmp/near/a"));
    ensure!(cluster.migrate(guest.running.pid, "home").is_ok());
    guest.run("read 5", "read YZ7--")?;
    guest.finish()
}

/// Three files of node 2, by their names at home.
fn three_files(cluster: &Cluster) -> Result<[String; 3]> {
    let files = [0, 1, 2].map(|n| format!("/tmp/near/{n}"));
    for file in &files {
        there(cluster, &format!("head -c 100000 /dev/zero > {file}"))?;
    }
    Ok(files.map(|file| format!("/mfs/2{file}")))
}

/// Only the program that opens a file waits for the node's file server.
#[test]
fn stopped_file_server_delays_no_other_program() -> Result<()> {
    let cluster = cluster("stopped-server", 2, true)?;
    let [a, b, c] = three_files(&cluster)?;
    let mut siblings = Siblings::start(&cluster, "-2", "0.3", &["opens", &a, &b, &c])?;
    siblings.running.await_output("opened")?;
    cluster.run(2, &["pkill", "-STOP", "-x", "tern-mfs"])?;
    siblings.running.send_input("go\n")?;
    siblings.running.await_output("read")?;
    cluster.run(2, &["pkill", "-CONT", "-x", "tern-mfs"])?;
    siblings.finish(&cluster, RUN_TIMEOUT)
}

/// When a program maps a file of another node, home queries that node's file server. Only that
/// program waits.
#[test]
fn stopped_file_server_delays_no_relative_of_one_that_maps() -> Result<()> {
    let cluster = cluster("stopped-maps", 2, true)?;
    let [a, b, c] = three_files(&cluster)?;
    let mut siblings = Siblings::start(&cluster, "-2", "0.3", &["maps", &a, &b, &c])?;
    siblings.running.await_output("opened")?;
    cluster.run(2, &["pkill", "-STOP", "-x", "tern-mfs"])?;
    siblings.running.send_input("go\n")?;
    await_stuck_thread(&cluster, 1, "files")?;
    cluster.run(2, &["pkill", "-CONT", "-x", "tern-mfs"])?;
    siblings.running.await_output("mapped")?;
    siblings.finish(&cluster, RUN_TIMEOUT)
}

/// A guest maps its node's own file locally, also if it had the file mapped on arrival, and sees
/// writes of other programs.
fn guest_maps_its_nodes_file_locally(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearmap", 3, fast_path)?;
    there(&cluster, "yes 0123456789abcde | head -c 1M > /tmp/near/big")?;
    let mapped = |node| -> Result<bool> {
        let maps = cluster.run(node, &["sh", "-c", "cat /proc/[0-9]*/maps 2>/dev/null; true"])?;
        Ok(String::from_utf8_lossy(&maps).contains("/tmp/near/big"))
    };
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("hold /mfs/2/tmp/near/big", "hold")?;
    ensure!(mapped(2)?, "it is not mapped on node 2");
    guest.run("held 64", "held 0123 0123")?;
    guest.run("poke 4096 ABCD", "poke")?;
    there(&cluster, "printf WXYZ | dd of=/tmp/near/big bs=1 seek=8192 conv=notrunc status=none")?;
    guest.run("held 8192", "held WXYZ WXYZ")?;
    for (to, there) in [("home", false), ("2", true), ("3", false), ("2", true), ("home", false)] {
        let moved = cluster.migrate(guest.running.pid, to);
        moved.map_err(|refused| anyhow::anyhow!("{to}: {}", refused.message))?;
        for (at, is) in [("4096", "0123 ABCD"), ("8192", "WXYZ WXYZ"), ("1048560", "0123 0123")] {
            guest.run(&format!("held {at}"), &format!("held {is}")).context(to)?;
        }
        ensure!(mapped(2)? == there, "on {to}");
    }
    guest.finish()
}

fn short_file_is_opened_locally_only_after_large_writes(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearshort", 2, fast_path)?;
    there(&cluster, "printf 0123456789abcdef > /tmp/near/a")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("open /mfs/2/tmp/near/a O_RDONLY", "open ")?;
    guest.run("read 4", "read 0123")?;
    ensure!(!guest.open_files()?.contains("/tmp/near/"), "it is open on node 2");
    guest.run("close", "close")?;
    guest.run("open /mfs/2/tmp/near/b O_WRONLY|O_CREAT", "open ")?;
    guest.run("write ----", "write 4")?;
    ensure!(!guest.open_files()?.contains("/tmp/near/"), "it is open on node 2");
    // More than the shim writes behind.
    guest.run("fill 80", "fill ")?;
    guest.run("write ++++", "write 4")?;
    ensure!(guest.open_files()?.contains("/tmp/near/b"), "it is not open on node 2");
    ensure!(there(&cluster, "stat -c %s /tmp/near/b; tail -c 4 /tmp/near/b")? == "327688\n++++");
    guest.finish()
}

fn local_open_is_the_same_file_with_the_same_rights(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearrights", 2, fast_path)?;
    there(&cluster, "umask 0; for f in a b c d; do printf old$f > /tmp/near/$f; done")?;
    let mut guest =
        FileGuest::start(&cluster, &["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"])?;
    for (file, meanwhile, near) in [
        ("a", "true", true),
        ("b", "chmod 0 /tmp/near/b", false),
        ("c", "mv /tmp/near/c /tmp/near/away; printf new > /tmp/near/c", false),
        ("d", "rm /tmp/near/d; ln -s /tmp/near/away /tmp/near/d", false),
    ] {
        guest.run(&format!("open /mfs/2/tmp/near/{file} O_RDWR"), "open ")?;
        there(&cluster, meanwhile)?;
        guest.run("read 10", &format!("read old{file}"))?;
        let open = guest.open_files()?;
        ensure!(open.contains("/tmp/near/") == near, "{file}: {open}");
        guest.run("write !", "write 1")?;
        guest.run("close", "close")?;
    }
    ensure!(there(&cluster, "cat /tmp/near/[abc] /tmp/near/away")? == "olda!oldb!newoldc!");
    guest.finish()
}

fn mount_without_dfsa_opens_nothing_locally(fast_path: bool) -> Result<()> {
    let cluster = mounted("neardfsa", 2, "timeout=3,dfsa=0", fast_path)?;
    there(&cluster, "printf 0123456789abcdef > /tmp/near/a")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("open /mfs/2/tmp/near/a O_RDWR", "open ")?;
    guest.run("read 4", "read 0123")?;
    guest.run("write ----", "write 4")?;
    guest.run("seek 0 1", "seek 8")?;
    ensure!(!guest.open_files()?.contains("/tmp/near/a"), "it is open on node 2");
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123----89abcdef");
    guest.finish()
}

/// `mosctl nomfs` also applies to guests that have files of the node open locally.
fn nomfs_applies_to_local_files_of_guests(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearclosed", 2, fast_path)?;
    there(&cluster, "printf 0123456789abcdef > /tmp/near/a")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("open /mfs/2/tmp/near/a O_RDWR", "open ")?;
    guest.run("read 4", "read 0123")?;
    ensure!(guest.open_files()?.contains("/tmp/near/a"), "it is not open on node 2");
    cluster.run(2, &["mosctl", "nomfs"])?;
    // EACCES
    guest.run("write ----", "write 13")?;
    ensure!(!guest.open_files()?.contains("/tmp/near/a"), "it is still open on node 2");
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123456789abcdef");
    cluster.run(2, &["mosctl", "mfs"])?;
    guest.run("write ----", "write 4")?;
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123----89abcdef");
    guest.finish()
}

/// The guest's deputy waits in the kernel for a reply of MFS, and must stop for the migration.
fn guest_blocked_on_a_lock_can_be_moved(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearlock", 2, fast_path)?;
    let [mut holder, mut waiter] = [FileGuest::start(&cluster, &[])?, FileGuest::start(&cluster, &[])?];
    for guest in [&mut holder, &mut waiter] {
        guest.run("open /mfs/2/tmp/near/a O_RDWR|O_CREAT", "open ")?;
    }
    holder.run("lock", "lock")?;
    let pid = waiter.running.pid;
    for place in ["home", "2"] {
        if place == "home" {
            waiter.send("lock")?;
        }
        let waits = format!("until grep -q ^72 /proc/{pid}/syscall; do sleep 0.01; done");
        cluster.run(1, &["timeout", "20", "sh", "-c", &waits]).context("it does not wait")?;
        let moved = cluster.migrate(pid, place);
        moved.map_err(|refused| anyhow::anyhow!("{place}: {}", refused.message))?;
    }
    holder.run("close", "close")?;
    waiter.running.await_output(&format!("{}: lock", waiter.sent))?;
    for guest in [holder, waiter] {
        guest.finish()?;
    }
    Ok(())
}

/// On the node of its files, the program has the files open locally; on other nodes, they are
/// delegated.
fn delegated_file_io_survives_moves(fast_path: bool) -> Result<()> {
    move_while_running("delegation", "nearmoves", fast_path)
}

fn frequent_file_calls_survive_moves(fast_path: bool) -> Result<()> {
    move_while_running("fastpath", "nearhot", fast_path)
}

/// A program whose files are on node 2 is migrated all the time.
fn move_while_running(program: &str, name: &str, fast_path: bool) -> Result<()> {
    let cluster = cluster(name, 3, fast_path)?;
    random_moves::move_while_running(&cluster, program, "/mfs/2/tmp/near")?;
    ensure!(there(&cluster, "ls /tmp/near")?.is_empty());
    Ok(())
}
