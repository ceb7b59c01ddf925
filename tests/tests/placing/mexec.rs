//! Commands that are placed on another node, against the same commands at home.

use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::breaking;
use tern_tests::cluster::Cluster;
use tern_tests::outcome::said;

/// How long something that is to happen may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A shell's line on node 1, after this prefix.
fn shell(cluster: &Cluster, before: &str, line: &str) -> Command {
    let mut command = cluster.command(1, "sh");
    // As a caller would have it: with a status of its own.
    command.args(["-c", &format!("{before} \"$0\" -c \"$1\""), "sh", line]).current_dir("/tmp");
    command
}

fn until(what: &str, holds: impl FnMut() -> bool) {
    breaking::until(what, PATIENCE, holds).expect("it takes too long");
}

const ELSEWHERE: &str = "mexec -n 2 --";

#[test]
fn a_command_is_as_it_would_be_here() {
    let cluster = Cluster::with_nodes("mexecas", 2).unwrap();
    cluster.run(1, &["sh", "-c", "echo home > /tmp/whose; echo away > /dev/null"]).unwrap();
    for line in [
        "echo out; echo err >&2; exit 7",
        "cat /tmp/whose; pwd; umask; ulimit -a; id",
        "echo written > /tmp/by-it; cat /tmp/by-it; rm /tmp/by-it",
        "nice; echo $0 $FOO; env | grep -v ^_ | sort",
        "kill -9 $$",
        "kill -TERM $$",
        "trap '' PIPE; exit 255",
        "for i in 1 2 3; do echo $i; echo $i >&2; done",
        "head -c 3000000 /dev/zero | tr '\\0' x",
        "cat <&-; echo $?",
        "set -- $(cat /proc/self/stat); [ $1 != $$ ] && [ -d /proc/$$ ] && echo a process",
    ] {
        let run = |before: &str| {
            let before =
                format!("umask 027; ulimit -n 99; ulimit -c 0; export FOO='a b'; exec nice -n 7 {before}");
            said(&shell(&cluster, &before, line).stdin(Stdio::null()).output().unwrap())
        };
        assert_eq!(run(ELSEWHERE), run(""), "{line}");
    }
    let there = cluster.run(1, &["mexec", "-n", "2", "hostname"]).unwrap();
    assert_eq!(there, cluster.run(2, &["hostname"]).unwrap(), "it does run there");
}

#[test]
fn users_are_who_they_are() {
    let cluster = Cluster::with_nodes("mexecuser", 2).unwrap();
    cluster
        .run(1, &["sh", "-c", "mkdir -m 700 /tmp/roots; mkdir /tmp/hers; chown 1234:77 /tmp/hers"])
        .unwrap();
    let who = "exec setpriv --reuid 1234 --regid 77 --groups 77,4242";
    for line in [
        "id",
        "ls /tmp/roots",
        "echo x > /tmp/hers/file && stat -c %u:%g:%a /tmp/hers/file; rm /tmp/hers/file",
        "kill -9 1",
        "mount -t tmpfs x /tmp",
    ] {
        let run = |before: &str| {
            let (code, out, err) = said(
                &shell(&cluster, &format!("{who} {before}"), line).stdin(Stdio::null()).output().unwrap(),
            );
            // Who init is, and who refuses to mount, has other words there.
            (
                code == Some(0),
                out,
                err.contains("not permitted") || err.contains("denied") || err.contains("must be"),
            )
        };
        assert_eq!(run(ELSEWHERE), run(""), "{line}");
    }
    // Its streams are his, also by their names.
    let line = "cat < /dev/stdin > /dev/stdout; echo err > /dev/stderr";
    let mut named = shell(&cluster, &format!("echo in | {} {ELSEWHERE}", &who[5..]), line);
    assert_eq!(said(&named.output().unwrap()), (Some(0), "in\n".into(), "err\n".into()));
}

