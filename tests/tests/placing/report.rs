//! What users see of placed commands: the report of a build, the status line of a terminal, and
//! mps.

use anyhow::{Context, Result};
use serde_json::Value;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tern_control::PlacedRow;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection;

/// Timeout for anything that a busy machine may delay.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    fault_injection::wait_until(what, EVENT_TIMEOUT, holds).expect("timed out");
}

/// A project whose recipes take a while; their output contains `</script>`, which must not end the
/// page's script.
const PROJECT: &str = r##"
unset MAKELEVEL MAKEFLAGS MFLAGS
rm -rf /tmp/p && mkdir /tmp/p && cd /tmp/p
cat > Makefile <<'END'
all: $(addprefix o, 1 2 3 4 5 6 7 8) last
o%:
	@sleep 0.4; echo 'made $@ </script>' >&2; touch $@
last: $(addprefix o, 1 2 3 4 5 6 7 8)
	@sh -c 'exit 3'
removed:
	@trap 'while test -e $@; do sleep 0.05; done; trap - INT; kill -INT $$$$' INT; touch $@; sleep 300
END
"##;

fn shell(cluster: &Cluster, line: &str) -> Command {
    let mut command = cluster.command(1, "sh");
    command.args(["-c", &format!("{PROJECT}\n{line}")]).env("TERM", "xterm");
    command
}

#[test]
fn report_lists_every_command_and_a_pipe_gets_no_status() {
    let cluster = Cluster::with_nodes("report", 3).unwrap();
    let run = |make: &str| {
        let end = shell(&cluster, make).output().unwrap();
        let text = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        (end.status.code(), text(&end.stdout), text(&end.stderr))
    };
    let native = run("make -j6");
    assert!(native.0 == Some(2) && native.2.len() == 9, "{native:?}");
    assert_eq!(run("mpmake -j6 --report build.html"), native);
    let page = String::from_utf8(cluster.run(1, &["cat", "/tmp/p/build.html"]).unwrap()).unwrap();
    let data = page.split("id=\"data\">").nth(1).and_then(|rest| rest.split("</script>").next()).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let commands = data["commands"].as_array().unwrap();
    assert_eq!(commands.len(), 9);
    let mut nodes = Vec::new();
    for command in commands {
        let time = |at: usize| command[at].as_u64().unwrap();
        assert!(time(0) <= time(1) && time(1) + 1000 < time(2), "{command}");
        assert!(command[7].as_u64().is_some_and(|cpu| cpu > 0), "no CPU time: {command}");
        nodes.push(data["nodes"][time(3) as usize]["name"].as_str().unwrap().to_owned());
    }
    nodes.sort();
    nodes.dedup();
    assert!(nodes.len() > 1, "{nodes:?}");
    let failed: Vec<_> = commands.iter().filter(|command| command[6] != 0).collect();
    assert!(failed.len() == 1 && failed[0][6] == 3 && failed[0][9] == "sh -c 'exit 3'", "{failed:?}");
    assert!(page.contains("it failed with 2; ") && page.contains(", 6 jobs at a time"));
    // The same for commands that were not started by mpmake.
    let line =
        "for i in 1 2 3; do TERN_PLACED=notes mexec -n 2,3 sleep 0.1 & done; wait; mexec --report-of notes";
    let end = shell(&cluster, line).output().unwrap();
    let page = String::from_utf8_lossy(&end.stdout).into_owned();
    assert!(page.contains("<b>3</b>commands") && page.contains("asked for by name"), "{page}");
    assert_eq!(run("mpmake --report /nonexistent/x").0, Some(74));
    let left = cluster.run(1, &["sh", "-c", "ls /tmp | grep -c ^mpmake- || true"]).unwrap();
    assert_eq!(left, b"0\n");
}

/// One of two nodes has all files and is busy, and its link carries 2.5 MB/s, which the interface
/// does not report.
#[test]
fn slow_link_is_reported_as_the_bottleneck() {
    let cluster = Cluster::with_link("narrow", 2, "switch:20mbit").unwrap();
    let project = r##"
unset MAKELEVEL MAKEFLAGS MFLAGS
mkdir /tmp/p && cd /tmp/p
for n in $(seq 16); do head -c 3000000 /dev/urandom > f$n; done
cat > Makefile <<'END'
all: $(addprefix o, $(shell seq 16))
o%: f%
	@sleep 0.1; sha256sum $< > $@
END
while :; do :; done & busy="$busy $!"
while :; do :; done & busy="$busy $!"
until [ $(($(cat /run/mosix/nodes/1/load) * $(cat /run/mosix/nodes/1/speed))) -gt 1700000 ]; do sleep 0.1; done
mpmake -j4 --report build.html 2> /dev/null && cat build.html
kill $busy
"##;
    let page = cluster.run(1, &["sh", "-c", project]).unwrap();
    let page = String::from_utf8_lossy(&page).into_owned();
    let held_up = page.split("<h2>Bottleneck</h2>").nth(1).expect("a report");
    let held_up = held_up.split("<h2>").next().unwrap();
    assert!(held_up.starts_with("<p>The link of this node, which all files come from: for "), "{held_up}");
    // The link, 2.5 MB/s, was full for more than half of the time.
    let rate = held_up.split("data waited to be sent, at ").nth(1).and_then(|said| said.split(' ').next());
    let rate: f64 = rate.and_then(|rate| rate.parse().ok()).expect("a rate");
    assert!((1.2..2.7).contains(&rate) && held_up.contains(" MB a second"), "{held_up}");
}

fn placed(cluster: &Cluster, node: u16) -> Result<Vec<PlacedRow>> {
    Ok(serde_json::from_slice(&cluster.run(node, &["mps", "-x", "--json"])?)?)
}

