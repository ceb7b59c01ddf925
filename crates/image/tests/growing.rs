//! A region that grows is not sent again as a whole, and memory that was never touched costs
//! nothing.
#![allow(unsafe_code, reason = "memory of this process is mapped and its writes are tracked")]

use tern_image::layout::{Backing, Layout, Region};
use tern_image::pages::{PageFinder, Scan};
use tern_tracee::PAGE;
use tern_tracee::write_tracker::WriteTracker;

const SIZE: u64 = 16 * PAGE;

/// Maps memory: at any free address if `at` is 0, otherwise at `at`.
fn map(at: u64, length: u64) -> u64 {
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    // SAFETY: new memory, or what this test has mapped itself and refers to by number only.
    let got = unsafe {
        libc::mmap(at as *mut _, length as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(got, libc::MAP_FAILED);
    got as u64
}

fn write(at: u64) {
    // SAFETY: this test has mapped it.
    unsafe { (at as *mut u8).write_volatile(1) };
}

fn layout(parts: &[(u64, u64)]) -> Layout {
    let region = |&(start, end): &(u64, u64)| Region {
        start,
        end,
        prot: 3,
        shared: false,
        grows_down: false,
        no_reserve: false,
        advice: tern_image::MemoryAdvice::default(),
        backing: Backing::Anonymous,
        remap: false,
    };
    Layout { regions: parts.iter().map(region).collect(), files: Vec::new() }
}

/// Marks and scans the layout, and scans new parts. Returns the marks, the scan, and the content of
/// the new parts.
fn scan(finder: &mut PageFinder, parts: &[(u64, u64)]) -> (Vec<bool>, Scan, Vec<(u64, u64)>) {
    let mut layout = layout(parts);
    finder.mark_remapped(&mut layout);
    let scan = finder.scan(&layout).expect("this process lives");
    let mut content = Vec::new();
    for &rest in &scan.new_parts {
        let mut rest = Some(rest);
        while let Some(now) = rest {
            let (found, left) = finder.scan_part(now).expect("this process lives");
            content.extend(found);
            rest = left;
        }
    }
    (layout.regions.iter().map(|r| r.remap).collect(), scan, content)
}

#[test]
fn untouched_memory_costs_nothing() {
    const VAST: u64 = 1 << 40;
    let mut finder = tracking();
    let Some(finder) = &mut finder else { return };
    let start = reserve(VAST);
    let (first, second) = (start + 3 * PAGE, start + VAST / 2);
    write(first);
    let whole = [(start, start + VAST)];
    let (_, found, content) = scan(finder, &whole);
    assert_eq!((found.discard, content), (vec![], vec![(first, PAGE)]));
    // A page in the same page table, and one whose table was empty.
    write(first + PAGE);
    write(second);
    let (_, found, content) = scan(finder, &whole);
    assert_eq!((found.send, content), (vec![(first + PAGE, PAGE)], vec![(second, PAGE)]));
    // All pages are discarded.
    // SAFETY: this test has mapped it.
    unsafe { libc::madvise(start as *mut _, VAST as usize, libc::MADV_DONTNEED) };
    let (_, found, content) = scan(finder, &whole);
    assert_eq!((found.send, content), (vec![], vec![]));
    let forgotten = |page: u64| found.discard.iter().any(|&(at, len)| at <= page && page < at + len);
    assert!(forgotten(first) && forgotten(first + PAGE) && forgotten(second), "{:?}", found.discard);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let tables = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    let tables: u64 = tables.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(tables < 10_000, "{tables} KiB of page tables");
}

/// Reserves addresses without memory.
fn reserve(length: u64) -> u64 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new memory.
    let got = unsafe {
        libc::mmap(std::ptr::null_mut(), length as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(got, libc::MAP_FAILED);
    got as u64
}

/// A finder for this process; `None` if the kernel cannot track writes.
fn tracking() -> Option<PageFinder> {
    let me = std::process::id() as i32;
    let call = &mut |nr: i64, a: [u64; 6]| {
        // SAFETY: userfaultfd, and close of the descriptor that it returns, take integers.
        let got = unsafe { libc::syscall(nr, a[0], a[1], a[2], a[3], a[4], a[5]) };
        Ok(if got < 0 {
            -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(1))
        } else {
            got
        })
    };
    let tracker = WriteTracker::begin(me, call).ok()?;
    PageFinder::new(me, Some(tracker), true).ok()
}

/// The mapping that contains this address.
fn mapping_of(address: u64) -> (u64, u64) {
    let found = tern_tracee::procfs::mapping_at(std::process::id() as i32, address);
    let found = found.expect("this process lives").expect("it is mapped");
    (found.start, found.end)
}

#[test]
fn stack_that_has_grown_stays_one_mapping() {
    let Some(mut finder) = tracking() else { return };
    let below = map(0, 40 * SIZE);
    // SAFETY: nothing refers to this memory.
    unsafe { libc::munmap((below + PAGE) as *mut _, (40 * SIZE - PAGE) as usize) };
    let (start, end) = (below + 38 * SIZE, below + 39 * SIZE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_GROWSDOWN;
    // SAFETY: new memory where this test has made room.
    let got = unsafe { libc::mmap(start as *mut _, SIZE as usize, 3, flags, -1, 0) };
    assert_eq!(got as u64, start);
    write(start);
    let mut described = layout(&[(below, below + PAGE), (start, end)]);
    described.regions[1].grows_down = true;
    // It grows after it was described.
    let grown = start - 3 * PAGE;
    write(grown);
    assert_eq!(mapping_of(grown), (grown, end));
    finder.scan(&described).unwrap();
    assert_eq!(mapping_of(grown), (grown, end), "the whole mapping is tracked, and not split");
}

#[test]
fn growing_region_is_not_scanned_again() {
    let Some(mut finder) = tracking() else { return };
    let start = map(0, 4 * SIZE);
    // A heap followed by a hole.
    // SAFETY: nothing refers to this memory.
    unsafe { libc::munmap((start + SIZE) as *mut _, 3 * SIZE as usize) };
    (0..16).for_each(|page| write(start + page * PAGE));
    let (remap, found, content) = scan(&mut finder, &[(start, start + SIZE)]);
    assert_eq!((remap, content), (vec![true], vec![(start, SIZE)]));
    assert_eq!((found.discard, found.send), (vec![], vec![]));

    // The heap grows by a separate mapping, since its first part is tracked.
    map(start + SIZE, SIZE);
    write(start + 3 * PAGE);
    write(start + SIZE + 5 * PAGE);
    let grown = (start + SIZE, start + 2 * SIZE);
    let (remap, found, content) = scan(&mut finder, &[(start, start + SIZE), grown]);
    assert_eq!((remap, content), (vec![false, false], vec![(start + SIZE + 5 * PAGE, PAGE)]));
    assert_eq!((found.discard, found.send), (vec![(start + SIZE, SIZE)], vec![(start + 3 * PAGE, PAGE)]));

    // Now both are tracked, and have merged.
    write(start + SIZE);
    let one = (start, start + 2 * SIZE);
    let (remap, found, content) = scan(&mut finder, &[one]);
    assert_eq!((remap, content, found.discard), (vec![false], vec![], vec![]));
    assert_eq!(found.send, [(start + SIZE, PAGE)]);

    // A mapping beyond a gap. When the gap is closed, two pieces with content must become one.
    let far = (start + 2 * SIZE + PAGE, start + 3 * SIZE);
    map(far.0, far.1 - far.0);
    write(far.0);
    let (remap, _, content) = scan(&mut finder, &[one, far]);
    assert_eq!((remap, content), (vec![false, false], vec![(far.0, PAGE)]));
    map(start + 2 * SIZE, PAGE);
    let (remap, found, content) = scan(&mut finder, &[(start, start + 3 * SIZE)]);
    assert_eq!((remap, found.send, found.discard), (vec![true], vec![], vec![(start, 3 * SIZE)]));
    assert!(content.iter().any(|&(at, len)| at == start && len >= 2 * SIZE), "{content:?}");

    // A new mapping at the same address has other content.
    map(start, SIZE);
    write(start + 7 * PAGE);
    let (remap, found, content) =
        scan(&mut finder, &[(start, start + SIZE), (start + SIZE, start + 3 * SIZE)]);
    assert_eq!((remap, content), (vec![false, false], vec![(start + 7 * PAGE, PAGE)]));
    assert_eq!((found.discard, found.send), (vec![(start, SIZE)], vec![]));
}
