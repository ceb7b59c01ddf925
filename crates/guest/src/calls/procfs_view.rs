//! The content of /proc files about a guest's own memory, which exists on this node only.
//!
//! The deputy opens files of /proc, but its memory is empty. So an open of such a file is sent with
//! the content that the file has here, as it would look at home, and home substitutes it for the
//! opened file (`deputy/calls/procfs_view.rs`). A file that can be written, or is useful only at
//! the moment of reading, brings the process home.

use crate::process::shared::Process;
use crate::process::space::MappedFiles;
use tern_image::Reserve;
use tern_syscall::{Arg, Call};
use tern_tracee::PAGE;
use tern_tracee::procfs::{self, Mapping};

/// Larger content is not sent: the deputy's file is used then.
const MAX_VIEW_LEN: usize = 8 << 20;

/// The index of the file name in the arguments of a call that opens a file.
fn opened_name(nr: u32) -> Option<usize> {
    match i64::from(nr) {
        libc::SYS_open => Some(0),
        libc::SYS_openat | libc::SYS_openat2 => Some(1),
        _ => None,
    }
}

/// The index of the file name in the arguments of a call that returns what a file is, without
/// opening it.
fn examined_name(nr: u32) -> Option<usize> {
    match i64::from(nr) {
        libc::SYS_readlink | libc::SYS_stat | libc::SYS_lstat | libc::SYS_access => Some(0),
        libc::SYS_readlinkat
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_faccessat
        | libc::SYS_faccessat2 => Some(1),
        _ => None,
    }
}

/// The name of a /proc file about the caller itself, without the beginning of its path, if argument
/// `at` of this call names one.
fn own_proc_file(call: &Call, own_pid: i32, at: usize) -> Option<&[u8]> {
    let Arg::Bytes(path) = call.args.get(at)? else { return None };
    let rest = path.strip_suffix(b"\0")?.strip_prefix(b"/proc/")?;
    let slash = rest.iter().position(|b| *b == b'/')?;
    let (whose, mut name) = (&rest[..slash], &rest[slash + 1..]);
    if whose != b"self" && whose != b"thread-self" && whose != own_pid.to_string().as_bytes() {
        return None;
    }
    // All threads have the same memory.
    if let Some(process_of_thread) = name.strip_prefix(b"task/") {
        name = &process_of_thread[process_of_thread.iter().position(|b| *b == b'/')? + 1..];
    }
    Some(name)
}

/// Whether a call opens a file by which memory is read or changed, or reaches or examines the files
/// behind the mappings: it must be made at home.
pub(crate) fn reaches_memory(call: &Call, own_pid: i32) -> bool {
    let named = |at: Option<usize>| own_proc_file(call, own_pid, at?);
    let opened = named(opened_name(call.nr));
    opened.is_some_and(|name| matches!(name, b"mem" | b"pagemap" | b"clear_refs"))
        || opened
            .or_else(|| named(examined_name(call.nr)))
            .and_then(|name| name.strip_prefix(b"map_files"))
            .is_some_and(|rest| matches!(rest, [] | [b'/', ..]))
}

/// The content, as it is on this node, of the /proc file about the caller's own memory that this
/// call opens; none for any other call.
pub(crate) fn view(call: &Call, process: &Process) -> Option<Vec<u8>> {
    let name = match own_proc_file(call, process.own_pid, opened_name(call.nr)?)? {
        b"maps" => "maps",
        b"smaps" => "smaps",
        b"smaps_rollup" => "smaps_rollup",
        b"statm" => "statm",
        b"status" => "status",
        b"stat" => "stat",
        _ => return None,
    };
    let text = std::fs::read(format!("/proc/{}/{name}", process.memory.pid())).ok()?;
    let view = match name {
        "maps" | "smaps" => mappings(&text, process.reserve, &process.mapped_files),
        "statm" => subtract_reserve(&text),
        // Home adds the other lines, from the deputy.
        "status" => lines(&text)
            .filter(|line| line.starts_with(b"Vm") || line.starts_with(b"Rss"))
            .collect::<Vec<_>>()
            .concat(),
        "stat" => procfs::stat(process.memory.pid())
            .map(|s| format!("{} {}", s.field(23), s.field(24)))
            .ok()?
            .into_bytes(),
        _ => text,
    };
    Some(view).filter(|view| view.len() <= MAX_VIEW_LEN)
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split_inclusive(|b| *b == b'\n')
}

