//! mexec: commands placed on another node, compared with the same commands at home.

use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection;
use tern_tests::runs::outcome::result_of;

/// Timeout for anything that a busy machine may delay.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// A shell command on node 1 after this prefix.
fn shell(cluster: &Cluster, before: &str, line: &str) -> Command {
    let mut command = cluster.command(1, "sh");
    // In a shell of its own, as a caller would have it.
    command.args(["-c", &format!("{before} \"$0\" -c \"$1\""), "sh", line]).current_dir("/tmp");
    command
}

fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    fault_injection::wait_until(what, EVENT_TIMEOUT, holds).expect("timed out");
}

const ELSEWHERE: &str = "mexec -n 2 --";

#[test]
fn command_behaves_as_at_home() {
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
            result_of(&shell(&cluster, &before, line).stdin(Stdio::null()).output().unwrap())
        };
        assert_eq!(run(ELSEWHERE), run(""), "{line}");
    }
    let there = cluster.run(1, &["mexec", "-n", "2", "hostname"]).unwrap();
    assert_eq!(there, cluster.run(2, &["hostname"]).unwrap(), "it runs on node 2");
}

#[test]
fn command_runs_with_its_users_rights() {
    let cluster = Cluster::with_nodes("mexecuser", 2).unwrap();
    cluster
        .run(1, &["sh", "-c", "mkdir -m 700 /tmp/roots; mkdir /tmp/hers; chown 1234:77 /tmp/hers"])
        .unwrap();
    let as_user = "exec setpriv --reuid 1234 --regid 77 --groups 77,4242";
    for line in [
        "id",
        "ls /tmp/roots",
        "echo x > /tmp/hers/file && stat -c %u:%g:%a /tmp/hers/file; rm /tmp/hers/file",
        "kill -9 1",
        "mount -t tmpfs x /tmp",
    ] {
        let run = |before: &str| {
            let (code, out, err) = result_of(
                &shell(&cluster, &format!("{as_user} {before}"), line).stdin(Stdio::null()).output().unwrap(),
            );
            // The owner of init and the text of mount's error differ there.
            (
                code == Some(0),
                out,
                err.contains("not permitted") || err.contains("denied") || err.contains("must be"),
            )
        };
        assert_eq!(run(ELSEWHERE), run(""), "{line}");
    }
    // The user also owns its streams when it opens them by name.
    let line = "cat < /dev/stdin > /dev/stdout; echo err > /dev/stderr";
    let mut named = shell(&cluster, &format!("echo in | {} {ELSEWHERE}", &as_user[5..]), line);
    assert_eq!(result_of(&named.output().unwrap()), (Some(0), "in\n".into(), "err\n".into()));
}

#[test]
fn command_that_cannot_run_gives_an_error() {
    let cluster = Cluster::with_nodes("mexecnot", 2).unwrap();
    cluster.run(1, &["sh", "-c", "touch /tmp/plain; mkdir -p /run/only-here"]).unwrap();
    let run = |line: &str| result_of(&cluster.command(1, "sh").args(["-c", line]).output().unwrap());
    assert_eq!(
        run("mexec -n 2 no-such-thing"),
        (Some(127), String::new(), "mexec: no-such-thing: no such file or directory\n".into())
    );
    assert_eq!(run("mexec -n 2 /tmp/plain").0, Some(126));
    let (code, _, err) = run("cd /run/only-here && mexec -n 2 true");
    assert!(code == Some(5) && err.contains("directory is not visible there"), "{code:?} {err}");
    let (code, _, err) = run("mexec -n 9 true");
    assert!(code == Some(5) && err.contains("none of the nodes"), "{code:?} {err}");
    cluster.run(2, &["mosctl", "block"]).unwrap();
    let (code, _, err) = run("mexec -n 2 true");
    assert!(code == Some(5), "{code:?} {err}");
    assert_eq!(run("mexec").0, Some(2));
}

/// Starts a command on node 2, and waits until it runs.
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

