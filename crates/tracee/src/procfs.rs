//! What /proc tells of a process. Parsed from bytes: a mapping may bear any name.

use crate::error::{Error, Result};
use std::fs;
use std::io::Read;
use std::time::{Duration, Instant};

/// How long a thread is waited for that is about to rest in a call.
const REST: Duration = Duration::from_secs(1);

/// One line of /proc/PID/maps, with the flags of smaps if they were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address behind the last.
    pub end: u64,
    /// PROT_READ, PROT_WRITE, PROT_EXEC.
    pub prot: u32,
    /// MAP_SHARED.
    pub shared: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Device of the file, as `major << 20 | minor`.
    pub device: u64,
    /// Inode of the file; 0 for anonymous memory.
    pub inode: u64,
    /// Path or pseudo-name, as the kernel prints it (newline as `\012`); empty for anonymous memory.
    pub name: Vec<u8>,
    /// Two-letter flags of smaps (proc_pid_smaps(5)); empty if not asked for.
    pub flags: Vec<[u8; 2]>,
}

impl Mapping {
    /// A line of maps; nothing for what is none, as what smaps says besides.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        mapping(line)
    }

    /// The line of maps.
    #[must_use]
    pub fn line(&self) -> Vec<u8> {
        let bit = |bit: i32, letter: char| if self.prot & bit as u32 != 0 { letter } else { '-' };
        let mut line = format!(
            "{:08x}-{:08x} {}{}{}{} {:08x} {:02x}:{:02x} {} ",
            self.start,
            self.end,
            bit(libc::PROT_READ, 'r'),
            bit(libc::PROT_WRITE, 'w'),
            bit(libc::PROT_EXEC, 'x'),
            if self.shared { 's' } else { 'p' },
            self.offset,
            self.device >> 20,
            self.device & 0xf_ffff,
            self.inode
        );
        if !self.name.is_empty() {
            line = format!("{line:<73}");
        }
        let mut line = line.into_bytes();
        line.extend_from_slice(&self.name);
        line.push(b'\n');
        line
    }

    /// Whether smaps shows this flag.
    #[must_use]
    pub fn has(&self, flag: &[u8; 2]) -> bool {
        self.flags.contains(flag)
    }

    /// Whether it has no file. The first System V segment has one whose inode is 0.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        (self.device, self.inode) == (0, 0)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Never: the kernel shows no empty mappings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.end <= self.start
    }

    /// Whether it is one of the kernel's own: vDSO, its data, vsyscall.
    #[must_use]
    pub fn is_kernels(&self) -> bool {
        self.name.starts_with(b"[v")
    }
}

pub(crate) fn read(pid: i32, what: &'static str) -> Result<Vec<u8>> {
    whole(&format!("/proc/{pid}/{what}")).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::Gone { pid },
        _ => Error::from_io("read /proc", pid, e),
    })
}

/// Reads a file whose size nobody tells, as most are here, in two reads: `fs::read` begins with 32 bytes.
fn whole(path: &str) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::with_capacity(4096);
    fs::File::open(path)?.read_to_end(&mut text)?;
    Ok(text)
}

/// The address space, in order of address, without smaps' flags.
///
/// # Errors
/// If the process is gone or the kernel's lines are not understood.
pub fn maps(pid: i32) -> Result<Vec<Mapping>> {
    parse(pid, &read(pid, "maps")?)
}

/// The address space with flags; slower, the kernel counts pages.
///
/// # Errors
/// As [`maps`].
pub fn smaps(pid: i32) -> Result<Vec<Mapping>> {
    parse(pid, &read(pid, "smaps")?)
}

fn parse(pid: i32, text: &[u8]) -> Result<Vec<Mapping>> {
    let mut all: Vec<Mapping> = Vec::new();
    for line in text.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            if let Some(last) = all.last_mut() {
                last.flags = flags.split(|b| *b == b' ').filter_map(|f| f.try_into().ok()).collect();
            }
        } else if line[0].is_ascii_digit() || (b'a'..=b'f').contains(&line[0]) {
            all.push(mapping(line).ok_or(Error::Unreadable { what: "maps", pid })?);
        }
    }
    Ok(all)
}

fn mapping(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.splitn(6, |b| *b == b' ');
    let mut range = fields.next()?.split(|b| *b == b'-');
    let (start, end) = (hex(range.next()?)?, hex(range.next()?)?);
    let perms = fields.next()?;
    let offset = hex(fields.next()?)?;
    let mut dev = fields.next()?.split(|b| *b == b':');
    let device = hex(dev.next()?)? << 20 | hex(dev.next()?)?;
    let inode = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let name = fields.next().unwrap_or_default().trim_ascii_start().to_vec();
    let bit =
        |at: usize, letter: u8, value: i32| if perms.get(at) == Some(&letter) { value as u32 } else { 0 };
    let prot = bit(0, b'r', libc::PROT_READ) | bit(1, b'w', libc::PROT_WRITE) | bit(2, b'x', libc::PROT_EXEC);
    let shared = perms.get(3) == Some(&b's');
    Some(Mapping { start, end, prot, shared, offset, device, inode, name, flags: Vec::new() })
}

