//! Faults under placed commands: a build whose nodes are lost completes as if nothing had happened,
//! callers get an error where that is impossible, and nothing is left running.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tern_control::PlacedRow;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{self, await_up, configure};
use tern_tests::runs::outcome::result_of;

/// Timeout for anything that a busy machine may delay.
const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    fault_injection::wait_until(what, EVENT_TIMEOUT, holds).expect("timed out");
}

/// A shell command on node 1 with captured output.
fn shell(cluster: &Cluster, line: &str) -> Command {
    let mut command = cluster.command(1, "sh");
    command.args(["-c", line]).current_dir("/tmp").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The processes of a node, counted by command line.
fn processes(cluster: &Cluster, node: u16) -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    for line in String::from_utf8_lossy(&cluster.run(node, &["ps", "-eo", "args="]).unwrap()).lines() {
        if line != "ps -eo args=" {
            *all.entry(line.to_owned()).or_default() += 1;
        }
    }
    all
}

/// The processes of all nodes when no command is placed. Each node but node 1 has a container for
/// the commands of node 1.
struct IdleProcesses<'a>(&'a Cluster, Vec<(u16, BTreeMap<String, usize>)>);

impl<'a> IdleProcesses<'a> {
    fn of(cluster: &'a Cluster) -> Self {
        let nodes: Vec<u16> = cluster.lab().nodes().map(|node| node.number()).collect();
        for node in &nodes[1..] {
            cluster.run(1, &["mexec", "-n", &node.to_string(), "true"]).unwrap();
        }
        // The last command's init may exist a moment longer.
        let look = || nodes.iter().map(|node| (*node, processes(cluster, *node))).collect::<Vec<_>>();
        let mut idle = look();
        wait_until("the nodes are idle", || {
            std::thread::sleep(Duration::from_millis(300));
            let before = std::mem::replace(&mut idle, look());
            before == idle
        });
        Self(cluster, idle)
    }

