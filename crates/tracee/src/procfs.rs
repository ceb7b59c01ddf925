//! Reads /proc. Everything is parsed from bytes, since names may hold any bytes.

mod maps;
mod sleep;

pub use maps::{Mapping, mapping_at, maps, smaps, vdso};
pub use sleep::{Sleep, SleepMeter};

use crate::error::{Error, Result};
use std::fs;
use std::io::Read;
use std::time::{Duration, Instant};

/// Maximum time to wait until a thread that has made a system call sleeps in that call.
const MAX_SLEEP_WAIT: Duration = Duration::from_secs(1);

pub(crate) fn read(pid: i32, what: &'static str) -> Result<Vec<u8>> {
    read_all(&format!("/proc/{pid}/{what}")).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::Gone { pid },
        _ => Error::from_io("read /proc", pid, e),
    })
}

/// Reads a file of unknown size, as most files in /proc are, in two reads. (`fs::read` would begin
/// with a read of 32 bytes.)
fn read_all(path: &str) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::with_capacity(4096);
    fs::File::open(path)?.read_to_end(&mut text)?;
    Ok(text)
}

fn hex(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// Fields of /proc/PID/status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Command name.
    pub name: Vec<u8>,
    /// State letter.
    pub state: u8,
    /// Its pid in its own (innermost) pid namespace.
    pub own_pid: i32,
    /// Its parent.
    pub parent: i32,
    /// Its thread group.
    pub group: i32,
    /// The process that traces it, or 0.
    pub tracer: i32,
    /// Real, effective, saved and file system user.
    pub uid: [u32; 4],
    /// Real, effective, saved and file system group.
    pub gid: [u32; 4],
    /// Its supplementary groups.
    pub groups: Vec<u32>,
    /// Number of threads.
    pub threads: u32,
    /// Seccomp mode: 0 none, 1 strict, 2 filter.
    pub seccomp: u32,
    /// Blocked signals, bit n-1 for signal n.
    pub blocked: u64,
    /// Pending signals, of the thread and of its process.
    pub pending: u64,
    /// Signals that are ignored.
    pub ignored: u64,
    /// Signals that have a handler.
    pub caught: u64,
    /// Effective capabilities, bit n for capability n.
    pub effective: u64,
    /// Permitted capabilities.
    pub permitted: u64,
    /// Memory locked, KiB.
    pub locked_kib: u64,
    /// Memory in use, KiB; 0 for a kernel thread or a zombie.
    pub resident_kib: u64,
    /// Code of its program, KiB; 0 also between the end of the old program and the start of the new
    /// one, while execve(2) closes files. A running program has at least a page.
    pub code_kib: u64,
    /// Whether it uses a shadow stack.
    pub shadow_stack: bool,
}

impl Status {
    /// Whether it has exited, and is only waiting to be reaped.
    #[must_use]
    pub fn has_exited(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }
}

/// Whether a process or thread has exited, or is gone.
#[must_use]
pub fn has_exited(tid: i32) -> bool {
    status(tid).map_or(true, |status| status.has_exited())
}

/// Whether any thread of a process is alive. The first thread may exit before others. If another
/// thread then executes a program, that thread takes over the first one's number, and a check made
/// meanwhile may find neither. So this checks twice.
#[must_use]
pub fn is_alive(pid: i32) -> bool {
    let look = || status(pid).is_ok_and(|first| !first.has_exited() || first.threads > 1);
    look() || look()
}

/// The address of the next instruction of a thread that is blocked in the kernel; none if it runs.
///
/// # Errors
/// If it is gone, or the file cannot be parsed.
pub fn blocked_at(tid: i32) -> Result<Option<u64>> {
    // proc_pid_syscall(5): `running`, or numbers, the last of which is the instruction pointer.
    let text = read(tid, "syscall")?;
    let last = text.trim_ascii().rsplit(|byte| *byte == b' ').next().unwrap_or_default();
    if last == b"running" {
        return Ok(None);
    }
    let digits = std::str::from_utf8(last).ok().and_then(|last| last.strip_prefix("0x"));
    let address = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    address.map(Some).ok_or(Error::Unreadable { what: "syscall", pid: tid })
}

