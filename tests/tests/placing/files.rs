//! What commands that are placed elsewhere see of their home's files, which they believe for long: never what was over before they began,
//! before they were told something, or before anything else that they have seen.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use tern_tests::cluster::Cluster;

/// Rounds of each kind; a stale name or file in one of them is a failure.
const ROUNDS: usize = 60;

/// Home has to be asked for what its kernel tells it of: by itself it looks only when all of these are over.
fn cluster(name: &str, nodes: u16) -> Cluster {
    let cluster = Cluster::with_nodes(name, nodes).unwrap();
    let serve = "TERN_LATE_NOTICES=900 TERN_RUN_DIR=/run/tern setsid tern-mfs --config /etc/tern serve > /run/mfs 2>&1 & \
        until grep -q ready /run/mfs; do sleep 0.01; done";
    cluster.run(1, &["sh", "-ec", serve]).unwrap();
    cluster
}

/// The room's kernel cannot forget names, as before Linux 6.16.
fn is_old(cluster: &Cluster) {
    let serve = "TERN_NO_EPOCH=1 TERN_RUN_DIR=/run/tern setsid tern-exec --config /etc/tern serve > /run/exec 2>&1 & \
        until grep -q ready /run/exec; do sleep 0.01; done";
    cluster.run(2, &["sh", "-ec", serve]).unwrap();
}

/// A line of a shell on node 1, in a directory of its own.
fn home(cluster: &Cluster, line: &str) -> String {
    let script = format!("mkdir -p /tmp/d && cd /tmp/d && {line}");
    String::from_utf8(cluster.run(1, &["sh", "-ec", &script]).unwrap()).unwrap()
}

