//! A bug of ours must not cost the user his terminal.
#![allow(clippy::unwrap_used, reason = "a test may end by panicking, and its helpers too")]

use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_top::{Settings, Subject};

/// How long something may take to be seen.
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
#[ignore = "the other test runs it, in a terminal"]
fn a_thread_panics_while_the_cluster_is_shown() {
    let ask: tern_top::Ask = Arc::new(|_| panic!("on purpose"));
    let ended = tern_top::show(Subject::Cluster, Settings::default(), None, &ask);
    assert_eq!(ended.unwrap_err().code, 70);
}

#[test]
fn a_panic_is_reported_on_a_terminal_given_back() {
    let tmux = Tmux(format!("tern-top-panic-{}", std::process::id()));
    let this = std::env::current_exe().unwrap();
    let line = format!(
        "LC_ALL=C.UTF-8 RUST_BACKTRACE=0 {} --exact a_thread_panics_while_the_cluster_is_shown --ignored \
         --nocapture; echo ended with $?; stty -a | grep -o -- '-\\?icanon'; sleep 1000",
        this.display()
    );
    let started =
        tmux.run(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "40", "sh", "-c", &line]);
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    let begun = Instant::now();
    let screen = loop {
        let screen = String::from_utf8(tmux.run(&["capture-pane", "-p"]).stdout).unwrap();
        if screen.contains("icanon\n") {
            break screen;
        }
        assert!(begun.elapsed() < PATIENCE, "it has not ended:\n{screen}");
        std::thread::sleep(Duration::from_millis(20));
    };
    for said in ["\non purpose\n", "\nended with 0\n", "\nicanon\n"] {
        assert!(screen.contains(said), "no {said:?}:\n{screen}");
    }
    let state = tmux.run(&["display-message", "-p", "#{cursor_flag} #{alternate_on}"]);
    assert_eq!(String::from_utf8_lossy(&state.stdout).trim(), "1 0");
}

/// A tmux server of its own, which ends with this.
struct Tmux(String);

impl Tmux {
    fn run(&self, words: &[&str]) -> Output {
        Command::new("tmux").args(["-u", "-L", &self.0]).args(words).env_remove("TMUX").output().unwrap()
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.run(&["kill-server"]);
    }
}