#[test]
fn what_cannot_be_run_says_so() {
    let cluster = Cluster::with_nodes("mexecnot", 2).unwrap();
    cluster.run(1, &["sh", "-c", "touch /tmp/plain; mkdir -p /run/only-here"]).unwrap();
    let run = |line: &str| said(&cluster.command(1, "sh").args(["-c", line]).output().unwrap());
    assert_eq!(
        run("mexec -n 2 no-such-thing"),
        (Some(127), String::new(), "mexec: no-such-thing: no such file or directory\n".into())
    );
    assert_eq!(run("mexec -n 2 /tmp/plain").0, Some(126));
    let (code, _, err) = run("cd /run/only-here && mexec -n 2 true");
    assert!(code == Some(5) && err.contains("directory is not seen there"), "{code:?} {err}");
    let (code, _, err) = run("mexec -n 9 true");
    assert!(code == Some(5) && err.contains("none of the nodes"), "{code:?} {err}");
    cluster.run(2, &["mosctl", "block"]).unwrap();
    let (code, _, err) = run("mexec -n 2 true");
    assert!(code == Some(5), "{code:?} {err}");
    assert_eq!(run("mexec").0, Some(2));
}

/// A command on node 2 that says when it runs.
fn begin(cluster: &Cluster, line: &str) -> Result<Child> {
    let mut child = cluster
        .command(1, "mexec")
        .args(["-n", "2", "--", "sh", "-c", &format!("echo begun; {line}")])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut begun = [0; 6];
    child.stdout.as_mut().context("no pipe")?.read_exact(&mut begun)?;
    Ok(child)
}

/// mexec itself, which is the child of the lab's own way in.
fn mexec(cluster: &Cluster) -> Result<String> {
    Ok(String::from_utf8_lossy(&cluster.run(1, &["pgrep", "-x", "mexec"])?).trim().to_owned())
}

#[test]
fn signals_reach_it_and_its_end_is_ours() {
    let cluster = Cluster::with_nodes("mexecsig", 2).unwrap();
    let mut child =
        begin(&cluster, "trap 'echo usr1' USR1; trap 'echo int; exit 3' INT; while :; do sleep 0.1; done")
            .unwrap();
    let pid = mexec(&cluster).unwrap();
    cluster.run(1, &["kill", "-USR1", &pid]).unwrap();
    let mut heard = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"usr1\n");
    cluster.run(1, &["kill", "-INT", &pid]).unwrap();
    assert_eq!(said(&child.wait_with_output().unwrap()), (Some(3), "int\n".into(), String::new()));
}

