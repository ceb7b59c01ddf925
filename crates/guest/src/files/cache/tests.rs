use super::*;
use tern_ids::Credentials;
use tern_migrate::prefetch::{OpenPrefetch, PrefetchedContent};

const ME: i32 = 3;

fn delegated(fd: i32, inode: u64, reads: bool, writes: bool) -> (i32, FileNotice) {
    (
        fd,
        FileNotice::Delegated(FileDelegation {
            id: (1, inode),
            offset: 0,
            can_read: reads,
            can_write: writes,
            is_home_local: true,
        }),
    )
}

fn local_node() -> LocalNode {
    LocalNode::new(tern_ids::NodeId(2), "/nowhere".as_ref(), &[])
}

fn files(notices: &[(i32, FileNotice)]) -> FileCache {
    let mut files = FileCache::default();
    files.receive_notices(notices, None, true, &local_node());
    files
}

fn numbers(calls: &[Call]) -> Vec<i64> {
    calls.iter().map(|call| i64::from(call.nr)).collect()
}

fn args(fd: i32) -> [u64; 6] {
    [fd as u64, 0, 0, 0, 0, 0]
}

#[test]
fn pending_writes_precede_the_next_call_in_order() {
    let mut files = files(&[delegated(ME, 7, true, true)]);
    for (at, text) in [(0, "ab"), (2, "cd"), (1, "XY"), (9, "z")] {
        files.write(ME, at, text.into());
    }
    assert!(files.due().is_some() && !files.is_clean());
    let calls = files.prelude_for_call(1, libc::SYS_getppid as u32, &args(0));
    let bytes = |text: &str| Arg::Bytes(ByteBuf::from(text.as_bytes().to_vec()));
    assert_eq!(numbers(&calls), [libc::SYS_pwrite64; 2]);
    assert_eq!((&calls[0].args[1], &calls[0].args[3]), (&bytes("aXYd"), &Arg::Value(0)));
    assert_eq!((&calls[1].args[1], &calls[1].args[3]), (&bytes("z"), &Arg::Value(9)));
    // A signal came first, and home has run none of the prelude: the next call's prelude repeats
    // it.
    files.confirm(1, &[]);
    assert_eq!(files.prelude_for_call(2, libc::SYS_getppid as u32, &args(0)), calls);
    files.confirm(1, &[4, 1]);
    assert!(!files.is_clean(), "that was the prelude of another call");
    files.confirm(2, &[4, 1]);
    assert!(files.is_clean() && files.due().is_none());
}

#[test]
fn offsets_precede_every_call() {
    let mut files = files(&[delegated(ME, 7, true, false)]);
    files.get(ME).unwrap().delegation.offset = 100;
    assert!(files.prelude_for_internal_call(1).0.is_empty(), "no call of the program needs the offset");
    assert_eq!(numbers(&files.prelude_for_call(2, libc::SYS_poll as u32, &args(0))), [libc::SYS_lseek]);
    files.confirm(2, &[100]);
    files.home_call_done(libc::SYS_read as u32, &args(ME), 20);
    assert_eq!(files.get(ME).unwrap().delegation.offset, 120);
    assert!(
        files.prelude_for_call(3, libc::SYS_read as u32, &args(ME)).is_empty(),
        "home's read has moved the offset"
    );
    files.get(ME).unwrap().delegation.offset = 7;
    assert_eq!(numbers(&files.prelude_for_call(4, libc::SYS_fork as u32, &args(0))), [libc::SYS_lseek]);
    assert!(files.get(ME).is_none(), "it is shared from then on");
    files.confirm(4, &[7]);
    assert!(files.is_clean() && files.files.is_empty());
}

