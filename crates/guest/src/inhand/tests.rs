use super::*;
use tern_migrate::opened::{Beginning, Content};

const ME: i32 = 3;

fn in_hand(fd: i32, inode: u64, reads: bool, writes: bool) -> (i32, FileWord) {
    (fd, FileWord::InHand(InHand { id: (1, inode), offset: 0, reads, writes, local: true }))
}

fn beside() -> Beside {
    Beside::new(tern_ids::NodeId(2), "/nowhere".as_ref(), &[])
}

fn files(words: &[(i32, FileWord)]) -> Files {
    let mut files = Files::default();
    files.hear(words, None, true, &beside());
    files
}

fn numbers(calls: &[Call]) -> Vec<i64> {
    calls.iter().map(|call| i64::from(call.nr)).collect()
}

fn args(fd: i32) -> [u64; 6] {
    [fd as u64, 0, 0, 0, 0, 0]
}

#[test]
fn what_is_written_goes_with_the_next_call_in_its_order() {
    let mut files = files(&[in_hand(ME, 7, true, true)]);
    for (at, text) in [(0, "ab"), (2, "cd"), (1, "XY"), (9, "z")] {
        files.write(ME, at, text.into());
    }
    assert!(files.due().is_some() && !files.are_clean());
    let calls = files.send_before(1, libc::SYS_getppid as u32, &args(0));
    let bytes = |text: &str| Arg::Bytes(ByteBuf::from(text.as_bytes().to_vec()));
    assert_eq!(numbers(&calls), [libc::SYS_pwrite64; 2]);
    assert_eq!((&calls[0].args[1], &calls[0].args[3]), (&bytes("aXYd"), &Arg::Value(0)));
    assert_eq!((&calls[1].args[1], &calls[1].args[3]), (&bytes("z"), &Arg::Value(9)));
    // A signal came first, and home has made none of it: it goes with the next.
    files.confirm(1, &[]);
    assert_eq!(files.send_before(2, libc::SYS_getppid as u32, &args(0)), calls);
    files.confirm(1, &[4, 1]);
    assert!(!files.are_clean(), "that was another call's");
    files.confirm(2, &[4, 1]);
    assert!(files.are_clean() && files.due().is_none());
}

#[test]
fn offsets_go_home_before_any_call() {
    let mut files = files(&[in_hand(ME, 7, true, false)]);
    files.get(ME).unwrap().known.offset = 100;
    assert!(files.send_all(1).0.is_empty(), "nobody looks");
    assert_eq!(numbers(&files.send_before(2, libc::SYS_poll as u32, &args(0))), [libc::SYS_lseek]);
    files.confirm(2, &[100]);
    files.made(libc::SYS_read as u32, &args(ME), 20);
    assert_eq!(files.get(ME).unwrap().known.offset, 120);
    assert!(files.send_before(3, libc::SYS_read as u32, &args(ME)).is_empty(), "home has moved it itself");
    files.get(ME).unwrap().known.offset = 7;
    assert_eq!(numbers(&files.send_before(4, libc::SYS_fork as u32, &args(0))), [libc::SYS_lseek]);
    assert!(files.get(ME).is_none(), "it is shared from then on");
    files.confirm(4, &[7]);
    assert!(files.are_clean() && files.open.is_empty());
}

