//! Commands from a machine outside the cluster: what a client with a key may do, and that others
//! may do nothing.

mod gate;

use gate::{Gate, OUTSIDE, client_path, content, wait_until};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::runs::outcome::result_of;

/// Checks that must hold for every command of a client, with any Python.
fn check(gate: &Gate, python: &[String], key: &str) {
    let run = |words: &[&str]| {
        // All three standard streams are pipes: not every system can pass on a file without a name.
        let mut client = gate.client_of(python, key);
        let client =
            client.arg("--").args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = client.spawn().expect("it cannot be started");
        drop(child.stdin.take());
        result_of(&child.wait_with_output().expect("cannot wait for it"))
    };
    let ok = |out: &str| (Some(0), out.to_owned(), String::new());
    let line = "id -un; id -G; pwd; umask; echo $HOME $USER $LOGNAME $PATH";
    let expected = "anna\n4242\n/home/anna\n0022\n/home/anna anna anna /usr/local/bin:/usr/bin:/bin\n";
    assert_eq!(run(&["sh", "-c", line]), ok(expected), "{python:?}");
    assert_eq!(
        run(&["sh", "-c", "echo out; echo err >&2; exit 7"]),
        (Some(7), "out\n".into(), "err\n".into())
    );
    // No shell interprets the words, and none is taken as an option.
    let words = ["a b", "", "'\"$HOME;`id`", "two\nlines", "*", "-n", "ä€", "--", "back\\slash\\"];
    let printed: String = words.iter().map(|word| format!("<{word}>")).collect();
    assert_eq!(run(&[&["printf", "<%s>"][..], &words].concat()), ok(&printed), "{python:?}");
    let killed = run(&["sh", "-c", "kill -TERM $$"]);
    // The client dies by the same signal, and so does the lab's command, which then has no exit
    // code. On Windows, which has no signals, the client exits with 143.
    assert!(killed.0 == Some(143) || killed.0.is_none(), "{python:?}: {killed:?}");
    assert_eq!(run(&["no-such-thing"]).0, Some(127));
    assert_eq!(run(&["/etc/passwd"]).0, Some(126));
    // More than fits into all buffers, both ways at once, with all byte values.
    let mut client = gate.client_of(python, key);
    client.args(["--", "sh", "-c", "cat; echo over >&2"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = client.stderr(Stdio::piped()).spawn().expect("it cannot be started");
    let (content, mut stdin) = (content(5_000_000), child.stdin.take().expect("no pipe"));
    let sent = content.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let end = child.wait_with_output().expect("cannot wait for it");
    writer.join().expect("the writer fails").expect("the write fails");
    assert!(
        end.stdout == content && end.stderr == b"over\n" && end.status.success(),
        "{python:?}: {:?}",
        end.status
    );
}

/// Prints the node. The sleep is needed since a command of less than about 20 ms is expected to
/// stay at home.
const WHERE: [&str; 3] = ["sh", "-c", "sleep 0.1; hostname"];

#[test]
fn client_command_runs_as_its_user_on_any_node() {
    let gate = Gate::open("outrun", 2);
    let key = gate.key("laptop", &["--user", "anna"]);
    check(&gate, &["python3".into()], &key);
    // Once more with home busy, so that node 2 runs the commands: the results must be the same.
    gate.on(1, "for i in 1 2 3; do timeout 200 sh -c 'while :; do :; done' > /dev/null 2>&1 & done");
    wait_until("home is seen to be busy", || gate.run(&key, &WHERE).1 == "node2\n");
    check(&gate, &["python3".into()], &key);
    assert_eq!(gate.run(&key, &WHERE).1, "node2\n");
    assert_eq!(gate.list("list")[0]["client"], "laptop");
    assert!(gate.list("list")[0]["seen"]["from"].is_string() && gate.list("jobs").is_empty());
    let log = gate.on(1, "cat /run/tern/outside.log");
    assert!(log.contains("client=\"laptop\"") && log.contains("command=\"no-such-thing\""), "{log}");
}

#[test]
fn variables_and_directories_are_restricted() {
    let gate = Gate::open("outenv", 2);
    let key = gate.key("laptop", &["--user", "anna"]);
    gate.on(1, "mkdir /home/anna/sub /srv/open; chown anna /home/anna/sub; echo secret > /home/bert/file");
    let with = |options: &[&str], words: &[&str]| {
        result_of(&gate.client(&key).args(options).arg("--").args(words).output().unwrap())
    };
    let ok = |out: &str| (Some(0), out.to_owned(), String::new());
    assert_eq!(with(&["-e", "FOO=a b", "-e", "LANG=C"], &["sh", "-c", "echo $FOO $LANG"]), ok("a b C\n"));
    for variable in
        ["LD_PRELOAD=/tmp/x.so", "PATH=/tmp", "HOME=/tmp", "BASH_ENV=/tmp/x", "TERN_RUN_DIR=/tmp", "A B=1"]
    {
        let (code, out, err) = with(&["-e", variable], &["touch", "/tmp/was-run"]);
        assert!(
            code == Some(255) && out.is_empty() && err.lines().count() == 1,
            "{variable}: {code:?} {err}"
        );
    }
    assert_eq!(with(&["-d", "sub"], &["pwd"]), ok("/home/anna/sub\n"));
    assert_eq!(with(&["-d", "/srv/open"], &["pwd"]), ok("/srv/open\n"));
    for directory in ["/home/bert", "/root", "nowhere", "../bert"] {
        let (code, _, err) = with(&["-d", directory], &["touch", "/tmp/was-run"]);
        assert!(
            code == Some(255) && err.contains("cannot enter the directory"),
            "{directory}: {code:?} {err}"
        );
    }
    for line in [
        "cat /home/bert/file",
        "cat /etc/shadow",
        "cat /etc/tern/outside/laptop",
        "kill -9 1",
        "echo x > /run/tern/x",
    ] {
        let (code, out, err) = with(&[], &["sh", "-c", line]);
        let no = err.contains("denied") || err.contains("not permitted");
        assert!(code != Some(0) && out.is_empty() && no, "{line}: {code:?} {out}{err}");
    }
    // A client may not use the administrator's tools.
    let line = format!("{} outside jobs", gate.0.on_machine("tern").get_program().to_string_lossy());
    assert_eq!(with(&[], &["sh", "-c", &line]).0, Some(3));
    gate.on(1, "[ ! -e /tmp/was-run ]");
}

#[test]
fn invalid_keys_run_nothing() {
    let gate = Gate::open("outkeys", 2);
    let key = gate.key("laptop", &["--user", "anna"]);
    let expired = gate.key("old", &["--user", "anna", "--days", "1"]);
    let revoked = gate.key("lost", &["--user", "anna"]);
    let gone = gate.key("gone", &["--user", "bert"]);
    gate.on(1, "sed -i 's/^expires.*/expires = 1000/' /etc/tern/outside/old; tern outside revoke lost; userdel -r bert 2> /dev/null");
    let change = |name: &str, script: &str| {
        let path = format!("/tmp/{name}.key");
        gate.on(OUTSIDE, &format!("sed '{script}' {key} > {path}; chmod 600 {path}"));
        path
    };
    let zeros = "0".repeat(64);
    for (key, why) in [
        (expired, "this key has expired"),
        (revoked, "this key was revoked"),
        (gone, "knows no user bert"),
        (change("secret", &format!("s/^secret.*/secret = {zeros}/")), "not known"),
        (change("name", "s/^client.*/client = nobody/"), "not known"),
        (
            change("print", &format!("s/^fingerprint.*/fingerprint = {zeros}/")),
            "is not the gatekeeper that this key is for",
        ),
        (change("port", "s/:7102/:7103/"), "cannot be reached"),
        (change("empty", "d"), "is no key"),
        ("/tmp/none.key".into(), "cannot be read"),
    ] {
        let (code, out, err) = gate.run(&key, &["touch", "/tmp/was-run"]);
        assert!(code == Some(255) && out.is_empty(), "{key}: {code:?} {out}");
        assert!(err.contains(why) && err.lines().count() == 1, "{key}: {err}");
    }
    gate.on(OUTSIDE, &format!("chmod 644 {key}"));
    assert!(gate.run(&key, &["true"]).2.contains("others can read the key"));
    gate.on(OUTSIDE, &format!("chmod 600 {key}"));
    // A key for root requires --root.
    let root = |words: &[&str]| {
        let mut add = gate.0.tool(1, "outside");
        add.args(["add", "roots", "--address", "x:1", "--user", "root"])
            .args(words)
            .output()
            .unwrap()
            .status
            .code()
    };
    assert_eq!((root(&[]), root(&["--root"])), (Some(3), Some(0)));
    // Requests that no client would send.
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/placing/outside/hostile.py");
    let mut hostile = gate.0.command(OUTSIDE, "python3");
    let end = hostile.arg(script).arg(client_path()).arg(&key).output().unwrap();
    let (code, out, err) = result_of(&end);
    assert!(code == Some(0) && out.lines().count() == 28, "{code:?} {out}{err}");
    for line in out.lines() {
        let (case, came) = line.split_once(": ").unwrap();
        let right = match case {
            "flood" => came == "some closed",
            "garbage" => came.starts_with("closed"),
            "silence" => came == "closed",
            _ if case.starts_with("a ") && case != "a path" && case != "a long frame" => {
                came.starts_with("refused: ")
            }
            _ => {
                !came.contains("ended")
                    && !came.contains("let in")
                    && !came.contains("accepted")
                    && !came.contains("says nothing")
            }
        };
        assert!(right, "{line}");
    }
    gate.on(1, "[ ! -e /tmp/was-run ]");
    wait_until("nothing is left", || gate.list("jobs").is_empty() && gate.count("^sleep 9") == 0);
    let (code, out, _) = gate.run(&key, &["echo", "well"]);
    assert_eq!((code, &*out), (Some(0), "well\n"), "commands run again");
}

#[test]
fn job_ends_with_its_client_key_and_gatekeeper() {
    let gate = Gate::open("outend", 2);
    let key = gate.key("laptop", &["--user", "anna", "--jobs", "2"]);
    let line = "setsid sleep 1001 & sleep 1002";
    for place in ["here", "elsewhere"] {
        if place == "elsewhere" {
            gate.on(1, "for i in 1 2 3; do timeout 100 sh -c 'while :; do :; done' > /dev/null 2>&1 & done");
            wait_until("home is seen to be busy", || gate.run(&key, &WHERE).1 == "node2\n");
        }
        let mut child = gate.begin(&key, line);
        wait_until("it runs", || gate.count("^sleep 100[12]") == 2);
        gate.on(OUTSIDE, "pkill -KILL -f '[m]exec.py'");
        child.wait().unwrap();
        wait_until(place, || gate.count("^sleep 100[12]") == 0 && gate.list("jobs").is_empty());
    }
    gate.on(1, "pkill -KILL -x timeout; true");
    // As many jobs as the key allows, and no more.
    let (first, second) = (gate.begin(&key, line), gate.begin(&key, line));
    let (code, _, err) = gate.run(&key, &["true"]);
    assert!(code == Some(255) && err.contains("2 jobs of this key run"), "{code:?} {err}");
    let jobs = gate.list("jobs");
    assert_eq!(jobs.len(), 2);
    assert_eq!((&jobs[0]["client"], &jobs[0]["user"]), (&"laptop".into(), &"anna".into()));
    assert!(jobs[0]["command"].as_str().unwrap().contains("sleep 1002") && jobs[0]["from"].is_string());
    // The key is revoked.
    gate.on(1, "tern outside revoke laptop");
    for child in [first, second] {
        let (code, _, err) = result_of(&child.wait_with_output().unwrap());
        assert!(code == Some(255) && err.contains("this key was revoked"), "{code:?} {err}");
    }
    wait_until("all processes have ended", || gate.count("^sleep 100[12]") == 0);
    // The gatekeeper is killed; ternd starts another one.
    let key = gate.key("laptop", &["--user", "anna"]);
    let child = gate.begin(&key, line);
    gate.on(1, "pkill -KILL -f '[t]ern-exec.*outside'");
    let (code, _, err) = result_of(&child.wait_with_output().unwrap());
    assert!(code == Some(255) && err.contains("connection to the gatekeeper was lost"), "{code:?} {err}");
    wait_until("all processes have ended", || gate.count("^sleep 100[12]") == 0);
    wait_until("it is back", || gate.run(&key, &["true"]).0 == Some(0));
    // The node stops.
    let child = gate.begin(&key, line);
    gate.on(1, "pkill -TERM -x ternd");
    assert_eq!(result_of(&child.wait_with_output().unwrap()).0, Some(255));
    wait_until("no gatekeeper listens", || {
        gate.on(1, "ss -Htln").lines().all(|line| !line.contains(":7102"))
    });
    wait_until("all processes have ended", || gate.count("^sleep 100[12]") == 0);
}

#[test]
fn gatekeeper_listens_only_if_configured() {
    let gate = Gate(Cluster::with_nodes("outnone", 2).unwrap());
    let listens = |what: &str| gate.on(1, "ss -Htln").lines().any(|line| line.contains(what));
    assert!(!listens(":7102") && gate.count("tern-exec.*outside") == 0);
    gate.on(1, "useradd -m anna");
    let end = gate.0.tool(1, "outside").args(["add", "a", "--user", "anna"]).output().unwrap();
    assert!(
        end.status.code() == Some(2) && result_of(&end).2.contains("mexec_outside is not set"),
        "{:?}",
        result_of(&end)
    );
    assert_eq!(gate.0.tool(1, "outside").arg("jobs").output().unwrap().status.code(), Some(5));
    gate.listens("0.0.0.0:7102");
    assert!(listens("0.0.0.0:7102"));
    // The gatekeeper listens on another address, and then on none, as ternd.toml says.
    gate.listens("127.0.0.1:7104");
    wait_until("elsewhere", || listens("127.0.0.1:7104") && !listens(":7102"));
    gate.on(1, "sed -i /mexec_outside/d /etc/tern/ternd.toml");
    gate.0.lab().restart_daemon(1).unwrap();
    wait_until("nowhere", || !listens(":7104") && gate.count("tern-exec.*outside") == 0);
}

#[test]
fn client_signals_reach_its_command() {
    let gate = Gate::open("outsig", 2);
    let key = gate.key("laptop", &["--user", "anna"]);
    let kill = |signal: &str| gate.on(OUTSIDE, &format!("pkill -{signal} -f '^[^ ]*python[^ ]* .*mexec.py'"));
    let mut child = gate.begin(
        &key,
        "trap 'echo usr1' USR1; trap 'echo int; exit 3' INT; echo set; while :; do sleep 0.1; done",
    );
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap();
    kill("USR1");
    let mut output = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut output).unwrap();
    assert_eq!(&output, b"usr1\n");
    kill("INT");
    assert_eq!(result_of(&child.wait_with_output().unwrap()), (Some(3), "int\n".into(), String::new()));
    // As at a terminal: the shell waits for its child, which must get the signal as well. At home,
    // and on another node.
    for place in ["here", "elsewhere"] {
        if place == "elsewhere" {
            gate.on(1, "for i in 1 2 3; do timeout 100 sh -c 'while :; do :; done' > /dev/null 2>&1 & done");
            wait_until("home is seen to be busy", || gate.run(&key, &WHERE).1 == "node2\n");
        }
        let mut child = gate.begin(&key, "sleep 1003; echo not reached");
        kill("INT");
        let status = child.wait().unwrap();
        assert!(!status.success(), "{place}");
        wait_until("its child has ended", || gate.count("^sleep 1003") == 0);
        // The client stops and continues. It runs under a shell, because the lab's command stops
        // with its direct child.
        gate.on(1, "rm -f /tmp/at");
        let below = ["sh", "-c", "\"$@\"; exit $?", "sh", "python3"];
        let child = gate.begin_of(
            &below,
            &key,
            "i=0; while [ $i -lt 100 ]; do sleep 0.1; i=$((i + 1)); echo $i > /tmp/at; done",
        );
        let at = || gate.on(1, "cat /tmp/at 2> /dev/null || true");
        wait_until("it counts", || !at().is_empty());
        kill("TSTP");
        wait_until("the client stops", || {
            gate.on(OUTSIDE, "ps -eo stat,args | grep '^[^ ]* *[^ ]*python[^ ]* .*[m]exec.py'")
                .starts_with('T')
        });
        let has_stopped = || {
            let before = at();
            std::thread::sleep(Duration::from_millis(700));
            at() == before && before != "100\n"
        };
        wait_until("its command has stopped as well", has_stopped);
        kill("CONT");
        assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0), "{place}");
        assert_eq!(at(), "100\n");
    }
}