/// Reads a process's status.
///
/// # Errors
/// If it is gone, or the file cannot be parsed.
pub fn status(pid: i32) -> Result<Status> {
    let text = read(pid, "status")?;
    let mut status = Status::default();
    let bad = || Error::Unreadable { what: "status", pid };
    for line in text.split(|b| *b == b'\n') {
        let Some(colon) = line.iter().position(|b| *b == b':') else { continue };
        let (key, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        let numbers =
            || std::str::from_utf8(value).unwrap_or("").split_ascii_whitespace().map(str::parse::<u64>);
        let first = || numbers().next().and_then(std::result::Result::ok).ok_or_else(bad);
        let four = || -> Result<[u32; 4]> {
            let all: Vec<u32> = numbers().filter_map(|n| u32::try_from(n.ok()?).ok()).collect();
            all.try_into().map_err(|_e| bad())
        };
        match key {
            b"Name" => status.name = value.to_vec(),
            b"State" => status.state = value.first().copied().unwrap_or(b'?'),
            b"NSpid" => {
                let last = numbers().next_back().and_then(std::result::Result::ok).ok_or_else(bad)?;
                status.own_pid = i32::try_from(last).map_err(|_e| bad())?;
            }
            b"PPid" => status.parent = first()? as i32,
            b"Tgid" => status.group = first()? as i32,
            b"TracerPid" => status.tracer = first()? as i32,
            b"Uid" => status.uid = four()?,
            b"Gid" => status.gid = four()?,
            b"Groups" => status.groups = numbers().filter_map(|n| u32::try_from(n.ok()?).ok()).collect(),
            b"Threads" => status.threads = first()? as u32,
            b"Seccomp" => status.seccomp = first()? as u32,
            b"SigBlk" => status.blocked = hex(value).ok_or_else(bad)?,
            b"SigPnd" | b"ShdPnd" => status.pending |= hex(value).ok_or_else(bad)?,
            b"SigIgn" => status.ignored = hex(value).ok_or_else(bad)?,
            b"SigCgt" => status.caught = hex(value).ok_or_else(bad)?,
            b"CapEff" => status.effective = hex(value).ok_or_else(bad)?,
            b"CapPrm" => status.permitted = hex(value).ok_or_else(bad)?,
            b"VmLck" => status.locked_kib = first()?,
            b"VmExe" => status.code_kib = first()?,
            b"VmRSS" => status.resident_kib = first()?,
            b"x86_Thread_features" => status.shadow_stack = value.windows(5).any(|w| w == b"shstk"),
            _ => {}
        }
    }
    Ok(status)
}

/// Fields of /proc/PID/stat (proc_pid_stat(5), where they are numbered from 1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stat {
    fields: Vec<u64>,
}

impl Stat {
    /// Field `number` of proc_pid_stat(5), from 4 on; 0 if the kernel does not show it.
    #[must_use]
    pub fn field(&self, number: usize) -> u64 {
        self.fields.get(number.wrapping_sub(4)).copied().unwrap_or(0)
    }

    /// Memory in use, in bytes.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.field(24).saturating_mul(crate::PAGE)
    }

    /// The pages that hold the arguments and the environment, which `ps` reads: start and end
    /// address. Empty if they are longer than execve allows: a process may set any addresses
    /// (`PR_SET_MM`).
    #[must_use]
    pub fn argument_pages(&self) -> (u64, u64) {
        /// Three quarters of an 8 MiB stack (execve(2)).
        const MAX_ARGUMENT_BYTES: u64 = 6 << 20;
        let start = self.field(48) & !(crate::PAGE - 1);
        let end = self.field(51).checked_next_multiple_of(crate::PAGE).unwrap_or(0);
        if end.saturating_sub(start) > MAX_ARGUMENT_BYTES { (0, 0) } else { (start, end) }
    }

    /// Start time since boot, in clock ticks. Together with the pid it identifies a process.
    #[must_use]
    pub fn start_time(&self) -> u64 {
        self.field(22)
    }
}

/// Reads a process's stat.
///
/// # Errors
/// If it is gone, or the line cannot be parsed.
pub fn stat(pid: i32) -> Result<Stat> {
    stat_of(pid, &read(pid, "stat")?)
}