#[test]
fn it_has_a_terminal_when_that_is_asked_for() {
    let cluster = Cluster::with_nodes("mexectty", 2).unwrap();
    let line =
        "stty rows 31 cols 77; mexec -i -n 2 sh -c 'hostname; tty; stty size; exit 7'; echo code $?; stty -a";
    let mut script = cluster.command(1, "script");
    let script = script.args(["-qec", line, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut script = script.spawn().unwrap();
    // At its end script would type one as well.
    let typed = script.stdin.take();
    let end = script.wait_with_output().unwrap();
    drop(typed);
    let said = String::from_utf8_lossy(&end.stdout).into_owned();
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    assert_eq!((lines[0], lines[2], lines[3]), ("node2", "31 77", "code 7"), "{said}");
    assert!(lines[1].starts_with("/dev/pts/"), "{said}");
    assert!(said.contains(" icanon"), "the caller's terminal is as it was: {said}");
    let none = cluster.command(1, "mexec").args(["-i", "true"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(none.status.code(), Some(2));
}

#[test]
fn nothing_is_left_whoever_ends() {
    let cluster = Cluster::with_nodes("mexecend", 2).unwrap();
    let gone = |word: &str| until(word, || cluster.count(2, word) == 0);
    // The command, with what it has left.
    let end = shell(&cluster, ELSEWHERE, "setsid sleep 1001 & sleep 1002 & exit 4").output().unwrap();
    assert_eq!(end.status.code(), Some(4));
    gone("^sleep 100[12]");
    // mexec.
    let mut child = begin(&cluster, "setsid sleep 1003 & sleep 1004").unwrap();
    until("it runs", || cluster.count(2, "^sleep 100[34]") == 2);
    cluster.run(1, &["pkill", "-KILL", "-x", "mexec"]).unwrap();
    child.wait().unwrap();
    gone("^sleep 100[34]");
    // Either half.
    for node in [1, 2] {
        let child = begin(&cluster, "sleep 1005").unwrap();
        cluster.run(node, &["pkill", "-KILL", "-f", "tern-exec.*serve"]).unwrap();
        let (code, _, err) = said(&child.wait_with_output().unwrap());
        assert!(code == Some(if node == 1 { 5 } else { 255 }), "{code:?} {err}");
        gone("^sleep 1005");
    }
    // And all goes on.
    assert_eq!(cluster.run(1, &["mexec", "-n", "2", "echo", "well"]).unwrap(), b"well\n");
}

#[test]
fn a_lost_node_is_said_or_another_takes_over() {
    let cluster = Cluster::with_nodes("mexeclost", 3).unwrap();
    let child = begin(&cluster, "sleep 1006").unwrap();
    cluster.lab().cut(Cable::Node(2)).unwrap();
    let (code, _, err) = said(&child.wait_with_output().unwrap());
    assert!(code == Some(255) && err.contains("node 2 was lost"), "{code:?} {err}");
    until("its command is ended there", || cluster.count(2, "^sleep 1006") == 0);
    cluster.lab().heal(Cable::Node(2)).unwrap();
    // Where it began is noted; the second time it ends.
    let line = "hostname >> /tmp/where; [ $(wc -l < /tmp/where) -gt 1 ] || sleep 1007; echo once";
    let mut again = cluster.command(1, "mexec");
    let child = again
        .args(["-r", "-n", "2,3", "--", "sh", "-c", line])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let at = || (2..=3).find(|node| cluster.count(*node, "^sleep 1007") > 0);
    until("it runs", || at().is_some());
    let node = at().unwrap();
    cluster.run(node, &["pkill", "-KILL", "-f", "tern-exec.*serve"]).unwrap();
    assert_eq!(said(&child.wait_with_output().unwrap()), (Some(0), "once\n".into(), String::new()));
    let hosts = cluster.run(1, &["cat", "/tmp/where"]).unwrap();
    assert_eq!(String::from_utf8_lossy(&hosts).lines().count(), 2);
}

#[test]
fn streams_are_whole_and_nobody_waits_for_another() {
    let cluster = Cluster::with_nodes("mexecstream", 2).unwrap();
    // More than all that is under way, both ways at once.
    let mut child = cluster
        .command(1, "mexec")
        .args(["-n", "2", "--", "sh", "-c", "cat; echo over >&2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let content: Vec<u8> = (0..20_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut stdin = child.stdin.take().unwrap();
    let sent = content.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let end = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(
        end.stdout == content && end.stderr == b"over\n" && end.status.success(),
        "{} bytes",
        end.stdout.len()
    );
    // However late what was written last is read, and more of it than may be under way.
    let end = shell(&cluster, "", "mexec -n 2 head -c 380000 /dev/zero | (sleep 4; wc -c)").output().unwrap();
    assert_eq!(said(&end), (Some(0), "380000\n".into(), String::new()));
    // What may be run again has its input as any.
    let end = shell(&cluster, "", "echo in | mexec -r -n 2 cat").output().unwrap();
    assert_eq!(said(&end), (Some(0), "in\n".into(), String::new()));
    // Who takes nothing of the output hears of errors all the same.
    let mut child =
        begin(&cluster, "(head -c 9000000 /dev/zero; echo done >&2) & echo first >&2; wait").unwrap();
    let mut first = [0; 6];
    child.stderr.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"first\n");
    // And who goes away has the command told by SIGPIPE.
    drop(child.stdout.take());
    let _status = child.wait().unwrap();
    let end = shell(&cluster, "", "mexec -n 2 yes | head -n 1; echo over").output().unwrap();
    assert_eq!(said(&end), (Some(0), "y\nover\n".into(), String::new()));
}

#[test]
fn who_finds_no_room_waits_for_his_turn() {
    let cluster = Cluster::with_nodes("mexecturn", 2).unwrap();
    cluster.run(1, &["sh", "-c", "mkdir /tmp/done"]).unwrap();
    let line = "for i in $(seq 40); do mexec -n 2 sh -c 'sleep 0.05; : > /tmp/done/$0' $i & done; wait; ls /tmp/done | wc -l";
    assert_eq!(
        said(&cluster.command(1, "sh").args(["-c", line]).output().unwrap()),
        (Some(0), "40\n".into(), String::new())
    );
}

#[test]
fn one_user_has_no_more_room_than_a_user_may_have() {
    let cluster = Cluster::with_nodes("mexecuser", 2).unwrap();
    breaking::configure(&cluster, 2, "mexec_jobs = 3\nmexec_user_jobs = 1").unwrap();
    cluster.run(1, &["sh", "-c", "mkdir -m 777 /tmp/run"]).unwrap();
    let begin = |user: u32, name: &str| {
        // Whoever finds another of his user's at work says so.
        let job = format!(
            "mkdir /tmp/run/{user} || : > /tmp/run/twice; until [ -e /tmp/go ]; do sleep 0.05; done; rmdir /tmp/run/{user}"
        );
        let before = format!("setpriv --reuid {user} --regid {user} --clear-groups");
        let line = format!("exec mexec -n 2 -- sh -c '{job}' {name}");
        shell(&cluster, &before, &line).stdin(Stdio::null()).spawn().unwrap()
    };
    let there = |path: &str| cluster.run(1, &["test", "-e", path]).is_ok();
    let mut jobs = vec![begin(1234, "first")];
    until("it runs", || there("/tmp/run/1234"));
    jobs.push(begin(1234, "second"));
    until("the other waits", || {
        let waits = cluster.run(1, &["mps", "-x", "--json"]).unwrap_or_default();
        String::from_utf8_lossy(&waits).matches("\"where\":null").count() == 1
    });
    jobs.push(begin(4321, "other"));
    until("another user's runs", || there("/tmp/run/4321"));
    cluster.touch("/tmp/go").unwrap();
    for job in &mut jobs {
        assert!(job.wait().unwrap().success());
    }
    assert!(!there("/tmp/run/twice"), "two of one user's ran at once");
}

/// A project with a shell of its own, a recursive make, a file that does not compile, and a recipe of two lines.
const PROJECT: &str = r##"
mkdir -p sub
for i in $(seq 8); do echo "int f$i(int x) { return x * $i; }" > f$i.c; done
echo 'int broken(' > bad.c
cat > Makefile <<'END'
SHELL = /bin/bash
OBJECTS = $(patsubst %.c,%.o,$(wildcard f*.c))
all: lib.a sub bad.o
lib.a: $(OBJECTS)
	@ar rcsD $@ $^
	@[[ -s $@ ]] && echo "made $@" > made
%.o: %.c
	@gcc -O2 -c -o $@ $< 2> /dev/null; code=$$?; echo $$$$ >> $$HOME/pids; hostname >> hosts; exit $$code
.PHONY: sub
sub:
	@$(MAKE) --no-print-directory -s -C sub
END
printf 'x.o: ../f1.c\n\t@gcc -c -o $@ $< && hostname >> ../hosts\n' > sub/Makefile
"##;

#[test]
fn make_makes_the_same_with_recipes_elsewhere() {
    let cluster = Cluster::with_nodes("mpmake", 3).unwrap();
    let made = |make: &str| {
        // The tests may have been begun by a make, whose recursive one this is not.
        let line = format!(
            "unset MAKELEVEL MAKEFLAGS MFLAGS; rm -rf /tmp/p && mkdir /tmp/p && cd /tmp/p && export HOME=$PWD\n{PROJECT}\n{make} -k; echo $?; cat made; sha256sum *.o lib.a sub/x.o"
        );
        let end = cluster.command(1, "sh").args(["-c", &line]).output().unwrap();
        let (code, out, err) = said(&end);
        // Lines of make itself have the time in which it met them.
        let mut err: Vec<_> = err.lines().map(str::to_owned).collect();
        err.sort();
        let hosts = cluster.run(1, &["sh", "-c", "sort -u /tmp/p/hosts"]).unwrap();
        ((code, out, err), String::from_utf8_lossy(&hosts).into_owned())
    };
    let (native, at_home) = made("make -j2");
    assert!(native.1.starts_with("2\nmade lib.a\n") && native.1.lines().count() == 12, "{native:?}");
    assert_eq!(at_home.trim(), "node1");
    // However much home has to do: nothing of it is for home.
    cluster
        .run(
            1,
            &[
                "sh",
                "-c",
                "for i in 1 2 3; do timeout 100 sh -c 'while :; do :; done' > /dev/null 2>&1 & done",
            ],
        )
        .unwrap();
    // One that takes less than some 20 ms belongs home.
    let busy =
        || cluster.run(1, &["mexec", "sh", "-c", "sleep 0.1; hostname"]).is_ok_and(|host| host != b"node1\n");
    until("home is seen to be busy", busy);
    let (placed, hosts) = made("mpmake -j6");
    assert_eq!(placed, native);
    assert!(hosts.contains("node2") || hosts.contains("node3"), "{hosts}");
}
