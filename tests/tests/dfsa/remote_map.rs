//! A large file of its home that a guest maps is not sent: its pages are fetched on demand.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{self, wait_until};
use tern_tests::drivers::file_guest::FileGuest;
use tern_tests::drivers::siblings::Siblings;

const EVENT_TIMEOUT: Duration = Duration::from_secs(30);
/// The command line of the process that provides files of home on the guest's node.
const TREE: &str = "tern-mfs .*homes";
/// The middle of the file.
const MIDDLE: u64 = 32 << 20;

/// A cluster of `nodes` nodes; node 1 has a file of 64 MiB.
fn cluster(name: &str, nodes: u16) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, nodes)?;
    at_home(&cluster, "mkdir -m 777 /tmp/far; yes 0123456789abcde | head -c 64M > /tmp/far/big")?;
    Ok(cluster)
}

fn at_home(cluster: &Cluster, line: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&cluster.run(1, &["sh", "-c", line])?).into_owned())
}

/// Whether a program on this node has the file mapped through /mfs.
fn is_mapped(cluster: &Cluster, node: u16) -> Result<bool> {
    let maps = cluster.run(node, &["sh", "-c", "cat /proc/[0-9]*/maps 2>/dev/null; true"])?;
    Ok(String::from_utf8_lossy(&maps).contains("/1/tmp/far/big"))
}

/// Bytes that a node has received.
fn received(cluster: &Cluster, node: u16) -> Result<u64> {
    let count = cluster.run(node, &["sh", "-c", "cat /sys/class/net/*/statistics/rx_bytes"])?;
    Ok(String::from_utf8_lossy(&count).lines().filter_map(|line| line.parse::<u64>().ok()).sum())
}

/// Wherever the guest goes, its writes to its private mapping stay, and it sees later writes to the
/// file.
#[test]
fn mapped_file_of_home_is_not_sent() -> Result<()> {
    let cluster = cluster("farmap", 3)?;
    let before = received(&cluster, 2)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("hold /tmp/far/big", "hold")?;
    ensure!(
        is_mapped(&cluster, 2)?,
        "it is not mapped on node 2\n{}",
        cluster.diagnostics(guest.running.pid)
    );
    guest.run("held 64", "held 0123 0123")?;
    guest.run("poke 4096 ABCD", "poke")?;
    let there = format!("printf WXYZ | dd of=/tmp/far/big bs=1 seek={MIDDLE} conv=notrunc status=none");
    at_home(&cluster, &there)?;
    let middle = MIDDLE.to_string();
    for to in ["2", "home", "2", "3", "2", "home"] {
        if guest.sent > 4 || to != "2" {
            let moved = cluster.migrate(guest.running.pid, to);
            moved.map_err(|refused| anyhow::anyhow!("{to}: {}", refused.message))?;
        }
        for (at, is) in [("4096", "0123 ABCD"), (&middle, "WXYZ WXYZ"), ("67108848", "0123 0123")] {
            guest.run(&format!("held {at}"), &format!("held {is}")).context(to)?;
        }
        for node in [2, 3] {
            ensure!(
                is_mapped(&cluster, node)? == (to == node.to_string()),
                "node {node} while the guest is on {to}"
            );
        }
    }
    let came = received(&cluster, 2)? - before;
    ensure!(came < 40 << 20, "node 2 received {came} bytes on three visits");
    guest.finish()
}

/// A file that another node has open for writing is mapped as well, also shared.
#[test]
fn file_open_for_writing_elsewhere_can_be_mapped() -> Result<()> {
    let cluster = cluster("farwritten", 3)?;
    cluster.mount(3, "timeout=10")?;
    let writes = "exec 9<>/mfs/1/tmp/far/big; touch /tmp/opened; exec sleep 1000";
    let mut writer = cluster.command(3, "sh").args(["-c", writes]).spawn()?;
    wait_until("it is open", EVENT_TIMEOUT, || cluster.run(3, &["test", "-e", "/tmp/opened"]).is_ok())?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("hold /tmp/far/big", "hold")?;
    ensure!(is_mapped(&cluster, 2)?, "it is not mapped on node 2");
    guest.run(&format!("held {MIDDLE}"), "held 0123 0123")?;
    cluster.run(3, &["pkill", "-x", "sleep"])?;
    writer.wait()?;
    guest.finish()
}