    /// Waits until no other processes run on these nodes.
    fn await_idle(&self, nodes: &[u16]) {
        for (node, idle) in self.1.iter().filter(|(node, _)| nodes.contains(node)) {
            let more = || {
                let mut now = processes(self.0, *node);
                now.retain(|line, count| *count > idle.get(line).copied().unwrap_or(0));
                now
            };
            let end = Instant::now() + EVENT_TIMEOUT;
            while !more().is_empty() {
                assert!(Instant::now() < end, "left on node {node}: {:#?}", more());
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Number of commands of node 1 that run on a node, according to node 1.
fn placed(cluster: &Cluster, node: u16) -> usize {
    let end = cluster.command(1, "mps").args(["-x", "--json"]).output().unwrap();
    let rows: Vec<PlacedRow> = serde_json::from_slice(&end.stdout).unwrap_or_default();
    rows.iter().filter(|row| row.from.is_none() && row.r#where.is_some_and(|on| on.0 == node)).count()
}

/// Three directories with nine files each, the two below built by recursive makes; each file takes
/// about a third of a second to compile.
const PROJECT: &str = r##"
unset MAKELEVEL MAKEFLAGS MFLAGS
rm -rf /tmp/p && mkdir -p /tmp/p/a /tmp/p/b && cd /tmp/p
for d in t a b; do
  for i in $(seq 9); do
    for n in $(seq 50); do
      echo "int ${d}${i}_$n(int *a, int n) { int s = $n; for (int i = 0; i < n; i++) s += a[i] * (i ^ $i) % 7; return s; }"
    done > $d$i.c
  done
  [ $d = t ] || mv $d*.c $d
done
echo 'int t1_1(int *, int); int main(void) { int a[9] = {1}; return t1_1(a, 9) == 0; }' > main.c
cat > rules.mk <<'END'
OBJECTS = $(patsubst %.c,%.o,$(sort $(wildcard *.c)))
lib.a: $(OBJECTS)
	ar rcsD $@ $^
%.o: %.c
	gcc -O2 -c -o $@ $<
END
for d in a b; do echo 'include ../rules.mk' > $d/Makefile; done
cat > Makefile <<'END'
program: lib.a a b
	gcc -o $@ main.o lib.a a/lib.a b/lib.a
include rules.mk
.PHONY: a b
a b:
	$(MAKE) -s -C $@
END
"##;

const SUMS: &str = "cd /tmp/p && find . -name '*.o' -o -name '*.a' -o -name program | sort | xargs sha256sum";

fn objects(cluster: &Cluster) -> usize {
    let count = cluster.run(1, &["sh", "-c", "find /tmp/p -name '*.o' -size +0 | wc -l"]).unwrap();
    String::from_utf8_lossy(&count).trim().parse().unwrap()
}

/// Runs mpmake in a fresh copy of the project.
fn build(cluster: &Cluster) -> Child {
    shell(cluster, &format!("{PROJECT}\nexec mpmake -j9 --report /tmp/build.html")).spawn().unwrap()
}

/// Waits until this many objects exist and a command runs on this node.
fn await_progress(cluster: &Cluster, made: usize, node: u16) {
    wait_until("it runs there", || objects(cluster) >= made && placed(cluster, node) > 0);
}

/// Builds with plain make, and returns the checksums.
fn native(cluster: &Cluster) -> String {
    let end = shell(cluster, &format!("{PROJECT}\nmake -sj3 && {SUMS}")).output().unwrap();
    let (code, sums, err) = result_of(&end);
    assert!(code == Some(0) && sums.lines().count() == 28 + 3 + 1, "{code:?} {sums} {err}");
    sums
}

/// Node 2 fails in the middle of a build, and node 3 a little later: the build completes as if
/// nothing had happened.
fn lose_two_nodes(prefix: &str, damage: impl Fn(&Cluster, u16), repair: impl Fn(&Cluster, u16)) {
    let cluster = Cluster::up(prefix).unwrap();
    let begun = Instant::now();
    let at = |what: &str| println!("{:5.1} s: {what}", begun.elapsed().as_secs_f32());
    let sums = native(&cluster);
    at("plain make is done");
    let idle = IdleProcesses::of(&cluster);
    let mpmake = build(&cluster);
    await_progress(&cluster, 4, 2);
    damage(&cluster, 2);
    at("node 2 is lost");
    await_progress(&cluster, 10, 3);
    damage(&cluster, 3);
    at("node 3 is lost");
    let (code, out, err) = result_of(&mpmake.wait_with_output().unwrap());
    at("mpmake is done");
    assert!(code == Some(0), "{code:?} {out}{err}");
    let made = || String::from_utf8(cluster.run(1, &["sh", "-c", SUMS]).unwrap()).unwrap();
    assert_eq!(made(), sums);
    idle.await_idle(&[1]);
    let report = String::from_utf8(cluster.run(1, &["cat", "/tmp/build.html"]).unwrap()).unwrap();
    for node in [2, 3] {
        let again = report.matches(&format!("again, since node {node} was lost")).count();
        println!("{again} commands once more since node {node} was lost");
        assert!(again > 0, "no command of node {node} was run again: {err}");
    }
    for node in [2, 3] {
        repair(&cluster, node);
    }
    at("both are back");
    // Commands that ran there have ended, and have written nothing more.
    idle.await_idle(&[1, 2, 3]);
    assert_eq!(made(), sums);
    for node in ["2", "3"] {
        wait_until("it is back", || cluster.run(1, &["mexec", "-n", node, "true"]).is_ok());
    }
    at("both run commands");
}

#[test]
fn build_survives_killed_daemons() {
    let kill = |cluster: &Cluster, node| {
        let line = "pkill -KILL -x 'ternd|tern-exec|tern-container|tern-mfs'; ! pgrep -x 'ternd|tern-exec|tern-container|tern-mfs' || sleep 1";
        cluster.run(node, &["sh", "-c", line]).unwrap();
    };
    let restart = |cluster: &Cluster, node| {
        assert!(processes(cluster, node).keys().all(|line| !line.contains("gcc") && !line.contains("cc1")));
        cluster.lab().restart(node).unwrap();
        await_up(cluster, node).unwrap();
    };
    lose_two_nodes("faultskill", kill, restart);
}

#[test]
fn build_survives_cut_links() {
    let cut = |cluster: &Cluster, node| cluster.lab().cut(Cable::Node(node)).unwrap();
    let heal = |cluster: &Cluster, node| {
        cluster.lab().heal(Cable::Node(node)).unwrap();
        await_up(cluster, node).unwrap();
    };
    lose_two_nodes("faultscut", cut, heal);
}

#[test]
fn build_survives_power_cuts() {
    let kill = |cluster: &Cluster, node| cluster.lab().kill(node).unwrap();
    let restart = |cluster: &Cluster, node| {
        cluster.lab().restart(node).unwrap();
        await_up(cluster, node).unwrap();
    };
    lose_two_nodes("faultspower", kill, restart);
}

#[test]
fn killed_executor_is_replaced_or_reported() {
    let cluster = Cluster::with_nodes("faultsexec", 2).unwrap();
    let sums = native(&cluster);
    let idle = IdleProcesses::of(&cluster);
    let kill = |node| cluster.run(node, &["pkill", "-KILL", "-f", "[t]ern-exec.*serve"]).unwrap();
    let made = || String::from_utf8(cluster.run(1, &["sh", "-c", SUMS]).unwrap()).unwrap();
    // On the remote node: its commands are run again.
    let mpmake = build(&cluster);
    await_progress(&cluster, 4, 2);
    kill(2);
    let (code, out, err) = result_of(&mpmake.wait_with_output().unwrap());
    assert!(code == Some(0), "{code:?} {out}{err}");
    assert_eq!(made(), sums);
    idle.await_idle(&[1, 2]);
    // At home: the outcome of the commands is unknown, so make gets an error, and the next build
    // completes the rest.
    let mpmake = build(&cluster);
    await_progress(&cluster, 4, 2);
    kill(1);
    let (code, _, err) = result_of(&mpmake.wait_with_output().unwrap());
    assert!(
        code == Some(2) && err.contains("the connection to tern-exec was lost") && err.contains("Error 5"),
        "{err}"
    );
    idle.await_idle(&[1, 2]);
    let end = shell(&cluster, "unset MAKELEVEL MAKEFLAGS MFLAGS; cd p && mpmake -sj6").output().unwrap();
    assert_eq!(end.status.code(), Some(0), "{:?}", result_of(&end));
    assert_eq!(made(), sums);
}

#[test]
fn lost_home_ends_its_commands() {
    let cluster = Cluster::up("faultshome").unwrap();
    let idle = IdleProcesses::of(&cluster);
    let mut mpmake = build(&cluster);
    await_progress(&cluster, 4, 2);
    cluster.lab().kill(1).unwrap();
    let _status = mpmake.wait().unwrap();
    idle.await_idle(&[2, 3]);
}

#[test]
fn full_disk_is_an_error_at_home_and_away() {
    let cluster = Cluster::with_nodes("faultsfull", 2).unwrap();
    // Home is kept busy, so that everything is placed elsewhere.
    let prepare = format!(
        "{PROJECT}\nfor i in 1 2 3; do timeout 300 sh -c 'while :; do :; done' > /dev/null 2>&1 & done; \
         mkdir /tmp/small && mount -t tmpfs -o size=64k none /tmp/small && cp t1.c t2.c t3.c t4.c /tmp/small"
    );
    assert!(shell(&cluster, &prepare).status().unwrap().success());
    let idle = IdleProcesses::of(&cluster);
    wait_until("home is seen to be busy", || {
        cluster.run(1, &["mexec", "hostname"]).is_ok_and(|host| host == b"node2\n")
    });
    // The sources take half of the space, and the objects would take more than the rest.
    let line = "unset MAKELEVEL MAKEFLAGS MFLAGS; cd /tmp/small; mpmake -kj4 -f - <<'END'\n\
        all: t1.o t2.o t3.o t4.o\n%.o: %.c\n\tgcc -O2 -c -o $@ $<\nEND\n\
        echo code $?; for o in *.o; do cmp $o /tmp/p/$o; done";
    assert!(shell(&cluster, "cd /tmp/p && make -s t1.o t2.o t3.o t4.o").status().unwrap().success());
    let (_, out, err) = result_of(&shell(&cluster, line).output().unwrap());
    println!("{out}{err}");
    // Objects that exist are complete.
    assert!(
        out.contains("code 2\n") && err.contains("No space left on device") && !err.contains("EOF"),
        "{out}{err}"
    );
    // The same with programs that leave their partial output.
    let line = "rm -f small/*.o; mexec -n 2 head -c 1000000 /dev/zero > /dev/null; \
        mexec -n 2 sh -c 'head -c 1000000 /dev/zero > small/x'; echo code $?; \
        mexec -n 2 dd if=/dev/zero of=small/x bs=4k count=250 2> /dev/null; echo code $?; \
        mexec -n 2 cp p/t1.c p/t2.c p/t3.c p/t4.c p/t5.c p/t6.c p/t7.c small; echo code $?";
    let (_, out, err) = result_of(&shell(&cluster, line).output().unwrap());
    assert!(
        out == "code 1\ncode 1\ncode 1\n" && err.matches("No space left on device").count() >= 2,
        "{out}{err}"
    );
    // On the remote node: temporary files are in a tmpfs there, which is made small for this
    // command.
    let line = "echo at $TMPDIR; read go; gcc -O2 -c -o p/full.o p/t1.c; echo code $?; ls p/full.o";
    let mut command = shell(&cluster, &format!("exec mexec -r -n 2 sh -c '{line}'"));
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let pid = || {
        let pid = cluster.run(2, &["pgrep", "-f", "^sh -c echo at"]).unwrap_or_default();
        String::from_utf8_lossy(&pid).trim().to_owned()
    };
    wait_until("it runs", || !pid().is_empty());
    let shrink = format!("nsenter -m -t {} mount -o remount,size=16k /run/tern/tmp", pid());
    cluster.run(2, &["sh", "-c", &shrink]).unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let (code, out, err) = result_of(&child.wait_with_output().unwrap());
    assert!(code == Some(2) && out.starts_with("at /run/tern/tmp\ncode 1\n"), "{code:?} {out}{err}");
    assert!(err.contains("No space left on device"), "{err}");
    idle.await_idle(&[1, 2]);
}

/// A command on node 2 that echoes its input, in the middle of its stream: the writer thread writes
/// until it fails, and the reader thread reads until the end.
fn echoing(cluster: &Cluster) -> (Child, std::thread::JoinHandle<u64>, std::thread::JoinHandle<bool>) {
    let mut command = cluster.command(1, "mexec");
    command.args(["-n", "2", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    // Every byte is determined by its position.
    let at = |place: u64| (place.wrapping_mul(2_654_435_761) >> 13) as u8;
    let writer = std::thread::spawn(move || {
        let mut place = 0;
        loop {
            let part: Vec<u8> = (place..place + 65_536).map(at).collect();
            if input.write_all(&part).is_err() {
                return place;
            }
            place += 65_536;
        }
    });
    let (begun, begins) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let (mut place, mut bytes) = (0, vec![0; 65_536]);
        loop {
            let count = output.read(&mut bytes).unwrap_or(0);
            if count == 0 || bytes[..count].iter().zip(place..).any(|(byte, place)| *byte != at(place)) {
                return count == 0;
            }
            if place > 2_000_000 {
                let _over = begun.send(());
            }
            place += count as u64;
        }
    });
    let begun = begins.recv_timeout(EVENT_TIMEOUT).map_err(|error| {
        // The command may still run.
        let (killed, mut errors) = (child.kill(), String::new());
        let read = child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut errors));
        format!("{error}; {killed:?}, {read:?}: {errors}; {:?}", child.wait())
    });
    begun.unwrap();
    (child, writer, reader)
}

#[test]
fn cut_in_the_middle_of_a_stream_is_reported() {
    let cluster = Cluster::with_nodes("faultsstream", 2).unwrap();
    let idle = IdleProcesses::of(&cluster);
    // The link is cut.
    let (child, writer, reader) = echoing(&cluster);
    cluster.lab().cut(Cable::Node(2)).unwrap();
    let (code, _, err) = result_of(&child.wait_with_output().unwrap());
    assert!(code == Some(255) && err.contains("node 2 was lost"), "{code:?} {err}");
    assert!(reader.join().unwrap(), "the received bytes are those sent");
    let _all = writer.join().unwrap();
    idle.await_idle(&[1, 2]);
    cluster.lab().heal(Cable::Node(2)).unwrap();
    await_up(&cluster, 2).unwrap();
    // The link is cut for less than the detection time: nothing is lost.
    let (mut child, writer, reader) = echoing(&cluster);
    cluster.lab().cut(Cable::Node(2)).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    cluster.lab().heal(Cable::Node(2)).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert!(child.try_wait().unwrap().is_none());
    // The caller is killed.
    cluster.run(1, &["pkill", "-KILL", "-x", "mexec"]).unwrap();
    let _status = child.wait().unwrap();
    assert!(reader.join().unwrap(), "the received bytes are those sent");
    let _all = writer.join().unwrap();
    idle.await_idle(&[1, 2]);
    // The executor of the remote node is killed. On a busy machine the short cut may have been taken
    // for the end of the node.
    let is_chosen = || cluster.run(1, &["mexec", "-n", "2", "true"]).is_ok();
    wait_until("mexec chooses the node", is_chosen);
    let (child, writer, reader) = echoing(&cluster);
    cluster.run(2, &["pkill", "-KILL", "-f", "[t]ern-exec.*serve"]).unwrap();
    let (code, _, err) = result_of(&child.wait_with_output().unwrap());
    assert!(code == Some(255) && err.contains("node 2 was lost"), "{code:?} {err}");
    assert!(reader.join().unwrap(), "the received bytes are those sent");
    let _all = writer.join().unwrap();
    idle.await_idle(&[1, 2]);
}

#[test]
fn queued_command_for_a_lost_node_gets_an_error() {
    let cluster = Cluster::with_nodes("faultswait", 2).unwrap();
    configure(&cluster, 2, "mexec_jobs = 1\n").unwrap();
    let idle = IdleProcesses::of(&cluster);
    let mexec = |words: &[&str]| {
        let mut command = cluster.command(1, "mexec");
        command.args(["-n", "2"]).args(words).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let processes = mexec(&["sleep", "1011"]);
    wait_until("it runs", || placed(&cluster, 2) == 1);
    let waits: Vec<_> = (0..12).map(|_| mexec(&["true"])).collect();
    wait_until("the others wait", || {
        let rows = cluster.run(1, &["mps", "-x"]).unwrap();
        String::from_utf8_lossy(&rows).matches("queued").count() == 12
    });
    cluster.lab().cut(Cable::Node(2)).unwrap();
    let (code, _, err) = result_of(&processes.wait_with_output().unwrap());
    assert!(code == Some(255), "{code:?} {err}");
    for one in waits {
        let (code, _, err) = result_of(&one.wait_with_output().unwrap());
        println!("{err}");
        assert!(code == Some(5), "{code:?} {err}");
    }
    idle.await_idle(&[1, 2]);
    cluster.lab().heal(Cable::Node(2)).unwrap();
    await_up(&cluster, 2).unwrap();
    wait_until("commands run again", || mexec(&["true"]).wait().unwrap().success());
}