fn changes_before_each_command(cluster: &Cluster, rounds: usize) {
    // Each looks at what is to be there only in the next round, and so believes that it is not.
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
fn what_was_done_before_it_began_is_seen() {
    let cluster = cluster("placedbefore", 2);
    changes_before_each_command(&cluster, ROUNDS);
    // Also behind another server of files, which knows nothing of what the last one had promised.
    let kill = "pkill -9 -f 'tern-mf[s].*serve'; printf anew > f; mexec -n 2 cat f; printf agai > f; mexec -n 2 cat f";
    assert_eq!(home(&cluster, kill), "anewagai");
    changes_before_each_command(&cluster, 10);
}

#[test]
fn it_is_seen_by_an_older_kernel() {
    let cluster = cluster("placedold", 2);
    is_old(&cluster);
    changes_before_each_command(&cluster, ROUNDS);
}

/// A script that answers each line of its input with one.
struct Answering {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Answering {
    /// One that is placed on node 2.
    fn new(cluster: &Cluster, script: &str) -> Self {
        let mut command = cluster.command(1, "mexec");
        command.args(["-n", "2", "sh", "-c", script]).current_dir("/tmp");
        Self::begins(command)
    }

    /// One of node 1 itself.
    fn at_home(cluster: &Cluster, script: &str) -> Self {
        let mut command = cluster.command(1, "sh");
        command.args(["-c", script]);
        Self::begins(command)
    }

    fn begins(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        // After a failure it may wait for ever for what was to come.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

#[test]
fn what_was_done_before_it_was_told_is_seen() {
    let cluster = cluster("placedtold", 2);
    home(&cluster, "echo 0 > f; ln -s none l");
    // What it believes it has looked at some time after that was made: what is new is not believed.
    let look = "echo $(cat f) $(test -e x$n && echo there) $(test -e x$((n + 1)) || echo none) $(readlink l)";
    let script = format!("cd d; while read n; do {look}; sleep 0.06; {look} > /dev/null; echo ready; done");
    let mut command = Answering::new(&cluster, &script);
    let script = "cd /tmp/d; while read n; do echo $n > f; : > x$n; ln -sfn to$n l; echo done; done";
    let mut writer = Answering::at_home(&cluster, script);
    for n in 1..=ROUNDS {
        writer.tell(&n.to_string());
        writer.answer();
        command.tell(&n.to_string());
        assert_eq!(command.answer(), format!("{n} there none to{n}\n"));
        assert_eq!(command.answer(), "ready\n");
    }
}

#[test]
fn what_was_done_before_anything_that_it_finds_is_seen() {
    let cluster = cluster("placedfinds", 2);
    home(&cluster, "echo 0 > f; echo 0 > line");
    // It reads the file, and believes it; then it waits for a line in another one, of which it believes nothing since it opens that for writing.
    let script = format!(
        "cd d; n=0; while [ $n -lt {ROUNDS} ]; do n=$((n + 1)); sleep 0.06; cat f > /dev/null; test -e x$n; echo ready; \
            until read v <> line; [ \"$v\" = $n ]; do :; done; echo $(cat f) $(test -e x$n && echo there); done"
    );
    let mut command = Answering::new(&cluster, &script);
    let script = "cd /tmp/d; while read n; do echo $n > f; : > x$n; echo $n > line; done";
    let mut writer = Answering::at_home(&cluster, script);
    for n in 1..=ROUNDS {
        assert_eq!(command.answer(), "ready\n");
        writer.tell(&n.to_string());
        assert_eq!(command.answer(), format!("{n} there\n"));
    }
}

#[test]
fn what_another_node_s_command_has_done_is_seen() {
    let cluster = cluster("placedboth", 3);
    let line = "for n in $(seq 60); do \
            mexec -n 2 sh -c 'echo $0 > f; mkdir d$0; echo $0 > d$0/g' $n; \
            seen=$(mexec -n 3 sh -c 'cat f d$0/g; test -e d$1 || echo none; rm -r d$0' $n $((n + 1)) | tr '\\n' ' '); \
            [ \"$seen\" = \"$n $n none \" ] || echo \"round $n: $seen\"; \
            mexec -n 2 test -e d$n && echo \"round $n: d$n is there\"; done; true";
    assert_eq!(home(&cluster, line), "");
}

/// How often it is asked what a directory is like, which is believed; and how long it is left alone before it is changed, at first.
const OF_A_DIRECTORY: [(usize, f64); 2] = [(2, 2.5), (ROUNDS, 0.06)];

#[test]
fn what_its_directory_is_like_when_it_is_told_is_seen() {
    let cluster = cluster("placedlike", 2);
    home(&cluster, "mkdir sub; echo x > f");
    for (rounds, rest) in OF_A_DIRECTORY {
        // It has come there before, so that no name is looked up on the way.
        let look = "stat -c '%z %a' .";
        let script = format!(
            "cd d/sub; while read n; do {look}; {look} > /dev/null; sleep {rest}; {look} > /dev/null; echo ready; done"
        );
        let mut command = Answering::new(&cluster, &script);
        command.tell("0");
        let _first = (command.answer(), command.answer());
        for n in 1..=rounds {
            let line = format!(": > sub/x{n}; chmod 7{}5 sub; stat -c '%z %a' sub", n % 2 * 5);
            let is = home(&cluster, &line);
            command.tell(&n.to_string());
            assert_eq!(command.answer(), is, "round {n}");
            assert_eq!(command.answer(), "ready\n");
        }
    }
}

#[test]
fn what_an_open_file_is_like_when_it_is_told_is_seen() {
    let cluster = cluster("placedopen", 2);
    home(&cluster, "echo 0 > f");
    let look = "import os, sys; fd = os.open('/tmp/d/f', os.O_RDONLY)\n\
        for line in sys.stdin: print(os.fstat(fd).st_size, len(os.pread(fd, 9999, 0)), flush=True); os.fstat(fd)";
    let mut command = Answering::new(&cluster, &format!("exec python3 -uc \"{look}\""));
    let script = "cd /tmp/d; while read n; do echo $n >> f; stat -c '%s %s' f; done";
    let mut writer = Answering::at_home(&cluster, script);
    for n in 1..=ROUNDS {
        writer.tell(&n.to_string());
        let is = writer.answer();
        command.tell("look");
        assert_eq!(command.answer(), is, "round {n}");
    }
}

#[test]
fn who_may_not_enter_a_directory_is_told_so_and_may_when_he_may() {
    let cluster = cluster("placedmay", 2);
    // Somebody else's, so that the kernel goes by the mode that it believes.
    home(&cluster, "chmod 777 .; mkdir sub; echo x > sub/f");
    let script = "cd d/sub; while read n; do cat f 2> /dev/null || echo no; sleep 0.06; cat f > /dev/null 2>&1; echo ready; done";
    let script = format!("cd /tmp; exec setpriv --reuid 1000 --regid 1000 --clear-groups sh -c '{script}'");
    let mut command = Answering::new(&cluster, &script);
    for n in 1..=ROUNDS {
        let (mode, seen) = if n % 2 == 0 { ("700", "no\n") } else { ("755", "x\n") };
        home(&cluster, &format!("chmod {mode} sub"));
        command.tell(&n.to_string());
        assert_eq!(command.answer(), seen, "round {n}");
        assert_eq!(command.answer(), "ready\n");
    }
}

#[test]
fn an_open_file_of_two_has_the_locks_of_one_each() {
    let cluster = cluster("placedlock", 2);
    // Both have opened it alike: the second gets nothing of the first one's lock.
    let line = "echo x > f; mexec -n 2 sh -c 'cat f > /dev/null; exec 8< f 9< f; flock -x 8; flock -n -x 9 || echo held; flock -u 8; flock -n -x 9 && echo had'";
    assert_eq!(home(&cluster, line), "held\nhad\n");
}

#[test]
fn what_was_read_is_not_sent_again_when_something_else_changes() {
    let cluster = cluster("placedkept", 2);
    let line = "head -c 8000000 /dev/urandom > big; sleep 0.1; for i in 1 2 3; do mexec -n 2 cksum big > /dev/null; done; \
        sent() { awk 'NR > 2 { sub(/.*:/, \"\"); sum += $9 } END { print sum }' /proc/net/dev; }; \
        for i in 1 2 3; do touch new$i; before=$(sent); mexec -n 2 cksum big > /dev/null; echo $(($(sent) - before)); done";
    let sent = home(&cluster, line);
    let sent: Vec<u64> = sent.lines().map(|line| line.parse().unwrap()).collect();
    assert!(sent.len() == 3 && sent.iter().all(|bytes| *bytes < 1_000_000), "{sent:?}");
}

#[test]
fn what_is_cut_off_when_it_is_opened_can_be_mapped() {
    let cluster = cluster("placedmap", 2);
    let program = "import mmap, os; fd = os.open('f', os.O_RDWR | os.O_TRUNC); os.ftruncate(fd, 4096); \
        m = mmap.mmap(fd, 4096); m[:3] = b'new'; m.flush(); print('mapped')";
    let line = format!(
        "echo old > f; sleep 0.1; mexec -n 2 cat f; mexec -n 2 python3 -c \"{program}\"; head -c 3 f"
    );
    assert_eq!(home(&cluster, &line), "old\nmapped\nnew");
}

#[test]
fn a_lock_on_what_is_only_read_goes_with_its_descriptor() {
    let cluster = cluster("placedread", 2);
    // Files that are left open, of which a close is not told.
    let read = "import fcntl, os, sys; a = os.open('f', os.O_RDONLY); fcntl.lockf(a, fcntl.LOCK_SH); \
        print('has', flush=True); sys.stdin.readline(); os.close(a); print('closed', flush=True); sys.stdin.readline()";
    let write = "import fcntl, sys; f = open('f', 'r+')\nwhile True:\n  try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); break\n  except OSError: \
        sys.argv[1] == 'waits' or sys.exit('held')\nprint('free')";
    home(
        &cluster,
        &format!("echo x > f; printf '{}' > w.py; mexec -n 2 cat f", write.replace('\'', "'\\''")),
    );
    let mut command = Answering::new(&cluster, &format!("cd d; exec python3 -c \"{read}\""));
    assert_eq!(command.answer(), "has\n");
    assert_eq!(home(&cluster, "python3 w.py once 2>&1 || true"), "held\n");
    command.tell("close");
    assert_eq!(command.answer(), "closed\n");
    assert_eq!(home(&cluster, "timeout 20 python3 w.py waits"), "free\n");
}
