//! A terminal that a test can read and type on.

use crate::ternd::Ternd;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a test waits for an expected screen.
pub(crate) const SCREEN_TIMEOUT: Duration = Duration::from_secs(30);

/// A tmux server for one test; it ends on drop, with everything that runs in it.
pub(crate) struct Terminal {
    server: String,
}

impl Terminal {
    /// Runs a tool, then prints its exit status and the terminal's mode.
    pub(crate) fn start(ternd: &Ternd, size: (u16, u16), line: &str) -> Self {
        let after = "echo ended with $?; stty -a | grep -o -- '-\\?icanon'; sleep 1000";
        Self::with(ternd, size, &["sh", "-c", &format!("{line}; {after}")])
    }

    /// Runs a shell with job control.
    pub(crate) fn shell(ternd: &Ternd, size: (u16, u16)) -> Self {
        let terminal = Self::with(ternd, size, &["env", "PS1=ready ", "bash", "--norc", "--noprofile", "-i"]);
        terminal.wait_for("ready");
        terminal
    }

    fn with(ternd: &Ternd, (columns, lines): (u16, u16), program: &[&str]) -> Self {
        let name = ternd.dir.file_name().unwrap().to_str().unwrap();
        // A server that is still ending would block the reuse of its name.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let terminal = Self { server: format!("{name}-{}", COUNT.fetch_add(1, Ordering::Relaxed)) };
        let path = format!("PATH={}:{}", ternd.dir.display(), std::env::var("PATH").unwrap());
        let directory = format!("TERN_RUN_DIR={}", ternd.dir.display());
        let (columns, lines) = (columns.to_string(), lines.to_string());
        let mut words = vec!["-f", "/dev/null", "new-session", "-d", "-x", &columns, "-y", &lines];
        words.extend(["env", "-u", "NO_COLOR", "LC_ALL=C.UTF-8", &path, &directory]);
        words.extend(program);
        let output = terminal.tmux(&words);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        terminal
    }

    fn tmux(&self, words: &[&str]) -> Output {
        Command::new("tmux").args(["-u", "-L", &self.server]).args(words).env_remove("TMUX").output().unwrap()
    }

    /// The text on the screen.
    fn screen(&self) -> String {
        String::from_utf8(self.tmux(&["capture-pane", "-p"]).stdout).unwrap()
    }

    /// The text on the screen with its colour sequences.
    pub(crate) fn screen_with_colours(&self) -> String {
        String::from_utf8(self.tmux(&["capture-pane", "-p", "-e"]).stdout).unwrap()
    }

    /// Waits until `text` is on the screen; returns the whole screen.
    pub(crate) fn wait_for(&self, text: &str) -> String {
        self.wait_for_both(text, text)
    }

    /// Waits until both texts are on the screen at once; returns the whole screen. A picture drawn
    /// from top to bottom is complete only when both its first and its last line are there, because
    /// a capture can happen in between.
    pub(crate) fn wait_for_both(&self, one: &str, other: &str) -> String {
        let started = Instant::now();
        loop {
            let screen = self.screen();
            // Lets a pattern that begins with a newline match the first line too.
            let lines = format!("\n{screen}");
            if lines.contains(one) && lines.contains(other) {
                return screen;
            }
            assert!(started.elapsed() < SCREEN_TIMEOUT, "no {one:?} and {other:?} on the screen:\n{screen}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the tool has ended with this status and has restored the terminal.
    pub(crate) fn wait_for_restored(&self, status: &str) {
        self.wait_for(&format!("\nended with {status}\n"));
        let screen = self.wait_for("icanon\n");
        assert!(screen.contains("\nicanon"), "the terminal is still raw:\n{screen}");
        let cursor = self.tmux(&["display-message", "-p", "#{cursor_flag} #{alternate_on}"]);
        assert_eq!(String::from_utf8_lossy(&cursor.stdout).trim(), "1 0");
    }

    /// Presses keys, by tmux's names.
    pub(crate) fn press(&self, keys: &[&str]) {
        assert!(self.tmux(&[&["send-keys"], keys].concat()).status.success());
    }

    /// Types a line literally, so that words such as `home` are not key names.
    pub(crate) fn type_line(&self, line: &str) {
        self.press(&["-l", line]);
        self.press(&["Enter"]);
    }

    /// Resizes the terminal.
    pub(crate) fn resize(&self, (columns, lines): (u16, u16)) {
        let (columns, lines) = (columns.to_string(), lines.to_string());
        assert!(self.tmux(&["resize-window", "-x", &columns, "-y", &lines]).status.success());
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}
