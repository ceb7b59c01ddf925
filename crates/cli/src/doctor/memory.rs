//! Whether Tern can find the pages that a process has written since the last copy, and by which
//! mechanism; and whether shared memory can be moved.
#![expect(unsafe_code, reason = "userfaultfd and mmap have no safe form")]

use super::Finding;
use super::child::{checked, in_child};
use crate::output::error_text;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// From linux/userfaultfd.h and linux/fs.h; libc does not have these.
mod abi {
    /// `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
    pub(super) const UFFDIO_API: u64 = 0xC018_AA3F;
    /// `_IOWR(0xAA, 0x00, struct uffdio_register)`.
    pub(super) const UFFDIO_REGISTER: u64 = 0xC020_AA00;
    pub(super) const UFFD_API: u64 = 0xAA;
    pub(super) const UFFD_USER_MODE_ONLY: i32 = 1;
    pub(super) const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
    pub(super) const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
    pub(super) const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
    /// `_IOWR('f', 16, struct pm_scan_arg)`.
    pub(super) const PAGEMAP_SCAN: u64 = 0xC060_6610;
    pub(super) const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
    pub(super) const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
    pub(super) const PAGE_IS_WRITTEN: u64 = 1 << 1;
    /// The soft-dirty bit of an entry in /proc/PID/pagemap.
    pub(super) const SOFT_DIRTY: u64 = 1 << 55;
}

pub(super) fn probe() -> Vec<Finding> {
    let written = in_child(|| Pages::map()?.userfaultfd_finds_written_page());
    let soft_dirty = in_child(|| Pages::map()?.soft_dirty_finds_written_page());
    vec![
        write_tracking(written, soft_dirty),
        memfd(),
        shared_memory(open_mapped()),
        shared_files(mark_open_permission()),
    ]
}

/// Two mapped pages of this process; they live until it ends.
struct Pages {
    start: usize,
    size: usize,
}

impl Pages {
    fn map() -> io::Result<Self> {
        let size = rustix::param::page_size();
        // SAFETY: a new mapping at an address chosen by the kernel replaces no existing one.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                2 * size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { start: start as usize, size })
        }
    }

    fn write_page(&self, page: usize) {
        let at = (self.start + page * self.size) as *mut u8;
        // SAFETY: the address is in the mapping, which is writable and used by nothing else.
        unsafe { at.write_volatile(1) };
    }

    /// Tracks writes with userfaultfd, as the pre-copy rounds of a migration do. Returns 1 if
    /// exactly the written page is reported.
    fn userfaultfd_finds_written_page(&self) -> io::Result<u64> {
        self.write_page(0);
        self.write_page(1);
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | abi::UFFD_USER_MODE_ONLY;
        // SAFETY: the call takes no pointers.
        let uffd = checked(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })? as i32;
        let features = abi::UFFD_FEATURE_WP_ASYNC | abi::UFFD_FEATURE_WP_UNPOPULATED;
        ioctl(uffd, abi::UFFDIO_API, &mut [abi::UFFD_API, features, 0])?;
        let (start, length) = (self.start as u64, 2 * self.size as u64);
        ioctl(uffd, abi::UFFDIO_REGISTER, &mut [start, length, abi::UFFDIO_REGISTER_MODE_WP, 0])?;
        let pagemap = File::open("/proc/self/pagemap")?;
        self.scan(&pagemap)?;
        self.write_page(1);
        let [from, to, _] = self.scan(&pagemap)?;
        let second = start + self.size as u64;
        Ok(u64::from((from, to) == (second, start + length)))
    }

    /// Returns the first region written since the last scan, and write-protects it again.
    fn scan(&self, pagemap: &File) -> io::Result<[u64; 3]> {
        let mut region = [0u64; 3];
        let (start, end) = (self.start as u64, (self.start + 2 * self.size) as u64);
        let flags = abi::PM_SCAN_WP_MATCHING | abi::PM_SCAN_CHECK_WPASYNC;
        let written = abi::PAGE_IS_WRITTEN;
        // struct pm_scan_arg: size, flags, start, end, walk_end, vec, vec_len, max_pages, then the
        // category masks: inverted, all of, any of, returned.
        let vector = region.as_mut_ptr() as u64;
        ioctl(
            pagemap.as_raw_fd(),
            abi::PAGEMAP_SCAN,
            &mut [96, flags, start, end, 0, vector, 1, 0, 0, written, 0, written],
        )?;
        Ok(region)
    }

    /// Tracks writes with the soft-dirty bit. Returns 1 if exactly the written page is reported.
    fn soft_dirty_finds_written_page(&self) -> io::Result<u64> {
        self.write_page(0);
        self.write_page(1);
        std::fs::write("/proc/self/clear_refs", "4")?;
        self.write_page(1);
        let pagemap = File::open("/proc/self/pagemap")?;
        let mut entries = [0; 16];
        pagemap.read_exact_at(&mut entries, (self.start / self.size * 8) as u64)?;
        let (first, second) = entries.split_at(8);
        let dirty = |entry: &[u8]| {
            entry.try_into().is_ok_and(|entry| u64::from_ne_bytes(entry) & abi::SOFT_DIRTY != 0)
        };
        Ok(u64::from(!dirty(first) && dirty(second)))
    }
}

