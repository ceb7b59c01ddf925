//! Tests of the mosrun binary with a fake ternd.
#![allow(clippy::unwrap_used, reason = "a test may end by panicking, and its helpers too")]

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::mpsc::{self, Receiver};
use tern_control::{Advice, Lock, Refusal, RefusalKind, Reply, Request, stream};
use tern_ids::NodeId;

/// A directory with `mosrun` in it, and optionally a ternd's socket; removed on drop.
struct TestDir(PathBuf);

impl TestDir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("tern-mosrun-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for tool in ["mosrun", "runon", "runhome", "nomig"] {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tern"), dir.join(tool)).unwrap();
        }
        Self(dir)
    }

    /// Serves one connection for each reply. Returns a channel of the clients' pids and their
    /// requests.
    fn ternd(&self, replies: Vec<Reply>) -> Receiver<(u32, Request)> {
        let listener = UnixListener::bind(self.0.join("control")).unwrap();
        let (sender, requests) = mpsc::channel();
        std::thread::spawn(move || -> io::Result<()> {
            for reply in replies {
                let (mut connection, _) = listener.accept()?;
                let request = stream::read(&mut connection)?;
                let _ = sender.send((peer(&connection), request));
                stream::write(&mut connection, &reply)?;
            }
            Ok(())
        });
        requests
    }

    /// A command that runs the tool `name` with this directory's socket.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.0.join(name));
        command.env("TERN_RUN_DIR", &self.0);
        command
    }

    fn run(&self, name: &str, args: &[&str]) -> Output {
        self.command(name).args(args).output().unwrap()
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn peer(connection: &UnixStream) -> u32 {
    rustix::net::sockopt::socket_peercred(connection).unwrap().pid.as_raw_nonzero().get() as u32
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn unavailable() -> Reply {
    Reply::Refused(Refusal::new(RefusalKind::Unavailable, "node 2 is down").hint("tern status"))
}

fn at_exec(nodes: &[u16]) -> Request {
    Request::AtExec {
        candidates: nodes.iter().copied().map(NodeId).collect(),
        lock: Lock::Locked,
        advice: Advice::default(),
    }
}

#[test]
fn requesting_process_becomes_the_program() {
    let dir = TestDir::new("same-pid");
    let requests = dir.ternd(vec![Reply::Ready]);
    let child = dir
        .command("mosrun")
        .args(["-2", "sh", "-c", "echo $$ $0 $1", "a b"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stdout), format!("{pid} a b\n"));
    assert_eq!(requests.recv().unwrap(), (pid, at_exec(&[2])));
}

/// Everything that a program inherits must be the same with and without mosrun.
#[test]
fn program_inherits_everything_unchanged() {
    let dir = TestDir::new("inherits");
    // Not SigQ, which counts the queued signals of all processes of the user.
    let show = "umask; env | grep -v ^_= | sort; grep -E 'Sig[PBIC]|Seccomp|NoNewPrivs' /proc/self/status; \
                ls -l /proc/self/fd | sed 's/.*[0-9][0-9]:[0-9][0-9] //; s/pipe:.*/pipe/; s/proc.*/proc/'; ulimit -a";
    let setups =
        ["", "trap '' PIPE", "exec <&-", "exec <&- 7</dev/null", "umask 077", "trap '' HUP", "ulimit -n 99"];
    let _requests = dir.ternd(vec![Reply::Done; setups.len()]);
    for setup in setups {
        let run = |before: &str| {
            let script = format!("{setup}\nexec {before} sh -c \"$SHOW\"");
            let mut command = Command::new("sh");
            command.args(["-c", &script]).env("SHOW", show).env("TERN_RUN_DIR", &dir.0);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{setup}: {}", text(&output.stderr));
            assert_eq!(text(&output.stderr), "", "{setup}");
            text(&output.stdout).to_owned()
        };
        let mosrun = dir.0.join("mosrun");
        assert_eq!(run(&mosrun.display().to_string()), run(""), "after {setup:?}");
    }
}

#[test]
fn refusal_runs_nothing_without_fallback() {
    let dir = TestDir::new("refusal");
    let done = dir.0.join("done");
    let touch = ["touch", done.to_str().unwrap()];
    let requests = dir.ternd(vec![unavailable(), unavailable(), Reply::Done, unavailable()]);

    let output = dir.run("mosrun", &[&["-2"], &touch[..]].concat());
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(text(&output.stderr), "mosrun: node 2 is down\n  try: tern status\n");
    assert!(!done.exists());
    assert_eq!(requests.recv().unwrap().1, at_exec(&[2]));

    let output = dir.run("mosrun", &[&["-2", "-F"], &touch[..]].concat());
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    assert!(done.exists());
    assert_eq!(requests.recv().unwrap().1, at_exec(&[2]));
    let at_home = Request::Register { lock: Lock::Locked, never: false, advice: Advice::default() };
    assert_eq!(requests.recv().unwrap().1, at_home);

    // A start at home succeeds even if ternd refuses the request.
    let output = dir.run("runhome", &["true"]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    assert_eq!(requests.recv().unwrap().1, at_home);
}

#[test]
fn aliases_send_the_requests_of_their_options() {
    let dir = TestDir::new("aliases");
    let map = Reply::Map("1 alpha 1\n3 beta 1\n".into());
    let requests = dir.ternd(vec![Reply::Ready, map, Reply::Ready, Reply::Done]);
    assert!(dir.run("runon", &["2", "true"]).status.success());
    assert_eq!(requests.recv().unwrap().1, at_exec(&[2]));
    assert!(dir.run("runon", &["beta", "true"]).status.success());
    assert_eq!(requests.recv().unwrap().1, Request::GetMap);
    assert_eq!(requests.recv().unwrap().1, at_exec(&[3]));
    assert!(dir.run("nomig", &["true"]).status.success());
    assert_eq!(
        requests.recv().unwrap().1,
        Request::Register { lock: Lock::Locked, never: true, advice: Advice::default() }
    );
}

#[test]
fn without_ternd_only_home_starts_work() {
    let dir = TestDir::new("no-ternd");
    for args in [&["true"][..], &["-2", "true"], &["-b", "true"]] {
        let output = dir.run("mosrun", args);
        assert_eq!(output.status.code(), Some(5), "{args:?}");
        assert!(text(&output.stderr).starts_with("mosrun: ternd is not running"), "{args:?}");
    }
    for args in [&["-F", "true"][..], &["-2", "-F", "true"], &["-h", "true"]] {
        let output = dir.run("mosrun", args);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn programs_that_cannot_run_have_the_shells_codes() {
    let dir = TestDir::new("codes");
    let plain = dir.0.join("plain");
    std::fs::write(&plain, "echo").unwrap();
    let missing = dir.run("mosrun", &["-h", "tern-no-such-program"]);
    assert_eq!(missing.status.code(), Some(127));
    assert_eq!(text(&missing.stderr), "mosrun: tern-no-such-program: no such file or directory\n");
    let forbidden = dir.run("mosrun", &["-h", plain.to_str().unwrap()]);
    assert_eq!(forbidden.status.code(), Some(126));
    assert!(text(&forbidden.stderr).ends_with(": permission denied\n"));
    assert_eq!(dir.run("mosrun", &["-h", "sh", "-c", "exit 42"]).status.code(), Some(42));
}

#[test]
fn z_sets_argv0() {
    let dir = TestDir::new("argv0");
    let output = dir.run("mosrun", &["-h", "-z", "sh", "renamed", "-c", "tr '\\0' ' ' < /proc/$$/cmdline"]);
    assert!(text(&output.stdout).starts_with("renamed -c"), "{}", text(&output.stdout));
}

#[test]
fn lost_connection_to_ternd_is_reported() {
    let dir = TestDir::new("dies");
    let listener = UnixListener::bind(dir.0.join("control")).unwrap();
    let server = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        stream::read::<Request>(&mut connection).unwrap();
    });
    let output = dir.run("mosrun", &["-2", "true"]);
    server.join().unwrap();
    assert_eq!(output.status.code(), Some(70));
    assert!(text(&output.stderr).starts_with("mosrun: ternd closed the connection"));
}
