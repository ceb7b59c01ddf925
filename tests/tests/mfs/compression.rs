//! Compression on slow links: compressible data needs fewer bytes on the wire; other data is sent
//! as it is.

use anyhow::{Context, Result};
use tern_tests::cluster::Cluster;

/// Bytes of each file.
const LENGTH: u64 = 12 << 20;

/// Bytes that a node has received and sent on its networks so far.
fn network_bytes(cluster: &Cluster) -> Result<(u64, u64)> {
    let table = String::from_utf8(cluster.run(1, &["cat", "/proc/net/dev"])?)?;
    let mut sum = (0, 0);
    for line in table.lines().skip(2) {
        let (name, counts) = line.split_once(':').context("no counts")?;
        let counts: Vec<u64> = counts.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        if name.trim() != "lo" {
            sum = (sum.0 + counts[0], sum.1 + counts[8]);
        }
    }
    Ok(sum)
}

#[test]
fn compressible_data_is_compressed_on_a_slow_link() -> Result<()> {
    let cluster = Cluster::with_link("packed", 2, "switch:100mbit")?;
    for node in [1, 2] {
        cluster.run(node, &["mkdir", "-p", "/mfs"])?;
    }
    cluster.run(1, &["mount.mfs", "mymfs", "/mfs"])?;
    let create_files = format!(
        "cd /tmp; seq 1000000000 1009999999 | head -c {LENGTH} > text; head -c {LENGTH} /dev/urandom > noise; \
         until test -d /mfs/2/tmp; do sleep 0.1; done"
    );
    cluster.run(1, &["sh", "-c", &create_files])?;
    for (name, shrinks) in [("text", true), ("noise", false)] {
        let before = network_bytes(&cluster)?;
        cluster.run(1, &["cp", &format!("/tmp/{name}"), "/mfs/2/tmp"])?;
        let sent = network_bytes(&cluster)?.1 - before.1;
        let there = cluster.run(2, &["sha256sum", &format!("/tmp/{name}")])?;
        assert_eq!(cluster.run(1, &["sha256sum", &format!("/tmp/{name}")])?, there);
        // A file that the client's kernel has not cached.
        let other = format!("/tmp/{name}2");
        cluster.run(2, &["cp", &format!("/tmp/{name}"), &other])?;
        let before = network_bytes(&cluster)?;
        let content = cluster.run(1, &["cat", &format!("/mfs/2{other}")])?;
        let received = network_bytes(&cluster)?.0 - before.0;
        assert!(content == cluster.run(2, &["cat", &other])?, "{name} differs");
        println!("{name}: {LENGTH} bytes, {sent} sent, {received} received");
        if shrinks {
            // Some data is sent uncompressed until the kernel has measured how slow the link is.
            assert!(sent < LENGTH / 4 * 3 && received < LENGTH / 4 * 3, "{sent} {received}");
        } else {
            assert!(sent > LENGTH && received > LENGTH, "{sent} {received}");
        }
    }
    Ok(())
}
