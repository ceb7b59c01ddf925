//! A program of node 1 that runs on node 2, performs commands on one open file, and prints the
//! result of each.

use crate::cluster::Cluster;
use crate::runs::running::{ANNOUNCE, Running};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

/// The program, in Python.
const PROGRAM: &str = r#"
import fcntl, mmap, os, sys, threading, time
file = None
for number, line in enumerate(sys.stdin, 1):
    word, *more = line.split()
    said = ""
    try:
        if word == "open":
            file = os.open(more[0], sum(getattr(os, flag) for flag in more[1].split("|")), 0o600)
        elif word == "read":
            said = os.read(file, int(more[0])).decode()
        elif word == "write":
            said = os.write(file, more[0].encode())
        elif word == "fill":
            for _ in range(int(more[0])):
                os.write(file, bytes(4096))
        elif word == "seek":
            said = os.lseek(file, int(more[0]), int(more[1]))
        elif word == "fork":
            if (child := os.fork()) == 0:
                os.write(file, more[0].encode())
                os._exit(0)
            said = os.waitpid(child, 0)[1]
        elif word == "born":
            if (child := os.fork()) == 0:
                os.read(file, int(more[0]))
                os._exit(0)
            said = os.waitpid(child, 0)[1]
        elif word == "map":
            # A private mapping, as by a loader: its descriptor is open only for a moment.
            with open(more[0], "rb") as other, mmap.mmap(other.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
                said = mapped[:4].decode()
        elif word == "hold":
            with os.fdopen(os.dup(file), "rb") if more[0] == "it" else open(more[0], "rb") as other:
                shared = mmap.mmap(other.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
                private = mmap.mmap(other.fileno(), 0, access=mmap.ACCESS_COPY)
        elif word == "held":
            at = int(more[0])
            said = shared[at:at + 4].decode() + " " + private[at:at + 4].decode()
        elif word == "walk":
            # Reads all of it without making calls.
            print("walks", flush=True)
            for at in range(0, len(shared), 1 << 17):
                assert shared[at:at + 4] == b"0123", at
                until = time.monotonic() + 0.02
                while time.monotonic() < until:
                    pass
        elif word == "stride":
            print("strides", flush=True)
            for at in range(int(more[0])):
                at = at * 7919 * 4096 % len(shared)
                assert shared[at:at + 4] == b"0123", at
        elif word == "drop":
            os.setgroups([])
            os.setresgid(1234, 1234, 1234)
            os.setresuid(1234, 1234, 1234)
        elif word == "poke":
            at = int(more[0])
            private[at:at + 4] = more[1].encode()
        elif word == "lock":
            fcntl.lockf(file, fcntl.LOCK_EX)
        elif word == "look":
            fcntl.lockf(file, fcntl.LOCK_SH)
        elif word == "close":
            said = os.close(file)
        elif word == "each":
            # Stats this many names of a directory.
            at, count = more[0], int(more[1])
            said = sum(os.lstat(f"{at}/{name}").st_size for name in range(count))
        elif word == "absent":
            said = sum(not os.path.exists(f"{more[0]}/none{name}") for name in range(int(more[1])))
        elif word == "like":
            stat = os.stat(more[0])
            said = f"{stat.st_mode:o} {stat.st_size}"
        elif word == "names":
            said = os.lstat(more[0]).st_nlink
        elif word == "link":
            os.link(more[0], more[1])
            said = os.lstat(more[0]).st_nlink
        elif word == "leads":
            said = os.readlink(more[0])
        elif word == "goto":
            os.chdir(more[0])
        elif word == "threads":
            # Two threads that look up names, and communicate through memory only.
            at, wrong, turn = more[0], 0, [0]
            def look(mine):
                global wrong
                for number in range(mine, int(more[1]), 2):
                    while turn[0] != number:
                        time.sleep(0)
                    if number:
                        wrong += os.path.exists(f"{at}/turn{number - 1}")
                        wrong += not os.path.exists(f"{at}/next{number - 1}")
                    os.close(os.open(f"{at}/turn{number}", os.O_CREAT | os.O_WRONLY))
                    for other in range(6):
                        wrong += not os.path.exists(f"{at}/turn{number}")
                    os.rename(f"{at}/turn{number}", f"{at}/next{number}")
                    turn[0] = number + 1
            others = [threading.Thread(target=look, args=(mine,)) for mine in (0, 1)]
            [other.start() for other in others]
            [other.join() for other in others]
            said = wrong
    except OSError as error:
        said = error.errno
    print(f"{number}:", word, said, flush=True)
"#;

/// The running program.
#[derive(Debug)]
pub struct FileGuest<'a> {
    cluster: &'a Cluster,
    /// The process.
    pub running: Running,
    /// Number of commands sent.
    pub sent: u32,
}

impl<'a> FileGuest<'a> {
    /// Starts it with `prefix` before its command, such as setpriv, and migrates it to node 2.
    ///
    /// # Errors
    /// If it does not start, or is not migrated.
    pub fn start(cluster: &'a Cluster, prefix: &[&str]) -> Result<Self> {
        let mut command = cluster.command(1, "sh");
        command.args(["-c", ANNOUNCE, "sh"]).args(prefix).args(["/usr/bin/python3", "-c", PROGRAM]);
        let mut guest = Self { cluster, running: Running::start(&mut command, false)?, sent: 0 };
        guest.run("hello", "hello")?;
        cluster.migrate(guest.running.pid, "2")?;
        Ok(guest)
    }

    /// Sends a command and waits for its expected result.
    ///
    /// # Errors
    /// If the result is another one.
    pub fn run(&mut self, words: &str, result: &str) -> Result<()> {
        self.send(words)?;
        self.running
            .await_output(&format!("{}: {result}", self.sent))
            .with_context(|| format!("{words}: {}", self.running.output_so_far()))
    }

    /// Sends a command without waiting.
    ///
    /// # Errors
    /// If the program has ended.
    pub fn send(&mut self, words: &str) -> Result<()> {
        self.sent += 1;
        self.running.send_input(&format!("{words}\n"))
    }

    /// Closes its input, and checks that it exits successfully.
    ///
    /// # Errors
    /// If it does not.
    pub fn finish(mut self) -> Result<()> {
        self.running.close_input();
        let end = self.running.finish(Duration::from_secs(20))?;
        ensure!(end.status == 0, "{end:?}");
        Ok(())
    }

    /// The files that guests have open on node 2.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub fn open_files(&self) -> Result<String> {
        let look = "for p in /proc/[0-9]*; do case $(tr '\\0' ' ' < $p/cmdline 2>/dev/null) in \
                    tern:*) for f in $p/fd/*; do readlink $f; done;; esac; done; true";
        let said = self.cluster.run(2, &["sh", "-c", look])?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }
}
