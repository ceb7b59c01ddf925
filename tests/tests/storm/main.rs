//! Real work in a storm of migrations (`tern lab storm`): the output and files of shells, small
//! tools, builds, repositories, databases and Python's own tests must be the same as without Tern.
//!
//! `TERN_SEED=N` repeats a run's choices; `TERN_MODULES=test_os,test_select` selects Python test
//! modules.
#![allow(clippy::unwrap_used, reason = "tests and their helpers fail by panicking")]
#![forbid(unsafe_code)]

mod servers;
mod task_run;
mod tasks;
mod threaded;
mod tool;

use task_run::storm;
use tasks::{BIRTHS, BUILD, COREUTILS, GIT, OPENSSL, PYTHON, SHELL, SQLITE, Task};
use tern_tests::cluster::Cluster;
use tern_tests::programs::wanted;
use tern_tests::runs::verdict::Verdict;
use threaded::{FFMPEG, GO, JAVA, MULTIPROCESSING, NODE, RAYON, REDIS};

/// Number of moves in the long tests.
const LONG_TEST_MOVES: u64 = 1_000;
/// Number of moves for each module of Python's tests, of which there are many.
const MODULE_MOVES: u64 = 100;

fn quick(task: &Task) {
    let cluster = Cluster::up("quick-storm").unwrap();
    let report = storm(&cluster, task, task.quick, "20..200ms", 10).unwrap();
    eprintln!("{}", task_run::summary(task.name, &report));
}

fn long(task: &Task) {
    let cluster = Cluster::up("storm").unwrap();
    let report = storm(&cluster, task, task.long, "20..200ms", LONG_TEST_MOVES).unwrap();
    eprintln!("{}", task_run::summary(task.name, &report));
}

#[test]
fn shell_survives_a_short_storm() {
    quick(&SHELL);
}

#[test]
fn small_tools_survive_a_short_storm() {
    quick(&COREUTILS);
}

/// Threads start and end while their process is migrated.
#[test]
fn thread_creation_survives_moves() {
    let cluster = Cluster::up("births-storm").unwrap();
    let report = storm(&cluster, &BIRTHS, &[], "5..60ms", 8).unwrap();
    eprintln!("{}", task_run::summary("births", &report));
}

mod thousand_moves {
    use super::*;

    #[test]
    fn shell() {
        long(&SHELL);
    }

    #[test]
    fn small_tools() {
        long(&COREUTILS);
    }

    #[test]
    fn make_and_gcc() {
        long(&BUILD);
    }

    #[test]
    fn git() {
        long(&GIT);
    }

    #[test]
    fn sqlite() {
        long(&SQLITE);
    }

    #[test]
    fn openssl() {
        long(&OPENSSL);
    }

    #[test]
    fn ffmpeg() {
        long(&FFMPEG);
    }

    #[test]
    fn redis() {
        long(&REDIS);
    }

    #[test]
    fn go() {
        long(&GO);
    }

    #[test]
    fn java() {
        long(&JAVA);
    }

    #[test]
    fn node() {
        long(&NODE);
    }

    #[test]
    fn rayon() {
        long(&RAYON);
    }

    #[test]
    fn multiprocessing() {
        long(&MULTIPROCESSING);
    }

    #[test]
    fn python_modules() {
        let cluster = Cluster::up("storm").unwrap();
        let mut verdict = Verdict::default();
        let modules = PYTHON.long.iter().filter(|module| wanted("TERN_MODULES", module));
        verdict.each(modules.map(|module| ((*module).to_owned(), *module)), 1, |module| {
            let name = format!("test.{module}");
            let report = storm(&cluster, &PYTHON, &[&name], "20..200ms", MODULE_MOVES)
                .map_err(|e| format!("{e:#}"))?;
            Ok(vec![task_run::summary(module, &report)])
        });
        verdict.conclude();
    }
}