fn hex(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// What of /proc/PID/status we look at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Command name.
    pub name: Vec<u8>,
    /// State letter.
    pub state: u8,
    /// Its pid in its own, innermost pid namespace.
    pub own_pid: i32,
    /// Its parent.
    pub parent: i32,
    /// Its thread group.
    pub group: i32,
    /// Who traces it; 0 if nobody.
    pub tracer: i32,
    /// Real, effective, saved and file system user.
    pub uid: [u32; 4],
    /// Real, effective, saved and file system group.
    pub gid: [u32; 4],
    /// Its other groups.
    pub groups: Vec<u32>,
    /// Number of threads.
    pub threads: u32,
    /// Seccomp mode: 0 none, 1 strict, 2 filter.
    pub seccomp: u32,
    /// Blocked signals, bit n-1 for signal n.
    pub blocked: u64,
    /// Signals that wait, for this thread or for its process.
    pub pending: u64,
    /// Signals that are ignored.
    pub ignored: u64,
    /// Signals that have a handler.
    pub caught: u64,
    /// Effective capabilities, bit n for capability n.
    pub effective: u64,
    /// Memory locked, KiB.
    pub locked_kib: u64,
    /// Memory in use, KiB; 0 for a kernel thread or a zombie.
    pub resident_kib: u64,
    /// Shadow stack in use.
    pub shadow_stack: bool,
}

impl Status {
    /// Whether it has ended, and is only still there because somebody is to be told, or is being told just now.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }
}

/// Whether a process, or a thread, has ended: one whose end has been waited for as well.
#[must_use]
pub fn has_ended(tid: i32) -> bool {
    status(tid).map_or(true, |status| status.has_ended())
}

/// Whether any thread of a process has not ended. The first one may have before others, and one that executes a program then
/// gets its number: to who looks in between, both are gone, and so this looks twice.
#[must_use]
pub fn lives(pid: i32) -> bool {
    let look = || status(pid).is_ok_and(|first| !first.has_ended() || first.threads > 1);
    look() || look()
}

/// Reads a process' status.
///
/// # Errors
/// If it is gone or the file is not understood.
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
            b"VmLck" => status.locked_kib = first()?,
            b"VmRSS" => status.resident_kib = first()?,
            b"x86_Thread_features" => status.shadow_stack = value.windows(5).any(|w| w == b"shstk"),
            _ => {}
        }
    }
    Ok(status)
}

/// What of /proc/PID/stat we look at (proc_pid_stat(5); field numbers there count from 1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stat {
    fields: Vec<u64>,
}

impl Stat {
    /// Field `number` of proc_pid_stat(5), from 3 on; 0 if the kernel does not show it.
    #[must_use]
    pub fn field(&self, number: usize) -> u64 {
        self.fields.get(number.wrapping_sub(4)).copied().unwrap_or(0)
    }

    /// User and system time, in seconds.
    #[must_use]
    pub fn cpu_seconds(&self) -> f64 {
        // USER_HZ is 100 on x86-64 (the kernel's ABI, not its HZ).
        (self.field(14) + self.field(15)) as f64 / 100.0
    }

    /// Memory in use, in bytes.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.field(24).saturating_mul(crate::PAGE)
    }

    /// The pages that hold the arguments and the environment, which `ps` reads: the first address, and that behind the last.
    /// Nothing if they are more than exec takes: a process may say anything of them (`PR_SET_MM`).
    #[must_use]
    pub fn title(&self) -> (u64, u64) {
        /// Three quarters of 8 MiB of stack (execve(2)).
        const MOST: u64 = 6 << 20;
        let start = self.field(48) & !(crate::PAGE - 1);
        let end = self.field(51).checked_next_multiple_of(crate::PAGE).unwrap_or(0);
        if end.saturating_sub(start) > MOST { (0, 0) } else { (start, end) }
    }

    /// Start time since boot in clock ticks: with the pid it names a process for ever.
    #[must_use]
    pub fn start_time(&self) -> u64 {
        self.field(22)
    }
}

/// Reads a process' stat.
///
/// # Errors
/// If it is gone or the line is not understood.
pub fn stat(pid: i32) -> Result<Stat> {
    stat_of(pid, &read(pid, "stat")?)
}

/// Reads the stat of one thread of a process: its own times, where [`stat`] has those of all threads.
///
/// # Errors
/// As [`stat`].
pub fn thread_stat(process: i32, thread: i32) -> Result<Stat> {
    let text = whole(&format!("/proc/{process}/task/{thread}/stat"));
    let text = text.map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::Gone { pid: thread },
        _ => Error::from_io("read /proc", thread, e),
    });
    stat_of(thread, &text?)
}

fn stat_of(pid: i32, text: &[u8]) -> Result<Stat> {
    let close = text.iter().rposition(|b| *b == b')').ok_or(Error::Unreadable { what: "stat", pid })?;
    let rest = String::from_utf8_lossy(&text[close + 1..]).into_owned();
    // Field 3 is a letter; the numbers begin with field 4. Some are signed.
    let number =
        |f: &str| f.parse::<u64>().or_else(|_e| f.parse::<i64>().map(i64::cast_unsigned)).unwrap_or(0);
    Ok(Stat { fields: rest.split_ascii_whitespace().skip(1).map(number).collect() })
}