#[test]
fn what_was_read_ahead_is_good_until_somebody_says_otherwise() {
    let words = [in_hand(ME, 7, true, false)];
    let fill = Fill { fd: ME, start: 0, length: 6, doubts: 0 };
    let now = Instant::now();
    let mut files = files(&words);
    files.filled(fill, Some(b"abcdef".to_vec().into()), true, now);
    let file = files.get(ME).unwrap();
    assert_eq!(file.read(1, 2), Some(&b"bc"[..]));
    assert_eq!(file.read(4, 2), Some(&b"ef"[..]));
    assert_eq!(file.read(4, 3), None, "the rest is not here");
    files.hear(&[(ME, FileWord::Changed)], None, true, &beside());
    assert_eq!(files.get(ME).unwrap().read(1, 2), None);
    files.filled(fill, Some(b"abcdef".to_vec().into()), true, now);
    files.distrust();
    assert_eq!(files.get(ME).unwrap().read(1, 2), None, "a signal came");
    files.filled(fill, Some(b"abcdef".to_vec().into()), true, now);
    assert_eq!(files.get(ME).unwrap().read(1, 2), None, "that was read before");
    let fill = Fill { doubts: 1, ..fill };
    files.filled(fill, Some(b"abcdef".to_vec().into()), true, now - 2 * TERM);
    let file = files.get(ME).unwrap();
    assert_eq!((file.read(0, 2).is_some(), file.read(2, 2)), (true, None), "long ago");
    files.hear(&[(ME, FileWord::Steady)], Some(now), true, &beside());
    assert_eq!(files.get(ME).unwrap().read(2, 2), Some(&b"cd"[..]), "home has looked again");
    // What may be changing is for the one read that has waited for it; so is what has become old on the way.
    for (steady, since) in [(false, now), (true, now - 2 * TERM)] {
        files.filled(fill, Some(b"abcdef".to_vec().into()), steady, since);
        assert_eq!(files.get(ME).unwrap().read(0, 2), Some(&b"ab"[..]));
        assert_eq!(files.get(ME).unwrap().read(2, 2), None);
    }
}

#[test]
fn the_end_of_a_file_is_told_once() {
    let mut files = files(&[in_hand(ME, 7, true, false)]);
    let now = Instant::now();
    files.filled(Fill { fd: ME, start: 0, length: 9, doubts: 0 }, Some(b"abc".to_vec().into()), true, now);
    let file = files.get(ME).unwrap();
    assert_eq!(file.read(2, 8), Some(&b"c"[..]), "it ends there");
    assert_eq!(file.read(3, 8), Some(&b""[..]), "as it was when that was read");
    assert_eq!(file.read(3, 8), None, "it may have grown");
    files.filled(Fill { fd: ME, start: 3, length: 9, doubts: 0 }, Some(Vec::new().into()), true, now);
    let file = files.get(ME).unwrap();
    assert_eq!(file.read(3, 8), Some(&b""[..]));
    assert_eq!(file.read(3, 8), None);
}

#[test]
fn more_is_read_ahead_the_longer_it_goes_straight_on() {
    let mut files = files(&[in_hand(ME, 7, true, false)]);
    let file = files.get(ME).unwrap();
    assert_eq!([file.want(0, 10), file.want(0, 10), file.want(0, 10)], [FIRST, 2 * FIRST, 4 * FIRST]);
    assert_eq!(file.want(99, 10), 10, "elsewhere");
    assert_eq!(file.want(0, 1 << 20), 1 << 20);
    for _ in 0..9 {
        file.want(0, 1);
    }
    assert_eq!(file.want(0, 1), MOST_AHEAD);
    // Who has used little of it until it was old gets less.
    files.filled(
        Fill { fd: ME, start: 0, length: 6, doubts: 0 },
        Some(vec![0; MOST_AHEAD as usize].into()),
        true,
        Instant::now() - TERM,
    );
    let file = files.get(ME).unwrap();
    assert!(file.read(0, FIRST).is_some() && file.read(FIRST, 1).is_none());
    assert_eq!(file.want(FIRST, 1), 2 * FIRST);
}

#[test]
fn what_cannot_be_written_is_left_to_home() {
    let mut files = files(&[in_hand(ME, 7, false, true)]);
    files.write(ME, 0, b"abc".to_vec());
    let (before, nothing) = files.send_all(1);
    assert_eq!((numbers(&before), nothing.is_some()), (vec![libc::SYS_pwrite64], true));
    files.confirm(1, &[-28]);
    assert!(files.get(ME).is_none() && files.are_clean(), "it says so at the next call");
    assert!(files.send_all(2).1.is_none(), "there is nothing to do");
}

#[test]
fn what_home_says_twice_counts_once() {
    let mut files = files(&[in_hand(ME, 7, false, true)]);
    files.write(ME, 0, b"abc".to_vec());
    files.write(ME, 9, b"de".to_vec());
    files.send_before(1, libc::SYS_poll as u32, &args(0));
    // A signal came after the first.
    files.confirm(1, &[3]);
    // Halted, it asks again under the same number, and home answers as before.
    assert_eq!(files.send_before(1, libc::SYS_poll as u32, &args(0)).len(), 1);
    files.confirm(1, &[3]);
    assert!(!files.are_clean());
    assert_eq!(files.send_before(2, libc::SYS_poll as u32, &args(0)).len(), 1);
    files.confirm(2, &[2]);
    assert!(files.are_clean());
}

