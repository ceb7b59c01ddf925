//! Changes the address space of a process at home.

use std::collections::HashMap;
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use tern_image::Reserve;
use tern_image::apply::{self, InjectedSpace, MapStep};
use tern_image::content::{self, HomeFiles};
use tern_image::layout::{Backing, FileRef, Region};
use tern_tracee::batch::{BatchArea, InjectedCall, run_calls, wait_briefly};
use tern_tracee::inject::Injection;
use tern_tracee::pidfd::Pidfd;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Error, Memory, Result, limit};

/// A process at home under injection.
#[derive(Debug)]
pub(crate) struct HomeSpace<'a> {
    injection: &'a mut Injection,
    /// For paths, control messages and their results.
    memory: &'a Memory,
    /// Address of scratch memory in the process.
    scratch: u64,
    /// Memory in the process for batched calls.
    batch_area: BatchArea,
    /// The files that regions refer to.
    files: &'a [FileRef],
    /// The files that the shim has open, by index into `files`.
    opened: HashMap<u32, File>,
}

impl<'a> HomeSpace<'a> {
    pub(crate) fn new(
        injection: &'a mut Injection,
        memory: &'a Memory,
        reserve: Reserve,
        files: &'a [FileRef],
    ) -> Self {
        let (scratch, batch_area) = (reserve.scratch(), reserve.small_batch_area());
        Self { injection, memory, scratch, batch_area, files, opened: HashMap::new() }
    }

    /// Opens the files that these steps will map while the current mappings (`now`) still keep them
    /// reachable. Files that can be opened by name later are skipped.
    pub(crate) fn open_files(&mut self, steps: &[MapStep], now: &[Mapping], known: &HomeFiles) {
        let mapped = content::by_file(now);
        for step in steps {
            let MapStep::Map(Region { backing: Backing::File { file, .. }, .. }) = step else { continue };
            let Some(reference) = self.files.get(*file as usize).filter(|file| !file.is_object) else {
                continue;
            };
            if self.opened.contains_key(file) {
                continue;
            }
            let is_mapped = mapped.contains_key(&(reference.device, reference.inode));
            if !is_mapped && known.open_by_name(reference).is_ok() {
                continue;
            }
            if let Ok(open) = known.open_like(reference, &mapped) {
                self.opened.insert(*file, open);
            }
        }
    }

    /// Passes the process a descriptor of a file that the shim has open, over a socket pair: the
    /// process may not be allowed to copy it from the shim.
    fn pass_descriptor(&mut self, file: u32) -> Result<Option<u64>> {
        let Some(file) = self.opened.get(&file) else { return Ok(None) };
        let pid = self.memory.pid();
        let (pair, head, part) = (self.scratch, self.scratch + 64, self.scratch + 128);
        let (byte, control) = (self.scratch + 192, self.scratch + 256);
        let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
        let args = [libc::AF_UNIX as u64, kind, 0, pair, 0, 0];
        self.injection.must("create a socket pair", libc::SYS_socketpair, args)?;
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
            self.injection.must("receive a file", libc::SYS_recvmsg, args)?;
            // The length of the control data, which shows whether a number was free.
            if self.memory.word(head + 40)? == 0 {
                let source = std::io::Error::from_raw_os_error(libc::EMFILE);
                return Err(Error::Refused { operation: "receive a file", pid, source });
            }
            // struct cmsghdr: length, level, type; and then the descriptor.
            Ok(self.memory.word(control + 16)? & 0xffff_ffff)
        });
        for end in [ours, theirs] {
            self.injection.must("close a socket", libc::SYS_close, [end, 0, 0, 0, 0, 0])?;
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
    /// Maps shared memory again from an existing mapping of it, since the object need not have a
    /// name. With an old length of zero mremap(2) duplicates the mapping.
    fn remap_shared(&mut self, region: &Region, file: &FileRef, offset: u64) -> Result<()> {
        let pid = self.injection.pid();
        let shows = |m: &&Mapping| {
            m.shared
                && (m.device, m.inode) == (file.device, file.inode)
                && (m.offset..m.offset + m.len()).contains(&offset)
        };
        let maps = procfs::maps(pid)?;
        let Some(opened) = maps.iter().find(shows) else {
            return Err(Error::Inconsistent { what: "its shared memory is not mapped any more".into(), pid });
        };
        let from = opened.start + (offset - opened.offset);
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

impl InjectedSpace for HomeSpace<'_> {
    fn injection(&mut self) -> &mut Injection {
        self.injection
    }

    fn call(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64> {
        self.injection.must(operation, nr, args)
    }

    fn call_all(&mut self, calls: &[InjectedCall]) -> Result<Vec<i64>> {
        if let [(nr, args)] = calls {
            return Ok(vec![self.injection.call(*nr, *args)?]);
        }
        // Opened through the thread under injection, since the first thread may have exited.
        let memory = Memory::open(self.injection.pid())?;
        run_calls(self.injection, &memory, self.batch_area, calls, &mut wait_briefly)
    }

    /// Maps each file from the descriptor that the shim has open, or else by its name. Most files
    /// are mapped already, since the skeleton of the address space stays at home. This is for files
    /// that were mapped, or whose mappings were moved, while the process was away.
    fn map_files(&mut self, regions: &[Region]) -> Result<()> {
        for region in regions {
            let Backing::File { file, offset } = region.backing else { continue };
            self.map_file(region, file, offset)?;
        }
        Ok(())
    }
}

impl HomeSpace<'_> {
    fn map_file(&mut self, region: &Region, file: u32, offset: u64) -> Result<()> {
        let pid = self.injection.pid();
        let inconsistent = |what: String| Error::Inconsistent { what, pid };
        let number = file;
        let file = self.files.get(number as usize).ok_or_else(|| inconsistent("an unknown file".into()))?;
        if file.is_object {
            return self.remap_shared(region, file, offset);
        }
        let given = limit::with_spare_descriptors(pid, || self.pass_descriptor(number))?;
        let name = String::from_utf8_lossy(&file.path).into_owned();
        let fd = match given {
            Some(fd) => fd,
            None => limit::with_spare_descriptors(pid, || self.open(file))?,
        };
        // A descriptor that the shim passed needs no check: its file was found by device and inode,
        // or has the same content.
        let same = given.is_some()
            || std::fs::metadata(format!("/proc/{pid}/fd/{fd}"))
                .is_ok_and(|m| m.ino() == file.inode && m.size() == file.size);
        let args =
            [region.start, region.len(), u64::from(region.prot), apply::mmap_flags(region), fd, offset];
        let at = if same { Some(self.injection.call(libc::SYS_mmap, args)?) } else { None };
        self.injection.must("close a mapped file", libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
        match at {
            Some(at) if at.cast_unsigned() == region.start => Ok(()),
            Some(at) => Err(inconsistent(format!(
                "{name} cannot be mapped: {}",
                std::io::Error::from_raw_os_error((-at) as i32)
            ))),
            None => Err(inconsistent(format!("{name} is not the same file any more"))),
        }
    }
}