#[test]
fn read_ahead_is_valid_until_invalidated() {
    let notices = [delegated(ME, 7, true, false)];
    let fill = Fill { fd: ME, start: 0, length: 6, generation: 0 };
    let now = Instant::now();
    let mut files = files(&notices);
    files.complete_fill(fill, Some(b"abcdef".to_vec().into()), true, now);
    let file = files.get(ME).unwrap();
    assert_eq!(file.read(1, 2), Some(&b"bc"[..]));
    assert_eq!(file.read(4, 2), Some(&b"ef"[..]));
    assert_eq!(file.read(4, 3), None, "the rest is not cached");
    files.receive_notices(&[(ME, FileNotice::Changed)], None, true, &local_node());
    assert_eq!(files.get(ME).unwrap().read(1, 2), None);
    files.complete_fill(fill, Some(b"abcdef".to_vec().into()), true, now);
    files.invalidate();
    assert_eq!(files.get(ME).unwrap().read(1, 2), None, "a signal arrived");
    files.complete_fill(fill, Some(b"abcdef".to_vec().into()), true, now);
    assert_eq!(files.get(ME).unwrap().read(1, 2), None, "it was read before the signal");
    let fill = Fill { generation: 1, ..fill };
    files.complete_fill(fill, Some(b"abcdef".to_vec().into()), true, now - 2 * CACHE_TERM);
    let file = files.get(ME).unwrap();
    assert_eq!((file.read(0, 2).is_some(), file.read(2, 2)), (true, None), "it has expired");
    files.receive_notices(&[(ME, FileNotice::Unchanged)], Some(now), true, &local_node());
    assert_eq!(files.get(ME).unwrap().read(2, 2), Some(&b"cd"[..]), "home has validated it");
    // Data of a file that may be changing serves one read only; so does data that has expired.
    for (is_stable, since) in [(false, now), (true, now - 2 * CACHE_TERM)] {
        files.complete_fill(fill, Some(b"abcdef".to_vec().into()), is_stable, since);
        assert_eq!(files.get(ME).unwrap().read(0, 2), Some(&b"ab"[..]));
        assert_eq!(files.get(ME).unwrap().read(2, 2), None);
    }
}

#[test]
fn end_of_file_is_reported_once() {
    let mut files = files(&[delegated(ME, 7, true, false)]);
    let now = Instant::now();
    files.complete_fill(
        Fill { fd: ME, start: 0, length: 9, generation: 0 },
        Some(b"abc".to_vec().into()),
        true,
        now,
    );
    let file = files.get(ME).unwrap();
    assert_eq!(file.read(2, 8), Some(&b"c"[..]), "the file ends there");
    assert_eq!(file.read(3, 8), Some(&b""[..]), "the end is reported once");
    assert_eq!(file.read(3, 8), None, "it may have grown");
    files.complete_fill(
        Fill { fd: ME, start: 3, length: 9, generation: 0 },
        Some(Vec::new().into()),
        true,
        now,
    );
    let file = files.get(ME).unwrap();
    assert_eq!(file.read(3, 8), Some(&b""[..]));
    assert_eq!(file.read(3, 8), None);
}

#[test]
fn read_ahead_grows_with_sequential_reads() {
    let mut files = files(&[delegated(ME, 7, true, false)]);
    let file = files.get(ME).unwrap();
    assert_eq!(
        [file.plan_fill(0, 10), file.plan_fill(0, 10), file.plan_fill(0, 10)],
        [MIN_READ_AHEAD, 2 * MIN_READ_AHEAD, 4 * MIN_READ_AHEAD]
    );
    assert_eq!(file.plan_fill(99, 10), 10, "elsewhere");
    assert_eq!(file.plan_fill(0, 1 << 20), 1 << 20);
    for _ in 0..9 {
        file.plan_fill(0, 1);
    }
    assert_eq!(file.plan_fill(0, 1), MAX_READ_AHEAD);
    // If read-ahead data expires mostly unused, less is read ahead the next time.
    files.complete_fill(
        Fill { fd: ME, start: 0, length: 6, generation: 0 },
        Some(vec![0; MAX_READ_AHEAD as usize].into()),
        true,
        Instant::now() - CACHE_TERM,
    );
    let file = files.get(ME).unwrap();
    assert!(file.read(0, MIN_READ_AHEAD).is_some() && file.read(MIN_READ_AHEAD, 1).is_none());
    assert_eq!(file.plan_fill(MIN_READ_AHEAD, 1), 2 * MIN_READ_AHEAD);
}

#[test]
fn failed_write_behind_returns_the_delegation() {
    let mut files = files(&[delegated(ME, 7, false, true)]);
    files.write(ME, 0, b"abc".to_vec());
    let (before, nothing) = files.prelude_for_internal_call(1);
    assert_eq!((numbers(&before), nothing.is_some()), (vec![libc::SYS_pwrite64], true));
    files.confirm(1, &[-28]);
    assert!(files.get(ME).is_none() && files.is_clean(), "home reports the error at the next call");
    assert!(files.prelude_for_internal_call(2).1.is_none(), "nothing is pending");
}

