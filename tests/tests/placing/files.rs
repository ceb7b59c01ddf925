//! Placed commands cache files of their home for a long time. They must never see a state older
//! than their start, than a message they received, or than anything else they have seen.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use tern_tests::cluster::Cluster;

/// Rounds of each kind; one stale name or file is a failure.
const ROUNDS: usize = 60;

/// A cluster in which home's file server reads its kernel's change notices late, unless it reads
/// them for a request: by itself it would read them only after the rounds are over.
fn cluster(name: &str, nodes: u16) -> Cluster {
    let cluster = Cluster::with_nodes(name, nodes).unwrap();
    let serve = "TERN_LATE_NOTICES=900 TERN_RUN_DIR=/run/tern setsid tern-mfs --config /etc/tern serve > /run/mfs 2>&1 & \
        until grep -q ready /run/mfs; do sleep 0.01; done";
    cluster.run(1, &["sh", "-ec", serve]).unwrap();
    cluster
}

/// Node 2, where the container is, behaves as if its kernel could not invalidate names, as before
/// Linux 6.16.
fn use_old_kernel_behaviour(cluster: &Cluster) {
    let serve = "TERN_NO_EPOCH=1 TERN_RUN_DIR=/run/tern setsid tern-exec --config /etc/tern serve > /run/exec 2>&1 & \
        until grep -q ready /run/exec; do sleep 0.01; done";
    cluster.run(2, &["sh", "-ec", serve]).unwrap();
}

/// Runs a shell command on node 1 in a directory for the test.
fn home(cluster: &Cluster, line: &str) -> String {
    let script = format!("mkdir -p /tmp/d && cd /tmp/d && {line}");
    String::from_utf8(cluster.run(1, &["sh", "-ec", &script]).unwrap()).unwrap()
}

fn changes_before_each_command(cluster: &Cluster, rounds: usize) {
    // Each command looks for a name that appears in the next round, so that the absence of this
    // name is cached.
    let there = "cat f g l; test -e new$0 && echo new; test -e new$1 || echo none; cat dir/x; ls | wc -l";
    let line = format!(
        "n=0; while [ $n -lt {rounds} ]; do \
            n=$((n + 1)); next=$((n + 1)); text=$(printf %06d $n); \
            printf $text > f; printf $text > g.new; mv g.new g; printf $text > l$n; ln -sfn l$n l; \
            : > new$n; rm -f new$((n - 1)); rm -rf dir; mkdir dir; echo $text > dir/x; \
            expected=$(sh -c '{there}' $n $next); seen=$(mexec -n 2 sh -c '{there}' $n $next); \
            [ \"$seen\" = \"$expected\" ] || echo \"round $n: $seen and not $expected\"; \
         done"
    );
    assert_eq!(home(cluster, &line), "");
}

#[test]
fn command_sees_changes_before_its_start() {
    let cluster = cluster("placedbefore", 2);
    changes_before_each_command(&cluster, ROUNDS);
    // Also with a new file server, which knows no leases of the previous one.
    let kill = "pkill -9 -f 'tern-mf[s].*serve'; printf anew > f; mexec -n 2 cat f; printf agai > f; mexec -n 2 cat f";
    assert_eq!(home(&cluster, kill), "anewagai");
    changes_before_each_command(&cluster, 10);
}

#[test]
fn command_sees_changes_on_older_kernels() {
    let cluster = cluster("placedold", 2);
    use_old_kernel_behaviour(&cluster);
    changes_before_each_command(&cluster, ROUNDS);
}

/// A script that replies to each line of its input with a line.
struct LineScript {
    child: Child,
    replies: BufReader<std::process::ChildStdout>,
}

impl LineScript {
    /// Starts one that is placed on node 2.
    fn new(cluster: &Cluster, script: &str) -> Self {
        let mut command = cluster.command(1, "mexec");
        command.args(["-n", "2", "sh", "-c", script]).current_dir("/tmp");
        Self::spawn(command)
    }

    /// Starts one on node 1.
    fn at_home(cluster: &Cluster, script: &str) -> Self {
        let mut command = cluster.command(1, "sh");
        command.args(["-c", script]);
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let replies = BufReader::new(child.stdout.take().unwrap());
        Self { child, replies }
    }

