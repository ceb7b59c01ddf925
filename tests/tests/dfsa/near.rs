//! A guest on a file's own node has that file open itself: its calls on it are made there.

use anyhow::{Context, Result, ensure};
use tern_tests::breaking::configure;
use tern_tests::cluster::Cluster;
use tern_tests::mover;
use tern_tests::told::Told;

/// Each test runs with the fast path, and without it.
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
    a_guest_works_on_its_nodes_own_file,
    a_guest_maps_its_nodes_own_file,
    a_short_file_is_not_worth_it_until_much_has_been_written,
    it_is_that_file_or_none_and_under_the_same_rights,
    of_a_tree_without_dfsa_nothing_is_open_there,
    who_has_files_of_a_closed_node_open_is_sent_home,
    who_waits_for_a_lock_can_be_moved,
    what_it_reads_and_writes_is_the_same_wherever_it_goes,
    what_is_called_very_often_is_the_same_wherever_it_goes,
}

fn cluster(name: &str, nodes: u16, fast_path: bool) -> Result<Cluster> {
    mounted(name, nodes, "timeout=3,dfsa=1", fast_path)
}

fn mounted(name: &str, nodes: u16, options: &str, fast_path: bool) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, nodes)?;
    if !fast_path {
        (1..=nodes).try_for_each(|node| configure(&cluster, node, "hot_calls = false"))?;
    }
    cluster.mount(1, options)?;
    cluster.run(2, &["mkdir", "-m", "777", "/tmp/near"])?;
    Ok(cluster)
}

fn there(cluster: &Cluster, line: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&cluster.run(2, &["sh", "-c", line])?).into_owned())
}

fn a_guest_works_on_its_nodes_own_file(fast_path: bool) -> Result<()> {
    let cluster = cluster("near", 2, fast_path)?;
    there(&cluster, "printf 0123456789abcdef > /tmp/near/a; printf mapped > /tmp/near/b")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("open /mfs/2/tmp/near/a O_RDWR", "open ")?;
    told.tell("read 4", "read 0123")?;
    ensure!(told.open_there()?.contains("/tmp/near/a"), "it is not open there");
    // Of what it writes there nobody can believe anything: no file has a mark that makes an event of each write.
    let marks = "cat /proc/[0-9]*/fdinfo/* 2>/dev/null | grep 'fanotify ino:.* mask:c06 '; true";
    ensure!(there(&cluster, marks)?.is_empty(), "its writes are listened for");
    // What a program of that node does is seen at once, and the other way round.
    there(&cluster, "printf XYZ | dd of=/tmp/near/a bs=1 seek=4 conv=notrunc status=none")?;
    told.tell("read 4", "read XYZ7")?;
    told.tell("write ----", "write 4")?;
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123XYZ7----cdef");
    told.tell("map /mfs/2/tmp/near/b", "map mapp")?;
    told.tell("seek -2 2", "seek 14")?;
    // Who is born has the same offset, and nobody has the file there any more.
    told.tell("fork +++", "fork 0")?;
    told.tell("seek 0 1", "seek 17")?;
    ensure!(!told.open_there()?.contains("/tmp/near/a"), "it is open there, and shared");
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123XYZ7----cd+++");
    told.tell("close", "close")?;
    // Where it goes its offset goes too.
    there(&cluster, "truncate -s 100K /tmp/near/a")?;
    told.tell("open /mfs/2/tmp/near/a O_RDONLY", "open ")?;
    told.tell("read 5", "read 0123X")?;
    ensure!(told.open_there()?.contains("/tmp/near/a"));
    ensure!(cluster.migrate(told.running.pid, "home").is_ok());
    told.tell("read 5", "read YZ7--")?;
    told.ends()
}

/// A file of its own that a guest maps, or had mapped when it came, is mapped there itself: nothing of it is sent, and what others write is seen.
fn a_guest_maps_its_nodes_own_file(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearmap", 3, fast_path)?;
    there(&cluster, "yes 0123456789abcde | head -c 1M > /tmp/near/big")?;
    let mapped = |node| -> Result<bool> {
        let maps = cluster.run(node, &["sh", "-c", "cat /proc/[0-9]*/maps 2>/dev/null; true"])?;
        Ok(String::from_utf8_lossy(&maps).contains("/tmp/near/big"))
    };
    let mut told = Told::start(&cluster, &[])?;
    told.tell("hold /mfs/2/tmp/near/big", "hold")?;
    ensure!(mapped(2)?, "it is not mapped there");
    told.tell("held 64", "held 0123 0123")?;
    told.tell("poke 4096 ABCD", "poke")?;
    there(&cluster, "printf WXYZ | dd of=/tmp/near/big bs=1 seek=8192 conv=notrunc status=none")?;
    told.tell("held 8192", "held WXYZ WXYZ")?;
    for (to, there) in [("home", false), ("2", true), ("3", false), ("2", true), ("home", false)] {
        let moved = cluster.migrate(told.running.pid, to);
        moved.map_err(|refused| anyhow::anyhow!("{to}: {}", refused.message))?;
        for (at, is) in [("4096", "0123 ABCD"), ("8192", "WXYZ WXYZ"), ("1048560", "0123 0123")] {
            told.tell(&format!("held {at}"), &format!("held {is}")).context(to)?;
        }
        ensure!(mapped(2)? == there, "on {to}");
    }
    told.ends()
}

