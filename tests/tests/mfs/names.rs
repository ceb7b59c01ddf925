//! The names below /mfs that go by who asks, and what a node's administrator says of its files.

use anyhow::Result;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Stdio};
use tern_tests::cluster::Cluster;

fn mounted(prefix: &str) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, 2)?;
    cluster.mount(1, "timeout=10")?;
    Ok(cluster)
}

/// What a shell on a node says, and how it ends.
fn sh(cluster: &Cluster, node: u16, line: &str) -> String {
    let end = match cluster.command(node, "timeout").args(["60", "sh", "-c", line]).output() {
        Ok(end) => end,
        Err(error) => return format!("{error}: failed"),
    };
    let (out, err) = (String::from_utf8_lossy(&end.stdout), String::from_utf8_lossy(&end.stderr));
    format!("{out}{err}{}", if end.status.success() { "" } else { "failed" })
}

/// A program that does a line of Python each time that it is told to, and says what that came to.
struct Doer {
    pid: i32,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    child: std::process::Child,
}

const DOER: &str = "
import os, subprocess, sys
print(os.getpid(), flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
";

impl Doer {
    fn start(cluster: &Cluster) -> Result<Self> {
        let mut command = cluster.command(1, "/usr/bin/python3");
        let mut child = command.args(["-c", DOER]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = child.stdin.take().ok_or_else(|| anyhow::anyhow!("no pipe"))?;
        let mut from = BufReader::new(child.stdout.take().ok_or_else(|| anyhow::anyhow!("no pipe"))?);
        let mut pid = String::new();
        from.read_line(&mut pid)?;
        Ok(Self { pid: pid.trim().parse()?, to, from, child })
    }

    fn does(&mut self, line: &str) -> String {
        let mut answer = String::new();
        let told = writeln!(self.to, "{line}").and_then(|()| self.from.read_line(&mut answer));
        told.map_or_else(|error| error.to_string(), |_| answer.trim().to_owned())
    }
}

impl Drop for Doer {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

const MAKE: &str = "open('/mfs/magic/tmp/PLACE', 'w').write('made')";

#[test]
fn magic_is_where_a_file_is_made_and_then_where_it_was() {
    let cluster = mounted("mfsmagic").unwrap();
    let mut doer = Doer::start(&cluster).unwrap();
    let magic = "os.readlink('/mfs/magic')";
    assert_eq!(doer.does(magic), "1", "where it runs, as long as it has made nothing");
    cluster.migrate(doer.pid, "2").unwrap();
    assert_eq!(doer.does(magic), "2");
    assert_eq!(doer.does(&MAKE.replace("PLACE", "away")), "4");
    assert_eq!(sh(&cluster, 2, "cat /tmp/away"), "made");
    // It runs elsewhere now; what it has made is where it was made, and its children find it there.
    cluster.migrate(doer.pid, "home").unwrap();
    assert_eq!(doer.does("open('/mfs/magic/tmp/away').read()"), "made");
    assert_eq!(doer.does("subprocess.getoutput('cat /mfs/magic/tmp/away; readlink /mfs/magic')"), "made2");
    assert_eq!(doer.does("os.stat('/mfs/magic/tmp/away').st_size"), "4");
    // What cannot be made changes nothing, nor does what is made by another call than creat and open.
    assert_eq!(doer.does("open('/mfs/magic/tmp/no/such', 'w')"), "No such file or directory");
    assert_eq!(doer.does("os.mkdir('/mfs/magic/tmp/directory')"), "None");
    assert_eq!(sh(&cluster, 2, "ls -d /tmp/directory"), "/tmp/directory\n");
    // Nobody's file is opened there that is only on the other node: what O_EXCL makes is made here.
    assert_eq!(doer.does("os.close(os.open('/mfs/magic/tmp/away', os.O_CREAT | os.O_EXCL))"), "None");
    assert_eq!((doer.does(magic), sh(&cluster, 1, "stat -c %s /tmp/away")), ("1".into(), "0\n".into()));
    assert_eq!(doer.does("os.close(os.open('/mfs/magic/tmp/away', os.O_CREAT | os.O_EXCL))"), "File exists");
    // Made anew, it is made here, also where a file of that name is already.
    sh(&cluster, 1, "touch /tmp/there; chmod 666 /tmp/there");
    for place in ["here", "there"] {
        assert_eq!(doer.does(&MAKE.replace("PLACE", place)), "4");
        assert_eq!(doer.does(magic), "1");
        assert_eq!(sh(&cluster, 1, &format!("cat /tmp/{place}")), "made");
        assert_eq!(doer.does(&format!("os.unlink('/mfs/magic/tmp/{place}')")), "None");
    }
    assert_eq!(sh(&cluster, 2, "ls /tmp/here /tmp/there 2>&1 | wc -l"), "2\n");
}

#[test]
fn lastexec_is_where_the_program_was_executed() {
    let cluster = mounted("mfslastexec").unwrap();
    let mut doer = Doer::start(&cluster).unwrap();
    let (here, last) = ("os.readlink('/mfs/here')", "os.readlink('/mfs/lastexec')");
    assert_eq!((doer.does(here), doer.does(last)), ("1".into(), "1".into()));
    cluster.migrate(doer.pid, "2").unwrap();
    assert_eq!((doer.does(here), doer.does(last)), ("2".into(), "1".into()));
    // A child executes a program there, and so does what that becomes.
    assert_eq!(doer.does("subprocess.getoutput('readlink /mfs/lastexec')"), "2");
    let script = "exec /usr/bin/python3 -c \\\"import os; print(os.readlink(\\'/mfs/lastexec\\'))\\\"";
    assert_eq!(doer.does(&format!("subprocess.getoutput('{script}')")), "2");
    assert_eq!(doer.does(last), "1", "what its children do is theirs");
    // What was executed there and has come home still was; what it executes at home is executed at home.
    let moved = "import os, subprocess, sys; print(os.getpid(), flush=True); sys.stdin.readline(); \
                 print(os.readlink('/mfs/here'), os.readlink('/mfs/lastexec'), \
                 subprocess.getoutput('readlink /mfs/lastexec'))";
    let mut child = cluster.command(1, "runon");
    let child = child.args(["2", "sh", "-c", "exec /usr/bin/python3 -c \"$0\"", moved]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut from = BufReader::new(child.stdout.take().unwrap()).lines();
    let pid: i32 = from.next().unwrap().unwrap().parse().unwrap();
    cluster.migrate(pid, "home").unwrap();
    writeln!(child.stdin.take().unwrap()).unwrap();
    assert_eq!(from.next().unwrap().unwrap(), "1 2 1");
    child.wait().unwrap();
}

#[test]
fn a_node_that_lets_nobody_in_does_so_at_once() {
    let cluster = mounted("mfsnomfs").unwrap();
    sh(&cluster, 2, "mkdir -m 777 /tmp/open; echo kept > /tmp/open/file; sleep 0.2");
    let mut doer = Doer::start(&cluster).unwrap();
    assert_eq!(doer.does("globals().update(file=os.open('/mfs/2/tmp/open/file', os.O_RDWR))"), "None");
    assert_eq!(doer.does("os.pread(file, 4, 0)"), "b'kept'");
    assert_eq!(sh(&cluster, 2, "mosctl nomfs; mosctl status | head -1"), "nomfs\n");
    assert_eq!(doer.does("os.pread(file, 4, 0)"), "Permission denied");
    assert_eq!(doer.does("os.write(file, b'no')"), "Permission denied");
    assert!(sh(&cluster, 1, "ls /mfs/2/").contains("Permission denied"));
    assert!(sh(&cluster, 2, "cat /tmp/open/file").contains("kept"));
    // It is kept over restarts of ternd and of the server.
    sh(&cluster, 2, "pkill -KILL -f '[t]ern-mfs.*serve'");
    cluster.lab().restart_daemon(2).unwrap();
    assert!(sh(&cluster, 1, "ls /mfs/2/").contains("Permission denied"));
    let nobody = "setpriv --reuid 1234 --regid 1234 --clear-groups mosctl mfs";
    assert!(sh(&cluster, 2, nobody).contains("only root may"));
    assert_eq!(sh(&cluster, 2, "mosctl mfs; mosctl status | head -1"), "nothing is switched on\n");
    assert_eq!(sh(&cluster, 1, "cat /mfs/2/tmp/open/file"), "kept\n");
    assert_eq!(doer.does("os.pread(file, 4, 0)"), "b'kept'", "it was open all the time");
}