#[test]
fn placed_commands_are_listed_while_they_run() {
    let cluster = Cluster::with_nodes("mpsx", 2).unwrap();
    assert_eq!(placed(&cluster, 1).unwrap(), []);
    let mut many: Vec<_> = (0..7)
        .map(|_| cluster.command(1, "mexec").args(["-n", "2", "sleep", "1000"]).spawn().unwrap())
        .collect();
    let on = |node: Option<u16>| {
        let rows = placed(&cluster, 1).unwrap();
        rows.iter().filter(|row| row.r#where.map(|node| node.0) == node && row.from.is_none()).count()
    };
    // The node runs one command more than it has CPUs.
    wait_until("some run and the others wait", || on(Some(2)) == 2 && on(None) == 5);
    let there = placed(&cluster, 2).unwrap();
    assert_eq!(there.len(), on(Some(2)));
    assert!(there.iter().all(|row| row.from.is_some_and(|home| home.0 == 1) && row.command == "sleep 1000"));
    let table = String::from_utf8(cluster.run(1, &["mps", "-x"]).unwrap()).unwrap();
    assert!(table.contains("queued") && table.contains("sleep 1000"), "{table}");
    let mon = String::from_utf8(cluster.run(1, &["mon", "--once"]).unwrap()).unwrap();
    assert!(mon.contains(" queued, load "), "{mon}");
    // At a terminal, mexec prints what the command waits for.
    let said = at_a_terminal(&cluster, "exec mexec -n 2 true", "is full", b"\x03").unwrap();
    assert!(said.starts_with("mexec: waiting: node 2 is full\n"), "{said:?}");
    cluster.run(1, &["pkill", "-x", "mexec"]).unwrap();
    many.iter_mut().for_each(|one| drop(one.wait()));
    wait_until("none is left", || (1..=2).all(|node| placed(&cluster, node).unwrap().is_empty()));
}

/// The text of a terminal that has not scrolled, without the status line below it; and how often
/// the status line was drawn.
fn without_status(said: &str) -> (String, usize) {
    let mut parts = said.split("\x1b7");
    let mut text = parts.next().unwrap_or_default().to_owned();
    let mut count = 0;
    for part in parts {
        let (status, rest) = part.split_once("\x1b8").expect("the cursor is not restored");
        count += usize::from(status.contains("mpmake: "));
        text += rest;
    }
    (text.replace("\x1bD\x1b[A", ""), count)
}

/// Runs a command at a terminal, and returns its output. Once this word has appeared, these keys
/// are typed.
fn at_a_terminal(cluster: &Cluster, line: &str, word: &str, keys: &[u8]) -> Result<String> {
    let line = format!("stty rows 20 cols 90 -echo; {line}");
    let mut script = shell(cluster, "exec script -qec \"$0\" /dev/null");
    let script = script.arg(line).env("SHELL", "/bin/sh").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut script = script.spawn()?;
    // When its input closes, script sends an end of file, so the input stays open.
    let mut keyboard = script.stdin.take().context("no keyboard")?;
    let mut output = script.stdout.take().context("no output")?;
    let (mut said, mut bytes, mut typed) = (Vec::new(), [0; 4096], false);
    loop {
        let count = output.read(&mut bytes)?;
        if count == 0 {
            break;
        }
        said.extend_from_slice(&bytes[..count]);
        if !typed && String::from_utf8_lossy(&said).contains(word) {
            keyboard.write_all(keys)?;
            typed = true;
        }
    }
    let _status = script.wait()?;
    Ok(String::from_utf8_lossy(&said).replace('\r', ""))
}

#[test]
fn terminal_status_line_is_shown_and_removed() {
    let cluster = Cluster::with_nodes("status", 2).unwrap();
    let said = at_a_terminal(&cluster, "mpmake -j1 o1 o2 o3 o4 o5 o6 o7 o8; echo over", "\0", b"").unwrap();
    let (text, shown) = without_status(&said);
    let made: Vec<_> = (1..=8).map(|n| format!("made o{n} </script>")).collect();
    let lines: Vec<_> = text.lines().collect();
    assert!(shown > 0 && said.contains(" done | "), "{said:?}");
    assert_eq!(lines[..8], made, "{said:?}");
    assert!(
        lines[8].starts_with("mpmake: 8 commands in ") && lines[9].starts_with("mpmake: reasons: "),
        "{said:?}"
    );
    assert_eq!(lines[10..], ["over"]);
    // The whole screen scrolls again, and the status line is erased.
    assert!(said.rfind("\x1b[r\x1b[20;1H\x1b[0m\x1b[2K") > said.rfind(" done"), "{said:?}");
    // A short build shows no status line, if the machine is fast enough for it to be short.
    let begun = Instant::now();
    let said = at_a_terminal(&cluster, "mpmake o1", "\0", b"").unwrap();
    let shows_nothing = !said.contains('\x1b') || begun.elapsed() > Duration::from_secs(2);
    assert!(shows_nothing && said.contains("mpmake: 1 commands"), "{said:?}");
    // After an interrupt, make removes the target, and the terminal is restored. The recipe ends
    // only then: if make finds it ended before it handles the interrupt, make waits for a child that
    // it no longer has, and fails with 2, also natively.
    let line = "trap : INT; mpmake -j1 removed; echo code $?";
    let said = at_a_terminal(&cluster, line, " done | ", b"\x03").unwrap();
    let (text, _) = without_status(&said);
    assert!(text.contains("Interrupt") && text.contains("code 130"), "{said:?}");
    assert!(said.rfind("\x1b[r\x1b[20;1H\x1b[0m\x1b[2K") > said.rfind(" done | "), "{said:?}");
}
