//! mon and mtop in a real terminal (tmux), with a fake ternd on a real control socket.
#![allow(clippy::unwrap_used, reason = "a test may end by panicking, and its helpers too")]

#[path = "mon/ternd.rs"]
mod ternd;
#[path = "mon/tmux.rs"]
mod tmux;

use std::process::Command;
use tern_control::{Destination, MigrationReport, Refusal, RefusalKind, Reply, Request};
use tern_ids::{HomePid, MigrationId, NodeId};
use ternd::{Ternd, cluster, row};
use tmux::Terminal;

/// Two nodes and thirteen encoders, as in the MOSIX tutorial (docs/benchmarks.md).
fn tutorial(request: &Request) -> Reply {
    match request {
        Request::Cluster => Reply::Cluster(cluster(&[700.0, 600.0])),
        Request::Processes => Reply::Processes((31..37).map(|pid| row(pid, Some(2), None)).collect()),
        Request::ProcessesOf { .. } => {
            Reply::Processes((31..37).map(|pid| row(pid, None, Some(1))).collect())
        }
        Request::Migrate { pid, to: Destination::Home } => Reply::Migrated(MigrationReport {
            pid: *pid,
            command: "flac".into(),
            migration: MigrationId([1; 16]),
            from: NodeId(2),
            to: NodeId(1),
            bytes: 356_400,
            freeze_ms: 8.0,
            total_ms: 30.0,
        }),
        _ => Reply::Refused(Refusal::new(RefusalKind::NotAllowed, "31 is not yours").hint("sudo")),
    }
}

#[test]
fn tutorial_cluster_is_shown_and_a_process_migrated() {
    let ternd = Ternd::start("picture", tutorial);
    let terminal = Terminal::start(&ternd, (80, 24), "mon");
    terminal.wait_for("7.00");
    let screen = terminal.wait_for("6.00");
    assert!(screen.starts_with("mon  load  2 nodes"), "{screen}");
    assert!(screen.contains("└──"), "{screen}");
    terminal.press(&["2"]);
    let screen = terminal.wait_for("31 root");
    assert!(screen.starts_with("mon  node 2 host2  load 6.00  6 processes, 6 guests here"), "{screen}");
    assert!(ternd.requests().contains(&Request::ProcessesOf { node: NodeId(2) }));
    terminal.press(&["m"]);
    terminal.type_line("home");
    terminal.wait_for("31 flac: 2 → 1, 356.4 kB, frozen 8.0 ms");
    assert!(ternd.requests().contains(&Request::Migrate { pid: HomePid(31), to: Destination::Home }));
    // A refusal is shown in ternd's words.
    terminal.press(&["Down", "m", "7", "Enter"]);
    terminal.wait_for("31 is not yours; try: sudo");
    assert!(
        ternd.requests().contains(&Request::Migrate { pid: HomePid(32), to: Destination::Node(NodeId(7)) })
    );
    terminal.press(&["q"]);
    terminal.wait_for("mon  load");
    terminal.press(&["q"]);
    terminal.wait_for_restored("0");
}

#[test]
fn screen_follows_the_terminal_size() {
    let ternd = Ternd::start("resize", |request| match request {
        Request::Cluster => Reply::Cluster(cluster(&(0..1000).map(|n| n as f32 / 10.0).collect::<Vec<_>>())),
        _ => tutorial(request),
    });
    let terminal = Terminal::start(&ternd, (80, 24), "mon -V");
    terminal.wait_for("1000 nodes, 1–73");
    for (size, page) in [((40, 10), "1–33"), ((200, 50), "1–193"), ((80, 24), "1–73")] {
        terminal.resize(size);
        let screen = terminal.wait_for_both(page, "\nh help  q quit");
        let lines: Vec<_> = screen.lines().collect();
        assert!(lines.len() <= usize::from(size.1), "{screen}");
        assert_eq!(lines.iter().filter(|line| line.starts_with("mon  load")).count(), 1, "{screen}");
        assert!(lines.last().unwrap().starts_with("h help  q quit"), "{screen}");
    }
    terminal.press(&["End"]);
    terminal.wait_for("928–1000");
    terminal.press(&["q"]);
    terminal.wait_for_restored("0");
}

#[test]
fn job_control_stops_and_continues() {
    let ternd = Ternd::start("stop", tutorial);
    let terminal = Terminal::shell(&ternd, (80, 24));
    terminal.type_line("mon");
    terminal.wait_for("7.00");
    for _ in 0..2 {
        terminal.press(&["C-z"]);
        terminal.wait_for("Stopped");
        terminal.type_line("stty -a | grep -o -- '-\\?icanon'; echo still here");
        let screen = terminal.wait_for("\nstill here");
        assert!(screen.contains("\nicanon"), "{screen}");
        assert!(!screen.contains("7.00"), "{screen}");
        terminal.type_line("clear; fg");
        let screen = terminal.wait_for("7.00");
        assert!(screen.starts_with("mon  load"), "{screen}");
    }
    terminal.press(&["q"]);
    // Text typed before mon ends would be read by mon.
    terminal.wait_for("\nmon\nready");
    terminal.type_line("echo ended with $?");
    terminal.wait_for("\nended with 0");
}

#[test]
fn signal_restores_the_terminal() {
    for (signal, status) in [("TERM", "143"), ("INT", "130"), ("HUP", "129")] {
        let ternd = Ternd::start(&format!("signal-{signal}"), tutorial);
        let terminal = Terminal::start(&ternd, (80, 24), "mon");
        terminal.wait_for("7.00");
        send(ternd.caller(), signal);
        terminal.wait_for_restored(status);
    }
}

