//! Changing a guest's address space, by calls injected into its process.

use crate::vdso::foreign::ForeignVdso;
use std::collections::HashMap;
use tern_image::content::ContentCache;
use tern_image::layout::{Backing, FileRef, Layout, Region};
use tern_image::{Reserve, apply};
use tern_syscall::Route;
use tern_tracee::batch::{BatchArea, InjectedCall, run_calls, wait_briefly};
use tern_tracee::inject::Injection;
use tern_tracee::listener::{Listener, TrappedCall};
use tern_tracee::{Error, Memory, Result, procfs};

/// The descriptor number of a file in the guest while the guest maps the file. The guest's only
/// other descriptors are those of local files ([`crate::files::local`]), which never have this
/// number.
pub(crate) const MAPPED_FILE: i32 = 0;

/// A guest under injection, with the files that can be mapped into it.
pub(crate) struct GuestSpace<'a> {
    /// The guest.
    pub(crate) injection: &'a mut Injection,
    /// The notification fd of its filter.
    pub(crate) listener: &'a Listener,
    /// Where file content is found.
    pub(crate) cache: &'a ContentCache,
    /// The files that regions name.
    pub(crate) files: &'a [FileRef],
    /// Memory of the guest for batched calls, if it has any that is not in use.
    pub(crate) batch_area: Option<BatchArea>,
}

impl std::fmt::Debug for GuestSpace<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestSpace({})", self.injection.pid())
    }
}

impl<'a> GuestSpace<'a> {
    /// For a few calls, each made singly, because the guest's memory for batches may be in use.
    /// Regions cannot name files.
    pub(crate) fn for_single_calls(
        injection: &'a mut Injection,
        listener: &'a Listener,
        cache: &'a ContentCache,
    ) -> Self {
        Self { injection, listener, cache, files: &[], batch_area: None }
    }

    /// Makes a call, and lets it through the filter if it is trapped.
    ///
    /// # Errors
    /// If the guest is gone or behaves unexpectedly.
    pub(crate) fn call_through(&mut self, nr: i64, args: [u64; 6]) -> Result<i64> {
        if tern_syscall::route(nr as u32, &args) == Route::Here {
            return self.injection.call(nr, args);
        }
        self.listener.call_through(self.injection, nr, args, None)
    }

    /// Maps a part of a file as mmap(2) would, and returns the result of mmap.
    ///
    /// # Errors
    /// If the content is not here, or the guest behaves unexpectedly.
    pub(crate) fn map(&mut self, file: &FileRef, args: [u64; 6]) -> Result<i64> {
        let pid = self.injection.pid();
        let Some(content) = self.cache.get(file) else {
            return Err(Error::Inconsistent { what: "the content of a mapped file is missing".into(), pid });
        };
        let [addr, len, prot, flags, _, offset] = args;
        // Anonymous shared memory is backed by a file here. A file that is read from home page by
        // page is not populated, and is locked only as its pages are used: otherwise the whole shim
        // would wait until this call has read the file.
        let populate_flags =
            if self.cache.is_demand_paged(file) { libc::MAP_POPULATE | libc::MAP_LOCKED } else { 0 };
        let locks = (flags & populate_flags as u64) & libc::MAP_LOCKED as u64 != 0;
        let flags = flags & !((libc::MAP_ANONYMOUS | populate_flags) as u64);
        let args = [addr, len, prot, flags, MAPPED_FILE as u64, offset];
        let give = Some((content, MAPPED_FILE));
        let at = self.listener.call_through(self.injection, libc::SYS_mmap, args, give)?;
        if locks && at > 0 {
            let on_fault = u64::from(libc::MLOCK_ONFAULT);
            let args = [at.cast_unsigned(), len, on_fault, 0, 0, 0];
            // If this node's limit is lower than home's, the memory may be swapped.
            let _not_locked = self.call_through(libc::SYS_mlock2, args)?;
        }
        let close = [MAPPED_FILE as u64, 0, 0, 0, 0, 0];
        self.listener.call_through(self.injection, libc::SYS_close, close, None)?;
        Ok(at)
    }
}

