//! Very many placed commands, and very many bytes through one: all results are right, and no
//! resource leaks. TERN_JOBS=N sets the number.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::process::Stdio;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::resources::{ResourceCheck, show};

/// Commands that run at a time.
const CONCURRENCY: u64 = 8;

/// Idle connections to a node's executor that home keeps for two minutes (`home/links.rs`).
const POOLED_CONNECTIONS: u64 = 64;

/// Tolerated growth of the executors and of the file servers and mounts: pooled connections come
/// and go, each with a thread and descriptors; files stay open after reads; allocators round, and
/// make another arena when threads contend for one.
fn slack(of: &str) -> u64 {
    match of {
        "kib" => 8 << 10,
        "mappings" => 64 + 3 * CONCURRENCY,
        "descriptors" => 4 * CONCURRENCY,
        "threads" | "connection" | "connections" => CONCURRENCY,
        // Three of a mount wait for requests, all others end after a rest of 5 s.
        "fuser" => 2,
        _ => 0,
    }
}

/// One job by number: an exit status, a stream, a repeatable command with a temporary file and a
/// file at home, or a death by a signal. Prints what is wrong.
const JOB: &str = r#"
n=$1
case $((n % 4)) in
0) out=$(mexec -n 2 sh -c 'echo $0; exit 7' $n); [ $? = 7 ] && [ "$out" = $n ];;
1) out=$(echo $n | mexec -n 2 sh -c 'cat; cat >&2' 2>&1); [ $? = 0 ] && [ "$out" = $n ];;
2) mexec -r -n 2 sh -c 'echo $0 > $TMPDIR/x && cat $TMPDIR/x > f$0; setsid sleep 1000 &' $n; [ $? = 0 ] && [ "$(cat f$n)" = $n ] && rm f$n;;
3) mexec -n 2 sh -c 'kill -TERM $$' $n 2> /dev/null; [ $? = 143 ];;
esac || echo "job $n is wrong: $out"
"#;

/// Runs these jobs; returns what is wrong.
fn jobs(cluster: &Cluster, from: u64, count: u64) -> String {
    let line = format!(
        "mkdir -p /tmp/jobs && cd /tmp/jobs && seq {from} {} | xargs -P{CONCURRENCY} -n1 sh -c \"$0\" sh",
        from + count - 1
    );
    let end = cluster.command(1, "sh").args(["-c", &line, JOB]).stdin(Stdio::null()).output().unwrap();
    let wrong = String::from_utf8_lossy(&[end.stdout, end.stderr].concat()).into_owned();
    assert!(end.status.success() || !wrong.is_empty(), "{}", end.status);
    wrong
}

fn check_leaks(prefix: &str, warm: u64, count: u64) {
    let cluster = Cluster::with_nodes(prefix, 2).unwrap();
    let check =
        ResourceCheck { cluster: &cluster, programs: "ternd|tern-exec|tern-container|tern-mfs", slack };
    assert_eq!(jobs(&cluster, 1, warm), "");
    let before = check.stable_count(None).unwrap();
    let begun = std::time::Instant::now();
    assert_eq!(jobs(&cluster, warm + 1, count), "");
    println!("{count} jobs in {:.0} s", begun.elapsed().as_secs_f32());
    let after = check.stable_count(Some(&before)).unwrap();
    show(&before, &after);
    let grown = check.growth(&before, &after);
    assert!(grown.is_empty(), "grown after {count} jobs:\n{}", grown.join("\n"));
}

#[test]
fn hundreds_of_commands_leak_nothing() {
    check_leaks("manyfew", 100, 300);
}

