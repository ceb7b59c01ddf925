//! Changing a guest's address space, by calls injected into its process.

use crate::vdso::foreign::ForeignVdso;
use std::collections::HashMap;
use tern_image::content::ContentCache;
use tern_image::layout::{FileRef, Layout, Region};
use tern_image::{Reserve, apply};
use tern_syscall::Route;
use tern_tracee::inject::Injection;
use tern_tracee::listener::Listener;
use tern_tracee::{Error, Result, procfs};

/// The descriptor under which a guest has a file while it maps it. Its only other descriptors are
/// those of local files ([`crate::files::local`]), which never have this number.
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
}

impl std::fmt::Debug for GuestSpace<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestSpace({})", self.injection.pid())
    }
}

impl GuestSpace<'_> {
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
        // Shared memory without a file is backed by one here. A file that is read from home page by
        // page is not populated, because the whole shim would wait for this call.
        let populate_flags =
            if self.cache.is_shown(file) { libc::MAP_POPULATE | libc::MAP_LOCKED } else { 0 };
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

    fn map_file(&mut self, region: &Region, file: u32, offset: u64) -> Result<()> {
        let pid = self.injection.pid();
        let file = self.files.get(file as usize);
        let file =
            file.ok_or_else(|| Error::Inconsistent { what: "a region names an unknown file".into(), pid })?;
        let flags = apply::mmap_flags(region);
        let at = self.map(file, [region.start, region.len(), u64::from(region.prot), flags, 0, offset])?;
        if at.cast_unsigned() == region.start {
            return Ok(());
        }
        let source = std::io::Error::from_raw_os_error((-at) as i32);
        Err(Error::Refused { operation: "map a file", pid, source })
    }
}

/// A process's file mappings as this node shows them: the file at home, by device and inode here.
pub(crate) type MappedFiles = HashMap<(u64, u64), FileRef>;

/// Records how the files of an applied layout are shown.
///
/// # Errors
/// If the process is gone.
pub(crate) fn record_mapped_files(pid: i32, layout: &Layout, mapped_files: &mut MappedFiles) -> Result<()> {
    let maps = procfs::maps(pid)?;
    for region in &layout.regions {
        let tern_image::Backing::File { file, .. } = region.backing else { continue };
        let Some(file) = layout.files.get(file as usize) else { continue };
        let at = maps.partition_point(|m| m.end <= region.start);
        if let Some(m) = maps.get(at).filter(|m| m.start <= region.start && !m.is_anonymous()) {
            mapped_files.insert((m.device, m.inode), file.clone());
        }
    }
    Ok(())
}

/// Gives a guest this layout, by changing only what differs. The files' content is here.
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
    // A file may have been mapped again after it was changed.
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
