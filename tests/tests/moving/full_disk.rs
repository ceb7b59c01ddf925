//! A program that is away writes to a file system that is full, or becomes full: the write itself
//! fails, as at home, although writes are delayed on the guest's node.

use anyhow::{Result, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::runs::running::Running;

const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// Writes until a write fails, and ends without a close. After the first 8 MiB it waits for a line, if
/// there is room for them.
const WRITER: &str = "
import errno, os, sys
fd = os.open('/tmp/small/f', os.O_WRONLY | os.O_CREAT, 0o644)
total = 0
print('opened', flush=True)
try:
    while total < 1 << 30:
        if total == 8 << 20:
            print('waits', flush=True)
            sys.stdin.readline()
        wrote = os.write(fd, b'x' * 4096)
        total += wrote
        if wrote < 4096:
            break
    os.write(fd, b'x')
    print('no error')
except OSError as error:
    print(errno.errorcode[error.errno], total == os.fstat(fd).st_size, flush=True)
os._exit(3)
";

fn write_fails(name: &str, size: &str, fills_later: bool) -> Result<()> {
    let cluster = Cluster::without_quotas(name, 2)?;
    let mount = format!("mkdir /tmp/small && mount -t tmpfs -o size={size} none /tmp/small");
    cluster.run(1, &["sh", "-c", &mount])?;
    let mut running = Running::python(&cluster, &["-2"], WRITER, "opened")?;
    if fills_later {
        running.await_output("waits")?;
        cluster.run(1, &["sh", "-c", "! head -c 1G /dev/zero > /tmp/small/other"])?;
        // The writer has a little room left.
        cluster.run(1, &["truncate", "-s", "-20000", "/tmp/small/other"])?;
        running.send_input("go on\n")?;
    }
    let outcome = running.finish(RUN_TIMEOUT)?;
    ensure!(outcome.status == 3 && outcome.out.ends_with(b"ENOSPC True\n"), "{outcome:?}");
    Ok(())
}

#[test]
fn write_to_a_full_disk_fails() -> Result<()> {
    write_fails("full-disk", "100k", false)
}

#[test]
fn write_to_a_disk_that_has_become_full_fails() -> Result<()> {
    write_fails("filled-disk", "70m", true)
}