/// Tries all Pythons that are installed, and those of `TERN_PYTHONS`: command lines separated by
/// `;`, such as `wine /opt/python/python.exe`.
#[test]
fn client_runs_under_every_python() {
    let gate = Gate::open("outpython", 2);
    let key = gate.key("laptop", &["--user", "anna"]);
    let places = "echo $PATH | tr : '\\n'; ls -d ~/.pyenv/versions/*/bin 2> /dev/null";
    let find = format!(
        "for p in $({places}); do ls $p/python3 $p/python3.[0-9] $p/python3.[0-9][0-9] $p/pypy3 2> /dev/null; done; true"
    );
    let version = "import sys, platform; print(platform.python_implementation(), sys.version.split()[0]) if sys.version_info >= (3, 6) else 0";
    let mut tried: Vec<String> = Vec::new();
    let named = std::env::var("TERN_PYTHONS").unwrap_or_default();
    let found = gate.on(OUTSIDE, &find);
    for python in found.lines().chain(named.split(';')).filter(|line| !line.is_empty()) {
        let words: Vec<String> = python.split(' ').map(str::to_owned).collect();
        let end = gate
            .0
            .command(OUTSIDE, &words[0])
            .args(&words[1..])
            .args(["-c", version])
            .stdin(Stdio::piped())
            .output();
        let (code, out, _) = result_of(&end.unwrap());
        let kind = format!(
            "{}{}",
            out.trim(),
            if words.len() > 1 { format!(" ({})", words[0]) } else { String::new() }
        );
        // Skip other names of a tried version, and wrappers of a version that is not installed.
        if code != Some(0) || out.trim().is_empty() || tried.contains(&kind) {
            continue;
        }
        let begun = Instant::now();
        check(&gate, &words, &key);
        println!("{kind}: {:.1} s", begun.elapsed().as_secs_f32());
        tried.push(kind);
    }
    assert!(!tried.is_empty());
}
