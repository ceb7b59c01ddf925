//! The mappings of a process.

use super::{hex, read};
use crate::error::{Error, Result};
use std::fs::File;
use std::os::fd::AsRawFd;

/// A line of /proc/PID/maps, with the flags of smaps if they were read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// The first address after it.
    pub end: u64,
    /// PROT_READ, PROT_WRITE, PROT_EXEC.
    pub prot: u32,
    /// MAP_SHARED.
    pub shared: bool,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Device of the file, as `major << 20 | minor`.
    pub device: u64,
    /// Inode of the file; 0 for anonymous memory.
    pub inode: u64,
    /// Path or pseudo-name as the kernel prints it (newline as `\012`). Empty for anonymous memory.
    pub name: Vec<u8>,
    /// Two-letter flags of smaps (proc_pid_smaps(5)). Empty if smaps was not read.
    pub flags: Vec<[u8; 2]>,
}

impl Mapping {
    /// Parses a line of maps. `None` for other lines of smaps.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        mapping(line)
    }

    /// Formats the line as in maps.
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

    /// Whether it maps no file. The first System V segment has inode 0, but a device.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        (self.device, self.inode) == (0, 0)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Always false: the kernel shows no empty mappings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.end <= self.start
    }

    /// Whether it is a mapping of the kernel: vDSO, vvar, vsyscall.
    #[must_use]
    pub fn is_kernel_mapping(&self) -> bool {
        self.name.starts_with(b"[v")
    }
}

/// The mappings of a process, by address, without the flags of smaps.
///
/// # Errors
/// If the process is gone, or a line cannot be parsed.
pub fn maps(pid: i32) -> Result<Vec<Mapping>> {
    let text = read(pid, "maps")?;
    parse(&text, false).ok_or(Error::Unreadable { what: "maps", pid })
}

/// The mappings with flags. Slower, since the kernel counts pages for it.
///
/// # Errors
/// Those of [`maps`].
pub fn smaps(pid: i32) -> Result<Vec<Mapping>> {
    let text = read(pid, "smaps")?;
    parse(&text, true).ok_or(Error::Unreadable { what: "smaps", pid })
}

/// Parses maps, or smaps if `has_flags` is set. The text of smaps is long: the lines between a
/// mapping's first line and its flags are skipped as a whole.
fn parse(text: &[u8], has_flags: bool) -> Option<Vec<Mapping>> {
    const FLAGS: &[u8] = b"\nVmFlags:";
    let mut all: Vec<Mapping> = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let mut mapping = mapping(take_line(&mut rest))?;
        if has_flags {
            rest = &rest[find(rest, FLAGS)? + FLAGS.len()..];
            let flags = take_line(&mut rest).split(|b| *b == b' ');
            mapping.flags = flags.filter_map(|flag| flag.try_into().ok()).collect();
        }
        all.push(mapping);
    }
    Some(all)
}

/// Removes the first line from a text, and returns it.
fn take_line<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let end = find(text, b"\n").unwrap_or(text.len());
    let line = &text[..end];
    *text = text.get(end + 1..).unwrap_or_default();
    line
}

/// The position of these bytes in a text.
fn find(text: &[u8], bytes: &[u8]) -> Option<usize> {
    // SAFETY: the pointers and lengths are those of the slices, which are only read.
    let at = unsafe { libc::memmem(text.as_ptr().cast(), text.len(), bytes.as_ptr().cast(), bytes.len()) };
    (!at.is_null()).then(|| at.addr() - text.as_ptr().addr())
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

/// `_IOWR('f', 17, struct procmap_query)`
const PROCMAP_QUERY: u64 = 0xc068_6611;

/// `struct procmap_query` of the kernel.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// The mapping at an address, without the flags of smaps, if there is one. The kernel finds it
/// directly since Linux 6.11; before that all mappings are read.
///
/// # Errors
/// Those of [`maps`].
pub fn mapping_at(pid: i32, address: u64) -> Result<Option<Mapping>> {
    match query(pid, address) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) && super::status(pid).is_ok() => Ok(None),
        Err(_) => Ok(maps(pid)?.into_iter().find(|m| (m.start..m.end).contains(&address))),
    }
}

