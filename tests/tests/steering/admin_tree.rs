//! The administration tree below /run/mosix, used with cat and echo as in MOSIX.

use anyhow::{Context, Result};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;

/// Limit on a busy machine for commands that must not hang.
const MAX_RESPONSE_TIME: Duration = Duration::from_secs(10);

/// Prefix to run a command as an ordinary user.
const AS_USER: &str = "setpriv --reuid 1234 --regid 1234 --clear-groups";

fn up(prefix: &str) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, 2)?;
    for node in 1..=2 {
        wait_for(&cluster, node, "cat /run/mosix/nodes/1/load /run/mosix/nodes/2/load", |said| {
            said.lines().count() == 2 && !said.contains('-') && !said.contains("cat:")
        });
    }
    Ok(cluster)
}

/// The output of a shell command on a node, followed by `failed` if it fails.
fn sh(cluster: &Cluster, node: u16, line: &str) -> String {
    let end = match cluster.command(node, "timeout").args(["60", "bash", "-c", line]).output() {
        Ok(end) => end,
        Err(error) => return format!("{error}: failed"),
    };
    let (out, err) = (String::from_utf8_lossy(&end.stdout), String::from_utf8_lossy(&end.stderr));
    format!("{out}{err}{}", if end.status.success() { "" } else { "failed" })
}

