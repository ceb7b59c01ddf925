//! Files: by name, by descriptor, their metadata.

use super::arena::Arena;
use super::{alone, args, close, native, same, same_but_for_padding, same_result};
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

const HERE: u64 = libc::AT_FDCWD as u64;

/// A directory that is removed at the end of the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tern-syscall-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a scratch directory");
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("an ASCII path").into()
    }

    fn file(&self, name: &str, content: &[u8]) -> (String, File) {
        let path = self.path(name);
        fs::write(&path, content).expect("a file");
        let file = OpenOptions::new().read(true).write(true).open(&path).expect("the file just written");
        (path, file)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn fd(file: &File) -> u64 {
    file.as_raw_fd() as u64
}

#[test]
fn opening() {
    let _alone = alone();
    let scratch = Scratch::new("open");
    let (path, _file) = scratch.file("a", b"x");
    let opened = same(libc::SYS_open, |a| args(&[a.text(&path), 0, 0]), |ret, _| close(ret)).0;
    assert!(opened >= 0);
    let opened = same(libc::SYS_openat, |a| args(&[HERE, a.text(&path), 0, 0]), |ret, _| close(ret)).0;
    assert!(opened >= 0);
    let how = |a: &mut Arena| {
        let how = a.words(&[0, 0, 0]);
        args(&[HERE, a.text(&path), how, 24])
    };
    assert!(same(libc::SYS_openat2, how, |ret, _| close(ret)).0 >= 0);
    let missing = scratch.path("missing");
    assert_eq!(same_result(libc::SYS_open, |a| args(&[a.text(&missing), 0, 0])), -i64::from(libc::ENOENT));
}

#[test]
fn names_that_the_kernel_refuses() {
    let long = "n".repeat(5000);
    assert_eq!(same_result(libc::SYS_access, |a| args(&[a.text(&long), 0])), -i64::from(libc::ENAMETOOLONG));
    assert_eq!(same_result(libc::SYS_access, |_| args(&[0, 0])), -i64::from(libc::EFAULT));
    assert_eq!(same_result(libc::SYS_access, |_| args(&[1, 0])), -i64::from(libc::EFAULT));
    assert_eq!(same_result(libc::SYS_access, |a| args(&[a.text(""), 0])), -i64::from(libc::ENOENT));
    // The kernel checks the flags before it reads the name.
    let flags = 1 << 30;
    assert_eq!(same_result(libc::SYS_faccessat2, |_| args(&[HERE, 1, 0, flags])), -i64::from(libc::EINVAL));
}

#[test]
fn reading_and_writing() {
    let _alone = alone();
    let scratch = Scratch::new("read");
    let content: Vec<u8> = (0..20_000u32).map(|i| i as u8).collect();
    let (_, file) = scratch.file("a", &content);
    let fd = fd(&file);
    let rewind = |_, _: &mut _| {
        (&file).seek(SeekFrom::Start(0)).expect("a seekable file");
    };
    for (len, expected) in [(0, 0), (7, 7), (5000, 5000), (100_000, 20_000)] {
        assert_eq!(same(libc::SYS_read, |a| args(&[fd, a.reserve(len), len as u64]), rewind).0, expected);
    }
    assert_eq!(same_result(libc::SYS_pread64, |a| args(&[fd, a.reserve(64), 64, 19_990])), 10);
    assert_eq!(
        same_result(libc::SYS_pread64, |a| args(&[fd, a.reserve(64), 64, -1i64 as u64])),
        -i64::from(libc::EINVAL)
    );
    assert_eq!(same(libc::SYS_write, |a| args(&[fd, a.put(&[9; 5000]), 5000]), rewind).0, 5000);
    assert_eq!(same_result(libc::SYS_pwrite64, |a| args(&[fd, a.put(b"four"), 4, 8])), 4);
    assert_eq!(same_result(libc::SYS_lseek, |_| args(&[fd, 100, 0])), 100);

    // The data written through the pipeline is in the file.
    let mut expected = vec![9; 5000];
    expected[8..12].copy_from_slice(b"four");
    expected.extend(&content[5000..]);
    assert!(fs::read(scratch.path("a")).expect("the file") == expected);

    // A bad buffer, and a bad descriptor with a bad buffer, are for the kernel to judge.
    assert_eq!(same_result(libc::SYS_read, |_| args(&[fd, 1, 10])), -i64::from(libc::EFAULT));
    assert_eq!(same_result(libc::SYS_write, |_| args(&[fd, 1, 10])), -i64::from(libc::EFAULT));
    assert_eq!(same_result(libc::SYS_write, |_| args(&[9999, 1, 10])), -i64::from(libc::EBADF));
    assert_eq!(
        same_result(libc::SYS_read, |a| args(&[fd, a.reserve(8), u64::MAX])),
        -i64::from(libc::EFAULT)
    );
}

#[test]
fn segments() {
    let _alone = alone();
    let scratch = Scratch::new("iov");
    let (_, file) = scratch.file("a", &(0..200).collect::<Vec<u8>>());
    let fd = fd(&file);
    let rewind = |_, _: &mut _| {
        (&file).seek(SeekFrom::Start(0)).expect("a seekable file");
    };
    let three = |a: &mut Arena| {
        let (one, two, three) = (a.put(&[1; 10]), a.put(&[2; 150]), a.put(&[3; 100]));
        a.words(&[one, 10, 0, 0, two, 150, three, 100])
    };
    assert_eq!(same(libc::SYS_readv, |a| args(&[fd, three(a), 4]), rewind).0, 200);
    assert_eq!(same_result(libc::SYS_preadv, |a| args(&[fd, three(a), 4, 195])), 5);
    assert_eq!(same(libc::SYS_preadv2, |a| args(&[fd, three(a), 4, u64::MAX, 0, 0]), rewind).0, 200);
    assert_eq!(same_result(libc::SYS_pwritev, |a| args(&[fd, three(a), 4, 40])), 260);
    assert_eq!(same(libc::SYS_writev, |a| args(&[fd, three(a), 4]), rewind).0, 260);
    assert_eq!(same_result(libc::SYS_pwritev2, |a| args(&[fd, three(a), 3, 3, 0, 0])), 160);
    assert_eq!(same_result(libc::SYS_readv, |_| args(&[fd, 1, 2000])), -i64::from(libc::EINVAL));
    assert_eq!(same_result(libc::SYS_readv, |_| args(&[fd, 1, 3])), -i64::from(libc::EFAULT));
    assert_eq!(same_result(libc::SYS_readv, |_| args(&[fd, 0, 0])), 0);
    let negative = |a: &mut Arena| args(&[fd, a.words(&[16, u64::MAX]), 1]);
    assert_eq!(same_result(libc::SYS_writev, negative), -i64::from(libc::EINVAL));
}

#[test]
fn metadata() {
    let _alone = alone();
    let scratch = Scratch::new("stat");
    let (path, file) = scratch.file("a", b"hello");
    let fd = fd(&file);
    assert_eq!(same_result(libc::SYS_stat, |a| args(&[a.text(&path), a.reserve(144)])), 0);
    assert_eq!(same_result(libc::SYS_lstat, |a| args(&[a.text(&path), a.reserve(144)])), 0);
    assert_eq!(same_result(libc::SYS_fstat, |a| args(&[fd, a.reserve(144)])), 0);
    assert_eq!(same_result(libc::SYS_newfstatat, |a| args(&[HERE, a.text(&path), a.reserve(144), 0])), 0);
    assert_eq!(same_result(libc::SYS_statx, |a| args(&[HERE, a.text(&path), 0, 0xfff, a.reserve(256)])), 0);
    assert_eq!(same_result(libc::SYS_fstat, |_| args(&[fd, 1])), -i64::from(libc::EFAULT));
    let times = |a: &mut Arena| {
        let times = a.words(&[1000, 0, 2000, 5]);
        args(&[HERE, a.text(&path), times, 0])
    };
    assert_eq!(same_result(libc::SYS_utimensat, times), 0);
    let modified = fs::metadata(&path).expect("the file").modified().expect("a time");
    assert_eq!(modified, std::time::UNIX_EPOCH + std::time::Duration::new(2000, 5));
    // Only the forwarded call is made: free space may change between two calls.
    let (ret, mut arena) = {
        let mut arena = Arena::new();
        let call = args(&[arena.text("/proc"), arena.reserve(120)]);
        (crate::forwarded(libc::SYS_statfs, &call, &mut arena), arena)
    };
    assert_eq!(ret, 0);
    let statfs = arena.snapshot();
    assert!(statfs.windows(8).any(|word| word == 0x9fa0u64.to_le_bytes()), "proc's magic number");

    let handle = |a: &mut Arena| {
        let handle = a.put(&[&[0; 8][..], &[7; 16]].concat());
        args(&[HERE, a.text(&path), handle, a.reserve(4), 0])
    };
    let ret = same_result(libc::SYS_name_to_handle_at, handle);
    assert!([libc::EOVERFLOW, libc::EOPNOTSUPP].contains(&(-ret as i32)), "{ret}");
}

#[test]
fn directories_and_links() {
    let _alone = alone();
    let scratch = Scratch::new("dir");
    for name in ["one", "two", "three"] {
        scratch.file(name, b"");
    }
    let dir = File::open(&scratch.0).expect("the directory");
    let rewind = |_, _: &mut _| {
        native(libc::SYS_lseek as u32, &args(&[dir.as_raw_fd() as u64, 0, 0]));
    };
    for nr in [libc::SYS_getdents64, libc::SYS_getdents] {
        let list = |a: &mut Arena| args(&[dir.as_raw_fd() as u64, a.reserve(2000), 2000]);
        let (ret, _) = same_but_for_padding(nr, list, rewind);
        assert!(ret > 100);
        let (ret, _) = same(nr, |a| args(&[dir.as_raw_fd() as u64, a.reserve(8), 8]), rewind);
        assert_eq!(ret, -i64::from(libc::EINVAL));
    }
    let link = scratch.path("link");
    std::os::unix::fs::symlink("target of the link", &link).expect("a link");
    assert_eq!(same_result(libc::SYS_readlink, |a| args(&[a.text(&link), a.reserve(100), 100])), 18);
    assert_eq!(same_result(libc::SYS_readlinkat, |a| args(&[HERE, a.text(&link), a.reserve(5), 5])), 5);
    assert_eq!(
        same_result(libc::SYS_readlink, |a| args(&[a.text(&link), a.reserve(5), 0])),
        -i64::from(libc::EINVAL)
    );
    assert!(same_result(libc::SYS_getcwd, |a| args(&[a.reserve(4096), 4096])) > 1);
    assert_eq!(same_result(libc::SYS_getcwd, |a| args(&[a.reserve(1), 1])), -i64::from(libc::ERANGE));
    let made = scratch.path("made");
    let remove = |_, _: &mut _| fs::remove_dir(&made).expect("the directory just made");
    assert_eq!(same(libc::SYS_mkdir, |a| args(&[a.text(&made), 0o700]), remove).0, 0);
}

#[test]
fn extended_attributes() {
    let _alone = alone();
    let scratch = Scratch::new("xattr");
    let (path, file) = scratch.file("a", b"");
    let set = |a: &mut Arena| {
        let name = a.text("user.tern");
        args(&[a.text(&path), name, a.put(b"value"), 5, 0])
    };
    let ret = same_result(libc::SYS_setxattr, set);
    if ret == -i64::from(libc::EOPNOTSUPP) {
        return eprintln!("no extended attributes on this file system");
    }
    assert_eq!(ret, 0);
    let get = |size: usize| {
        same_result(libc::SYS_getxattr, |a| {
            args(&[a.text(&path), a.text("user.tern"), a.reserve(size), size as u64])
        })
    };
    assert_eq!(get(64), 5);
    assert_eq!(get(0), 5);
    assert_eq!(get(3), -i64::from(libc::ERANGE));
    assert!(same_result(libc::SYS_flistxattr, |a| args(&[fd(&file), a.reserve(300), 300])) >= 10);
    let long = "user.".to_owned() + &"x".repeat(300);
    let get = |a: &mut Arena| args(&[a.text(&path), a.text(&long), 0, 0]);
    assert_eq!(same_result(libc::SYS_getxattr, get), -i64::from(libc::ERANGE));
    let big = |a: &mut Arena| args(&[a.text(&path), a.text("user.big"), a.reserve(8), 70_000, 0]);
    assert_eq!(same_result(libc::SYS_setxattr, big), -i64::from(libc::E2BIG));
}

#[test]
fn copies_between_descriptors_move_the_offset() {
    let _alone = alone();
    let scratch = Scratch::new("copy");
    let (_, from) = scratch.file("from", &[5; 10_000]);
    let (_, to) = scratch.file("to", b"");
    let (from, to_fd) = (fd(&from), fd(&to));
    let empty = |_, _: &mut _| {
        to.set_len(0).expect("a file to write");
        (&to).seek(SeekFrom::Start(0)).expect("a seekable file");
    };
    let (ret, mut arena) = same(libc::SYS_sendfile, |a| args(&[to_fd, from, a.words(&[100]), 4000]), empty);
    assert_eq!(ret, 4000);
    assert!(arena.snapshot().windows(8).any(|word| word == 4100u64.to_le_bytes()));
    let both = |a: &mut Arena| {
        let offset = a.words(&[1]);
        args(&[from, offset, to_fd, a.words(&[7]), 64, 0])
    };
    assert_eq!(same(libc::SYS_copy_file_range, both, empty).0, 64);
}

#[test]
fn locks_and_requests() {
    let _alone = alone();
    let scratch = Scratch::new("lock");
    let (_, file) = scratch.file("a", b"0123456789");
    let fd = fd(&file);
    let lock = |a: &mut Arena, command: i32, kind: i32| {
        let mut flock = [0; 32];
        flock[..2].copy_from_slice(&(kind as i16).to_le_bytes());
        flock[8..16].copy_from_slice(&3u64.to_le_bytes());
        flock[16..24].copy_from_slice(&4u64.to_le_bytes());
        args(&[fd, command as u64, a.put(&flock)])
    };
    assert_eq!(same_result(libc::SYS_fcntl, |a| lock(a, libc::F_SETLK, libc::F_WRLCK)), 0);
    // The process's own lock does not conflict, so the kernel returns F_UNLCK.
    assert_eq!(same_result(libc::SYS_fcntl, |a| lock(a, libc::F_GETLK, libc::F_WRLCK)), 0);
    // A lock of an open file description conflicts with it, so the kernel returns the process's
    // lock.
    let (ret, mut arena) = same(libc::SYS_fcntl, |a| lock(a, libc::F_OFD_GETLK, libc::F_WRLCK), |_, _| {});
    assert_eq!(ret, 0);
    let pid = std::process::id().to_le_bytes();
    assert!(arena.snapshot().windows(4).any(|word| word == pid), "the owner of the lock");
    assert_eq!(same_result(libc::SYS_fcntl, |_| args(&[fd, libc::F_GETFL as u64])), 0o100_002);

    let (ret, mut arena) = same(libc::SYS_ioctl, |a| args(&[fd, libc::FIONREAD, a.reserve(4)]), |_, _| {});
    assert_eq!(ret, 0);
    assert!(arena.snapshot().windows(4).any(|word| word == 10u32.to_le_bytes()));
    assert_eq!(
        same_result(libc::SYS_ioctl, |a| args(&[fd, libc::TCGETS, a.reserve(36)])),
        -i64::from(libc::ENOTTY)
    );
}

#[test]
fn terminals() {
    let _alone = alone();
    let Ok(master) = OpenOptions::new().read(true).write(true).open("/dev/ptmx") else {
        return eprintln!("no pseudo-terminals here");
    };
    let fd = fd(&master);
    assert_eq!(same_result(libc::SYS_ioctl, |a| args(&[fd, libc::TCGETS, a.reserve(36)])), 0);
    let size = |a: &mut Arena| args(&[fd, libc::TIOCSWINSZ, a.put(&[50, 0, 132, 0, 0, 0, 0, 0])]);
    assert_eq!(same_result(libc::SYS_ioctl, size), 0);
    let (ret, mut arena) = same(libc::SYS_ioctl, |a| args(&[fd, libc::TIOCGWINSZ, a.reserve(8)]), |_, _| {});
    assert_eq!(ret, 0);
    assert!(arena.snapshot().windows(4).any(|word| word == [50, 0, 132, 0]));
    assert_eq!(same_result(libc::SYS_ioctl, |a| args(&[fd, libc::TIOCGPTN, a.reserve(4)])), 0);
    assert_eq!(same_result(libc::SYS_ioctl, |a| args(&[fd, libc::TIOCSPTLCK, a.ints(&[0])])), 0);
}
