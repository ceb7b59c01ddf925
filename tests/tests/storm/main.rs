//! Real work in a storm of migrations (`tern lab storm`): what shells, small tools, builds, repositories, databases and
//! Python's own tests say and leave must be what they say and leave without Tern.
//!
//! `TERN_SEED=N` repeats a run's choices; `TERN_MODULES=test_os,test_select` picks some of Python's.
#![allow(clippy::unwrap_used, reason = "a test may end by panicking, and what it calls too")]
#![forbid(unsafe_code)]

mod bed;
mod tasks;
mod threaded;
mod tool;

use bed::storm;
use tasks::{BIRTHS, BUILD, COREUTILS, GIT, OPENSSL, PYTHON, SHELL, SQLITE, Task};
use tern_tests::cluster::Cluster;
use tern_tests::programs::wanted;
use tern_tests::verdict::Verdict;
use threaded::{FFMPEG, GO, JAVA, MULTIPROCESSING, NODE, RAYON, REDIS};

/// Moves that a program must have survived, in the long tests.
const MANY: u64 = 1_000;
/// And each module of Python's tests, of which there are many.
const SOME: u64 = 100;

fn quick(task: &Task) {
    let cluster = Cluster::up("quick-storm").unwrap();
    let report = storm(&cluster, task, task.quick, "20..200ms", 10).unwrap();
    eprintln!("{}", bed::line(task.name, &report));
}

fn long(task: &Task) {
    let cluster = Cluster::up("storm").unwrap();
    let report = storm(&cluster, task, task.long, "20..200ms", MANY).unwrap();
    eprintln!("{}", bed::line(task.name, &report));
}

#[test]
fn a_shell_in_a_short_storm() {
    quick(&SHELL);
}

#[test]
fn small_tools_in_a_short_storm() {
    quick(&COREUTILS);
}

/// A process that begins and ends threads while it is sent.
#[test]
fn threads_begin_while_their_process_is_sent() {
    let cluster = Cluster::up("births-storm").unwrap();
    let report = storm(&cluster, &BIRTHS, &[], "5..60ms", 8).unwrap();
    eprintln!("{}", bed::line("births", &report));
}

mod thousand_moves {
    use super::*;

    #[test]
    fn of_a_shell() {
        long(&SHELL);
    }

    #[test]
    fn of_small_tools() {
        long(&COREUTILS);
    }

    #[test]
    fn of_make_and_gcc() {
        long(&BUILD);
    }

    #[test]
    fn of_git() {
        long(&GIT);
    }

    #[test]
    fn of_sqlite() {
        long(&SQLITE);
    }

    #[test]
    fn of_openssl() {
        long(&OPENSSL);
    }

    #[test]
    fn of_ffmpeg() {
        long(&FFMPEG);
    }

    #[test]
    fn of_redis() {
        long(&REDIS);
    }

    #[test]
    fn of_go() {
        long(&GO);
    }

    #[test]
    fn of_java() {
        long(&JAVA);
    }

    #[test]
    fn of_node() {
        long(&NODE);
    }

    #[test]
    fn of_rayon() {
        long(&RAYON);
    }

    #[test]
    fn of_multiprocessing() {
        long(&MULTIPROCESSING);
    }

    #[test]
    fn of_python_modules() {
        let cluster = Cluster::up("storm").unwrap();
        let mut verdict = Verdict::default();
        let modules = PYTHON.long.iter().filter(|module| wanted("TERN_MODULES", module));
        verdict.each(modules.map(|module| ((*module).to_owned(), *module)), 1, |module| {
            let name = format!("test.{module}");
            let report =
                storm(&cluster, &PYTHON, &[&name], "20..200ms", SOME).map_err(|e| format!("{e:#}"))?;
            Ok(vec![bed::line(module, &report)])
        });
        verdict.pronounce();
    }
}