#[test]
fn an_offset_that_home_does_not_know_is_none() {
    let mut files = files(&[in_hand(ME, 7, true, false)]);
    files.get(ME).unwrap().known.offset = 1 << 32;
    files.send_before(1, libc::SYS_read as u32, &args(ME));
    files.confirm(1, &[-22]);
    assert_eq!(files.get(ME).unwrap().known.offset, 0);
    assert!(files.are_clean());
}

#[test]
fn one_file_under_two_descriptors_is_not_for_us_if_one_writes() {
    let mut two =
        files(&[in_hand(ME, 7, true, false), in_hand(4, 7, true, false), in_hand(5, 8, true, true)]);
    assert!(two.get(ME).is_some() && two.get(4).is_some() && two.get(5).is_some());
    two.hear(&[in_hand(6, 7, false, true)], None, true, &beside());
    assert!(two.get(ME).is_none() && two.get(4).is_none() && two.get(6).is_none() && two.get(5).is_some());
    let mut none = Files::default();
    none.hear(&[in_hand(ME, 7, true, false)], None, false, &beside());
    assert!(none.get(ME).is_none(), "not alone");
    none.put_down();
    none.hear(&[in_hand(ME, 7, true, false)], None, true, &beside());
    assert!(none.get(ME).is_none(), "about to leave");
}

#[test]
fn calls_are_known_by_what_they_do_to_files() {
    let touch = |nr: i64, args: [u64; 6]| Touch::of(nr as u32, &args);
    assert_eq!(touch(libc::SYS_fcntl, [3, libc::F_SETLK as u64, 0, 0, 0, 0]), Touch::None);
    assert_eq!(touch(libc::SYS_fcntl, [3, libc::F_DUPFD as u64, 0, 0, 0, 0]), Touch::Takes(3));
    assert_eq!(touch(libc::SYS_mmap, [0, 9, 1, libc::MAP_SHARED as u64, 5, 0]), Touch::Takes(5));
    assert_eq!(touch(libc::SYS_mmap, [0, 9, 1, libc::MAP_PRIVATE as u64, 5, 0]), Touch::None);
    let written = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    assert_eq!(touch(libc::SYS_mmap, [0, 9, written, libc::MAP_SHARED as u64, 5, 0]), Touch::TakesAll);
    assert_eq!(touch(libc::SYS_preadv2, [3, 4, 0, 0, 0, 0]), Touch::None);
    assert_eq!(touch(libc::SYS_dup2, [3, 4, 0, 0, 0, 0]), Touch::TakesAll);
    assert_eq!(touch(libc::SYS_ioctl, [3, 4, 0, 0, 0, 0]), Touch::Takes(3));
    assert_eq!(touch(libc::SYS_rt_sigaction, [3, 0, 0, 0, 0, 0]), Touch::None);
    assert_eq!(touch(libc::SYS_prlimit64, [0, 7, 0, 1, 0, 0]), Touch::None);
    assert_eq!(touch(libc::SYS_prlimit64, [0, 1, 1, 0, 0, 0]), Touch::TakesAll);
}

const OPENAT: u32 = libc::SYS_openat as u32;

