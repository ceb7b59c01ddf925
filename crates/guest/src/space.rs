//! How a guest's address space is changed: by calls that its own process makes under our hand.

use crate::foreign::Foreign;
use std::collections::HashMap;
use tern_image::content::Cache;
use tern_image::layout::{FileRef, Layout, Region};
use tern_image::{Reserve, apply};
use tern_syscall::Route;
use tern_tracee::inject::Injection;
use tern_tracee::listener::Listener;
use tern_tracee::{Error, Result, procfs};

/// The number under which a guest sees a file that it is to map, for just that moment. It has no descriptors of its own but those of
/// files of this node ([`crate::near`]), and never one under this number.
pub(crate) const MAPPED_FILE: i32 = 0;

/// A guest under injection, with what is needed to map files into it.
pub struct GuestSpace<'a> {
    /// The guest.
    pub injection: &'a mut Injection,
    /// Its filter's listening end.
    pub listener: &'a Listener,
    /// Where file content is found.
    pub cache: &'a Cache,
    /// The files that regions name.
    pub files: &'a [FileRef],
}

impl std::fmt::Debug for GuestSpace<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestSpace({})", self.injection.pid())
    }
}

impl GuestSpace<'_> {
    /// Makes a call, letting it through the filter if that traps it.
    ///
    /// # Errors
    /// If the guest is gone or strays.
    pub fn make(&mut self, nr: i64, args: [u64; 6]) -> Result<i64> {
        if tern_syscall::route(nr as u32, &args) == Route::Here {
            return self.injection.call(nr, args);
        }
        self.listener.call_through(self.injection, nr, args, None)
    }

    /// Maps a part of a file as mmap(2) would, and returns what mmap returned.
    ///
    /// # Errors
    /// If the content is not here, or the guest strays.
    pub fn map(&mut self, file: &FileRef, args: [u64; 6]) -> Result<i64> {
        let pid = self.injection.pid();
        let Some(content) = self.cache.get(file) else {
            return Err(Error::Astray { what: "the content of a mapped file is missing".into(), pid });
        };
        let [addr, len, prot, flags, _, offset] = args;
        // Shared memory without a file has one here. What comes from home page by page is not brought in as a whole while all wait for this call.
        let whole = if self.cache.is_shown(file) { libc::MAP_POPULATE | libc::MAP_LOCKED } else { 0 };
        let locks = (flags & whole as u64) & libc::MAP_LOCKED as u64 != 0;
        let flags = flags & !((libc::MAP_ANONYMOUS | whole) as u64);
        let args = [addr, len, prot, flags, MAPPED_FILE as u64, offset];
        let give = Some((content, MAPPED_FILE));
        let at = self.listener.call_through(self.injection, libc::SYS_mmap, args, give)?;
        if locks && at > 0 {
            let on_fault = u64::from(libc::MLOCK_ONFAULT);
            let args = [at.cast_unsigned(), len, on_fault, 0, 0, 0];
            // Where the node grants less than home, it could be swapped.
            let _not_locked = self.make(libc::SYS_mlock2, args)?;
        }
        let close = [MAPPED_FILE as u64, 0, 0, 0, 0, 0];
        self.listener.call_through(self.injection, libc::SYS_close, close, None)?;
        Ok(at)
    }
}

impl apply::Space for GuestSpace<'_> {
    fn injection(&mut self) -> &mut Injection {
        self.injection
    }

    fn call(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64> {
        let ret = self.make(nr, args)?;
        if (-4095..0).contains(&ret) {
            let source = std::io::Error::from_raw_os_error((-ret) as i32);
            return Err(Error::Refused { operation, pid: self.injection.pid(), source });
        }
        Ok(ret.cast_unsigned())
    }

    fn map_file(&mut self, region: &Region, file: u32, offset: u64) -> Result<()> {
        let pid = self.injection.pid();
        let file = self.files.get(file as usize);
        let file = file.ok_or_else(|| Error::Astray { what: "an unknown file".into(), pid })?;
        let flags = apply::flags(region);
        let at = self.map(file, [region.start, region.len(), u64::from(region.prot), flags, 0, offset])?;
        if at.cast_unsigned() == region.start {
            return Ok(());
        }
        let source = std::io::Error::from_raw_os_error((-at) as i32);
        Err(Error::Refused { operation: "map a file", pid, source })
    }
}

/// How this node's maps show mapped files: by device and inode, the file at home.
pub type Shown = HashMap<(u64, u64), FileRef>;

/// Learns how the files of a layout are shown, once it has been applied.
///
/// # Errors
/// If the process is gone.
pub fn learn(pid: i32, layout: &Layout, shown: &mut Shown) -> Result<()> {
    let maps = procfs::maps(pid)?;
    for region in &layout.regions {
        let tern_image::Backing::File { file, .. } = region.backing else { continue };
        let Some(file) = layout.files.get(file as usize) else { continue };
        let at = maps.partition_point(|m| m.end <= region.start);
        if let Some(m) = maps.get(at).filter(|m| m.start <= region.start && !m.is_anonymous()) {
            shown.insert((m.device, m.inode), file.clone());
        }
    }
    Ok(())
}

/// Gives a guest this layout, changing only what differs. The files' content is here.
///
/// # Errors
/// If the guest is gone or a step fails; it is then of no use.
pub fn apply(
    space: &mut GuestSpace<'_>,
    layout: &Layout,
    (reserve, foreign): (Reserve, Option<&Foreign>),
    shown: &mut Shown,
) -> Result<()> {
    let pid = space.injection.pid();
    let now = Foreign::without(foreign, procfs::smaps(pid)?);
    // A file may have been mapped again after it was changed.
    let key = |f: &FileRef| (f.device, f.inode, f.hash);
    let by_file: HashMap<_, u32> =
        layout.files.iter().enumerate().map(|(at, f)| (key(f), at as u32)).collect();
    let identify = |m: &procfs::Mapping| {
        let file = shown.get(&(m.device, m.inode))?;
        by_file.get(&key(file)).copied()
    };
    let steps = apply::plan(&now, layout, Some(reserve), &identify);
    apply::carry_out(&steps, space)?;
    learn(pid, layout, shown)
}