/// The pid of mexec itself; its parent is the lab's command.
fn mexec(cluster: &Cluster) -> Result<String> {
    Ok(String::from_utf8_lossy(&cluster.run(1, &["pgrep", "-x", "mexec"])?).trim().to_owned())
}

#[test]
fn signals_and_exit_status_are_passed_on() {
    let cluster = Cluster::with_nodes("mexecsig", 2).unwrap();
    let mut child =
        begin(&cluster, "trap 'echo usr1' USR1; trap 'echo int; exit 3' INT; while :; do sleep 0.1; done")
            .unwrap();
    let pid = mexec(&cluster).unwrap();
    cluster.run(1, &["kill", "-USR1", &pid]).unwrap();
    let mut output = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut output).unwrap();
    assert_eq!(&output, b"usr1\n");
    cluster.run(1, &["kill", "-INT", &pid]).unwrap();
    assert_eq!(result_of(&child.wait_with_output().unwrap()), (Some(3), "int\n".into(), String::new()));
}

#[test]
fn interactive_command_has_a_terminal() {
    let cluster = Cluster::with_nodes("mexectty", 2).unwrap();
    let line =
        "stty rows 31 cols 77; mexec -i -n 2 sh -c 'hostname; tty; stty size; exit 7'; echo code $?; stty -a";
    let mut script = cluster.command(1, "script");
    let script = script.args(["-qec", line, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut script = script.spawn().unwrap();
    // When its input closes, script sends an end of file, so the input stays open.
    let typed = script.stdin.take();
    let end = script.wait_with_output().unwrap();
    drop(typed);
    let said = String::from_utf8_lossy(&end.stdout).into_owned();
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    assert_eq!((lines[0], lines[2], lines[3]), ("node2", "31 77", "code 7"), "{said}");
    assert!(lines[1].starts_with("/dev/pts/"), "{said}");
    assert!(said.contains(" icanon"), "the terminal of the caller is restored: {said}");
    let none = cluster.command(1, "mexec").args(["-i", "true"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(none.status.code(), Some(2));
}

#[test]
fn no_process_is_left_whichever_side_ends() {
    let cluster = Cluster::with_nodes("mexecend", 2).unwrap();
    let gone = |word: &str| wait_until(word, || cluster.count(2, word) == 0);
    // The command ends and leaves background processes.
    let end = shell(&cluster, ELSEWHERE, "setsid sleep 1001 & sleep 1002 & exit 4").output().unwrap();
    assert_eq!(end.status.code(), Some(4));
    gone("^sleep 100[12]");
    // mexec is killed.
    let mut child = begin(&cluster, "setsid sleep 1003 & sleep 1004").unwrap();
    wait_until("it runs", || cluster.count(2, "^sleep 100[34]") == 2);
    cluster.run(1, &["pkill", "-KILL", "-x", "mexec"]).unwrap();
    child.wait().unwrap();
    gone("^sleep 100[34]");
    // Either executor is killed.
    for node in [1, 2] {
        let child = begin(&cluster, "sleep 1005").unwrap();
        cluster.run(node, &["pkill", "-KILL", "-f", "tern-exec.*serve"]).unwrap();
        let (code, _, err) = result_of(&child.wait_with_output().unwrap());
        assert!(code == Some(if node == 1 { 5 } else { 255 }), "{code:?} {err}");
        gone("^sleep 1005");
    }
    // New commands run afterwards.
    assert_eq!(cluster.run(1, &["mexec", "-n", "2", "echo", "well"]).unwrap(), b"well\n");
}

#[test]
fn lost_node_is_reported_or_command_is_repeated() {
    let cluster = Cluster::with_nodes("mexeclost", 3).unwrap();
    let child = begin(&cluster, "sleep 1006").unwrap();
    cluster.lab().cut(Cable::Node(2)).unwrap();
    let (code, _, err) = result_of(&child.wait_with_output().unwrap());
    assert!(code == Some(255) && err.contains("node 2 was lost"), "{code:?} {err}");
    wait_until("its command is ended there", || cluster.count(2, "^sleep 1006") == 0);
    cluster.lab().heal(Cable::Node(2)).unwrap();
    // If it is not up yet when node 3 is lost, no node is left to repeat the command on.
    wait_until("node 2 is up again", || cluster.run(1, &["mosctl", "isup", "2"]).is_ok());
    // The command records each node where it starts; its second run ends.
    let line = "hostname >> /tmp/where; [ $(wc -l < /tmp/where) -gt 1 ] || sleep 1007; echo once";
    let mut again = cluster.command(1, "mexec");
    let child = again
        .args(["-r", "-n", "2,3", "--", "sh", "-c", line])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let at = || (2..=3).find(|node| cluster.count(*node, "^sleep 1007") > 0);
    wait_until("it runs", || at().is_some());
    let node = at().unwrap();
    cluster.run(node, &["pkill", "-KILL", "-f", "tern-exec.*serve"]).unwrap();
    assert_eq!(result_of(&child.wait_with_output().unwrap()), (Some(0), "once\n".into(), String::new()));
    let hosts = cluster.run(1, &["cat", "/tmp/where"]).unwrap();
    assert_eq!(String::from_utf8_lossy(&hosts).lines().count(), 2);
}

#[test]
fn streams_are_complete_and_independent() {
    let cluster = Cluster::with_nodes("mexecstream", 2).unwrap();
    // More than fits into all buffers, both ways at once.
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
    // The end of the output is read late, and is more than fits into the buffers.
    let end = shell(&cluster, "", "mexec -n 2 head -c 380000 /dev/zero | (sleep 4; wc -c)").output().unwrap();
    assert_eq!(result_of(&end), (Some(0), "380000\n".into(), String::new()));
    // A repeatable command has its input, too.
    let end = shell(&cluster, "", "echo in | mexec -r -n 2 cat").output().unwrap();
    assert_eq!(result_of(&end), (Some(0), "in\n".into(), String::new()));
    // A caller that does not read the output still gets the errors.
    let mut child =
        begin(&cluster, "(head -c 9000000 /dev/zero; echo done >&2) & echo first >&2; wait").unwrap();
    let mut first = [0; 6];
    child.stderr.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"first\n");
    // When the caller closes the output, the command gets SIGPIPE.
    drop(child.stdout.take());
    let _status = child.wait().unwrap();
    let end = shell(&cluster, "", "mexec -n 2 yes | head -n 1; echo over").output().unwrap();
    assert_eq!(result_of(&end), (Some(0), "y\nover\n".into(), String::new()));
}

#[test]
fn commands_beyond_the_limit_are_queued() {
    let cluster = Cluster::with_nodes("mexecturn", 2).unwrap();
    cluster.run(1, &["sh", "-c", "mkdir /tmp/done"]).unwrap();
    let line = "for i in $(seq 40); do mexec -n 2 sh -c 'sleep 0.05; : > /tmp/done/$0' $i & done; wait; ls /tmp/done | wc -l";
    assert_eq!(
        result_of(&cluster.command(1, "sh").args(["-c", line]).output().unwrap()),
        (Some(0), "40\n".into(), String::new())
    );
}

#[test]
fn per_user_limit_is_enforced() {
    let cluster = Cluster::with_nodes("mexecuser", 2).unwrap();
    fault_injection::configure(&cluster, 2, "mexec_jobs = 3\nmexec_user_jobs = 1").unwrap();
    cluster.run(1, &["sh", "-c", "mkdir -m 777 /tmp/run"]).unwrap();
    let begin = |user: u32, name: &str| {
        // A job that finds another one of the same user running reports that.
        let job = format!(
            "mkdir /tmp/run/{user} || : > /tmp/run/twice; until [ -e /tmp/go ]; do sleep 0.05; done; rmdir /tmp/run/{user}"
        );
        let before = format!("setpriv --reuid {user} --regid {user} --clear-groups");
        let line = format!("exec mexec -n 2 -- sh -c '{job}' {name}");
        shell(&cluster, &before, &line).stdin(Stdio::null()).spawn().unwrap()
    };
    let there = |path: &str| cluster.run(1, &["test", "-e", path]).is_ok();
    let mut jobs = vec![begin(1234, "first")];
    wait_until("it runs", || there("/tmp/run/1234"));
    jobs.push(begin(1234, "second"));
    wait_until("the other waits", || {
        let waits = cluster.run(1, &["mps", "-x", "--json"]).unwrap_or_default();
        String::from_utf8_lossy(&waits).matches("\"where\":null").count() == 1
    });
    jobs.push(begin(4321, "other"));
    wait_until("another user's runs", || there("/tmp/run/4321"));
    cluster.touch("/tmp/go").unwrap();
    for job in &mut jobs {
        assert!(job.wait().unwrap().success());
    }
    assert!(!there("/tmp/run/twice"), "two commands of one user ran at once");
}

/// A project with a SHELL of its own, other shells for two targets, a recursive make, a file that does not compile, and a recipe
/// of two lines.
const PROJECT: &str = r##"
mkdir -p sub
for i in $(seq 8); do echo "int f$i(int x) { return x * $i; }" > f$i.c; done
echo 'int broken(' > bad.c
cat > Makefile <<'END'
SHELL = /bin/bash
OBJECTS = $(patsubst %.c,%.o,$(wildcard f*.c))
all: lib.a sub bad.o strict plain
lib.a: $(OBJECTS)
	@ar rcsD $@ $^
	@[[ -s $@ ]] && echo "made $@" > made
%.o: %.c
	@gcc -O2 -c -o $@ $< 2> /dev/null; code=$$?; echo $$$$ >> $$HOME/pids; hostname >> hosts; exit $$code
strict: SHELL = /bin/bash -o pipefail
strict:
	@false | true; echo "strict $$?" > $@
plain: SHELL := /bin/sh
plain:
	@echo "plain $${BASH_VERSION:+bash}" > $@
.PHONY: sub
sub:
	@$(MAKE) --no-print-directory -s -C sub
END
printf 'x.o: ../f1.c\n\t@gcc -c -o $@ $< && hostname >> ../hosts\n' > sub/Makefile
"##;

#[test]
fn mpmake_has_the_same_results_as_make() {
    let cluster = Cluster::with_nodes("mpmake", 3).unwrap();
    let made = |make: &str| {
        // The tests may have been started by a make. The make started here must not count as a
        // recursive make of it.
        let line = format!(
            "unset MAKELEVEL MAKEFLAGS MFLAGS; rm -rf /tmp/p && mkdir /tmp/p && cd /tmp/p && export HOME=$PWD\n{PROJECT}\n{make} -k; echo $?; cat made strict plain; sha256sum *.o lib.a sub/x.o"
        );
        let end = cluster.command(1, "sh").args(["-c", &line]).output().unwrap();
        let (code, out, err) = result_of(&end);
        // make prints its own lines in the order of events.
        let mut err: Vec<_> = err.lines().map(str::to_owned).collect();
        err.sort();
        let hosts = cluster.run(1, &["sh", "-c", "sort -u /tmp/p/hosts"]).unwrap();
        ((code, out, err), String::from_utf8_lossy(&hosts).into_owned())
    };
    let (native, at_home) = made("make -j2");
    assert!(
        native.1.starts_with("2\nmade lib.a\nstrict 1\nplain \n") && native.1.lines().count() == 14,
        "{native:?}"
    );
    assert_eq!(at_home.trim(), "node1");
    // Home is kept busy, so that mpmake places commands on other nodes.
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
    // A command that takes less than about 20 ms would stay at home.
    let busy =
        || cluster.run(1, &["mexec", "sh", "-c", "sleep 0.1; hostname"]).is_ok_and(|host| host != b"node1\n");
    wait_until("home is seen to be busy", busy);
    let (placed, hosts) = made("mpmake -j6");
    assert_eq!(placed, native);
    assert!(hosts.contains("node2") || hosts.contains("node3"), "{hosts}");
}
