//! How the address space of a process at home is changed.

use std::collections::HashMap;
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use tern_image::Reserve;
use tern_image::apply::{self, Space, Step};
use tern_image::content::HomeFiles;
use tern_image::layout::{Backing, FileRef, Region};
use tern_tracee::inject::Injection;
use tern_tracee::pidfd::Pidfd;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Error, Memory, Result};

/// A process at home under injection.
#[derive(Debug)]
pub(crate) struct HomeSpace<'a> {
    injection: &'a mut Injection,
    /// For the names of files.
    memory: &'a Memory,
    /// Room for them in the process.
    scratch: u64,
    /// The files that regions name.
    files: &'a [FileRef],
    /// Those of them that we have open, by their number.
    held: HashMap<u32, File>,
}

impl<'a> HomeSpace<'a> {
    pub(crate) fn new(
        injection: &'a mut Injection,
        memory: &'a Memory,
        reserve: Reserve,
        files: &'a [FileRef],
    ) -> Self {
        Self { injection, memory, scratch: reserve.scratch(), files, held: HashMap::new() }
    }

    /// Takes hold of the files that these steps will map, whatever has become of their names: as long as `now` is what is
    /// mapped, they are to be had from there.
    pub(crate) fn hold(&mut self, steps: &[Step], now: &[Mapping], known: &HomeFiles) {
        for step in steps {
            let Step::Map(Region { backing: Backing::File { file, .. }, .. }) = step else { continue };
            let Some(reference) = self.files.get(*file as usize).filter(|file| !file.live) else { continue };
            let is_it = |m: &Mapping| (m.device, m.inode) == (reference.device, reference.inode);
            let named = !now.iter().any(is_it) && known.open_by_name(reference).is_ok();
            if named || self.held.contains_key(file) {
                continue;
            }
            if let Ok(open) = known.open_like(reference, now) {
                self.held.insert(*file, open);
            }
        }
    }

    /// Gives the process a descriptor of a file that we have open. It may not take it from us by itself.
    fn give(&mut self, file: u32) -> Result<Option<u64>> {
        let Some(file) = self.held.get(&file) else { return Ok(None) };
        let pid = self.memory.pid();
        let (pair, head, part) = (self.scratch, self.scratch + 64, self.scratch + 128);
        let (byte, control) = (self.scratch + 192, self.scratch + 256);
        let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
        let args = [libc::AF_UNIX as u64, kind, 0, pair, 0, 0];
        self.injection.must("make a way for a file", libc::SYS_socketpair, args)?;
        let ends = self.memory.word(pair)?;
        let (ours, theirs) = (ends & 0xffff_ffff, ends >> 32);
        let sent = Pidfd::open(pid).and_then(|p| p.descriptor(ours as i32)).and_then(|socket| {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut rights = rustix::net::SendAncillaryBuffer::new(&mut space);
            let fds = [file.as_fd()];
            rights.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
            let none = rustix::net::SendFlags::empty();
            rustix::net::sendmsg(&socket, &[IoSlice::new(&[0])], &mut rights, none)
                .map_err(|e| Error::Refused { operation: "send a file", pid, source: e.into() })
        });
        let got = sent.and_then(|_one| {
            // struct msghdr: name, its length, parts, their count, control, its length, flags.
            let words = [0, 0, part, 1, control, 24, 0];
            self.memory.write_forced(head, &words.map(u64::to_le_bytes).concat())?;
            self.memory.write_forced(part, &[byte, 1].map(u64::to_le_bytes).concat())?;
            let args = [theirs, head, libc::MSG_CMSG_CLOEXEC as u64, 0, 0, 0];
            self.injection.must("take a file", libc::SYS_recvmsg, args)?;
            // struct cmsghdr: length, level, type; and then the descriptor.
            Ok(self.memory.word(control + 16)? & 0xffff_ffff)
        });
        for end in [ours, theirs] {
            self.injection.must("close a way", libc::SYS_close, [end, 0, 0, 0, 0, 0])?;
        }
        got.map(Some)
    }

    fn open(&mut self, file: &FileRef) -> Result<u64> {
        let mut path = file.path.clone();
        path.push(0);
        self.memory.write_forced(self.scratch, &path)?;
        let at_cwd = i64::from(libc::AT_FDCWD).cast_unsigned();
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
        let args = [at_cwd, self.scratch, flags, 0, 0, 0];
        self.injection.must("open a mapped file", libc::SYS_openat, args)
    }
}

impl HomeSpace<'_> {
    /// Maps shared memory that is mapped elsewhere already, which is held until then: it need not have a name. A mapping
    /// of no length is copied, mremap(2) says.
    fn map_again(&mut self, region: &Region, file: &FileRef, offset: u64) -> Result<()> {
        let pid = self.injection.pid();
        let shows = |m: &&Mapping| {
            m.shared
                && (m.device, m.inode) == (file.device, file.inode)
                && (m.offset..m.offset + m.len()).contains(&offset)
        };
        let maps = procfs::maps(pid)?;
        let Some(held) = maps.iter().find(shows) else {
            return Err(Error::Astray { what: "shared memory that is not held any more".into(), pid });
        };
        let from = held.start + (offset - held.offset);
        let how = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        self.injection.must(
            "map shared memory",
            libc::SYS_mremap,
            [from, 0, region.len(), how, region.start, 0],
        )?;
        let protect = [region.start, region.len(), u64::from(region.prot), 0, 0, 0];
        self.injection.must("protect shared memory", libc::SYS_mprotect, protect).map(drop)
    }
}

impl Space for HomeSpace<'_> {
    fn injection(&mut self) -> &mut Injection {
        self.injection
    }

    fn call(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64> {
        self.injection.must(operation, nr, args)
    }

    /// Maps a file by its name, or one that is held. Most files are mapped already, since the skeleton of the address space stays
    /// at home; this is for those that were mapped away, or moved about.
    fn map_file(&mut self, region: &Region, file: u32, offset: u64) -> Result<()> {
        let pid = self.injection.pid();
        let astray = |what: String| Error::Astray { what, pid };
        let number = file;
        let file = self.files.get(number as usize).ok_or_else(|| astray("an unknown file".into()))?;
        if file.live {
            return self.map_again(region, file, offset);
        }
        let given = self.give(number)?;
        let name = String::from_utf8_lossy(&file.path).into_owned();
        let fd = given.map_or_else(|| self.open(file), Ok)?;
        // One that is given was found by its device and inode, or has the same content.
        let same = given.is_some()
            || std::fs::metadata(format!("/proc/{pid}/fd/{fd}"))
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
