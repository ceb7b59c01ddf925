//! A panic must not leave the user's terminal in raw mode.
#![allow(clippy::unwrap_used, reason = "a test may end by panicking, and its helpers too")]

use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_top::{InitialView, ViewSettings};

/// How long a test waits for an expected screen.
const SCREEN_TIMEOUT: Duration = Duration::from_secs(30);

#[test]
#[ignore = "the other test runs it, in a terminal"]
fn thread_panics_while_cluster_is_shown() {
    let ask: tern_top::RequestFn = Arc::new(|_| panic!("on purpose"));
    let ended = tern_top::show(InitialView::Cluster, ViewSettings::default(), None, &ask);
    assert_eq!(ended.unwrap_err().code, 70);
}

#[test]
fn panic_restores_the_terminal_and_is_reported() {
    let tmux = Tmux(format!("tern-top-panic-{}", std::process::id()));
    let this = std::env::current_exe().unwrap();
    let line = format!(
        "LC_ALL=C.UTF-8 RUST_BACKTRACE=0 {} --exact thread_panics_while_cluster_is_shown --ignored \
         --nocapture; echo ended with $?; stty -a | grep -o -- '-\\?icanon'; sleep 1000",
        this.display()
    );
    let started =
        tmux.run(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "40", "sh", "-c", &line]);
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    let started = Instant::now();
    let screen = loop {
        let screen = String::from_utf8(tmux.run(&["capture-pane", "-p"]).stdout).unwrap();
        if screen.contains("icanon\n") {
            break screen;
        }
        assert!(started.elapsed() < SCREEN_TIMEOUT, "it has not ended:\n{screen}");
        std::thread::sleep(Duration::from_millis(20));
    };
    for text in ["\non purpose\n", "\nended with 0\n", "\nicanon\n"] {
        assert!(screen.contains(text), "no {text:?}:\n{screen}");
    }
    let state = tmux.run(&["display-message", "-p", "#{cursor_flag} #{alternate_on}"]);
    assert_eq!(String::from_utf8_lossy(&state.stdout).trim(), "1 0");
}

/// A tmux server for this test; it ends on drop.
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
