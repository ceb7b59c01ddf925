//! How the address space of a process at home is changed.

use std::os::unix::fs::MetadataExt;
use tern_image::apply::{self, Space};
use tern_image::layout::{FileRef, Region};
use tern_tracee::inject::Injection;
use tern_tracee::{Error, Memory, Result};

/// A process at home under injection.
#[derive(Debug)]
pub(crate) struct HomeSpace<'a> {
    pub(crate) injection: &'a mut Injection,
    /// For the names of files.
    pub(crate) memory: &'a Memory,
    /// Room for them in the process.
    pub(crate) scratch: u64,
    /// The files that regions name.
    pub(crate) files: &'a [FileRef],
}

impl Space for HomeSpace<'_> {
    fn injection(&mut self) -> &mut Injection {
        self.injection
    }

    fn call(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64> {
        self.injection.must(operation, nr, args)
    }

    /// Maps a file by its name. Most files are mapped already, since the skeleton of the address space stays
    /// at home; this is for those that were mapped away, or moved about.
    fn map_file(&mut self, region: &Region, file: u32, offset: u64) -> Result<()> {
        let pid = self.injection.pid();
        let astray = |what: String| Error::Astray { what, pid };
        let file = self.files.get(file as usize).ok_or_else(|| astray("an unknown file".into()))?;
        let name = String::from_utf8_lossy(&file.path).into_owned();
        let mut path = file.path.clone();
        path.push(0);
        self.memory.write_forced(self.scratch, &path)?;
        let at_cwd = i64::from(libc::AT_FDCWD).cast_unsigned();
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
        let fd = self.injection.must(
            "open a mapped file",
            libc::SYS_openat,
            [at_cwd, self.scratch, flags, 0, 0, 0],
        )?;
        let same = std::fs::metadata(format!("/proc/{pid}/fd/{fd}"))
            .is_ok_and(|m| m.ino() == file.inode && m.size() == file.size);
        let args = [region.start, region.len(), u64::from(region.prot), apply::flags(region), fd, offset];
        let at = if same { Some(self.injection.call(libc::SYS_mmap, args)?) } else { None };
        self.injection.must("close a mapped file", libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
        match at {
            Some(at) if at.cast_unsigned() == region.start => Ok(()),
            Some(at) => Err(astray(format!(
                "{name} cannot be mapped: {}",
                std::io::Error::from_raw_os_error((-at) as i32)
            ))),
            None => Err(astray(format!("{name} is not the file any more that it had mapped"))),
        }
    }
}
