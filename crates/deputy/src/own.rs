//! What /proc says of a program's own memory while it is away (`guest/own.rs`).
//!
//! The deputy has opened the file. In its place, under the same number, comes a file in memory with what the guest's node
//! shows: of the moment of opening, and it stays so if it is read again later. What is not about memory stays the
//! deputy's.

use crate::member::Member;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use tern_tracee::stop::Stopped;
use tern_tracee::{Memory, Result};

impl Member {
    /// Puts that view in the place of the file that a standing deputy has just opened, if it is one of /proc; the deputy
    /// goes on. What cannot be put there (no descriptor is left) is not: it sees the deputy's.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn show_own(&mut self, stopped: Stopped, opened: i64, view: &[u8]) -> Result<()> {
        // Through a thread that lives.
        let pid = stopped.pid();
        let path = format!("/proc/{pid}/fd/{opened}");
        let Some((name, text)) = text(&path, view) else { return self.go_on(stopped) };
        let (mut injection, reserve) = self.injection(stopped)?;
        // Whoever asks what this descriptor is reads the name of what was opened.
        Memory::open(pid)?.write(reserve.scratch(), &name)?;
        let named = [reserve.scratch(), u64::from(libc::MFD_CLOEXEC), 0, 0, 0, 0];
        let file = injection.call(libc::SYS_memfd_create, named)?;
        if file >= 0 {
            let (file, opened) = (file.cast_unsigned(), opened.cast_unsigned());
            let there = fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/fd/{file}"));
            if there.and_then(|mut there| std::io::Write::write_all(&mut there, &text)).is_ok() {
                let asked = [opened, libc::F_GETFD as u64, 0, 0, 0, 0];
                let at_exec = injection.call(libc::SYS_fcntl, asked)? & i64::from(libc::FD_CLOEXEC) != 0;
                let flags = if at_exec { libc::O_CLOEXEC as u64 } else { 0 };
                let _not_placed = injection.call(libc::SYS_dup3, [file, opened, flags, 0, 0, 0])?;
            }
            injection.call(libc::SYS_close, [file, 0, 0, 0, 0, 0])?;
        }
        let stopped = injection.finish()?;
        self.go_on(stopped)
    }
}

/// The name of what this descriptor is, and what is to be read instead; nothing if it is none of the files of /proc that are about memory. The
/// guest says what the memory is like, and nothing else.
fn text(opened: &str, view: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let link = fs::read_link(opened).ok()?;
    let is_proc = link.starts_with("/proc");
    let name = link.file_name().filter(|_| is_proc)?;
    let deputys = || File::open(opened).and_then(std::io::read_to_string).ok();
    let text = match name.as_bytes() {
        b"maps" | b"smaps" | b"smaps_rollup" | b"statm" => view.to_vec(),
        b"status" => status(&deputys()?, std::str::from_utf8(view).ok()?),
        b"stat" => stat(&deputys()?, std::str::from_utf8(view).ok()?)?,
        _ => return None,
    };
    Some(([link.as_os_str().as_bytes(), b"\0"].concat(), text))
}

/// The deputy's lines, but those about memory, which the view has.
fn status(deputys: &str, view: &str) -> Vec<u8> {
    let of_memory = |line: &&str| line.starts_with("Vm") || line.starts_with("Rss");
    let mut all = String::with_capacity(deputys.len() + view.len());
    let mut shown = false;
    for line in deputys.split_inclusive('\n') {
        if !of_memory(&line) {
            all += line;
        } else if !std::mem::replace(&mut shown, true) {
            view.split_inclusive('\n').filter(of_memory).for_each(|line| all += line);
        }
    }
    all.into_bytes()
}

/// The deputy's line, with the size and the resident pages of the view (fields 23 and 24).
fn stat(deputys: &str, view: &str) -> Option<Vec<u8>> {
    let (size, resident) = view.split_once(' ')?;
    let (size, resident): (u64, u64) = (size.parse().ok()?, resident.parse().ok()?);
    // The name may have anything in it.
    let (name, rest) = deputys.split_at(deputys.rfind(')')? + 1);
    let mut fields: Vec<String> = rest.split(' ').map(str::to_owned).collect();
    // Before the third field is the blank behind the name.
    *fields.get_mut(23 - 2)? = size.to_string();
    *fields.get_mut(24 - 2)? = resident.to_string();
    Some([name, &fields.join(" ")].concat().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_is_anothers() {
        let deputys = "Name:\tx\nVmPeak:\t1 kB\nVmRSS:\t1 kB\nRssAnon:\t0 kB\nThreads:\t1\n";
        let seen = status(deputys, "VmPeak:\t9 kB\nVmRSS:\t8 kB\nName:\tother\n");
        assert_eq!(seen, b"Name:\tx\nVmPeak:\t9 kB\nVmRSS:\t8 kB\nThreads:\t1\n");
        let line: Vec<String> = (3..=52).map(|n| n.to_string()).collect();
        let seen = stat(&format!("31 (a ) b) {}\n", line.join(" ")), "2300 2400").unwrap();
        let wanted = format!("31 (a ) b) {}\n", line.join(" ")).replace(" 23 24 ", " 2300 2400 ");
        assert_eq!(String::from_utf8(seen).unwrap(), wanted);
        assert!(stat("31 (x) 1 2", "1 2").is_none() && stat("", "1 x").is_none());
    }
}