/// Reads the stat of one thread. Its times are the thread's own; the times in [`stat`] are the sums
/// over all threads.
///
/// # Errors
/// Those of [`stat`].
pub(crate) fn thread_stat(process: i32, thread: i32) -> Result<Stat> {
    let text = read_all(&format!("/proc/{process}/task/{thread}/stat"));
    let text = text.map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::Gone { pid: thread },
        _ => Error::from_io("read /proc", thread, e),
    });
    stat_of(thread, &text?)
}

fn stat_of(pid: i32, text: &[u8]) -> Result<Stat> {
    let close = text.iter().rposition(|b| *b == b')').ok_or(Error::Unreadable { what: "stat", pid })?;
    let rest = String::from_utf8_lossy(&text[close + 1..]).into_owned();
    // Field 3 is a letter, and numbers start with field 4. Some are signed.
    let number =
        |f: &str| f.parse::<u64>().or_else(|_e| f.parse::<i64>().map(i64::cast_unsigned)).unwrap_or(0);
    Ok(Stat { fields: rest.split_ascii_whitespace().skip(1).map(number).collect() })
}

/// The stack pointer of a thread in a system call.
///
/// The thread may still be running: a trapped call can be received before the thread sleeps, if the
/// thread is on another processor, or if the kernel (before 6.6) does not switch to the listener
/// directly.
///
/// # Errors
/// If it is gone, does not sleep within a second, or may not be traced.
pub fn syscall_stack_pointer(tid: i32) -> Result<u64> {
    let begun = Instant::now();
    loop {
        let text = read(tid, "syscall")?;
        if text.starts_with(b"running") && begun.elapsed() < MAX_SLEEP_WAIT {
            crate::stop::pause(Duration::from_micros(20));
            continue;
        }
        let words: Vec<&[u8]> = text.split(|b| *b == b' ').collect();
        let stack = words.get(words.len().wrapping_sub(2)).and_then(|w| w.strip_prefix(b"0x")).and_then(hex);
        return stack.ok_or(Error::Unreadable { what: "syscall", pid: tid });
    }
}

/// The command line, arguments separated by blanks; the name in brackets if there is none.
#[must_use]
pub fn command_line(pid: i32) -> String {
    let text = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = text.split(|b| *b == 0).map(String::from_utf8_lossy).collect();
    let line = words.join(" ").trim_end().to_owned();
    if !line.is_empty() {
        return line;
    }
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("[{}]", String::from_utf8_lossy(&name).trim_end())
}

/// The auxiliary vector, as bytes.
///
/// # Errors
/// If the process is gone.
pub fn auxv(pid: i32) -> Result<Vec<u8>> {
    read(pid, "auxv")
}

/// The address where the kernel has mapped the vDSO, in an auxiliary vector.
pub(crate) fn vdso_address(auxv: &[u8]) -> Option<u64> {
    let (words, _) = auxv.as_chunks::<8>();
    let entries = words.chunks_exact(2).map(|entry| entry.iter().map(|word| u64::from_le_bytes(*word)));
    let mut found = entries
        .filter_map(|mut entry| (entry.next() == Some(libc::AT_SYSINFO_EHDR)).then(|| entry.next())?);
    found.next()
}

