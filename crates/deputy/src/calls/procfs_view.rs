//! Virtualises what /proc reports of a program's own memory while it is away. The guest's shim sends
//! the text.
//!
//! After the deputy has opened such a file, its descriptor is replaced by a memfd with the text
//! that the guest's node reports. The text is a snapshot made at the open: reading it again gives the
//! same. Lines that are not about memory are the deputy's.

use crate::process::Process;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result, limit};

impl Process {
    /// A stopped deputy has just opened a file. If it is one of /proc's files about memory, puts
    /// `view` in its place. Then resumes the deputy. If the kernel refuses the memory for this, the
    /// program sees the deputy's file.
    ///
    /// # Errors
    /// If the deputy is gone.
    pub(crate) fn install_procfs_view(&mut self, stopped: Stopped, opened: i64, view: &[u8]) -> Result<()> {
        // The tid of this thread, since the first thread may have exited, and then has an empty
        // /proc/PID/fd.
        let pid = stopped.pid();
        let path = format!("/proc/{pid}/fd/{opened}");
        let Some((name, text)) = view_for(&path, view) else { return self.resume_unnoticed(stopped) };
        let (mut injection, reserve) = self.injection(stopped)?;
        // The memfd's name is what /proc/PID/fd shows for it: the path that was opened.
        Memory::open(pid)?.write(reserve.scratch(), &name)?;
        let create_args = [reserve.scratch(), u64::from(libc::MFD_CLOEXEC), 0, 0, 0, 0];
        let create = || injection.must("make a view", libc::SYS_memfd_create, create_args);
        let memfd = match limit::with_spare_descriptors(pid, create) {
            Ok(memfd) => Some(memfd),
            Err(Error::Refused { .. }) => None,
            Err(error) => return Err(error),
        };
        if let Some(memfd) = memfd {
            let opened = opened.cast_unsigned();
            let shim_side = fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/fd/{memfd}"));
            if shim_side.and_then(|mut file| std::io::Write::write_all(&mut file, &text)).is_ok() {
                let get_flags = [opened, libc::F_GETFD as u64, 0, 0, 0, 0];
                let close_on_exec =
                    injection.call(libc::SYS_fcntl, get_flags)? & i64::from(libc::FD_CLOEXEC) != 0;
                let flags = if close_on_exec { libc::O_CLOEXEC as u64 } else { 0 };
                let _not_replaced = injection.call(libc::SYS_dup3, [memfd, opened, flags, 0, 0, 0])?;
            }
            injection.call(libc::SYS_close, [memfd, 0, 0, 0, 0, 0])?;
        }
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped)
    }
}

/// The path behind this descriptor and the text to show instead of the file's; none if it is not one of
/// /proc's files about memory. Only the figures about memory are taken from the guest.
fn view_for(opened: &str, view: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let link = fs::read_link(opened).ok()?;
    let is_proc = link.starts_with("/proc");
    let name = link.file_name().filter(|_| is_proc)?;
    let deputy_text = || File::open(opened).and_then(std::io::read_to_string).ok();
    let text = match name.as_bytes() {
        b"maps" | b"smaps" | b"smaps_rollup" | b"statm" => view.to_vec(),
        b"status" => merge_status(&deputy_text()?, std::str::from_utf8(view).ok()?),
        b"stat" => merge_stat(&deputy_text()?, std::str::from_utf8(view).ok()?)?,
        _ => return None,
    };
    Some(([link.as_os_str().as_bytes(), b"\0"].concat(), text))
}

/// The deputy's lines, with those about memory replaced by the view's.
fn merge_status(deputy_text: &str, view: &str) -> Vec<u8> {
    let of_memory = |line: &&str| line.starts_with("Vm") || line.starts_with("Rss");
    let mut all = String::with_capacity(deputy_text.len() + view.len());
    let mut is_inserted = false;
    for line in deputy_text.split_inclusive('\n') {
        if !of_memory(&line) {
            all += line;
        } else if !std::mem::replace(&mut is_inserted, true) {
            view.split_inclusive('\n').filter(of_memory).for_each(|line| all += line);
        }
    }
    all.into_bytes()
}

/// The deputy's line, with the size and resident pages of the view (fields 23 and 24).
fn merge_stat(deputy_text: &str, view: &str) -> Option<Vec<u8>> {
    let (size, resident) = view.split_once(' ')?;
    let (size, resident): (u64, u64) = (size.parse().ok()?, resident.parse().ok()?);
    // The command name may contain any character.
    let (name, rest) = deputy_text.split_at(deputy_text.rfind(')')? + 1);
    let mut fields: Vec<String> = rest.split(' ').map(str::to_owned).collect();
    // The first piece is empty, before the blank; so field N has index N - 2.
    *fields.get_mut(23 - 2)? = size.to_string();
    *fields.get_mut(24 - 2)? = resident.to_string();
    Some([name, &fields.join(" ")].concat().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_lines_come_from_the_view() {
        let deputy_text = "Name:\tx\nVmPeak:\t1 kB\nVmRSS:\t1 kB\nRssAnon:\t0 kB\nThreads:\t1\n";
        let shown = merge_status(deputy_text, "VmPeak:\t9 kB\nVmRSS:\t8 kB\nName:\tother\n");
        assert_eq!(shown, b"Name:\tx\nVmPeak:\t9 kB\nVmRSS:\t8 kB\nThreads:\t1\n");
        let line: Vec<String> = (3..=52).map(|n| n.to_string()).collect();
        let shown = merge_stat(&format!("31 (a ) b) {}\n", line.join(" ")), "2300 2400").unwrap();
        let wanted = format!("31 (a ) b) {}\n", line.join(" ")).replace(" 23 24 ", " 2300 2400 ");
        assert_eq!(String::from_utf8(shown).unwrap(), wanted);
        assert!(merge_stat("31 (x) 1 2", "1 2").is_none() && merge_stat("", "1 x").is_none());
    }
}