#[test]
fn repeated_confirmation_counts_once() {
    let mut files = files(&[delegated(ME, 7, false, true)]);
    files.write(ME, 0, b"abc".to_vec());
    files.write(ME, 9, b"de".to_vec());
    files.prelude_for_call(1, libc::SYS_poll as u32, &args(0));
    // A signal came after the first write.
    files.confirm(1, &[3]);
    // After a stop the thread makes the call again under the same number, and home replies as
    // before.
    assert_eq!(files.prelude_for_call(1, libc::SYS_poll as u32, &args(0)).len(), 1);
    files.confirm(1, &[3]);
    assert!(!files.is_clean());
    assert_eq!(files.prelude_for_call(2, libc::SYS_poll as u32, &args(0)).len(), 1);
    files.confirm(2, &[2]);
    assert!(files.is_clean());
}

#[test]
fn unsupported_offset_is_reset() {
    let mut files = files(&[delegated(ME, 7, true, false)]);
    files.get(ME).unwrap().delegation.offset = 1 << 32;
    files.prelude_for_call(1, libc::SYS_read as u32, &args(ME));
    files.confirm(1, &[-22]);
    assert_eq!(files.get(ME).unwrap().delegation.offset, 0);
    assert!(files.is_clean());
}

#[test]
fn file_with_two_descriptors_is_not_delegated_if_one_is_writable() {
    let mut two =
        files(&[delegated(ME, 7, true, false), delegated(4, 7, true, false), delegated(5, 8, true, true)]);
    assert!(two.get(ME).is_some() && two.get(4).is_some() && two.get(5).is_some());
    two.receive_notices(&[delegated(6, 7, false, true)], None, true, &local_node());
    assert!(two.get(ME).is_none() && two.get(4).is_none() && two.get(6).is_none() && two.get(5).is_some());
    let mut none = FileCache::default();
    none.receive_notices(&[delegated(ME, 7, true, false)], None, false, &local_node());
    assert!(none.get(ME).is_none(), "the process has several threads");
    none.return_delegations();
    none.receive_notices(&[delegated(ME, 7, true, false)], None, true, &local_node());
    assert!(none.get(ME).is_none(), "delegations are being returned");
}

#[test]
fn calls_conflict_with_the_right_delegations() {
    let conflict = |nr: i64, args: [u64; 6]| Conflict::of(nr as u32, &args);
    assert_eq!(conflict(libc::SYS_fcntl, [3, libc::F_SETLK as u64, 0, 0, 0, 0]), Conflict::None);
    assert_eq!(conflict(libc::SYS_fcntl, [3, libc::F_DUPFD as u64, 0, 0, 0, 0]), Conflict::File(3));
    assert_eq!(conflict(libc::SYS_mmap, [0, 9, 1, libc::MAP_SHARED as u64, 5, 0]), Conflict::File(5));
    assert_eq!(conflict(libc::SYS_mmap, [0, 9, 1, libc::MAP_PRIVATE as u64, 5, 0]), Conflict::None);
    let written = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    assert_eq!(conflict(libc::SYS_mmap, [0, 9, written, libc::MAP_SHARED as u64, 5, 0]), Conflict::All);
    assert_eq!(conflict(libc::SYS_preadv2, [3, 4, 0, 0, 0, 0]), Conflict::None);
    assert_eq!(conflict(libc::SYS_dup2, [3, 4, 0, 0, 0, 0]), Conflict::All);
    assert_eq!(conflict(libc::SYS_ioctl, [3, 4, 0, 0, 0, 0]), Conflict::File(3));
    assert_eq!(conflict(libc::SYS_rt_sigaction, [3, 0, 0, 0, 0, 0]), Conflict::None);
    assert_eq!(conflict(libc::SYS_prlimit64, [0, 7, 0, 1, 0, 0]), Conflict::None);
    assert_eq!(conflict(libc::SYS_prlimit64, [0, 1, 1, 0, 0, 0]), Conflict::All);
}

const OPENAT: u32 = libc::SYS_openat as u32;

/// The attributes of a file of this size.
pub(crate) fn attributes(size: u64) -> FileAttributes {
    FileAttributes {
        mask: 0xfff,
        blksize: 4096,
        attributes: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        mode: 0o100_600,
        ino: 7,
        size,
        blocks: 8,
        attributes_mask: 0,
        times: [(1, 0); 4],
        rdev: (0, 0),
        dev: (0, 1),
        mnt_id: 1,
    }
}

fn prefetch(content: &[u8]) -> OpenPrefetch {
    let attributes = attributes(content.len() as u64);
    OpenPrefetch {
        attributes,
        content: Some(PrefetchedContent { bytes: ByteBuf::from(content.to_vec()), at_eof: true }),
    }
}

