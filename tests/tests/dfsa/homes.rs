//! A large file of its home that a guest maps is not sent: its node shows it, page by page.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::breaking::{self, until};
use tern_tests::cluster::Cluster;
use tern_tests::told::Told;

const PATIENCE: Duration = Duration::from_secs(30);
/// The middle of the file.
const MIDDLE: u64 = 32 << 20;

/// A cluster of so many, and on node 1 a file of 64 MiB.
fn cluster(name: &str, nodes: u16) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(name, nodes)?;
    at_home(&cluster, "mkdir -m 777 /tmp/far; yes 0123456789abcde | head -c 64M > /tmp/far/big")?;
    Ok(cluster)
}

fn at_home(cluster: &Cluster, line: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&cluster.run(1, &["sh", "-c", line])?).into_owned())
}

/// Whether a program on this node has the file mapped from the tree.
fn is_shown(cluster: &Cluster, node: u16) -> Result<bool> {
    let maps = cluster.run(node, &["sh", "-c", "cat /proc/[0-9]*/maps 2>/dev/null; true"])?;
    Ok(String::from_utf8_lossy(&maps).contains("/1/tmp/far/big"))
}

/// Bytes that have come to a node.
fn received(cluster: &Cluster, node: u16) -> Result<u64> {
    let count = cluster.run(node, &["sh", "-c", "cat /sys/class/net/*/statistics/rx_bytes"])?;
    Ok(String::from_utf8_lossy(&count).lines().filter_map(|line| line.parse::<u64>().ok()).sum())
}

/// Wherever it goes: what it has written into its own mapping stays, and what was written to the file since is seen.
#[test]
fn a_guest_maps_a_large_file_of_its_home_that_is_not_sent() -> Result<()> {
    let cluster = cluster("farmap", 3)?;
    let before = received(&cluster, 2)?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("hold /tmp/far/big", "hold")?;
    ensure!(is_shown(&cluster, 2)?, "it is not shown there\n{}", cluster.scene(told.running.pid));
    told.tell("held 64", "held 0123 0123")?;
    told.tell("poke 4096 ABCD", "poke")?;
    let there = format!("printf WXYZ | dd of=/tmp/far/big bs=1 seek={MIDDLE} conv=notrunc status=none");
    at_home(&cluster, &there)?;
    let middle = MIDDLE.to_string();
    for to in ["2", "home", "2", "3", "2", "home"] {
        if told.told > 4 || to != "2" {
            let moved = cluster.migrate(told.running.pid, to);
            moved.map_err(|refused| anyhow::anyhow!("{to}: {}", refused.message))?;
        }
        for (at, is) in [("4096", "0123 ABCD"), (&middle, "WXYZ WXYZ"), ("67108848", "0123 0123")] {
            told.tell(&format!("held {at}"), &format!("held {is}")).context(to)?;
        }
        for node in [2, 3] {
            ensure!(is_shown(&cluster, node)? == (to == node.to_string()), "{node} when it is on {to}");
        }
    }
    let came = received(&cluster, 2)? - before;
    ensure!(came < 40 << 20, "{came} bytes have come to node 2, on three visits");
    told.ends()
}

/// Nobody else's use of the file keeps it from being mapped, shared too.
#[test]
fn what_another_node_writes_is_mapped_as_well() -> Result<()> {
    let cluster = cluster("farwritten", 3)?;
    cluster.mount(3, "timeout=10")?;
    let writes = "exec 9<>/mfs/1/tmp/far/big; touch /tmp/opened; exec sleep 1000";
    let mut writer = cluster.command(3, "sh").args(["-c", writes]).spawn()?;
    until("it is open", PATIENCE, || cluster.run(3, &["test", "-e", "/tmp/opened"]).is_ok())?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("hold /tmp/far/big", "hold")?;
    ensure!(is_shown(&cluster, 2)?, "it is not shown there");
    told.tell(&format!("held {MIDDLE}"), "held 0123 0123")?;
    cluster.run(3, &["pkill", "-x", "sleep"])?;
    writer.wait()?;
    told.ends()
}