/// The guest mostly sleeps in page faults, from which no signal wakes it. The migration succeeds
/// nevertheless, and the guest completes its reads at home.
#[test]
fn guest_in_page_faults_can_be_moved() -> Result<()> {
    let cluster = Cluster::with_link("farslow", 2, "switch:30ms")?;
    at_home(&cluster, "mkdir -m 777 /tmp/far; yes 0123456789abcde | head -c 64M > /tmp/far/big")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("hold /tmp/far/big", "hold")?;
    ensure!(is_mapped(&cluster, 2)?, "it is not mapped on node 2");
    guest.send("stride 4000")?;
    guest.running.await_output("strides")?;
    cluster.migrate(guest.running.pid, "home")?;
    guest
        .running
        .await_output(&format!("{}: stride", guest.sent))
        .with_context(|| guest.running.output_so_far())?;
    guest.finish()
}

/// The page arrives once the home is reachable again, and the guest gets no error.
#[test]
fn page_fault_waits_for_an_unreachable_home() -> Result<()> {
    let cluster = cluster("farcut", 2)?;
    fault_injection::set_timeouts(&cluster, 1, 60)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("hold /tmp/far/big", "hold")?;
    ensure!(is_mapped(&cluster, 2)?, "it is not mapped on node 2");
    guest.send("walk")?;
    guest.running.await_output("walks")?;
    cluster.lab().cut(Cable::Node(2))?;
    let state = || cluster.processes(2).unwrap_or_default().first().map(|row| row.state.clone());
    wait_until("it has stopped", EVENT_TIMEOUT, || state().as_deref() == Some("suspended"))?;
    cluster.lab().heal(Cable::Node(2))?;
    guest
        .running
        .await_output(&format!("{}: walk", guest.sent))
        .with_context(|| guest.running.output_so_far())?;
    guest.run("held 64", "held 0123 0123")?;
    guest.finish()
}

/// Existing mappings stay valid. A file that is mapped afterwards is sent instead.
#[test]
fn mapping_survives_nomfs_of_home() -> Result<()> {
    let cluster = cluster("farclosed", 2)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("hold /tmp/far/big", "hold")?;
    ensure!(is_mapped(&cluster, 2)?, "it is not mapped on node 2");
    cluster.run(1, &["mosctl", "nomfs"])?;
    guest.run(&format!("held {MIDDLE}"), "held 0123 0123")?;
    guest.run("hold /tmp/far/big", "hold")?;
    ensure!(!is_mapped(&cluster, 2)?, "it is still mapped on node 2");
    guest.run(&format!("held {MIDDLE}"), "held 0123 0123")?;
    guest.finish()
}

/// The node opens the file with the guest's present credentials. A file that the guest opened
/// before it dropped its rights is sent.
#[test]
fn file_that_the_guest_may_not_open_is_sent() -> Result<()> {
    let cluster = cluster("farwhole", 2)?;
    at_home(&cluster, "mkdir -m 700 /tmp/shut; cp /tmp/far/big /tmp/shut/big")?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("open /tmp/shut/big O_RDONLY", "open ")?;
    guest.run("drop", "drop")?;
    guest.run("hold it", "hold")?;
    guest.run(&format!("held {MIDDLE}"), "held 0123 0123")?;
    let maps = cluster.run(2, &["sh", "-c", "cat /proc/[0-9]*/maps 2>/dev/null; true"])?;
    ensure!(!String::from_utf8_lossy(&maps).contains("shut/big"), "it is opened with other credentials");
    guest.run("hold /tmp/far/big", "hold")?;
    ensure!(is_mapped(&cluster, 2)?, "a file that it may open is not mapped");
    guest.finish()
}

/// The process that provides files of home on the guest's node does not answer. Only the program
/// that maps a file waits for that process.
#[test]
fn stopped_tree_delays_no_relative_of_one_that_maps() -> Result<()> {
    let cluster = cluster("farstopped", 2)?;
    let mut guest = FileGuest::start(&cluster, &[])?;
    guest.run("hold /tmp/far/big", "hold")?;
    ensure!(is_mapped(&cluster, 2)?, "it is not mapped on node 2");
    at_home(&cluster, "head -c 17M /tmp/far/big > /tmp/far/other; touch -d yesterday /tmp/far/other")?;
    let mut siblings = Siblings::start(&cluster, "-2", "0.3", &["maps", "/tmp/far/other"])?;
    siblings.running.await_output("opened")?;
    let refused = || {
        let logs = "cat /run/tern/shims/*.log | grep -c 'file cannot be opened here'; true";
        cluster
            .run(2, &["sh", "-c", logs])
            .map_or(0, |count| String::from_utf8_lossy(&count).trim().parse::<u32>().unwrap_or(0))
    };
    cluster.run(2, &["pkill", "-STOP", "-f", TREE])?;
    siblings.running.send_input("go\n")?;
    wait_until("the tree is given up", EVENT_TIMEOUT, || refused() == 1)?;
    siblings.running.await_output("mapped")?;
    cluster.run(2, &["pkill", "-CONT", "-f", TREE])?;
    siblings.finish(&cluster, Duration::from_secs(60))?;
    guest.finish()
}
