//! Names in /mfs that depend on the calling process (`magic`, `here`, `lastexec`), and access rules
//! of a node.

use anyhow::Result;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Stdio};
use tern_tests::cluster::Cluster;

fn mounted(prefix: &str) -> Result<Cluster> {
    let cluster = Cluster::with_nodes(prefix, 2)?;
    cluster.mount(1, "timeout=10")?;
    Ok(cluster)
}

/// The output of a shell command on a node, followed by `failed` if it fails.
fn sh(cluster: &Cluster, node: u16, line: &str) -> String {
    let end = match cluster.command(node, "timeout").args(["60", "sh", "-c", line]).output() {
        Ok(end) => end,
        Err(error) => return format!("{error}: failed"),
    };
    let (out, err) = (String::from_utf8_lossy(&end.stdout), String::from_utf8_lossy(&end.stderr));
    format!("{out}{err}{}", if end.status.success() { "" } else { "failed" })
}

/// A program that evaluates a line of Python for each request, and prints the result.
struct Worker {
    pid: i32,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    child: std::process::Child,
}

const WORKER: &str = "
import os, subprocess, sys
print(os.getpid(), flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
";

impl Worker {
    fn start(cluster: &Cluster) -> Result<Self> {
        let mut command = cluster.command(1, "/usr/bin/python3");
        let mut child = command.args(["-c", WORKER]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = child.stdin.take().ok_or_else(|| anyhow::anyhow!("no pipe"))?;
        let mut from = BufReader::new(child.stdout.take().ok_or_else(|| anyhow::anyhow!("no pipe"))?);
        let mut pid = String::new();
        from.read_line(&mut pid)?;
        Ok(Self { pid: pid.trim().parse()?, to, from, child })
    }

    fn request(&mut self, line: &str) -> String {
        let mut answer = String::new();
        let result = writeln!(self.to, "{line}").and_then(|()| self.from.read_line(&mut answer));
        result.map_or_else(|error| error.to_string(), |_| answer.trim().to_owned())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

const MAKE: &str = "open('/mfs/magic/tmp/PLACE', 'w').write('made')";

#[test]
fn magic_is_the_node_of_the_last_created_file() {
    let cluster = mounted("mfsmagic").unwrap();
    let mut worker = Worker::start(&cluster).unwrap();
    let magic = "os.readlink('/mfs/magic')";
    assert_eq!(worker.request(magic), "1", "the current node, before it has created a file");
    cluster.migrate(worker.pid, "2").unwrap();
    assert_eq!(worker.request(magic), "2");
    assert_eq!(worker.request(&MAKE.replace("PLACE", "away")), "4");
    assert_eq!(sh(&cluster, 2, "cat /tmp/away"), "made");
    // Now it runs elsewhere; the file it created is still found where it was created, also by its
    // children.
    cluster.migrate(worker.pid, "home").unwrap();
    assert_eq!(worker.request("open('/mfs/magic/tmp/away').read()"), "made");
    assert_eq!(
        worker.request("subprocess.getoutput('cat /mfs/magic/tmp/away; readlink /mfs/magic')"),
        "made2"
    );
    assert_eq!(worker.request("os.stat('/mfs/magic/tmp/away').st_size"), "4");
    // A creation by another call than creat and open changes nothing.
    assert_eq!(worker.request("os.mkdir('/mfs/magic/tmp/directory')"), "None");
    assert_eq!(sh(&cluster, 2, "ls -d /tmp/directory"), "/tmp/directory\n");
    // O_EXCL creates the file on the current node, even if the other node has one of that name.
    assert_eq!(worker.request("os.close(os.open('/mfs/magic/tmp/away', os.O_CREAT | os.O_EXCL))"), "None");
    assert_eq!((worker.request(magic), sh(&cluster, 1, "stat -c %s /tmp/away")), ("1".into(), "0\n".into()));
    assert_eq!(
        worker.request("os.close(os.open('/mfs/magic/tmp/away', os.O_CREAT | os.O_EXCL))"),
        "File exists"
    );
    // Creation happens on the current node, also if the file exists there already.
    sh(&cluster, 1, "touch /tmp/there; chmod 666 /tmp/there");
    for place in ["here", "there"] {
        assert_eq!(worker.request(&MAKE.replace("PLACE", place)), "4");
        assert_eq!(worker.request(magic), "1");
        assert_eq!(sh(&cluster, 1, &format!("cat /tmp/{place}")), "made");
        assert_eq!(worker.request(&format!("os.unlink('/mfs/magic/tmp/{place}')")), "None");
    }
    assert_eq!(sh(&cluster, 2, "ls /tmp/here /tmp/there 2>&1 | wc -l"), "2\n");
    // Nor does a creation that fails on another node than home.
    cluster.migrate(worker.pid, "2").unwrap();
    assert_eq!(worker.request("open('/mfs/magic/tmp/no/such', 'w')"), "No such file or directory");
    assert_eq!(worker.request(magic), "1");
}

#[test]
fn lastexec_is_the_node_of_the_last_exec() {
    let cluster = mounted("mfslastexec").unwrap();
    let mut worker = Worker::start(&cluster).unwrap();
    let (here, last) = ("os.readlink('/mfs/here')", "os.readlink('/mfs/lastexec')");
    assert_eq!((worker.request(here), worker.request(last)), ("1".into(), "1".into()));
    cluster.migrate(worker.pid, "2").unwrap();
    assert_eq!((worker.request(here), worker.request(last)), ("2".into(), "1".into()));
    // A child that executes a program on node 2 has node 2 as `lastexec`, and so has a program that
    // this program executes in turn.
    assert_eq!(worker.request("subprocess.getoutput('readlink /mfs/lastexec')"), "2");
    let script = "exec /usr/bin/python3 -c \\\"import os; print(os.readlink(\\'/mfs/lastexec\\'))\\\"";
    assert_eq!(worker.request(&format!("subprocess.getoutput('{script}')")), "2");
    assert_eq!(worker.request(last), "1", "an exec of a child does not affect its parent");
    // A program that was executed on node 2 and has come home keeps node 2 as `lastexec`. A program
    // that it executes at home has node 1.
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
fn nomfs_applies_at_once() {
    let cluster = mounted("mfsnomfs").unwrap();
    sh(&cluster, 2, "mkdir -m 777 /tmp/open; echo kept > /tmp/open/file; sleep 0.2");
    let mut worker = Worker::start(&cluster).unwrap();
    assert_eq!(worker.request("globals().update(file=os.open('/mfs/2/tmp/open/file', os.O_RDWR))"), "None");
    assert_eq!(worker.request("os.pread(file, 4, 0)"), "b'kept'");
    assert_eq!(sh(&cluster, 2, "mosctl nomfs; mosctl status | head -1"), "nomfs\n");
    assert_eq!(worker.request("os.pread(file, 4, 0)"), "Permission denied");
    assert_eq!(worker.request("os.write(file, b'no')"), "Permission denied");
    assert!(sh(&cluster, 1, "ls /mfs/2/").contains("Permission denied"));
    assert!(sh(&cluster, 2, "cat /tmp/open/file").contains("kept"));
    // The setting persists over restarts of ternd and of the server.
    sh(&cluster, 2, "pkill -KILL -f '[t]ern-mfs.*serve'");
    cluster.lab().restart_daemon(2).unwrap();
    assert!(sh(&cluster, 1, "ls /mfs/2/").contains("Permission denied"));
    let nobody = "setpriv --reuid 1234 --regid 1234 --clear-groups mosctl mfs";
    assert!(sh(&cluster, 2, nobody).contains("only root may"));
    assert_eq!(sh(&cluster, 2, "mosctl mfs; mosctl status | head -1"), "nothing is switched on\n");
    assert_eq!(sh(&cluster, 1, "cat /mfs/2/tmp/open/file"), "kept\n");
    assert_eq!(worker.request("os.pread(file, 4, 0)"), "b'kept'", "it was open all the time");
}