/// The vDSO of a process, unless the process has unmapped it.
///
/// # Errors
/// Those of [`maps`].
pub fn vdso(pid: i32) -> Result<Option<Mapping>> {
    let is_vdso = |m: &Mapping| m.name == b"[vdso]";
    // The kernel mapped it at this address. The process may have moved it since.
    let address = super::vdso_address(&super::auxv(pid)?);
    let found = address.map_or(Ok(None), |address| mapping_at(pid, address))?;
    match found.filter(is_vdso) {
        None => Ok(maps(pid)?.into_iter().find(is_vdso)),
        found => Ok(found),
    }
}

fn query(pid: i32, address: u64) -> std::io::Result<Mapping> {
    const READABLE: u64 = 1;
    const WRITABLE: u64 = 2;
    const EXECUTABLE: u64 = 4;
    const SHARED: u64 = 8;
    let file = File::open(format!("/proc/{pid}/maps"))?;
    let mut name = [0u8; libc::PATH_MAX as usize];
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_addr: address,
        vma_name_size: name.len() as u32,
        vma_name_addr: name.as_mut_ptr() as u64,
        ..ProcmapQuery::default()
    };
    // SAFETY: `query` is the structure that this request reads and writes. It has the address and
    // the size of `name`, which the kernel fills.
    if unsafe { libc::ioctl(file.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let prot = |flag: u64, prot: i32| if query.vma_flags & flag != 0 { prot as u32 } else { 0 };
    // The size that the kernel returns includes a zero byte at the end. As in maps, a newline is
    // escaped.
    let name = name.get(..(query.vma_name_size as usize).saturating_sub(1)).unwrap_or_default();
    let escaped = |byte: &u8| if *byte == b'\n' { b"\\012".to_vec() } else { vec![*byte] };
    Ok(Mapping {
        start: query.vma_start,
        end: query.vma_end,
        prot: prot(READABLE, libc::PROT_READ)
            | prot(WRITABLE, libc::PROT_WRITE)
            | prot(EXECUTABLE, libc::PROT_EXEC),
        shared: query.vma_flags & SHARED != 0,
        offset: query.vma_offset,
        device: u64::from(query.dev_major) << 20 | u64::from(query.dev_minor),
        inode: query.inode,
        name: name.iter().flat_map(escaped).collect(),
        flags: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_names_keep_any_bytes() {
        let line = b"7f00-8f00 rw-s 00001000 fe:0a 42                         /tmp/a b\xff (deleted)";
        let m = mapping(line).unwrap();
        assert_eq!((m.start, m.end, m.offset, m.inode, m.shared), (0x7f00, 0x8f00, 0x1000, 42, true));
        assert_eq!(m.name, b"/tmp/a b\xff (deleted)");
        assert_eq!(m.prot, 3);
        assert!(mapping(b"garbage").is_none());
    }

    #[test]
    fn flags_belong_to_the_mapping_above_them() {
        let text = b"1000-2000 rw-p 00000000 00:00 0 \nSize: 4 kB\nVmFlags: rd wr gd \n\
            2000-3000 r--p 00000000 fe:0a 42    /tmp/VmFlags: a b\nSize: 4 kB\nVmFlags: rd \n";
        let all = parse(text, true).unwrap();
        assert_eq!(all.len(), 2);
        assert!(all[0].has(b"gd") && !all[1].has(b"wr") && all[1].has(b"rd"));
        assert_eq!(all[1].name, b"/tmp/VmFlags: a b");
        assert_eq!(parse(&text[..40], true), None, "its flags are missing");
        let lines = b"1000-2000 rw-p 00000000 00:00 0 \n2000-3000 rw-p 00000000 00:00 0";
        assert_eq!(parse(lines, false).unwrap().len(), 2);
        assert_eq!(parse(b"", true).unwrap().len(), 0);
    }

    #[test]
    fn mapping_at_an_address_is_found() {
        let me = std::process::id() as i32;
        let all = maps(me).unwrap();
        let is_stable = |m: &&Mapping| m.inode != 0 || m.name == b"[vdso]";
        for m in all.iter().filter(is_stable) {
            assert_eq!(mapping_at(me, m.end - 1).unwrap().as_ref(), Some(m));
        }
        assert!(all.iter().any(|m| is_stable(&m)));
        assert_eq!(mapping_at(me, 0).unwrap(), None);
    }
}