/// Most of the time it sleeps where no signal wakes it, and is not waited for; and it is home all the same when it is told to be.
#[test]
fn who_waits_for_one_page_after_the_other_can_be_moved() -> Result<()> {
    let cluster = Cluster::with_link("farslow", 2, "switch:30ms")?;
    at_home(&cluster, "mkdir -m 777 /tmp/far; yes 0123456789abcde | head -c 64M > /tmp/far/big")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("hold /tmp/far/big", "hold")?;
    ensure!(is_shown(&cluster, 2)?, "it is not shown there");
    told.say("stride 4000")?;
    told.running.hear("strides")?;
    let moved = cluster.migrate(told.running.pid, "home");
    moved.map_err(|refused| anyhow::anyhow!("{}", refused.message))?;
    told.running.hear(&format!("{}: stride", told.told)).with_context(|| told.running.so_far())?;
    told.ends()
}

/// What it waits for comes when its home is back, as a reply would, and it is not told that there is nothing.
#[test]
fn who_needs_a_page_while_its_home_is_out_of_reach_gets_it_later() -> Result<()> {
    let cluster = cluster("farcut", 2)?;
    breaking::set_patience(&cluster, 1, 60)?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("hold /tmp/far/big", "hold")?;
    ensure!(is_shown(&cluster, 2)?, "it is not shown there");
    told.say("walk")?;
    told.running.hear("walks")?;
    cluster.lab().cut(Cable::Node(2))?;
    let state = || cluster.processes(2).unwrap_or_default().first().map(|row| row.state.clone());
    until("it stands still", PATIENCE, || state().as_deref() == Some("suspended"))?;
    cluster.lab().heal(Cable::Node(2))?;
    told.running.hear(&format!("{}: walk", told.told)).with_context(|| told.running.so_far())?;
    told.tell("held 64", "held 0123 0123")?;
    told.ends()
}

/// What it has mapped is its memory: nobody takes that away. What it maps next is sent.
#[test]
fn who_has_mapped_a_file_of_a_home_that_closes_goes_on() -> Result<()> {
    let cluster = cluster("farclosed", 2)?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("hold /tmp/far/big", "hold")?;
    ensure!(is_shown(&cluster, 2)?, "it is not shown there");
    cluster.run(1, &["mosctl", "nomfs"])?;
    told.tell(&format!("held {MIDDLE}"), "held 0123 0123")?;
    told.tell("hold /tmp/far/big", "hold")?;
    ensure!(!is_shown(&cluster, 2)?, "it is shown all the same");
    told.tell(&format!("held {MIDDLE}"), "held 0123 0123")?;
    told.ends()
}

/// It is opened there as the guest itself, and so not if it has it open by rights that it has no more.
#[test]
fn what_it_may_not_open_itself_is_sent() -> Result<()> {
    let cluster = cluster("farwhole", 2)?;
    at_home(&cluster, "mkdir -m 700 /tmp/shut; cp /tmp/far/big /tmp/shut/big")?;
    let mut told = Told::start(&cluster, &[])?;
    told.tell("open /tmp/shut/big O_RDONLY", "open ")?;
    told.tell("drop", "drop")?;
    told.tell("hold it", "hold")?;
    told.tell(&format!("held {MIDDLE}"), "held 0123 0123")?;
    let maps = cluster.run(2, &["sh", "-c", "cat /proc/[0-9]*/maps 2>/dev/null; true"])?;
    ensure!(!String::from_utf8_lossy(&maps).contains("shut/big"), "it is opened as somebody else");
    told.tell("hold /tmp/far/big", "hold")?;
    ensure!(is_shown(&cluster, 2)?, "what it may open is not shown");
    told.ends()
}