impl apply::InjectedSpace for GuestSpace<'_> {
    fn injection(&mut self) -> &mut Injection {
        self.injection
    }

    fn call(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64> {
        let ret = self.call_through(nr, args)?;
        if (-4095..0).contains(&ret) {
            let source = std::io::Error::from_raw_os_error((-ret) as i32);
            return Err(Error::Refused { operation, pid: self.injection.pid(), source });
        }
        Ok(ret.cast_unsigned())
    }

    fn call_all(&mut self, calls: &[InjectedCall]) -> Result<Vec<i64>> {
        let is_trapped = |(nr, args): &InjectedCall| tern_syscall::route(*nr as u32, args) != Route::Here;
        match self.batch_area {
            Some(area) if calls.len() > 1 && !calls.iter().any(is_trapped) => {
                let memory = Memory::open(self.injection.pid())?;
                run_calls(self.injection, &memory, area, calls, &mut wait_briefly)
            }
            _ => calls.iter().map(|(nr, args)| self.call_through(*nr, *args)).collect(),
        }
    }

    /// The guest gets a descriptor of each file before it maps the file. Each file replaces the
    /// previous one under the same number, and the number is closed at the end.
    fn map_files(&mut self, regions: &[Region]) -> Result<()> {
        let pid = self.injection.pid();
        let unknown = |what: &str| Error::Inconsistent { what: what.into(), pid };
        let mut calls = Vec::with_capacity(regions.len() + 1);
        let mut given = None;
        for region in regions {
            let Backing::File { file: index, offset } = region.backing else { continue };
            let file = self.files.get(index as usize);
            let file = file.ok_or_else(|| unknown("a region names an unknown file"))?;
            let content = self.cache.get(file);
            let content = content.ok_or_else(|| unknown("the content of a mapped file is missing"))?;
            let flags = apply::mmap_flags(region);
            let args =
                [region.start, region.len(), u64::from(region.prot), flags, MAPPED_FILE as u64, offset];
            let is_given = given.replace(index) == Some(index);
            let new_fd = (!is_given).then_some((content, MAPPED_FILE));
            calls.push(TrappedCall { call: (libc::SYS_mmap, args), new_fd });
        }
        calls
            .push(TrappedCall { call: (libc::SYS_close, [MAPPED_FILE as u64, 0, 0, 0, 0, 0]), new_fd: None });
        let results = match self.batch_area {
            Some(area) => self.listener.run_calls_through(self.injection, area, &calls)?,
            None => {
                let mut make = |one: &TrappedCall<'_>| {
                    self.listener.call_through(self.injection, one.call.0, one.call.1, one.new_fd)
                };
                calls.iter().map(&mut make).collect::<Result<_>>()?
            }
        };
        let failed = regions.iter().zip(results).find(|(region, at)| at.cast_unsigned() != region.start);
        failed.map_or(Ok(()), |(_, at)| {
            let source = std::io::Error::from_raw_os_error((-at) as i32);
            Err(Error::Refused { operation: "map a file", pid, source })
        })
    }
}

/// The files that a process maps, as they are known at home, keyed by the device and inode that
/// this node shows for them.
pub(crate) type MappedFiles = HashMap<(u64, u64), FileRef>;

/// Records under which device and inode this node shows the files of an applied layout.
///
/// # Errors
/// If the process is gone.
pub(crate) fn record_mapped_files(pid: i32, layout: &Layout, mapped_files: &mut MappedFiles) -> Result<()> {
    let maps = procfs::maps(pid)?;
    for region in &layout.regions {
        let Backing::File { file, .. } = region.backing else { continue };
        let Some(file) = layout.files.get(file as usize) else { continue };
        let at = maps.partition_point(|m| m.end <= region.start);
        if let Some(m) = maps.get(at).filter(|m| m.start <= region.start && !m.is_anonymous()) {
            let known = mapped_files.entry((m.device, m.inode)).or_insert_with(|| file.clone());
            if known != file {
                known.clone_from(file);
            }
        }
    }
    Ok(())
}

/// Gives a guest this layout, by changing only what differs. The content of all its files must be
/// on this node.
///
/// # Errors
/// If the guest is gone or a step fails; it is then unusable.
pub(crate) fn apply(
    space: &mut GuestSpace<'_>,
    layout: &Layout,
    (reserve, foreign_vdso): (Reserve, Option<&ForeignVdso>),
    mapped_files: &mut MappedFiles,
) -> Result<()> {
    let pid = space.injection.pid();
    let now = ForeignVdso::exclude_from(foreign_vdso, procfs::smaps(pid)?);
    // The hash is part of the key: a file may have been mapped again after it was changed.
    let key = |f: &FileRef| (f.device, f.inode, f.hash);
    let by_file: HashMap<_, u32> =
        layout.files.iter().enumerate().map(|(at, f)| (key(f), at as u32)).collect();
    let identify = |m: &procfs::Mapping| {
        let file = mapped_files.get(&(m.device, m.inode))?;
        by_file.get(&key(file)).copied()
    };
    let steps = apply::plan(&now, layout, Some(reserve), &identify);
    apply::execute_plan(&steps, space)?;
    record_mapped_files(pid, layout, mapped_files)
}