fn a_short_file_is_not_worth_it_until_much_has_been_written(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearshort", 2, fast_path)?;
    there(&cluster, "printf 0123456789abcdef > /tmp/near/a")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("open /mfs/2/tmp/near/a O_RDONLY", "open ")?;
    told.tell("read 4", "read 0123")?;
    ensure!(!told.open_there()?.contains("/tmp/near/"), "it is open there");
    told.tell("close", "close")?;
    told.tell("open /mfs/2/tmp/near/b O_WRONLY|O_CREAT", "open ")?;
    told.tell("write ----", "write 4")?;
    ensure!(!told.open_there()?.contains("/tmp/near/"), "it is open there");
    // More than is written behind at once.
    told.tell("fill 80", "fill ")?;
    told.tell("write ++++", "write 4")?;
    ensure!(told.open_there()?.contains("/tmp/near/b"), "it is not open there");
    ensure!(there(&cluster, "stat -c %s /tmp/near/b; tail -c 4 /tmp/near/b")? == "327688\n++++");
    told.ends()
}

fn it_is_that_file_or_none_and_under_the_same_rights(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearrights", 2, fast_path)?;
    there(&cluster, "umask 0; for f in a b c d; do printf old$f > /tmp/near/$f; done")?;
    let mut told =
        Told::start(&cluster, &["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"])?;
    for (file, meanwhile, near) in [
        ("a", "true", true),
        ("b", "chmod 0 /tmp/near/b", false),
        ("c", "mv /tmp/near/c /tmp/near/away; printf new > /tmp/near/c", false),
        ("d", "rm /tmp/near/d; ln -s /tmp/near/away /tmp/near/d", false),
    ] {
        told.tell(&format!("open /mfs/2/tmp/near/{file} O_RDWR"), "open ")?;
        there(&cluster, meanwhile)?;
        told.tell("read 10", &format!("read old{file}"))?;
        let open = told.open_there()?;
        ensure!(open.contains("/tmp/near/") == near, "{file}: {open}");
        told.tell("write !", "write 1")?;
        told.tell("close", "close")?;
    }
    ensure!(there(&cluster, "cat /tmp/near/[abc] /tmp/near/away")? == "olda!oldb!newoldc!");
    told.ends()
}

fn of_a_tree_without_dfsa_nothing_is_open_there(fast_path: bool) -> Result<()> {
    let cluster = mounted("neardfsa", 2, "timeout=3,dfsa=0", fast_path)?;
    there(&cluster, "printf 0123456789abcdef > /tmp/near/a")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("open /mfs/2/tmp/near/a O_RDWR", "open ")?;
    told.tell("read 4", "read 0123")?;
    told.tell("write ----", "write 4")?;
    told.tell("seek 0 1", "seek 8")?;
    ensure!(!told.open_there()?.contains("/tmp/near/a"), "it is open there");
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123----89abcdef");
    told.ends()
}

/// What the node says to others (`mosctl nomfs`) holds for guests that have its files open themselves, too.
fn who_has_files_of_a_closed_node_open_is_sent_home(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearclosed", 2, fast_path)?;
    there(&cluster, "printf 0123456789abcdef > /tmp/near/a")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("open /mfs/2/tmp/near/a O_RDWR", "open ")?;
    told.tell("read 4", "read 0123")?;
    ensure!(told.open_there()?.contains("/tmp/near/a"), "it is not open there");
    cluster.run(2, &["mosctl", "nomfs"])?;
    // EACCES
    told.tell("write ----", "write 13")?;
    ensure!(!told.open_there()?.contains("/tmp/near/a"), "it is open there all the same");
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123456789abcdef");
    cluster.run(2, &["mosctl", "mfs"])?;
    told.tell("write ----", "write 4")?;
    ensure!(there(&cluster, "cat /tmp/near/a")? == "0123----89abcdef");
    told.ends()
}

/// Its deputy waits in the kernel for an answer of MFS, and is to stand still for the move.
fn who_waits_for_a_lock_can_be_moved(fast_path: bool) -> Result<()> {
    let cluster = cluster("nearlock", 2, fast_path)?;
    let [mut holder, mut waiter] = [Told::start(&cluster, &[])?, Told::start(&cluster, &[])?];
    for told in [&mut holder, &mut waiter] {
        told.tell("open /mfs/2/tmp/near/a O_RDWR|O_CREAT", "open ")?;
    }
    holder.tell("lock", "lock")?;
    let pid = waiter.running.pid;
    for place in ["home", "2"] {
        if place == "home" {
            waiter.say("lock")?;
        }
        let waits = format!("until grep -q ^72 /proc/{pid}/syscall; do sleep 0.01; done");
        cluster.run(1, &["timeout", "20", "sh", "-c", &waits]).context("it does not wait")?;
        let moved = cluster.migrate(pid, place);
        moved.map_err(|refused| anyhow::anyhow!("{place}: {}", refused.message))?;
    }
    holder.tell("close", "close")?;
    waiter.running.hear(&format!("{}: lock", waiter.told))?;
    for told in [holder, waiter] {
        told.ends()?;
    }
    Ok(())
}

/// Wherever it is: on the files' node it has them itself, elsewhere in hand.
fn what_it_reads_and_writes_is_the_same_wherever_it_goes(fast_path: bool) -> Result<()> {
    goes_about("inhand", "nearmoves", fast_path)
}

fn what_is_called_very_often_is_the_same_wherever_it_goes(fast_path: bool) -> Result<()> {
    goes_about("hotcalls", "nearhot", fast_path)
}

/// A program whose files are those of node 2 is moved all the time.
fn goes_about(program: &str, name: &str, fast_path: bool) -> Result<()> {
    let cluster = cluster(name, 3, fast_path)?;
    mover::goes_about(&cluster, program, "/mfs/2/tmp/near")?;
    ensure!(there(&cluster, "ls /tmp/near")?.is_empty());
    Ok(())
}
