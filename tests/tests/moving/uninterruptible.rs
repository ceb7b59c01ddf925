//! A long call at home that cannot be interrupted affects only the program that made it: no
//! relative is delayed or killed.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::wait_until;
use tern_tests::cluster::stalling_files::{self, StallingFiles, Waiting};
use tern_tests::drivers::siblings::Siblings;
use tern_tests::runs::running::Running;

/// Limit for a step of a test.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);

/// Limit for a call of the child, in seconds. It leaves room for a busy machine. A call that waited
/// for the fsync would take longer: a second at least, after which home postpones the journey.
const SLOWEST_CALL: &str = "0.8";

/// A program whose second thread is in an fsync at home, and the file system of the file.
struct Synchronising {
    files: StallingFiles,
    cluster: Cluster,
    siblings: Siblings,
}

impl Synchronising {
    /// Starts it with this option of mosrun.
    fn start(name: &str, option: &str) -> Result<Self> {
        let cluster = Cluster::without_quotas(name, 2)?;
        let files = StallingFiles::mount(&cluster, 1, Waiting::Syncs)?;
        files.stall(&cluster)?;
        let siblings = Siblings::start(&cluster, option, SLOWEST_CALL, &["syncs", stalling_files::FILE])?;
        let running = &siblings.running;
        running.await_output("syncing")?;
        let syncs = format!("grep -q '^{} ' /proc/{}/task/*/syscall", libc::SYS_fsync, running.pid);
        let syncs = || cluster.run(1, &["sh", "-c", &syncs]).is_ok();
        wait_until("its deputy is in the fsync", STEP_TIMEOUT, syncs)?;
        Ok(Self { files, cluster, siblings })
    }

    /// Where the program is, and why.
    fn location(&self) -> Result<(u16, String)> {
        self.cluster.location(self.siblings.running.pid)?.context("it is not known")
    }

    /// Ends the fsync.
    fn release(&self) -> Result<()> {
        self.files.release(&self.cluster)?;
        self.siblings
            .running
            .await_output("synced")
            .with_context(|| self.cluster.diagnostics(self.siblings.running.pid))
    }

    /// The child of the program checks that none of its calls took long.
    fn finish(mut self) -> Result<()> {
        self.siblings.running.close_input();
        self.siblings.finish(&self.cluster, STEP_TIMEOUT)
    }
}

/// The move is refused while the call lasts, and the program and its child go on where they are.
#[test]
fn fetching_a_process_in_an_fsync_delays_no_relative() -> Result<()> {
    let this = Synchronising::start("fsync-home", "-2")?;
    let pid = this.siblings.running.pid;
    let refused = this.cluster.migrate(pid, "home").err().context("it came home in its fsync")?;
    ensure!(refused.message.contains("busy"), "{refused:?}");
    ensure!(this.location()?.0 == 2, "{:?}", this.location()?);
    this.release()?;
    this.cluster.migrate(pid, "home")?;
    this.finish()
}

/// The call waits for the fsync of the other thread, and is then made.
#[test]
fn call_that_needs_home_during_an_fsync_delays_no_relative() -> Result<()> {
    let mut this = Synchronising::start("fsync-fetch", "-2")?;
    this.siblings.running.send_input("go\n")?;
    let is_fetched = || matches!(this.location(), Ok((2, why)) if why.contains("ioctl"));
    wait_until("it is fetched home", STEP_TIMEOUT, is_fetched)?;
    // Longer than home tries before it postpones the journey.
    std::thread::sleep(Duration::from_secs(2));
    ensure!(this.location()?.0 == 2, "{:?}", this.location()?);
    this.release()?;
    this.siblings.running.await_output("made")?;
    this.finish()
}

/// A process that runs at home is not moved or frozen in its fsync, and goes on.
#[test]
fn process_in_an_fsync_at_home_is_refused() -> Result<()> {
    let this = Synchronising::start("fsync-leave", "-L")?;
    let pid = this.siblings.running.pid;
    let refused = this.cluster.migrate(pid, "2").err().context("it left in its fsync")?;
    ensure!(refused.message.contains("busy"), "{refused:?}");
    let frozen = this.cluster.run(1, &["migrate", &pid.to_string(), "freeze"]);
    ensure!(frozen.is_err_and(|why| format!("{why:#}").contains("busy")), "it was frozen in its fsync");
    this.release()?;
    this.cluster.migrate(pid, "2")?;
    this.finish()
}

/// A program whose child serves a file system and shares memory with it. The program looks up a
/// name in that file system. Before the child answers, the child makes an ioctl that only home can
/// make. Both use the shared memory before and after the ioctl.
const SHARING_SERVER: &str = "
import ctypes, fcntl, mmap, os, struct, time
shared, at = mmap.mmap(-1, 4096), '/tmp/shared-server'
os.mkdir(at)
fuse = os.open('/dev/fuse', os.O_RDWR)
options = f'fd={fuse},rootmode=40000,user_id=0,group_id=0'.encode()
assert ctypes.CDLL(None).mount(b'server', at.encode(), b'fuse.server', 0, options) == 0

def serve():
    null = os.open('/dev/null', os.O_RDWR)
    while True:
        _, operation, unique = struct.unpack_from('=IIQ', os.read(fuse, 1 << 20))
        if operation == 26:
            body = struct.pack('=4I2H2I2H8I', 7, 31, 4096, 0, 0, 0, 4096, 1, 0, 0, *[0] * 8)
            os.write(fuse, struct.pack('=IiQ', 16 + len(body), 0, unique) + body)
            print('serving', flush=True)
        elif operation not in (2, 36, 42):
            try:
                fcntl.ioctl(null, 0x7e57)
            except OSError:
                shared[1] = shared[0] + 1
            os.write(fuse, struct.pack('=IiQ', 16, -2, unique))

server = os.fork()
if server == 0:
    serve()
os.close(fuse)
while not os.path.exists('/tmp/look'):
    time.sleep(0.01)
shared[0] = 41
try:
    os.stat(at + '/name')
    found = True
except FileNotFoundError:
    found = False
seen = shared[1]
os.kill(server, 9)
os.wait()
ctypes.CDLL(None).umount2(at.encode(), 2)
print('PASS' if seen == 42 and not found else f'FAIL: {seen} {found}')
";

/// One process must come home for a call. Meanwhile another process, with which it shares memory,
/// waits for the first one's answer in a call that cannot be interrupted.
#[test]
fn server_that_must_come_home_leaves_its_client_behind() -> Result<()> {
    let cluster = Cluster::with_nodes("server-home", 2)?;
    let mut running = Running::python(&cluster, &["-2"], SHARING_SERVER, "serving")?;
    let pid = running.pid;
    let is_away = || cluster.location(pid).is_ok_and(|found| found.is_some_and(|(node, _)| node == 2));
    wait_until("it is away", STEP_TIMEOUT, is_away)?;
    cluster.touch("/tmp/look")?;
    running.await_output("PASS").with_context(|| cluster.diagnostics(pid))?;
    let end = running.finish(STEP_TIMEOUT)?;
    ensure!(end.status == 0, "{end:?}");
    Ok(())
}
