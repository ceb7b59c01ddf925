//! A shell in a node, on a terminal: job control works. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use support::{lab, lab_command};

/// The terminal's output.
struct Screen {
    lines: Receiver<Vec<u8>>,
    text: String,
}

impl Screen {
    /// Waits until the output contains this text after the text of the previous wait.
    fn wait_for(&mut self, what: &str) {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(at) = self.text.find(what) {
                self.text.drain(..at + what.len());
                return;
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(bytes) => self.text += &String::from_utf8_lossy(&bytes),
                Err(_) => panic!("no {what:?} in {:?}", self.text),
            }
        }
    }
}

#[test]
fn a_shell_in_a_node_has_job_control() {
    let lab = lab("switch", 1);
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let slave = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
    let slave = File::options().read(true).write(true).open(slave).unwrap();
    let mut shell = lab_command(&["exec", "1", "--", "bash", "--norc", "-i"], lab.name());
    shell.env("PS1", "$(hostname)> ").stdin(slave.try_clone().unwrap());
    shell.stdout(slave.try_clone().unwrap()).stderr(slave);
    // SAFETY: system calls only.
    unsafe {
        shell.pre_exec(|| {
            rustix::process::setsid()?;
            rustix::process::ioctl_tiocsctty(std::io::stdin())?;
            Ok(())
        });
    }
    let mut child = shell.spawn().unwrap();
    // Remaining descriptors of the terminal's slave side in this process would keep the terminal
    // open.
    drop(shell);
    let mut keyboard = File::from(master);
    let mut screen = keyboard.try_clone().unwrap();
    let (shown, lines) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = screen.read(&mut buffer) {
            if shown.send(buffer[..n].to_vec()).is_err() {
                break;
            }
        }
    });
    let mut screen = Screen { lines, text: String::new() };
    let mut key = |text: &str| keyboard.write_all(text.as_bytes()).unwrap();
    screen.wait_for("node1> ");
    key("sleep 1000\n");
    screen.wait_for("sleep 1000");
    let sleeping = || support::output_of(&lab.node(1), "ps -eo comm").contains("sleep");
    support::wait_until("sleep runs", sleeping);
    key("\x1a");
    screen.wait_for("Stopped");
    screen.wait_for("node1> ");
    key("jobs -l; fg\n");
    // `jobs -l` and `fg` both print the command. After `fg` has printed it, the shell continues the
    // job.
    screen.wait_for("sleep 1000");
    screen.wait_for("sleep 1000");
    let in_front = || support::output_of(&lab.node(1), "ps -eo stat,comm | grep sleep; :").contains("S+");
    support::wait_until("sleep runs in the foreground", in_front);
    key("\x03");
    screen.wait_for("node1> ");
    support::wait_until("sleep was interrupted", || !sleeping());
    key("exit 9\n");
    assert_eq!(child.wait().unwrap().code(), Some(9));
}
