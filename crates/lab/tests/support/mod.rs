//! Helpers of the lab's tests: labs, sockets in nodes, waiting for conditions.
#![allow(dead_code, reason = "each test program uses a part of it")]

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{self, File};
use std::io;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};
use tern_lab::{Lab, LabName, LabOptions, Node};

/// The binary with the lab's command line, which is also its init.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_tern-lab");

/// Options for a lab with a unique name.
pub(crate) fn options(link: &str, nodes: u16) -> LabOptions {
    let own = LabOptions::unique("test").unwrap();
    LabOptions { nodes, link: link.parse().unwrap(), helper: Some(PROGRAM.into()), ..own }
}

/// Creates a lab. It is taken down when the test ends, also by a panic.
pub(crate) fn lab(link: &str, nodes: u16) -> Lab {
    start_lab(&options(link, nodes))
}

/// Creates a lab with these options.
pub(crate) fn start_lab(options: &LabOptions) -> Lab {
    Lab::up(options).unwrap_or_else(|e| panic!("no lab: {e}"))
}

/// Runs a shell script in the node.
pub(crate) fn sh(node: &Node, script: &str) -> Output {
    node.command("sh").args(["-c", script]).output().unwrap()
}

/// Runs a shell script in the node, which must succeed, and returns its output.
pub(crate) fn output_of(node: &Node, script: &str) -> String {
    let output = sh(node, script);
    assert!(output.status.success(), "{script} on node {}: {output:?}", node.number());
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Waits until the condition holds, for at most 20 s.
pub(crate) fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    assert!(holds_in_time(condition), "never: {what}");
}

/// Whether the condition holds within 20 s.
fn holds_in_time(mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(20);
    while !condition() {
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Runs a closure in the node's network namespace.
pub(crate) fn in_network_namespace<T: Send + 'static>(
    node: &Node,
    run: impl FnOnce() -> T + Send + 'static,
) -> T {
    let space = File::open(format!("/proc/{}/ns/net", node.init_pid().unwrap())).unwrap();
    // A thread of its own, so that the caller's thread stays in its namespace.
    let thread = thread::spawn(move || {
        move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        run()
    });
    thread.join().unwrap()
}

/// A UDP socket in the node, bound to this port.
pub(crate) fn udp_socket(node: &Node, port: u16) -> UdpSocket {
    let socket = in_network_namespace(node, move || UdpSocket::bind(("0.0.0.0", port)).unwrap());
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    socket
}

/// The two ends of a TCP connection from one node to another.
pub(crate) fn tcp_connection(from: &Node, to: &Node, port: u16) -> (TcpStream, TcpStream) {
    let listener = in_network_namespace(to, move || TcpListener::bind(("0.0.0.0", port)).unwrap());
    let address = to.address();
    let near = in_network_namespace(from, move || TcpStream::connect((address, port)).unwrap());
    (near, listener.accept().unwrap().0)
}

/// Whether a datagram gets from one node to the other within about a second.
pub(crate) fn reaches(from: &Node, to: &Node) -> bool {
    let (near, far) = (udp_socket(from, 0), udp_socket(to, 0));
    let port = far.local_addr().unwrap().port();
    let mut buffer = [0; 16];
    (0..4).any(|_| {
        // Without a neighbour entry the kernel reports an error after a while.
        let _ = near.send_to(b"tern", (to.address(), port));
        far.recv(&mut buffer).is_ok_and(|n| &buffer[..n] == b"tern")
    })
}

/// All remains of a lab on this machine: directories, mounts and processes.
pub(crate) fn remains(name: &LabName) -> Vec<String> {
    let name = name.as_str();
    let mut found = Vec::new();
    let mut directories = vec![PathBuf::from("/run/tern-lab").join(name)];
    for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        directories.push(hierarchy.path().join("tern-lab").join(name));
    }
    directories.push(Path::new("/sys/fs/cgroup/tern-lab").join(name));
    found.extend(directories.iter().filter(|d| d.exists()).map(|d| d.display().to_string()));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    found.extend(mounts.lines().filter(|l| l.contains(name)).map(str::to_owned));
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(words) = fs::read(process.path().join("cmdline")) else { continue };
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        let is_pid = process.file_name().to_string_lossy().parse::<u32>().is_ok();
        if is_pid && words.contains("tern-lab") && words.split(' ').any(|w| w == name) {
            found.push(format!("{} {words}", process.file_name().to_string_lossy()));
        }
    }
    found
}

/// Waits until no trace of the lab remains.
pub(crate) fn assert_gone(name: &LabName) {
    let is_gone = holds_in_time(|| remains(name).is_empty());
    assert!(is_gone, "left of the lab: {:?}", remains(name));
}

/// A `tern-lab` command with these arguments, for the lab of this name.
pub(crate) fn lab_command(words: &[&str], name: &LabName) -> Command {
    let mut command = Command::new(PROGRAM);
    let (verb, rest) = words.split_first().unwrap();
    command.arg(verb).args(["--lab", name.as_str()]).args(rest);
    command
}

/// Whether the error is a read timeout.
pub(crate) fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