/// Opens the file, with prefetched content. `interrupt` runs between the request and the result.
fn open_file(files: &mut FileCache, number: u64, content: &[u8], interrupt: impl FnOnce(&mut FileCache)) {
    let before = files.prelude_for_call(number, OPENAT, &args(-100));
    files.confirm(number, &vec![0; before.len()]);
    interrupt(files);
    let notice = (ME, FileNotice::Prefetched(Box::new(prefetch(content))));
    files.receive_notices(
        &[delegated(ME, 7, true, false), notice],
        Some(Instant::now()),
        true,
        &local_node(),
    );
}

#[test]
fn prefetched_attributes_are_valid_until_the_next_result() {
    let mut files = FileCache::default();
    let open = |files: &mut FileCache, number| {
        files.close(ME);
        open_file(files, number, b"abc", |_| ());
        assert_eq!(files.attributes(ME).unwrap().size, 3);
    };
    open(&mut files, 1);
    files.receive_notices(&[(ME, FileNotice::Unchanged)], Some(Instant::now()), true, &local_node());
    assert!(files.attributes(ME).is_none(), "a call has returned");
    assert_eq!(
        files.get(ME).unwrap().read(0, 9),
        Some(&b"abc"[..]),
        "the result says that the file is unchanged"
    );
    open(&mut files, 2);
    files.receive_notices(&[(ME, FileNotice::Changed)], Some(Instant::now()), true, &local_node());
    assert!(files.attributes(ME).is_none() && files.get(ME).unwrap().read(0, 9).is_none());
    open(&mut files, 3);
    files.invalidate();
    assert!(
        files.attributes(ME).is_none() && files.get(ME).unwrap().read(0, 9).is_none(),
        "a signal arrived"
    );
    open(&mut files, 4);
    let file = files.get(ME).unwrap();
    assert_eq!(file.read(0, 2), Some(&b"ab"[..]));
    assert_eq!(file.read(2, 9), Some(&b"c"[..]));
    assert_eq!(file.read(3, 9), Some(&b""[..]));
    assert_eq!(file.read(3, 9), None, "the end is reported once");
    assert!(files.attributes(ME).is_none(), "it has been read since");
    open(&mut files, 5);
    let long_ago = Instant::now().checked_sub(CACHE_TERM).unwrap();
    let file = files.get(ME).unwrap();
    file.attributes.as_mut().unwrap().1 = long_ago;
    file.read_ahead.as_mut().unwrap().since = long_ago;
    assert!(file.read(0, 9).is_none() && files.attributes(ME).is_none(), "it has expired");
    files.close(ME);
    open_file(&mut files, 6, b"abc", FileCache::invalidate);
    assert!(
        files.attributes(ME).is_none() && files.get(ME).unwrap().read(0, 9).is_none(),
        "a signal arrived first"
    );
}

#[test]
fn unread_prefetch_stops_prefetching() {
    let mut files = FileCache::default();
    assert!(files.prefetch_len(OPENAT) > 0 && files.prefetch_len(libc::SYS_read as u32) == 0);
    open_file(&mut files, 1, b"abc", |_| ());
    assert!(files.close(ME));
    assert_eq!(files.prefetch_len(OPENAT), 0);
    open_file(&mut files, 2, b"", |_| ());
    files.plan_fill(ME, 0, 10);
    assert!(files.prefetch_len(OPENAT) > 0, "this file is read");
    files.return_delegations();
    assert_eq!(files.prefetch_len(OPENAT), 0, "delegations are being returned");
}

#[test]
fn closes_precede_every_call() {
    let mut files = files(&[delegated(ME, 7, true, false), delegated(4, 8, true, false)]);
    files.get(ME).unwrap().delegation.offset = 100;
    assert!(files.close(ME) && files.get(ME).is_none());
    assert!(!files.is_clean() && files.due().is_some_and(|due| due < Instant::now() + CACHE_TERM));
    let calls = files.prelude_for_call(1, OPENAT, &args(-100));
    assert_eq!((numbers(&calls), calls[0].args[0].clone()), (vec![libc::SYS_close], Arg::Value(ME as u64)));
    // A signal came first, and home has run none of the prelude: the next call's prelude repeats
    // it.
    files.confirm(1, &[]);
    assert!(files.close(4));
    assert_eq!(numbers(&files.prelude_for_call(2, OPENAT, &args(-100))), [libc::SYS_close; 2]);
    files.confirm(2, &[0]);
    // After a stop the thread makes the call again under the same number, and home repeats its
    // results.
    assert_eq!(numbers(&files.prelude_for_call(2, OPENAT, &args(-100))), [libc::SYS_close]);
    files.confirm(2, &[0, 0]);
    assert!(files.is_clean() && files.due().is_none());
    files.receive_notices(&[delegated(ME, 9, true, false)], None, true, &local_node());
    assert!(files.close(ME));
    let (before, nothing) = files.prelude_for_internal_call(3);
    assert_eq!((numbers(&before), nothing.is_some()), (vec![libc::SYS_close], true), "without another call");
}