/// The lines of maps or smaps as they would be at home: without the reserved range, and with the
/// names of home's files.
fn mappings(text: &[u8], reserve: Reserve, mapped_files: &MappedFiles) -> Vec<u8> {
    let mut all: Vec<u8> = Vec::with_capacity(text.len());
    let mut skipped = false;
    for line in lines(text) {
        let Some(mut mapping) = Mapping::parse(line.trim_ascii_end()) else {
            // A line of smaps about the previous mapping.
            if !skipped {
                all.extend_from_slice(line);
            }
            continue;
        };
        if let Some(file) = mapped_files.get(&(mapping.device, mapping.inode)) {
            (mapping.device, mapping.inode) = (file.device, file.inode);
            mapping.name.clone_from(&file.path);
        }
        let parts = Reserve::exclude(Some(reserve), &[mapping]);
        skipped = parts.is_empty();
        for part in parts {
            all.extend(part.line());
        }
    }
    all
}

/// statm has the fields size, resident, shared, text, lib, data, dirty, in pages; the reserved
/// range counts as size and data.
fn subtract_reserve(text: &[u8]) -> Vec<u8> {
    let numbers = text.trim_ascii_end().split(|b| *b == b' ').enumerate().map(|(at, number)| {
        let number: u64 = std::str::from_utf8(number).ok().and_then(|n| n.parse().ok()).unwrap_or(0);
        let ours = if matches!(at, 0 | 5) { Reserve::LEN / PAGE } else { 0 };
        number.saturating_sub(ours).to_string()
    });
    (numbers.collect::<Vec<_>>().join(" ") + "\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_syscall::ByteBuf;

    fn call(nr: i64, path: &str) -> Call {
        let mut args = [const { Arg::Value(0) }; 6];
        args[1] = Arg::Bytes(ByteBuf::from(format!("{path}\0").into_bytes()));
        Call { nr: nr as u32, args }
    }

    fn open(path: &str) -> Call {
        call(libc::SYS_openat, path)
    }

    #[test]
    fn only_own_proc_files_are_recognised() {
        for path in ["/proc/self/maps", "/proc/31/maps", "/proc/thread-self/maps", "/proc/self/task/32/maps"]
        {
            assert_eq!(own_proc_file(&open(path), 31, 1), Some(&b"maps"[..]), "{path}");
        }
        for path in ["/proc/32/maps", "/proc/meminfo", "/proc/self", "maps", "/proc/self/task/32"] {
            assert_eq!(own_proc_file(&open(path), 31, 1), None, "{path}");
        }
        assert_eq!(own_proc_file(&open("/proc/self/fd/3"), 31, 1), Some(&b"fd/3"[..]));
        for path in
            ["/proc/self/mem", "/proc/self/map_files", "/proc/31/map_files/", "/proc/31/map_files/1-2"]
        {
            assert!(reaches_memory(&open(path), 31), "{path}");
        }
        for path in ["/proc/self/maps", "/proc/32/map_files", "/proc/self/map_filesystem"] {
            assert!(!reaches_memory(&open(path), 31), "{path}");
        }
        let link = "/proc/self/map_files/1-2";
        assert!(reaches_memory(&call(libc::SYS_readlinkat, link), 31));
        assert!(reaches_memory(&call(libc::SYS_statx, link), 31));
        assert!(!reaches_memory(&call(libc::SYS_statx, "/proc/self/mem"), 31), "it is not opened");
        assert!(!reaches_memory(&call(libc::SYS_pwrite64, link), 31), "data, and no name");
    }

    #[test]
    fn maps_hide_the_reserved_range_and_show_home_s_names() {
        let reserve = Reserve { start: Reserve::HINT };
        let (start, end) = (reserve.start, reserve.end());
        let text = format!(
            "00400000-00401000 r-xp 00001000 00:2a 77 /cache/abc\nRss: 4 kB\n{start:x}-{end:x} rw-p 00000000 00:00 0 \nRss: 8 kB\n"
        );
        let hash = tern_ids::ContentHash([0; 32]);
        let (device, path) = (8 << 20 | 1, b"/usr/bin/work".to_vec());
        let file = tern_image::FileRef {
            device,
            inode: 4711,
            path,
            size: 1,
            hash,
            shareable: true,
            is_object: false,
            location: None,
        };
        let mapped_files = MappedFiles::from([((0x2a, 77), file)]);
        let seen = String::from_utf8(mappings(text.as_bytes(), reserve, &mapped_files)).unwrap();
        let wanted =
            format!("{:<73}/usr/bin/work\nRss: 4 kB\n", "00400000-00401000 r-xp 00001000 08:01 4711 ");
        assert_eq!(seen, wanted);
        assert_eq!(subtract_reserve(b"100 50 10 1 0 80 0\n"), b"36 50 10 1 0 16 0\n");
    }
}