#[test]
fn interrupt_key_ends_by_sigint() {
    let ternd = Ternd::start("interrupted", tutorial);
    let terminal = Terminal::start(&ternd, (80, 24), "mon");
    terminal.wait_for("7.00");
    // In raw mode the terminal sends no signal for ^C: mon receives a key.
    terminal.press(&["C-c"]);
    terminal.wait_for_restored("130");
}

#[test]
fn stop_is_refused_without_a_shell() {
    let ternd = Ternd::start("alone-in-session", tutorial);
    let terminal = Terminal::start(&ternd, (80, 24), "mon");
    terminal.wait_for("7.00");
    terminal.press(&["C-z"]);
    terminal.wait_for("cannot stop, because no shell would continue it");
    terminal.press(&["q"]);
    terminal.wait_for_restored("0");
}

#[test]
fn colours_and_characters_match_the_terminal() {
    let ternd = Ternd::start("colours", tutorial);
    let red_bar = "\u{1b}[38;5;1m█";
    {
        let terminal = Terminal::start(&ternd, (80, 24), "mon");
        terminal.wait_for("7.00");
        assert!(terminal.screen_with_colours().contains(red_bar), "{}", terminal.screen_with_colours());
    }
    for (line, sign) in [("NO_COLOR=1 mon", "█"), ("TERM=vt220 mon", "█"), ("LC_ALL=C mon", "#")] {
        let terminal = Terminal::start(&ternd, (80, 24), line);
        assert!(terminal.wait_for("7.00").contains(sign), "{line}");
        assert!(!terminal.screen_with_colours().contains(red_bar), "{line}");
    }
    // This terminal cannot move its cursor, so mon prints one picture after the other.
    let terminal = Terminal::start(&ternd, (80, 24), "TERM=dumb mon -i 0.1");
    let before = ternd.requests().len();
    terminal.wait_for("mon  load  2 nodes");
    ternd.wait_for_requests(before + 3);
    send(ternd.caller(), "TERM");
    terminal.wait_for("\nended with 143\n");
}

#[test]
fn lost_ternd_is_reported_until_it_returns() {
    let mut ternd = Ternd::start("gone", tutorial);
    let terminal = Terminal::start(&ternd, (120, 24), "mon -i 0.2");
    terminal.wait_for("7.00");
    ternd.stop();
    let screen = terminal.wait_for("ternd is not running on this node");
    assert!(screen.contains("7.00"), "the last picture is gone: {screen}");
    ternd.serve_again(tutorial);
    terminal.wait_for("mon  load  2 nodes");
    terminal.press(&["q"]);
    terminal.wait_for_restored("0");
}

#[test]
fn missing_cluster_and_refusals_are_shown() {
    let ternd = Ternd::start("alone", |_| Reply::Cluster(cluster(&[])));
    let terminal = Terminal::start(&ternd, (80, 24), "mosmon");
    terminal.wait_for("this node is not in a cluster");
    let ternd = Ternd::start("old", |_| {
        Reply::Refused(Refusal::new(
            RefusalKind::Unsupported,
            "this ternd does not know the other nodes' load",
        ))
    });
    let terminal = Terminal::start(&ternd, (80, 24), "mon");
    terminal.wait_for("this ternd does not know the other nodes' load");
}

#[test]
fn mtop_lists_and_signals() {
    let victim = Victim::start();
    let pid = victim.0.id().cast_signed();
    let ternd = Ternd::start("mtop", move |request| match request {
        Request::Processes => Reply::Processes(vec![row(pid, Some(2), None)]),
        _ => Reply::Refused(Refusal::new(RefusalKind::Unsupported, "this ternd does not know the load")),
    });
    let terminal = Terminal::start(&ternd, (80, 24), "mtop");
    let screen = terminal.wait_for("flac -8");
    assert!(screen.starts_with("mtop  1 process, 1 away  by CPU"), "{screen}");
    assert!(screen.contains(&format!("{pid} root")), "{screen}");
    terminal.press(&["k", "Enter"]);
    terminal.wait_for(&format!("sent signal 15 to {pid} flac"));
    assert_eq!(victim.ended(), Some(15));
    terminal.press(&["q"]);
    terminal.wait_for_restored("0");
}

#[test]
fn single_picture_needs_no_terminal() {
    let ternd = Ternd::start("once", tutorial);
    let run = |args: &str| {
        let mut command = ternd.command(args);
        let output = command.env("LC_ALL", "C").output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, out, _) = run("mon --once -t");
    assert_eq!(code, Some(0));
    assert!(
        out.starts_with("mon  load  2 nodes") && out.is_ascii() && out.contains("total: load 13.0"),
        "{out}"
    );
    let (code, out, _) = run("mon --json");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["nodes"][1]["load"]), (Some(0), &serde_json::json!(600.0)));
    let (code, out, _) = run("mtop --once");
    assert_eq!((code, out.lines().count()), (Some(0), 8), "{out}");
    assert!(out.lines().nth(2).unwrap().contains(" 0.0 "), "{out}");
    assert!(!out.contains('>'), "no line can be selected: {out}");
    let (code, _, err) = run("mon");
    assert_eq!(code, Some(2));
    assert_eq!(err, "mon: standard output is not a terminal\n  try: --once or --json\n");
}

fn send(pid: i32, signal: &str) {
    assert!(Command::new("kill").args(["-s", signal, &pid.to_string()]).status().unwrap().success());
}

/// A process for a test to signal.
struct Victim(std::process::Child);

impl Victim {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }

    /// The signal that ended the process.
    fn ended(mut self) -> Option<i32> {
        std::os::unix::process::ExitStatusExt::signal(&self.0.wait().unwrap())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