#[test]
fn closes_that_others_may_see_go_home() {
    let mut files =
        files(&[delegated(ME, 7, true, false), delegated(4, 7, true, false), delegated(5, 9, false, true)]);
    assert!(!files.close(5), "it is writable");
    assert!(!files.close(6), "it is not delegated");
    files.prelude_for_call(1, libc::SYS_fcntl as u32, &[4, libc::F_SETLK as u64, 0, 0, 0, 0]);
    assert!(!files.close(4) && !files.close(ME), "the lock belongs to the process and the file");
    files.receive_notices(&[delegated(6, 10, true, false)], None, true, &local_node());
    files.get(6).unwrap().delegation.is_home_local = false;
    assert!(!files.close(6), "it is not a local file of home");
    files.receive_notices(&[delegated(7, 11, true, false)], None, true, &local_node());
    files.publish(7, 0);
    assert!(!files.close(7), "it is published");
}

/// A shared file that is open here and was just validated by home.
fn shared() -> FileCache {
    let mut files = files(&[delegated(ME, 7, true, false)]);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    files.open_here(ME, LocalFile::Open(file.into(), None));
    files.validate(ME);
    files
}

#[test]
fn shared_file_is_read_here_only_while_valid() {
    let receive_notices = |files: &mut FileCache, notices: &[FileNotice]| {
        let notices: Vec<_> = notices.iter().map(|notice| (ME, notice.clone())).collect();
        files.receive_notices(&notices, Some(Instant::now()), true, &local_node());
    };
    let mut files = shared();
    assert!(
        files.is_validated(ME) && files.local_fds(true).eq([ME]) && files.local_fds(false).next().is_none()
    );
    // The result of a call without a notice about it.
    receive_notices(&mut files, &[]);
    assert!(!files.is_validated(ME) && files.local_fds(true).next().is_none());
    receive_notices(&mut files, &[FileNotice::Unchanged]);
    assert!(files.is_validated(ME) && files.valid_until().is_some());
    files.invalidate();
    assert!(!files.is_validated(ME), "a signal may have announced a change");
    receive_notices(&mut files, &[FileNotice::Unchanged]);
    receive_notices(&mut files, &[FileNotice::Changed]);
    assert!(files.get(ME).is_none(), "it is read at home");
    assert_eq!(files.take_stale_fds(), [ME]);
}

#[test]
fn lock_call_ends_local_use_of_shared_files() {
    for nr in [libc::SYS_flock, libc::SYS_fcntl] {
        let mut files = shared();
        files.receive_notices(&[delegated(5, 8, true, false)], None, true, &local_node());
        files.prelude_for_call(1, nr as u32, &[5, libc::F_SETLKW as u64, 0, 0, 0, 0]);
        assert!(files.get(ME).is_none() && files.get(5).is_some());
        assert_eq!(files.take_stale_fds(), [ME]);
    }
    let mut files = shared();
    files.prelude_for_call(1, libc::SYS_fcntl as u32, &[ME as u64, libc::F_GETFD as u64, 0, 0, 0, 0]);
    assert!(files.get(ME).is_some());
}

#[test]
fn only_declared_directories_are_shared() {
    let file = tern_ids::SharedFile {
        handle: None,
        inode: 7,
        born: None,
        size: 1,
        modified: (1, 0),
        changed: (1, 0),
    };
    let notice = |root: &str| {
        let [root, path] = [root, "a"].map(|text| ByteBuf::from(text.as_bytes().to_vec()));
        let location = tern_migrate::message::SharedFileRef {
            root,
            path,
            file: file.clone(),
            credentials: Credentials { uid: 1, gid: 1, groups: vec![] },
        };
        (ME, FileNotice::Shared(Box::new(location)))
    };
    let local_node = LocalNode::new(tern_ids::NodeId(2), "/nowhere".as_ref(), &["/nfs".into()]);
    for (root, writes, shares) in [("/nfs", false, true), ("/nfs/a", false, false), ("/nfs", true, false)] {
        let mut files = files(&[delegated(ME, 7, true, writes)]);
        files.receive_notices(&[notice(root)], Some(Instant::now()), true, &local_node);
        let is_shared = files.get(ME).unwrap().local_file.as_ref().is_some_and(LocalFile::is_shared);
        assert_eq!(is_shared, shares, "{root} {writes}");
    }
}