/// The stack pointer of a thread that is inside a system call.
///
/// It may just be coming to rest there: a thread whose call has been trapped is heard of while it still runs, if that is
/// on another processor, or if the kernel (before 6.6) does not hand its processor over to who listens.
///
/// # Errors
/// If it is gone, does not come to rest within a second, or is not ours.
pub fn stack_pointer(tid: i32) -> Result<u64> {
    let begun = Instant::now();
    loop {
        let text = read(tid, "syscall")?;
        if text.starts_with(b"running") && begun.elapsed() < REST {
            std::thread::sleep(Duration::from_micros(20));
            continue;
        }
        let words: Vec<&[u8]> = text.split(|b| *b == b' ').collect();
        let stack = words.get(words.len().wrapping_sub(2)).and_then(|w| w.strip_prefix(b"0x")).and_then(hex);
        return stack.ok_or(Error::Unreadable { what: "syscall", pid: tid });
    }
}

/// Its command line, arguments separated by blanks; the name in brackets if it has none.
#[must_use]
pub fn command_line(pid: i32) -> String {
    let text = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = text.split(|b| *b == 0).map(String::from_utf8_lossy).collect();
    let line = words.join(" ").trim_end().to_owned();
    if !line.is_empty() {
        return line;
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("[{}]", name.trim_end())
}

/// The auxiliary vector, as bytes.
///
/// # Errors
/// If the process is gone.
pub fn auxv(pid: i32) -> Result<Vec<u8>> {
    read(pid, "auxv")
}

/// The process' threads.
///
/// # Errors
/// If it is gone.
pub fn threads(pid: i32) -> Result<Vec<i32>> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).map_err(|_e| Error::Gone { pid })?;
    Ok(entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// A thread of a process that lives, through which its memory and files are seen: the first one, unless that has ended
/// before others. If none lives, or it is gone, still its own number.
#[must_use]
pub fn living(pid: i32) -> i32 {
    let lives = |tid: &i32| !has_ended(*tid);
    if lives(&pid) {
        return pid;
    }
    threads(pid).into_iter().flatten().find(lives).unwrap_or(pid)
}

/// Where its descriptors lead, as the links of /proc/PID/fd read.
///
/// # Errors
/// If the process is gone or not ours.
pub fn descriptors(pid: i32) -> Result<Vec<Vec<u8>>> {
    use std::os::unix::ffi::OsStringExt;
    let entries =
        fs::read_dir(format!("/proc/{pid}/fd")).map_err(|e| Error::from_io("list descriptors", pid, e))?;
    Ok(entries
        .filter_map(|e| Some(fs::read_link(e.ok()?.path()).ok()?.into_os_string().into_vec()))
        .collect())
}

/// Bytes that it has read and written by calls of its own, of files and of all else.
///
/// # Errors
/// If the process is gone or not ours.
pub fn transferred(pid: i32) -> Result<u64> {
    let text = read(pid, "io")?;
    let lines = text.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let counts = lines.filter_map(|line| {
        line.strip_prefix("rchar: ").or_else(|| line.strip_prefix("wchar: "))?.parse::<u64>().ok()
    });
    Ok(counts.fold(0, u64::saturating_add))
}

/// Where an open file of it is read and written next, and its flags, as open(2) has them.
///
/// # Errors
/// If it has no such descriptor, or is not ours.
pub fn descriptor(pid: i32, fd: i32) -> Result<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"))
        .map_err(|e| Error::from_io("look at a descriptor", pid, e))?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let offset = field("pos:").and_then(|offset| offset.parse().ok());
    let flags = field("flags:").and_then(|flags| u64::from_str_radix(flags, 8).ok());
    let astray = || Error::Astray { what: format!("its descriptor {fd} has no offset or flags"), pid };
    offset.zip(flags).ok_or_else(astray)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_about_to_rest_is_waited_for() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(50) {}
            let _rests = ended.recv();
        });
        assert!(stack_pointer(told.recv().unwrap()).unwrap() > 0);
        drop(end);
        thread.join().unwrap();
    }

    #[test]
    fn odd_names_are_kept() {
        let line = b"7f00-8f00 rw-s 00001000 fe:0a 42                         /tmp/a b\xff (deleted)";
        let m = mapping(line).unwrap();
        assert_eq!((m.start, m.end, m.offset, m.inode, m.shared), (0x7f00, 0x8f00, 0x1000, 42, true));
        assert_eq!(m.name, b"/tmp/a b\xff (deleted)");
        assert_eq!(m.prot, 3);
        assert!(mapping(b"garbage").is_none());
    }

    #[test]
    fn we_can_read_ourselves() {
        let me = std::process::id() as i32;
        assert!(smaps(me).unwrap().iter().any(|m| m.has(b"gd")), "the stack grows down");
        assert_eq!(status(me).unwrap().own_pid, me);
        assert!(stat(me).unwrap().start_time() > 0);
    }
}