/// The threads of a process.
///
/// # Errors
/// If it is gone.
pub fn threads(pid: i32) -> Result<Vec<i32>> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).map_err(|_e| Error::Gone { pid })?;
    Ok(entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// The children of a process, except those that have been waited for. Empty if it is gone.
#[must_use]
pub fn children(pid: i32) -> Vec<i32> {
    let of_thread = |tid: i32| read_all(&format!("/proc/{pid}/task/{tid}/children")).unwrap_or_default();
    let texts = threads(pid).into_iter().flatten().map(of_thread);
    let parse = |text: Vec<u8>| -> Vec<i32> {
        let words = text.split(|byte| *byte == b' ').map(|word| std::str::from_utf8(word).ok()?.parse().ok());
        words.flatten().collect()
    };
    texts.flat_map(parse).collect()
}

/// The processes that trace threads of a process, once for each thread that is traced. Empty if the
/// process is gone.
#[must_use]
pub fn tracers(pid: i32) -> Vec<i32> {
    tracers_of(&thread_statuses(pid))
}

/// As [`tracers`], for threads with these statuses.
#[must_use]
pub fn tracers_of(threads: &[Status]) -> Vec<i32> {
    threads.iter().map(|thread| thread.tracer).filter(|tracer| *tracer != 0).collect()
}

/// The statuses of all threads of a process. Empty if the process is gone.
#[must_use]
pub fn thread_statuses(pid: i32) -> Vec<Status> {
    threads(pid).into_iter().flatten().filter_map(|tid| status(tid).ok()).collect()
}

/// A live thread of a process, through whose /proc entries its memory and files are read: the
/// first, unless it has exited before others. The pid itself if no thread is alive.
#[must_use]
pub fn live_thread(pid: i32) -> i32 {
    let is_alive = |tid: &i32| !has_exited(*tid);
    if is_alive(&pid) {
        return pid;
    }
    threads(pid).into_iter().flatten().find(is_alive).unwrap_or(pid)
}

/// The targets of a process's descriptors, as the links in /proc/PID/fd show them.
///
/// # Errors
/// If the process is gone, or may not be traced.
pub fn descriptors(pid: i32) -> Result<Vec<Vec<u8>>> {
    use std::os::unix::ffi::OsStringExt;
    let entries =
        fs::read_dir(format!("/proc/{pid}/fd")).map_err(|e| Error::from_io("list descriptors", pid, e))?;
    Ok(entries
        .filter_map(|e| Some(fs::read_link(e.ok()?.path()).ok()?.into_os_string().into_vec()))
        .collect())
}

/// Number of bytes that a process has read and written by system calls, on files and everything
/// else.
///
/// # Errors
/// If the process is gone, or may not be traced.
pub fn io_bytes(pid: i32) -> Result<u64> {
    let text = read(pid, "io")?;
    let lines = text.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let counts = lines.filter_map(|line| {
        line.strip_prefix("rchar: ").or_else(|| line.strip_prefix("wchar: "))?.parse::<u64>().ok()
    });
    Ok(counts.fold(0, u64::saturating_add))
}

/// Offset and open(2) flags of an open file.
///
/// # Errors
/// If it has no such descriptor, or may not be traced.
pub fn descriptor_state(pid: i32, fd: i32) -> Result<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"))
        .map_err(|e| Error::from_io("read the state of a descriptor", pid, e))?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let offset = field("pos:").and_then(|offset| offset.parse().ok());
    let flags = field("flags:").and_then(|flags| u64::from_str_radix(flags, 8).ok());
    let inconsistent =
        || Error::Inconsistent { what: format!("its descriptor {fd} has no offset or flags"), pid };
    offset.zip(flags).ok_or_else(inconsistent)
}

/// Whether this descriptor of a process is a pidfd of this process, which lives.
#[must_use]
pub fn is_pidfd_of(pid: i32, fd: i32, target: i32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("Pid:")).map(str::trim);
    named.and_then(|named| named.parse().ok()) == Some(target)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn stack_pointer_waits_for_running_thread_to_sleep() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(50) {}
            let _rests = ended.recv();
        });
        assert!(syscall_stack_pointer(receiver.recv().unwrap()).unwrap() > 0);
        drop(end);
        thread.join().unwrap();
    }

    #[test]
    fn pidfd_is_recognised() {
        let (me, file) = (std::process::id() as i32, fs::File::open("/dev/null").unwrap());
        let pid = rustix::process::Pid::from_raw(me).unwrap();
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        assert!(is_pidfd_of(me, pidfd.as_raw_fd(), me));
        assert!(!is_pidfd_of(me, pidfd.as_raw_fd(), 1), "it is another process's");
        assert!(!is_pidfd_of(me, file.as_raw_fd(), me), "it is no pidfd");
    }

    #[test]
    fn own_process_can_be_read() {
        let me = std::process::id() as i32;
        assert!(smaps(me).unwrap().iter().any(|m| m.has(b"gd")), "the stack grows down");
        assert_eq!(status(me).unwrap().own_pid, me);
        assert!(stat(me).unwrap().start_time() > 0);
        let vdso = vdso_address(&auxv(me).unwrap()).unwrap();
        assert_eq!(mapping_at(me, vdso).unwrap().unwrap().name, b"[vdso]");
    }
}