    fn send(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn reply(&mut self) -> String {
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        line
    }
}

impl Drop for LineScript {
    fn drop(&mut self) {
        // After a failure it may wait for input for ever.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

#[test]
fn command_sees_changes_before_a_message() {
    let cluster = cluster("placedtold", 2);
    home(&cluster, "echo 0 > f; ln -s none l");
    // The second look comes some time after the change, because a file that has just changed is not
    // cached.
    let look = "echo $(cat f) $(test -e x$n && echo there) $(test -e x$((n + 1)) || echo none) $(readlink l)";
    let script = format!("cd d; while read n; do {look}; sleep 0.06; {look} > /dev/null; echo ready; done");
    let mut command = LineScript::new(&cluster, &script);
    let script = "cd /tmp/d; while read n; do echo $n > f; : > x$n; ln -sfn to$n l; echo done; done";
    let mut writer = LineScript::at_home(&cluster, script);
    for n in 1..=ROUNDS {
        writer.send(&n.to_string());
        writer.reply();
        command.send(&n.to_string());
        assert_eq!(command.reply(), format!("{n} there none to{n}\n"));
        assert_eq!(command.reply(), "ready\n");
    }
}

#[test]
fn command_sees_changes_before_anything_it_reads() {
    let cluster = cluster("placedfinds", 2);
    home(&cluster, "echo 0 > f; echo 0 > line");
    // The command reads and caches one file. Then it waits for a line in another file, which is not
    // cached, since it is open for writing.
    let script = format!(
        "cd d; n=0; while [ $n -lt {ROUNDS} ]; do n=$((n + 1)); sleep 0.06; cat f > /dev/null; test -e x$n; echo ready; \
            until read v <> line; [ \"$v\" = $n ]; do :; done; echo $(cat f) $(test -e x$n && echo there); done"
    );
    let mut command = LineScript::new(&cluster, &script);
    let script = "cd /tmp/d; while read n; do echo $n > f; : > x$n; echo $n > line; done";
    let mut writer = LineScript::at_home(&cluster, script);
    for n in 1..=ROUNDS {
        assert_eq!(command.reply(), "ready\n");
        writer.send(&n.to_string());
        assert_eq!(command.reply(), format!("{n} there\n"));
    }
}

#[test]
fn command_sees_changes_by_commands_on_other_nodes() {
    let cluster = cluster("placedboth", 3);
    let line = "for n in $(seq 60); do \
            mexec -n 2 sh -c 'echo $0 > f; mkdir d$0; echo $0 > d$0/g' $n; \
            seen=$(mexec -n 3 sh -c 'cat f d$0/g; test -e d$1 || echo none; rm -r d$0' $n $((n + 1)) | tr '\\n' ' '); \
            [ \"$seen\" = \"$n $n none \" ] || echo \"round $n: $seen\"; \
            mexec -n 2 test -e d$n && echo \"round $n: d$n is there\"; done; true";
    assert_eq!(home(&cluster, line), "");
}

/// Number of queries of a directory's attributes, which are cached, and the seconds before each
/// change.
const DIRECTORY_ROUNDS: [(usize, f64); 2] = [(2, 2.5), (ROUNDS, 0.06)];

#[test]
fn directory_attributes_are_current_after_a_message() {
    let cluster = cluster("placedlike", 2);
    home(&cluster, "mkdir sub; echo x > f");
    for (rounds, rest) in DIRECTORY_ROUNDS {
        // The command is already in the directory, so no name is looked up on the way.
        let look = "stat -c '%z %a' .";
        let script = format!(
            "cd d/sub; while read n; do {look}; {look} > /dev/null; sleep {rest}; {look} > /dev/null; echo ready; done"
        );
        let mut command = LineScript::new(&cluster, &script);
        command.send("0");
        let _first = (command.reply(), command.reply());
        for n in 1..=rounds {
            let line = format!(": > sub/x{n}; chmod 7{}5 sub; stat -c '%z %a' sub", n % 2 * 5);
            let is = home(&cluster, &line);
            command.send(&n.to_string());
            assert_eq!(command.reply(), is, "round {n}");
            assert_eq!(command.reply(), "ready\n");
        }
    }
}

#[test]
fn open_file_attributes_are_current_after_a_message() {
    let cluster = cluster("placedopen", 2);
    home(&cluster, "echo 0 > f");
    let look = "import os, sys; fd = os.open('/tmp/d/f', os.O_RDONLY)\n\
        for line in sys.stdin: print(os.fstat(fd).st_size, len(os.pread(fd, 9999, 0)), flush=True); os.fstat(fd)";
    let mut command = LineScript::new(&cluster, &format!("exec python3 -uc \"{look}\""));
    let script = "cd /tmp/d; while read n; do echo $n >> f; stat -c '%s %s' f; done";
    let mut writer = LineScript::at_home(&cluster, script);
    for n in 1..=ROUNDS {
        writer.send(&n.to_string());
        let is = writer.reply();
        command.send("look");
        assert_eq!(command.reply(), is, "round {n}");
    }
}

#[test]
fn directory_permissions_are_current_after_a_message() {
    let cluster = cluster("placedmay", 2);
    // Owned by another user, so that the kernel checks the cached mode.
    home(&cluster, "chmod 777 .; mkdir sub; echo x > sub/f");
    let script = "cd d/sub; while read n; do cat f 2> /dev/null || echo no; sleep 0.06; cat f > /dev/null 2>&1; echo ready; done";
    let script = format!("cd /tmp; exec setpriv --reuid 1000 --regid 1000 --clear-groups sh -c '{script}'");
    let mut command = LineScript::new(&cluster, &script);
    for n in 1..=ROUNDS {
        let (mode, seen) = if n % 2 == 0 { ("700", "no\n") } else { ("755", "x\n") };
        home(&cluster, &format!("chmod {mode} sub"));
        command.send(&n.to_string());
        assert_eq!(command.reply(), seen, "round {n}");
        assert_eq!(command.reply(), "ready\n");
    }
}

#[test]
fn two_opens_have_separate_locks() {
    let cluster = cluster("placedlock", 2);
    // Both descriptors were opened alike, yet they do not share the first one's lock.
    let line = "echo x > f; mexec -n 2 sh -c 'cat f > /dev/null; exec 8< f 9< f; flock -x 8; flock -n -x 9 || echo held; flock -u 8; flock -n -x 9 && echo had'";
    assert_eq!(home(&cluster, line), "held\nhad\n");
}

#[test]
fn cached_content_survives_unrelated_changes() {
    let cluster = cluster("placedkept", 2);
    let line = "head -c 8000000 /dev/urandom > big; sleep 0.1; for i in 1 2 3; do mexec -n 2 cksum big > /dev/null; done; \
        sent() { awk 'NR > 2 { sub(/.*:/, \"\"); sum += $9 } END { print sum }' /proc/net/dev; }; \
        for i in 1 2 3; do touch new$i; before=$(sent); mexec -n 2 cksum big > /dev/null; echo $(($(sent) - before)); done";
    let sent = home(&cluster, line);
    let sent: Vec<u64> = sent.lines().map(|line| line.parse().unwrap()).collect();
    assert!(sent.len() == 3 && sent.iter().all(|bytes| *bytes < 1_000_000), "{sent:?}");
}

#[test]
fn truncated_file_can_be_mapped() {
    let cluster = cluster("placedmap", 2);
    let program = "import mmap, os; fd = os.open('f', os.O_RDWR | os.O_TRUNC); os.ftruncate(fd, 4096); \
        m = mmap.mmap(fd, 4096); m[:3] = b'new'; m.flush(); print('mapped')";
    let line = format!(
        "echo old > f; sleep 0.1; mexec -n 2 cat f; mexec -n 2 python3 -c \"{program}\"; head -c 3 f"
    );
    assert_eq!(home(&cluster, &line), "old\nmapped\nnew");
}

#[test]
fn closing_a_descriptor_releases_its_read_locks() {
    let cluster = cluster("placedread", 2);
    // Files that stay open on the server, which learns of no close.
    let read = "import fcntl, os, sys; a = os.open('f', os.O_RDONLY); fcntl.lockf(a, fcntl.LOCK_SH); \
        print('has', flush=True); sys.stdin.readline(); os.close(a); print('closed', flush=True); sys.stdin.readline()";
    let write = "import fcntl, sys; f = open('f', 'r+')\nwhile True:\n  try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); break\n  except OSError: \
        sys.argv[1] == 'waits' or sys.exit('held')\nprint('free')";
    home(
        &cluster,
        &format!("echo x > f; printf '{}' > w.py; mexec -n 2 cat f", write.replace('\'', "'\\''")),
    );
    let mut command = LineScript::new(&cluster, &format!("cd d; exec python3 -c \"{read}\""));
    assert_eq!(command.reply(), "has\n");
    assert_eq!(home(&cluster, "python3 w.py once 2>&1 || true"), "held\n");
    command.send("close");
    assert_eq!(command.reply(), "closed\n");
    assert_eq!(home(&cluster, "timeout 20 python3 w.py waits"), "free\n");
}
