//! A region that only grows is not sent again: what is known of it stays known; and what was never touched costs nothing.
#![allow(unsafe_code, reason = "memory of this process is mapped and its writes are tracked")]

use tern_image::layout::{Backing, Layout, Region};
use tern_image::pages::{Finder, Look};
use tern_tracee::PAGE;
use tern_tracee::dirty::Tracker;

const SIZE: u64 = 16 * PAGE;

/// As the kernel maps it; at its first call anywhere, with room behind it.
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
        advice: tern_image::Advice::default(),
        backing: Backing::Anonymous,
        anew: false,
    };
    Layout { regions: parts.iter().map(region).collect(), files: Vec::new() }
}

/// Marked, looked at, and what is new to it too: (anew, forgotten, sent, sent of what is new).
fn look(finder: &mut Finder, parts: &[(u64, u64)]) -> (Vec<bool>, Look, Vec<(u64, u64)>) {
    let mut layout = layout(parts);
    finder.mark(&mut layout);
    let look = finder.look(&layout).expect("this process lives");
    let mut content = Vec::new();
    for &rest in &look.fresh {
        let mut rest = Some(rest);
        while let Some(now) = rest {
            let (found, left) = finder.content(now).expect("this process lives");
            content.extend(found);
            rest = left;
        }
    }
    (layout.regions.iter().map(|r| r.anew).collect(), look, content)
}

#[test]
fn what_nobody_has_touched_costs_nothing() {
    const VAST: u64 = 1 << 40;
    let mut finder = tracking();
    let Some(finder) = &mut finder else { return };
    let start = reserve(VAST);
    let (first, second) = (start + 3 * PAGE, start + VAST / 2);
    write(first);
    let whole = [(start, start + VAST)];
    let (_, found, content) = look(finder, &whole);
    assert_eq!((found.forget, content), (vec![], vec![(first, PAGE)]));
    // Its neighbour in the same table; and what had none.
    write(first + PAGE);
    write(second);
    let (_, found, content) = look(finder, &whole);
    assert_eq!((found.send, content), (vec![(first + PAGE, PAGE)], vec![(second, PAGE)]));
    // Thrown away, and nothing but that.
    // SAFETY: this test has mapped it.
    unsafe { libc::madvise(start as *mut _, VAST as usize, libc::MADV_DONTNEED) };
    let (_, found, content) = look(finder, &whole);
    assert_eq!((found.send, content), (vec![], vec![]));
    let forgotten = |page: u64| found.forget.iter().any(|&(at, len)| at <= page && page < at + len);
    assert!(forgotten(first) && forgotten(first + PAGE) && forgotten(second), "{:?}", found.forget);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let tables = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    let tables: u64 = tables.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(tables < 10_000, "{tables} KiB of page tables");
}

/// Addresses without memory behind them.
fn reserve(length: u64) -> u64 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new memory.
    let got = unsafe {
        libc::mmap(std::ptr::null_mut(), length as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(got, libc::MAP_FAILED);
    got as u64
}

/// Of this process; none where the kernel cannot track writes.
fn tracking() -> Option<Finder> {
    let me = std::process::id() as i32;
    let call = &mut |nr: i64, a: [u64; 6]| {
        // SAFETY: userfaultfd and close of what it gives, with integers.
        let got = unsafe { libc::syscall(nr, a[0], a[1], a[2], a[3], a[4], a[5]) };
        Ok(if got < 0 {
            -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(1))
        } else {
            got
        })
    };
    let tracker = Tracker::begin(me, call).ok()?;
    Finder::new(me, Some(tracker), true).ok()
}

#[test]
fn what_is_known_of_a_region_that_grows_stays_known() {
    let Some(mut finder) = tracking() else { return };
    let start = map(0, 4 * SIZE);
    // The heap, with a hole behind it.
    // SAFETY: nobody refers to it.
    unsafe { libc::munmap((start + SIZE) as *mut _, 3 * SIZE as usize) };
    (0..16).for_each(|page| write(start + page * PAGE));
    let (anew, found, content) = look(&mut finder, &[(start, start + SIZE)]);
    assert_eq!((anew, content), (vec![true], vec![(start, SIZE)]));
    assert_eq!((found.forget, found.send), (vec![], vec![]));

    // It has grown, as a region of its own, since the first part is tracked.
    map(start + SIZE, SIZE);
    write(start + 3 * PAGE);
    write(start + SIZE + 5 * PAGE);
    let grown = (start + SIZE, start + 2 * SIZE);
    let (anew, found, content) = look(&mut finder, &[(start, start + SIZE), grown]);
    assert_eq!((anew, content), (vec![false, false], vec![(start + SIZE + 5 * PAGE, PAGE)]));
    assert_eq!((found.forget, found.send), (vec![(start + SIZE, SIZE)], vec![(start + 3 * PAGE, PAGE)]));

    // Now both are tracked, and one.
    write(start + SIZE);
    let one = (start, start + 2 * SIZE);
    let (anew, found, content) = look(&mut finder, &[one]);
    assert_eq!((anew, content, found.forget), (vec![false], vec![], vec![]));
    assert_eq!(found.send, [(start + SIZE, PAGE)]);

    // By something beyond a gap, which is then closed: what was two pieces with content must become one.
    let far = (start + 2 * SIZE + PAGE, start + 3 * SIZE);
    map(far.0, far.1 - far.0);
    write(far.0);
    let (anew, _, content) = look(&mut finder, &[one, far]);
    assert_eq!((anew, content), (vec![false, false], vec![(far.0, PAGE)]));
    map(start + 2 * SIZE, PAGE);
    let (anew, found, content) = look(&mut finder, &[(start, start + 3 * SIZE)]);
    assert_eq!((anew, found.send, found.forget), (vec![true], vec![], vec![(start, 3 * SIZE)]));
    assert!(content.iter().any(|&(at, len)| at == start && len >= 2 * SIZE), "{content:?}");

    // Mapped anew at the same place: it is not what it was.
    map(start, SIZE);
    write(start + 7 * PAGE);
    let (anew, found, content) =
        look(&mut finder, &[(start, start + SIZE), (start + SIZE, start + 3 * SIZE)]);
    assert_eq!((anew, content), (vec![false, false], vec![(start + 7 * PAGE, PAGE)]));
    assert_eq!((found.forget, found.send), (vec![(start, SIZE)], vec![]));
}