/// An ioctl whose argument is a structure of 64-bit fields.
fn ioctl<const N: usize>(fd: i32, request: u64, argument: &mut [u64; N]) -> io::Result<u64> {
    // SAFETY: every request in `abi` encodes the size of its structure, which is N fields at each
    // call above. Where a field is itself a pointer (PAGEMAP_SCAN's vector), the caller's array
    // outlives the call.
    checked(unsafe { libc::ioctl(fd, request, argument.as_mut_ptr()) }.into())
}

fn write_tracking(written: io::Result<u64>, soft_dirty: io::Result<u64>) -> Finding {
    let name = "write tracking";
    let why = |tried: io::Result<u64>| match tried {
        Ok(_) => "does not find the written page".to_owned(),
        Err(error) => error_text(&error),
    };
    match (written, soft_dirty) {
        (Ok(1), _) => Finding::ok(name, "userfaultfd WP_ASYNC and PAGEMAP_SCAN"),
        (other, Ok(1)) => Finding::limited(
            name,
            format!("only soft-dirty bits (userfaultfd WP_ASYNC: {})", why(other)),
            "processes with much memory are frozen longer when they leave this node; update to kernel 6.7",
        ),
        (written, soft_dirty) => Finding::limited(
            name,
            format!("none (userfaultfd WP_ASYNC: {}; soft-dirty: {})", why(written), why(soft_dirty)),
            "processes that leave this node are frozen while all their memory is copied; update to kernel 6.7",
        ),
    }
}

fn memfd() -> Finding {
    let name = "memfd";
    match rustix::fs::memfd_create("tern-doctor", rustix::fs::MemfdFlags::CLOEXEC) {
        Ok(_) => Finding::ok(name, "works"),
        Err(error) => Finding::missing(
            name,
            error_text(&error.into()),
            "no process can leave this node, because a deputy's mailbox is a memfd",
        ),
    }
}

/// Opens the file behind a mapping of this process through /proc/self/map_files.
fn open_mapped() -> io::Result<File> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let of_file = maps.lines().find(|line| line.contains('/')).and_then(|line| line.split(' ').next());
    File::open(format!("/proc/self/map_files/{}", of_file.ok_or(io::ErrorKind::NotFound)?))
}

fn shared_memory(opened: io::Result<File>) -> Finding {
    let name = "shared memory";
    match opened {
        Ok(_) => Finding::ok(name, "moves with the processes that share it"),
        Err(error) => {
            let follows =
                "processes that share anonymous memory stay at home; ternd needs CAP_CHECKPOINT_RESTORE";
            Finding::limited(name, error_text(&error), follows)
        }
    }
}

/// Asks fanotify for permission events on opening a file, as home does for shared files of
/// processes that are away.
fn mark_open_permission() -> io::Result<()> {
    let file = rustix::fs::memfd_create("tern-doctor", rustix::fs::MemfdFlags::CLOEXEC)?;
    let init = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC | InitFlags::FAN_REPORT_TID;
    let fanotify = Fanotify::init(init, EventFFlags::O_RDONLY)?;
    Ok(fanotify.mark(MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_OPEN_PERM, &file, None::<&str>)?)
}

fn shared_files(marked: io::Result<()>) -> Finding {
    let name = "shared files";
    match marked {
        Ok(()) => {
            Finding::ok(name, "an open of a file that is being written away waits until the file is home")
        }
        Err(error) => {
            let follows = "other programs' writes to a file or semaphore that is shared away may be lost; fanotify needs root";
            Finding::limited(name, format!("fanotify permission events: {}", error_text(&error)), follows)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::FindingState;

    #[test]
    fn shared_memory_needs_map_files() {
        assert_eq!(shared_memory(Err(io::ErrorKind::PermissionDenied.into())).state, FindingState::Limited);
        assert_eq!(shared_memory(File::open("/proc/self/maps")).state, FindingState::Ok);
    }

    #[test]
    fn shared_files_need_permission_events() {
        assert_eq!(shared_files(Err(io::ErrorKind::PermissionDenied.into())).state, FindingState::Limited);
        assert_eq!(shared_files(Ok(())).state, FindingState::Ok);
    }

    #[test]
    fn best_working_write_tracking_is_reported() {
        let no = || Err(io::Error::from_raw_os_error(libc::EINVAL));
        assert_eq!(write_tracking(Ok(1), no()).state, FindingState::Ok);
        assert!(write_tracking(no(), Ok(1)).found.starts_with("only soft-dirty"));
        let none = write_tracking(Ok(0), Ok(0));
        assert!(none.found.contains("WP_ASYNC: does not find the written page"), "{}", none.found);
    }
}
