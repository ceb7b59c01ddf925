//! Programs with more rights than their user run at home, since the node that runs a process could
//! make system calls with them.
#![allow(clippy::unwrap_used, reason = "tests and their helpers fail by panicking")]

use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{pids, wait_until};
use tern_tests::runs::running::{ANNOUNCE, Running};

const EVENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Copies of cat in a directory of node 1, by name, and the command that gives each its rights.
const PROGRAMS: [(&str, &str); 4] = [
    ("of-root", "chmod 4755"),
    ("of-another", "chown 65533 $0; chmod 4755"),
    ("of-group", "chgrp 65533 $0; chmod 2755"),
    ("capable", "setcap cap_dac_read_search+ep"),
];

/// A copy of cat without rights.
const PLAIN: &str = "plain-cat";

/// Ways in which a user's process on node 2 gets a new program: it is placed there, executes it, or
/// forks a child that executes it.
const WAYS: [&[&str]; 3] = [
    &["runon", "2"],
    &["runon", "2", "sh", "-c", "exec \"$0\" \"$@\""],
    &["runon", "2", "sh", "-c", "\"$0\" \"$@\"; exit $?"],
];

const AS_USER: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

fn make_programs(cluster: &Cluster) {
    let script = "umask 022; cd /usr/local/bin && cp /usr/bin/cat plain-cat && echo public > /usr/local/public
        echo secret > /usr/local/secret && chown 65533:65533 /usr/local/secret && chmod 440 /usr/local/secret";
    cluster.run(1, &["sh", "-c", script]).unwrap();
    for (name, how) in PROGRAMS {
        let program = format!("/usr/local/bin/{name}");
        let script = format!("cp /usr/bin/cat $0 && {how} $0");
        cluster.run(1, &["sh", "-c", &script, &program]).unwrap();
    }
}

/// Starts a program as a user, which prints the file and then waits for the end of its input.
fn start(cluster: &Cluster, way: &[&str], program: &str, file: &str) -> Running {
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).args(AS_USER).args(way);
    command.args([&*format!("/usr/local/bin/{program}"), file, "-"]);
    Running::start(&mut command, false).unwrap()
}

/// Waits until the program has printed the file, and returns its pid.
fn await_program(cluster: &Cluster, running: &Running, program: &str, word: &str) -> i32 {
    let printed = running.await_output(word);
    let seen = || format!("{}\n{}", running.output_so_far(), cluster.diagnostics(0));
    assert!(printed.is_ok(), "{program}: {printed:?}; {}", seen());
    let found = pids(cluster, 1, program).unwrap();
    assert_eq!(found.len(), 1, "the pids of {program}");
    found[0]
}

fn finish(mut running: Running, expected: &str) {
    running.close_input();
    let end = running.finish(EVENT_TIMEOUT).unwrap();
    assert_eq!((end.status, String::from_utf8_lossy(&end.out).as_ref()), (0, expected));
}

fn is_on_node_2(cluster: &Cluster, program: &str) -> bool {
    let start = format!("/usr/local/bin/{program} ");
    cluster.processes(2).unwrap().iter().any(|row| row.from.is_some() && row.command.starts_with(&start))
}

#[test]
fn program_with_more_rights_than_its_user_runs_at_home() {
    let cluster = Cluster::with_nodes("rights", 2).unwrap();
    make_programs(&cluster);
    for (number, way) in WAYS.into_iter().enumerate() {
        let running = start(&cluster, way, PLAIN, "/usr/local/public");
        await_program(&cluster, &running, PLAIN, "public");
        assert!(is_on_node_2(&cluster, PLAIN), "way {number}: the program is not placed");
        finish(running, "public\n");
        for (program, _) in PROGRAMS {
            let running = start(&cluster, way, program, "/usr/local/secret");
            let pid = await_program(&cluster, &running, program, "secret");
            assert!(!is_on_node_2(&cluster, program), "way {number}: {program} runs on node 2");
            let shown = cluster.location(pid).unwrap();
            assert!(
                shown.as_ref().is_some_and(|(node, why)| *node == 1 && why.starts_with("rights: ")),
                "way {number}: {program} is shown as {shown:?}"
            );
            finish(running, "secret\n");
        }
    }
}

/// A process at home that has more rights than its user is moved neither by that user nor by the
/// balancer; root may move it. Its next program must not have more rights than that.
#[test]
fn only_root_moves_a_process_with_more_rights() {
    let cluster = Cluster::with_nodes("rightsmove", 2).unwrap();
    make_programs(&cluster);
    for (program, _) in PROGRAMS {
        let running = start(&cluster, &["mosrun", "-L"], program, "/usr/local/secret");
        let pid = await_program(&cluster, &running, program, "secret");
        let mut command = cluster.command(1, AS_USER[0]);
        let end =
            command.args(&AS_USER[1..]).args(["tern", "migrate", &pid.to_string(), "2"]).output().unwrap();
        assert_eq!(end.status.code(), Some(3), "{program}: {}", String::from_utf8_lossy(&end.stderr));
        cluster.migrate(pid, "2").unwrap();
        assert!(is_on_node_2(&cluster, program));
        finish(running, "secret\n");
    }
    let script = "read line; exec /usr/local/bin/of-root /usr/local/secret -";
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).args(AS_USER).args(["mosrun", "-L", "sh", "-c", script]);
    let mut running = Running::start(&mut command, false).unwrap();
    cluster.migrate(running.pid, "2").unwrap();
    running.send_input("\n").unwrap();
    let pid = await_program(&cluster, &running, "of-root", "secret");
    assert_eq!(pid, running.pid);
    wait_until("it is at home", EVENT_TIMEOUT, || {
        cluster.location(pid).unwrap().is_some_and(|(node, why)| node == 1 && why.starts_with("rights: "))
    })
    .unwrap();
    finish(running, "secret\n");
}
