//! Servers with an event loop in the storm at its default pace: each answer is right, and a server
//! is moved at least `MIN_MOVE_PERCENT` % as often as a program that only computes.

use super::task_run::{storm, summary};
use super::tasks::Task;
use tern_lab::ProgramMoves;
use tern_tests::cluster::Cluster;

/// The pace of `tern lab storm` without options.
const DEFAULT_PACE: &str = "50..500ms";
/// Number of moves of all processes together.
const MOVES: u64 = 1_000;
/// The server must make at least this percentage of the moves of the program that computes. A
/// server's moves take longer: a Java virtual machine has more memory.
const MIN_MOVE_PERCENT: u64 = 40;
/// Maximum percentage of moves of the server that may be refused.
const MAX_REFUSED_PERCENT: u64 = 5;

const NODE: Task = server("node", &["node", "2000"], &[("node", "nodejs")]);
const JAVA: Task = server("java", &["java", "2000"], &[("javac", "default-jdk-headless")]);
const PYTHON: Task = server("python", &["python", "2000"], &[("/usr/bin/python3", "python3")]);

const fn server(
    name: &'static str,
    args: &'static [&'static str],
    needs: &'static [(&'static str, &'static str)],
) -> Task {
    Task { name, script: "servers.sh", quick: args, long: args, needs }
}

/// Runs a server's task; `program` is the name of the server's program.
fn run(task: &Task, program: &str) {
    let cluster = Cluster::up("server-storm").unwrap();
    let report = storm(&cluster, task, task.long, DEFAULT_PACE, MOVES).unwrap();
    eprintln!("{}\n{}", summary(task.name, &report), report.text());
    let moves_of = |program: &str| report.moves.programs.get(program).copied().unwrap_or_default();
    let (server, computing) = (moves_of(program), moves_of("awk"));
    assert!(
        server.moves * 100 >= computing.moves * MIN_MOVE_PERCENT,
        "{program}: {server:?}, awk: {computing:?}"
    );
    let ProgramMoves { moves, refused } = server;
    assert!(refused * 100 <= (moves + refused) * MAX_REFUSED_PERCENT, "{program}: {server:?}");
}

mod thousand_moves {
    use super::*;

    #[test]
    fn node_server() {
        run(&NODE, "node");
    }

    #[test]
    fn java_server() {
        run(&JAVA, "java");
    }

    #[test]
    fn python_server() {
        run(&PYTHON, "python3");
    }
}