#[test]
fn ten_thousand_commands_leak_nothing() {
    let wanted = std::env::var("TERN_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    check_leaks("many", 1000, wanted);
}

/// Pid and peak memory in KiB of each process of this name on a node.
fn peaks(cluster: &Cluster, node: u16, name: &str) -> Vec<(u64, u64)> {
    let line = format!(
        "for p in $(pgrep -x {name}); do echo $p $(awk '/^VmHWM/ {{ print $2 }}' /proc/$p/status); done"
    );
    let text = String::from_utf8(cluster.run(node, &["sh", "-c", &line]).unwrap()).unwrap();
    let pair = |line: &str| {
        let (pid, peak) = line.split_once(' ')?;
        Some((pid.parse().ok()?, peak.parse().ok()?))
    };
    text.lines().filter_map(pair).collect()
}

/// Fills a buffer with bytes determined by their position.
fn content(from: u64, into: &mut [u8]) {
    for (at, eight) in into.chunks_mut(8).enumerate() {
        let mixed = (from / 8 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        eight.copy_from_slice(&mixed.to_le_bytes()[..eight.len()]);
    }
}

/// Sends bytes through `cat` on node 2 and back, with a reader that pauses now and then.
fn echo_through_command(prefix: &str, total: u64) {
    let cluster = Cluster::with_nodes(prefix, 2).unwrap();
    cluster.run(1, &["mexec", "-n", "2", "true"]).unwrap();
    let executors = || [peaks(&cluster, 1, "tern-exec"), peaks(&cluster, 2, "tern-exec")].concat();
    let before = executors();
    let mut command = cluster.command(1, "mexec");
    let mut child =
        command.args(["-n", "2", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let begun = std::time::Instant::now();
    let (sent_all, checked) = std::sync::mpsc::channel::<()>();
    let writer = std::thread::spawn(move || {
        let (mut place, mut part) = (0, vec![0; 1 << 16]);
        while place < total {
            content(place, &mut part);
            input.write_all(&part).unwrap();
            place += part.len() as u64;
        }
        // The command must run until its memory has been measured.
        let _looked = checked.recv();
    });
    let (mut place, mut part, mut expected) = (0, vec![0; 1 << 16], vec![0; 1 << 16]);
    while place < total {
        output.read_exact(&mut part).unwrap();
        content(place, &mut expected);
        assert!(part == expected, "at {place}");
        place += part.len() as u64;
        if place % (64 << 20) == 0 {
            std::thread::sleep(std::time::Duration::from_millis(500));
        }
    }
    println!("{} MiB each way in {:.1} s", total >> 20, begun.elapsed().as_secs_f32());
    let after = [executors(), peaks(&cluster, 1, "mexec")].concat();
    drop(sent_all);
    writer.join().unwrap();
    assert_eq!(output.read(&mut part).unwrap(), 0);
    assert!(child.wait().unwrap().success());
    println!("peak memory, KiB: {before:?}, then {after:?}");
    let most = before.iter().map(|(_, peak)| peak).max().unwrap() + (24 << 10);
    assert!(
        after.len() > before.len() && after.iter().all(|(_, peak)| *peak < most),
        "{before:?}, then {after:?}"
    );
}

#[test]
fn many_bytes_pass_through_a_command() {
    echo_through_command("manybytes", 48 << 20);
}

#[test]
fn a_gibibyte_passes_through_a_command() {
    echo_through_command("manygib", 1 << 30);
}

/// Runs this many commands at once, each with an output and a status of its own.
fn run_at_once(prefix: &str, count: u64) {
    let cluster = Cluster::with_nodes(prefix, 2).unwrap();
    let check = ResourceCheck {
        cluster: &cluster,
        programs: "ternd|tern-exec|tern-container|tern-mfs",
        slack: slack_at_once,
    };
    assert_eq!(jobs(&cluster, 1, 100), "");
    let before = check.stable_count(None).unwrap();
    let begun = std::time::Instant::now();
    let script = format!(
        "rm -rf /tmp/all; mkdir -p /tmp/all && cd /tmp/all; \
         mexec -n 2 sleep 5 & mexec -n 2 sleep 5 & mexec -n 2 sleep 5 & mexec -n 2 sleep 5 & \
         i=0; while [ $i -lt {count} ]; do i=$((i + 1)); \
         (mexec -n 2 sh -c 'echo $0; exit $(($0 % 100))' $i > $i.out 2>&1 < /dev/null; echo $? >> $i.out) & done; wait; \
         i=0; while [ $i -lt {count} ]; do i=$((i + 1)); echo $(cat $i.out); done"
    );
    let mut child = cluster
        .command(1, "sh")
        .args(["-c", &script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut most = 0;
    let mut out = String::new();
    std::thread::scope(|scope| {
        let mut stdout = child.stdout.take().unwrap();
        let reader = scope.spawn(move || {
            let mut out = String::new();
            stdout.read_to_string(&mut out).map(|_| out)
        });
        while !reader.is_finished() {
            let rows = cluster.run(1, &["pgrep", "-cx", "mexec"]).unwrap_or_default();
            most = most.max(String::from_utf8_lossy(&rows).trim().parse().unwrap_or(0));
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        out = reader.join().unwrap().unwrap();
    });
    assert!(child.wait().unwrap().success());
    println!("{count} at once, at most {most} observed, in {:.1} s", begun.elapsed().as_secs_f32());
    let wrong: Vec<_> =
        out.lines().zip(1u64..).filter(|(line, n)| *line != format!("{n} {}", n % 100)).collect();
    assert!(out.lines().count() as u64 == count && wrong.is_empty(), "{wrong:?}");
    let after = check.stable_count(Some(&before)).unwrap();
    show(&before, &after);
    let grown = check.growth(&before, &after);
    assert!(grown.is_empty(), "grown after {count} at once:\n{}", grown.join("\n"));
    let peaks = [peaks(&cluster, 1, "tern-exec"), peaks(&cluster, 2, "tern-exec")].concat();
    println!("peak memory, KiB: {peaks:?}");
    assert!(peaks.iter().all(|(_, peak)| *peak < (64 << 10) + 64 * count), "{peaks:?}");
}

fn slack_at_once(of: &str) -> u64 {
    match of {
        // glibc caches stacks of ended threads, up to 40 MiB, and memory in its arenas.
        "kib" => 48 << 10,
        "mappings" => 512,
        "descriptors" | "threads" | "connection" | "connections" => POOLED_CONNECTIONS,
        of => slack(of),
    }
}

#[test]
fn a_hundred_commands_run_at_once() {
    run_at_once("manyonce", 100);
}

#[test]
fn a_thousand_commands_run_at_once() {
    run_at_once("manythousand", 1000);
}