fn wait_for(cluster: &Cluster, node: u16, line: &str, accept: impl Fn(&str) -> bool) -> String {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let said = sh(cluster, node, line);
        if accept(&said) || Instant::now() > end {
            assert!(accept(&said), "{line}: {said}");
            return said;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A program of a user on node 1, with its pid there.
struct Program {
    pid: i32,
    child: Child,
}

impl Program {
    fn start(cluster: &Cluster, prefix: &str, line: &str) -> Result<Self> {
        let mut command: Command = cluster.command(1, "sh");
        command.args(["-c", &format!("exec {prefix} sh -c 'echo $$; exec {line}'")]);
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let mut pid = String::new();
        let out = child.stdout.as_mut().context("no pipe")?;
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut pid)?;
        Ok(Self { pid: pid.trim().parse()?, child })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// Restarts ternd on node 1.
fn start(cluster: &Cluster) {
    let begin = "(setsid ternd > /tmp/ternd.log 2>&1 &); i=0; \
                 until mosctl status > /tmp/status || [ $i = 100 ]; do sleep 0.1; i=$((i+1)); done 2> /dev/null";
    assert_eq!(sh(cluster, 1, begin), "");
}

#[test]
fn nodes_are_shown_and_controlled() {
    let cluster = up("admnodes").unwrap();
    let cat = |file: &str| sh(&cluster, 1, &format!("cat /run/mosix/{file}"));
    let number =
        |file: &str| cat(file).trim().parse::<i64>().unwrap_or_else(|_| panic!("{file}: {}", cat(file)));
    assert_eq!(cat("admin/mospe"), "1\n");
    assert!(cat("admin/version").starts_with("Tern "));
    assert!(cat("admin/config").contains("10."), "the map");
    for file in ["mem", "rmem", "tmem", "speed", "CPUs", "util"] {
        assert!(number(&format!("nodes/2/{file}")) > 0, "{file}");
    }
    assert_eq!(number("nodes/2/status"), 3);
    assert_eq!(
        sh(&cluster, 1, "ls /run/mosix /run/mosix/nodes/"),
        "/run/mosix:\nadmin\ndecay\nnodes\nproc\nremote\n\n/run/mosix/nodes/:\n1\n2\n"
    );
    // Settings made here are shown by mosctl, and the other way round.
    for (word, off, bit) in
        [("stay", "nostay", 4), ("lstay", "nolstay", 8), ("block", "noblock", 16), ("nomfs", "mfs", 64)]
    {
        let on = sh(&cluster, 2, &format!("echo 1 > /run/mosix/admin/{word}; mosctl status | head -1"));
        assert_eq!(on, format!("{word}\n"));
        let status = format!("{}\n", 3 + bit);
        wait_for(&cluster, 1, "cat /run/mosix/nodes/2/status", |said| said == status);
        assert_eq!(sh(&cluster, 2, &format!("mosctl {off}; cat /run/mosix/admin/{word}")), "0\n");
    }
    wait_for(&cluster, 1, "cat /run/mosix/nodes/2/status", |said| said == "3\n");
    assert_eq!(
        sh(
            &cluster,
            1,
            "echo 5000 > /run/mosix/admin/speed; mosctl status | grep speed; echo 0 > /run/mosix/admin/speed"
        ),
        "speed 5000\n"
    );
    assert_eq!(
        sh(
            &cluster,
            1,
            "echo 900 > /run/mosix/admin/slow-decay; mosctl getdecay; cat /run/mosix/admin/slow-decay"
        ),
        "interval=1 slow=900 fast=926\n900\n"
    );
    // Invalid values, unknown files, and files that a user may not write.
    assert!(sh(&cluster, 1, "echo 7 > /run/mosix/admin/stay").contains("Invalid argument"));
    assert!(sh(&cluster, 1, "echo 1 > /run/mosix/admin/fly").contains("No such file"));
    assert!(sh(&cluster, 1, "echo 1 > /run/mosix/nodes/2/load").contains("Permission denied"));
    assert!(sh(&cluster, 1, "rm /run/mosix/admin/stay").contains("not permitted"));
    assert!(sh(&cluster, 1, "cat /run/mosix/nodes/9/load").contains("No such file"));
    let refused = sh(&cluster, 1, &format!("{AS_USER} sh -c 'echo 1 > /run/mosix/admin/stay'"));
    assert!(refused.contains("Permission denied") && cat("admin/stay") == "0\n", "{refused}");
    // A user can read all files.
    assert_eq!(
        sh(&cluster, 1, &format!("{AS_USER} cat /run/mosix/admin/stay /run/mosix/nodes/2/status")),
        "0\n3\n"
    );
    // Through /mfs the tree of another node is hidden, and that of this node is visible.
    let mfs = "mkdir -p /mfs; mount.mfs mymfs /mfs; cat /mfs/.mosix/admin/mospe; ls /mfs/2/run/mosix";
    let said = sh(&cluster, 1, mfs);
    assert!(said.starts_with("1\n") && said.contains("Permission denied"), "{said}");
    // A dead node is reported as unreachable, as in MOSIX.
    cluster.lab().cut(tern_lab::Cable::Node(2)).unwrap();
    wait_for(&cluster, 1, "cat /run/mosix/nodes/2/load /run/mosix/nodes/2/status", |said| {
        said == "-101\n1\n"
    });
}

#[test]
fn processes_are_shown_and_moved() {
    let cluster = up("admproc").unwrap();
    let program = Program::start(&cluster, "", "sleep 1000").unwrap();
    let (pid, dir) = (program.pid, format!("/run/mosix/proc/{}", program.pid));
    let at = |node: u16, line: &str| sh(&cluster, node, &line.replace("DIR", &dir));
    let here = |line: &str| at(1, line);
    assert_eq!(
        here("cat DIR/where DIR/nmigs DIR/selected; ls DIR"),
        "0\n0\n0\ncantmove\ngoto\nlock\nmigrate\nnmigs\nselected\nwhere\n"
    );
    assert_eq!(here("echo 2 > DIR/migrate; cat DIR/where DIR/nmigs"), "2\n1\n");
    assert_eq!(cluster.location(pid).unwrap().map(|(node, _)| node), Some(2));
    // On the other node it is listed as a guest.
    assert_eq!(
        at(2, &format!("ls /run/mosix/remote; cat /run/mosix/remote/{pid}/from")),
        format!("{pid}\n1\n")
    );
    let stats = at(2, &format!("cat /run/mosix/remote/{pid}/stats /run/mosix/remote/{pid}/statm"));
    assert!(stats.starts_with("utime=") && stats.lines().count() == 2, "{stats}");
    assert_eq!(here("echo 2 > DIR/goto; cat DIR/where"), "2\n", "already on that node");
    assert_eq!(here("echo home > DIR/migrate; cat DIR/where DIR/nmigs"), "0\n2\n");
    wait_for(&cluster, 2, "ls /run/mosix/remote", str::is_empty);
    assert!(here("echo 9 > DIR/migrate").contains("No such device or address"));
    // It is not balanced unless its lock is removed.
    assert_eq!(
        here("cat DIR/lock; echo 0 > DIR/lock; cat DIR/lock; echo 1 > DIR/lock; cat DIR/lock"),
        "1\n0\n1\n"
    );
    // Tern's own processes and init report why they stay.
    assert!(here("cat /run/mosix/proc/1/cantmove").contains("init"));
    assert!(here("cat /run/mosix/proc/$(pgrep -x ternd)/cantmove").contains("part of Tern"));
    assert!(here("echo 2 > /run/mosix/proc/$(pgrep -x ternd)/migrate").contains("not supported"));
    // Other users may not steer a process of root.
    let refused =
        here(&format!("{AS_USER} sh -c 'echo 2 > DIR/migrate; echo 2 > DIR/selected; echo 0 > DIR/lock'"));
    assert_eq!(refused.matches("Permission denied").count(), 3, "{refused}");
    // A user may steer a process of its own.
    let own = Program::start(&cluster, AS_USER, "sleep 1000").unwrap();
    let line = format!(
        "{AS_USER} sh -c 'cd /run/mosix/proc/{}; echo 2 > migrate; cat where; echo 0 > migrate; cat where'",
        own.pid
    );
    assert_eq!(here(&line), "2\n0\n");
    drop(program);
    wait_for(&cluster, 1, &format!("cat {dir}/where"), |said| said.contains("No such file"));
    assert!(
        here("ls /run/mosix/proc")
            .lines()
            .filter(|name| *name == "self" || name.parse::<u32>().is_ok())
            .count()
            > 5
    );
}

#[test]
fn process_moves_itself_and_selected_is_inherited() {
    let cluster = up("admself").unwrap();
    let here = |line: &str| sh(&cluster, 1, line);
    here("mkdir -p /mfs; mount.mfs mymfs /mfs; echo content > /tmp/x");
    let line = "readlink /mfs/selected; echo 2 > /run/mosix/proc/self/selected; cat /run/mosix/proc/self/selected; \
                readlink /mfs/selected; cp /tmp/x /mfs/selected/tmp/y; sh -c 'sh -c \"cat /mfs/selected/tmp/y\"; \
                echo 1 > /run/mosix/proc/self/selected; readlink /mfs/selected'; readlink /mfs/selected";
    assert_eq!(here(line), "1\n2\n2\ncontent\n1\n2\n");
    assert_eq!(sh(&cluster, 2, "cat /tmp/y"), "content\n");
    assert!(here("echo 9 > /run/mosix/proc/self/selected").contains("No such device"));
    // `selected` is also kept for a process whose parents have ended, after a restart of ternd, and
    // away.
    let orphan = "echo 2 > /run/mosix/proc/self/selected; setsid sh -c 'sleep 4; readlink /mfs/selected > /tmp/orphan' < /dev/null > /dev/null 2>&1 & sleep 2";
    here(orphan);
    cluster.lab().restart_daemon(1).unwrap();
    assert_eq!(here("until [ -s /tmp/orphan ]; do sleep 0.1; done; cat /tmp/orphan"), "2\n");
    let away = "echo 2 > /run/mosix/proc/self/selected; runon 2 sh -c 'readlink /mfs/selected /mfs/here; \
                cat /run/mosix/proc/self/where; echo 1 > /run/mosix/proc/self/selected; readlink /mfs/selected'";
    assert_eq!(here(away), "2\n2\n0\n1\n".replace("0\n", "2\n"));
    // A process can move itself, though its write is pending meanwhile.
    let moves = "echo 2 > /run/mosix/proc/self/migrate; i=0; until [ $(readlink /mfs/here) = 2 ] || [ $i = 100 ]; \
                 do sleep 0.1; i=$((i+1)); done; readlink /mfs/here; echo 0 > /run/mosix/proc/self/migrate; i=0; \
                 until [ $(readlink /mfs/here) = 1 ] || [ $i = 100 ]; do sleep 0.1; i=$((i+1)); done; readlink /mfs/here";
    assert_eq!(here(moves), "1\n1\n".replacen('1', "2", 1));
    assert_eq!(here("echo 1 > /run/mosix/decay/cpujob && echo said"), "said\n");
    assert!(here("cat /run/mosix/decay/cpujob").contains("Invalid argument"));
}

#[test]
fn requests_without_daemon_fail_at_once_and_mount_is_removed() {
    let cluster = up("admgone").unwrap();
    let program = Program::start(&cluster, "", "sleep 1000").unwrap();
    let serving = "pgrep -x tern-admin";
    let first = sh(&cluster, 1, serving);
    // Without ternd a request fails at once; with the next ternd it works again.
    sh(&cluster, 1, "pkill -KILL -x ternd");
    let begun = Instant::now();
    let dead = format!(
        "cat /run/mosix/admin/stay; cat /run/mosix/nodes/1/load; echo 2 > /run/mosix/proc/{}/migrate; ls /run/mosix/proc | wc -l",
        program.pid
    );
    let said = sh(&cluster, 1, &dead);
    assert_eq!(said.matches("not connected").count(), 3, "{said}");
    assert!(begun.elapsed() < MAX_RESPONSE_TIME, "{:?}", begun.elapsed());
    start(&cluster);
    assert_eq!(sh(&cluster, 1, &format!("cat /run/mosix/admin/stay; {serving}")), format!("0\n{first}"));
    // A killed tern-admin is started again, and the old mount fails at once.
    sh(&cluster, 1, "pkill -KILL -x tern-admin");
    assert!(begun.elapsed() < 3 * MAX_RESPONSE_TIME);
    wait_for(&cluster, 1, "cat /run/mosix/admin/mospe", |said| said == "1\n");
    assert_eq!(sh(&cluster, 1, "grep -c fuse.mosix /proc/self/mountinfo"), "1\n");
    // A node that leaves removes the mount, even if it is in use.
    sh(&cluster, 1, "pkill -TERM -x ternd");
    wait_for(&cluster, 1, "pgrep -x ternd; grep -c fuse.mosix /proc/self/mountinfo; ls /run", |said| {
        said.starts_with("0\n") && !said.contains("mosix")
    });
    assert_eq!(sh(&cluster, 1, "pgrep -x tern-admin || echo none"), "none\n");
    // The tree can be disabled.
    sh(&cluster, 1, "echo 'admin_tree = \"\"' >> /etc/tern/ternd.toml");
    start(&cluster);
    assert_eq!(sh(&cluster, 1, "sleep 1; pgrep -x tern-admin || echo none"), "none\n");
}
