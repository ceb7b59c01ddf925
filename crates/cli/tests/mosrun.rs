//! mosrun as its users meet it: the binary, before a ternd that answers what the test wants.
#![allow(clippy::unwrap_used, reason = "a test may end by panicking, and its helpers too")]

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::mpsc::{self, Receiver};
use tern_control::{Advice, Lock, Refusal, RefusalKind, Reply, Request, stream};
use tern_ids::NodeId;

/// A directory with `mosrun` in it, and perhaps a ternd's socket; gone at the end.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let place = std::env::temp_dir().join(format!("tern-mosrun-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        for tool in ["mosrun", "runon", "runhome", "nomig"] {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tern"), place.join(tool)).unwrap();
        }
        Self(place)
    }

    /// Answers one connection after the other; tells of each who asked, and what.
    fn ternd(&self, replies: Vec<Reply>) -> Receiver<(u32, Request)> {
        let listener = UnixListener::bind(self.0.join("control")).unwrap();
        let (asked, questions) = mpsc::channel();
        std::thread::spawn(move || -> io::Result<()> {
            for reply in replies {
                let (mut connection, _) = listener.accept()?;
                let request = stream::read(&mut connection)?;
                let _ = asked.send((peer(&connection), request));
                stream::write(&mut connection, &reply)?;
            }
            Ok(())
        });
        questions
    }

    /// `name`, in this place, as its own process.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.0.join(name));
        command.env("TERN_RUN_DIR", &self.0);
        command
    }

    fn run(&self, name: &str, args: &[&str]) -> Output {
        self.command(name).args(args).output().unwrap()
    }
}

impl Drop for Place {
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
fn the_process_that_asks_becomes_the_program() {
    let place = Place::new("same-pid");
    let asked = place.ternd(vec![Reply::Ready]);
    let child = place
        .command("mosrun")
        .args(["-2", "sh", "-c", "echo $$ $0 $1", "a b"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stdout), format!("{pid} a b\n"));
    assert_eq!(asked.recv().unwrap(), (pid, at_exec(&[2])));
}

/// Everything that a program inherits, seen from the program, must be as without mosrun.
#[test]
fn the_program_inherits_what_mosrun_did() {
    let place = Place::new("inherits");
    // Not SigQ, which counts what all processes of the user have queued.
    let show = "umask; env | grep -v ^_= | sort; grep -E 'Sig[PBIC]|Seccomp|NoNewPrivs' /proc/self/status; \
                ls -l /proc/self/fd | sed 's/.*[0-9][0-9]:[0-9][0-9] //; s/pipe:.*/pipe/; s/proc.*/proc/'; ulimit -a";
    let setups =
        ["", "trap '' PIPE", "exec <&-", "exec <&- 7</dev/null", "umask 077", "trap '' HUP", "ulimit -n 99"];
    let _asked = place.ternd(vec![Reply::Done; setups.len()]);
    for setup in setups {
        let run = |before: &str| {
            let script = format!("{setup}\nexec {before} sh -c \"$SHOW\"");
            let mut command = Command::new("sh");
            command.args(["-c", &script]).env("SHOW", show).env("TERN_RUN_DIR", &place.0);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{setup}: {}", text(&output.stderr));
            assert_eq!(text(&output.stderr), "", "{setup}");
            text(&output.stdout).to_owned()
        };
        let mosrun = place.0.join("mosrun");
        assert_eq!(run(&mosrun.display().to_string()), run(""), "after {setup:?}");
    }
}

#[test]
fn a_refusal_runs_nothing_unless_told_to() {
    let place = Place::new("refusal");
    let done = place.0.join("done");
    let touch = ["touch", done.to_str().unwrap()];
    let asked = place.ternd(vec![unavailable(), unavailable(), Reply::Done, unavailable()]);

    let output = place.run("mosrun", &[&["-2"], &touch[..]].concat());
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(text(&output.stderr), "mosrun: node 2 is down\n  try: tern status\n");
    assert!(!done.exists());
    assert_eq!(asked.recv().unwrap().1, at_exec(&[2]));

    let output = place.run("mosrun", &[&["-2", "-F"], &touch[..]].concat());
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    assert!(done.exists());
    assert_eq!(asked.recv().unwrap().1, at_exec(&[2]));
    let at_home = Request::Register { lock: Lock::Locked, never: false, advice: Advice::default() };
    assert_eq!(asked.recv().unwrap().1, at_home);

    // What is at home needs no permission.
    let output = place.run("runhome", &["true"]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    assert_eq!(asked.recv().unwrap().1, at_home);
}

#[test]
fn aliases_ask_for_what_they_stand_for() {
    let place = Place::new("aliases");
    let map = Reply::Map("1 alpha 1\n3 beta 1\n".into());
    let asked = place.ternd(vec![Reply::Ready, map, Reply::Ready, Reply::Done]);
    assert!(place.run("runon", &["2", "true"]).status.success());
    assert_eq!(asked.recv().unwrap().1, at_exec(&[2]));
    assert!(place.run("runon", &["beta", "true"]).status.success());
    assert_eq!(asked.recv().unwrap().1, Request::GetMap);
    assert_eq!(asked.recv().unwrap().1, at_exec(&[3]));
    assert!(place.run("nomig", &["true"]).status.success());
    assert_eq!(
        asked.recv().unwrap().1,
        Request::Register { lock: Lock::Locked, never: true, advice: Advice::default() }
    );
}

#[test]
fn without_ternd_only_home_is_left() {
    let place = Place::new("no-ternd");
    for args in [&["true"][..], &["-2", "true"], &["-b", "true"]] {
        let output = place.run("mosrun", args);
        assert_eq!(output.status.code(), Some(5), "{args:?}");
        assert!(text(&output.stderr).starts_with("mosrun: ternd is not running"), "{args:?}");
    }
    for args in [&["-F", "true"][..], &["-2", "-F", "true"], &["-h", "true"]] {
        let output = place.run("mosrun", args);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn programs_that_cannot_run_have_the_shell_s_codes() {
    let place = Place::new("codes");
    let plain = place.0.join("plain");
    std::fs::write(&plain, "echo").unwrap();
    let missing = place.run("mosrun", &["-h", "tern-no-such-program"]);
    assert_eq!(missing.status.code(), Some(127));
    assert_eq!(text(&missing.stderr), "mosrun: tern-no-such-program: no such file or directory\n");
    let forbidden = place.run("mosrun", &["-h", plain.to_str().unwrap()]);
    assert_eq!(forbidden.status.code(), Some(126));
    assert!(text(&forbidden.stderr).ends_with(": permission denied\n"));
    assert_eq!(place.run("mosrun", &["-h", "sh", "-c", "exit 42"]).status.code(), Some(42));
}

#[test]
fn z_gives_the_program_another_name() {
    let place = Place::new("argv0");
    let output = place.run("mosrun", &["-h", "-z", "sh", "renamed", "-c", "tr '\\0' ' ' < /proc/$$/cmdline"]);
    assert!(text(&output.stdout).starts_with("renamed -c"), "{}", text(&output.stdout));
}

#[test]
fn a_ternd_that_dies_in_mid_conversation_is_reported() {
    let place = Place::new("dies");
    let listener = UnixListener::bind(place.0.join("control")).unwrap();
    let server = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        stream::read::<Request>(&mut connection).unwrap();
    });
    let output = place.run("mosrun", &["-2", "true"]);
    server.join().unwrap();
    assert_eq!(output.status.code(), Some(70));
    assert!(text(&output.stderr).starts_with("mosrun: ternd ended the conversation"));
}