/// What a file of so many bytes is like.
pub(crate) fn about(size: u64) -> About {
    About {
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

fn begins(content: &[u8]) -> Beginning {
    let about = about(content.len() as u64);
    Beginning { about, content: Some(Content { bytes: ByteBuf::from(content.to_vec()), ends: true }) }
}

/// The file is opened, and begins so, if `heard` right behind the asking for it.
fn opened(files: &mut Files, number: u64, content: &[u8], heard: impl FnOnce(&mut Files)) {
    let before = files.send_before(number, OPENAT, &args(-100));
    files.confirm(number, &vec![0; before.len()]);
    heard(files);
    let word = (ME, FileWord::Begins(Box::new(begins(content))));
    files.hear(&[in_hand(ME, 7, true, false), word], Some(Instant::now()), true, &beside());
}

#[test]
fn what_comes_with_a_file_is_good_until_anything_is_heard() {
    let mut files = Files::default();
    let open = |files: &mut Files, number| {
        files.close(ME);
        opened(files, number, b"abc", |_| ());
        assert_eq!(files.about(ME).unwrap().size, 3);
    };
    open(&mut files, 1);
    files.hear(&[(ME, FileWord::Steady)], Some(Instant::now()), true, &beside());
    assert!(files.about(ME).is_none(), "a call has returned");
    assert_eq!(files.get(ME).unwrap().read(0, 9), Some(&b"abc"[..]), "which says that it is as it was");
    open(&mut files, 2);
    files.hear(&[(ME, FileWord::Changed)], Some(Instant::now()), true, &beside());
    assert!(files.about(ME).is_none() && files.get(ME).unwrap().read(0, 9).is_none());
    open(&mut files, 3);
    files.distrust();
    assert!(files.about(ME).is_none() && files.get(ME).unwrap().read(0, 9).is_none(), "a signal came");
    open(&mut files, 4);
    let file = files.get(ME).unwrap();
    assert_eq!(file.read(0, 2), Some(&b"ab"[..]));
    assert_eq!(file.read(2, 9), Some(&b"c"[..]));
    assert_eq!(file.read(3, 9), Some(&b""[..]));
    assert_eq!(file.read(3, 9), None, "its end is told once");
    assert!(files.about(ME).is_none(), "it has been read since");
    open(&mut files, 5);
    let long_ago = Instant::now().checked_sub(TERM).unwrap();
    let file = files.get(ME).unwrap();
    file.about.as_mut().unwrap().1 = long_ago;
    file.ahead.as_mut().unwrap().since = long_ago;
    assert!(file.read(0, 9).is_none() && files.about(ME).is_none(), "long ago");
    files.close(ME);
    opened(&mut files, 6, b"abc", Files::distrust);
    assert!(files.about(ME).is_none() && files.get(ME).unwrap().read(0, 9).is_none(), "a signal came first");
}

#[test]
fn what_came_along_unread_is_not_wanted_again() {
    let mut files = Files::default();
    assert!(files.wants_with(OPENAT) > 0 && files.wants_with(libc::SYS_read as u32) == 0);
    opened(&mut files, 1, b"abc", |_| ());
    assert!(files.close(ME));
    assert_eq!(files.wants_with(OPENAT), 0);
    opened(&mut files, 2, b"", |_| ());
    files.want(ME, 0, 10);
    assert!(files.wants_with(OPENAT) > 0, "this one is read");
    files.put_down();
    assert_eq!(files.wants_with(OPENAT), 0, "it is about to leave");
}

#[test]
fn what_is_closed_is_closed_at_home_before_any_call() {
    let mut files = files(&[in_hand(ME, 7, true, false), in_hand(4, 8, true, false)]);
    files.get(ME).unwrap().known.offset = 100;
    assert!(files.close(ME) && files.get(ME).is_none());
    assert!(!files.are_clean() && files.due().is_some_and(|due| due < Instant::now() + TERM));
    let calls = files.send_before(1, OPENAT, &args(-100));
    assert_eq!((numbers(&calls), calls[0].args[0].clone()), (vec![libc::SYS_close], Arg::Value(ME as u64)));
    // A signal came first, and home has made none of it: it goes with the next.
    files.confirm(1, &[]);
    assert!(files.close(4));
    assert_eq!(numbers(&files.send_before(2, OPENAT, &args(-100))), [libc::SYS_close; 2]);
    files.confirm(2, &[0]);
    // Halted, it asks again under the same number, and home says again what it has done.
    assert_eq!(numbers(&files.send_before(2, OPENAT, &args(-100))), [libc::SYS_close]);
    files.confirm(2, &[0, 0]);
    assert!(files.are_clean() && files.due().is_none());
    files.hear(&[in_hand(ME, 9, true, false)], None, true, &beside());
    assert!(files.close(ME));
    let (before, nothing) = files.send_all(3);
    assert_eq!((numbers(&before), nothing.is_some()), (vec![libc::SYS_close], true), "by itself");
}

#[test]
fn home_closes_what_somebody_may_wait_for() {
    let mut files =
        files(&[in_hand(ME, 7, true, false), in_hand(4, 7, true, false), in_hand(5, 9, false, true)]);
    assert!(!files.close(5), "it is written");
    assert!(!files.close(6), "it is not in hand");
    files.send_before(1, libc::SYS_fcntl as u32, &[4, libc::F_SETLK as u64, 0, 0, 0, 0]);
    assert!(!files.close(4) && !files.close(ME), "the lock is the process's, on the file");
    files.hear(&[in_hand(6, 10, true, false)], None, true, &beside());
    files.get(6).unwrap().known.local = false;
    assert!(!files.close(6), "another node has a part in it");
    files.hear(&[in_hand(7, 11, true, false)], None, true, &beside());
    files.lend(7, 0);
    assert!(!files.close(7), "it is lent");
}

/// A file that nodes share, opened here, of which home has just said so.
fn shared() -> Files {
    let mut files = files(&[in_hand(ME, 7, true, false)]);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    files.open_here(ME, Near::Open(file.into(), None));
    files.vouch(ME);
    files
}

#[test]
fn a_shared_file_is_read_here_only_while_home_vouches_for_it() {
    let hear = |files: &mut Files, words: &[FileWord]| {
        let words: Vec<_> = words.iter().map(|word| (ME, word.clone())).collect();
        files.hear(&words, Some(Instant::now()), true, &beside());
    };
    let mut files = shared();
    assert!(files.is_vouched(ME) && files.own_files(40) == 1 << ME);
    // The result of a call with which nothing is said of it.
    hear(&mut files, &[]);
    assert!(!files.is_vouched(ME) && files.own_files(40) == 0);
    hear(&mut files, &[FileWord::Steady]);
    assert!(files.is_vouched(ME) && files.vouched_until().is_some());
    files.distrust();
    assert!(!files.is_vouched(ME), "a signal may have told of a change");
    hear(&mut files, &[FileWord::Steady]);
    hear(&mut files, &[FileWord::Changed]);
    assert!(files.get(ME).is_none(), "it goes home");
    assert_eq!(files.take_stale(), [ME]);
}

#[test]
fn who_asks_for_a_lock_reads_shared_files_at_home() {
    for nr in [libc::SYS_flock, libc::SYS_fcntl] {
        let mut files = shared();
        files.hear(&[in_hand(5, 8, true, false)], None, true, &beside());
        files.send_before(1, nr as u32, &[5, libc::F_SETLKW as u64, 0, 0, 0, 0]);
        assert!(files.get(ME).is_none() && files.get(5).is_some());
        assert_eq!(files.take_stale(), [ME]);
    }
    let mut files = shared();
    files.send_before(1, libc::SYS_fcntl as u32, &[ME as u64, libc::F_GETFD as u64, 0, 0, 0, 0]);
    assert!(files.get(ME).is_some());
}

#[test]
fn only_what_this_node_declares_is_taken_for_shared() {
    let file = tern_ids::SharedFile {
        handle: None,
        inode: 7,
        born: None,
        size: 1,
        modified: (1, 0),
        changed: (1, 0),
    };
    let word = |root: &str| {
        let [root, path] = [root, "a"].map(|text| ByteBuf::from(text.as_bytes().to_vec()));
        let place =
            tern_migrate::message::SharedPlace { root, path, file: file.clone(), who: (1, 1, vec![]) };
        (ME, FileWord::Shared(Box::new(place)))
    };
    let beside = Beside::new(tern_ids::NodeId(2), "/nowhere".as_ref(), &["/nfs".into()]);
    for (root, writes, shares) in [("/nfs", false, true), ("/nfs/a", false, false), ("/nfs", true, false)] {
        let mut files = files(&[in_hand(ME, 7, true, writes)]);
        files.hear(&[word(root)], Some(Instant::now()), true, &beside);
        let is_shared = files.get(ME).unwrap().near.as_ref().is_some_and(Near::is_shared);
        assert_eq!(is_shared, shares, "{root} {writes}");
    }
}
