//! File systems that the nodes share, by NFS or the like, as the administrator has declared (`shared` in `ternd.toml`): what two nodes must know
//! to find the same file there (docs/design/direct.md).

use crate::handle;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, fstat, openat2, statx};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use tern_ids::SharedFile;

/// A declared directory that is there.
#[derive(Debug)]
pub struct Root {
    /// Itself, for looking up what is below.
    pub directory: OwnedFd,
    /// Its device: what is on another one is another mount's.
    pub device: u64,
    /// The kind of its file system.
    pub kind: String,
    /// It is mounted so that an open does not ask the server (`nocto`): what others have written may not be seen then.
    pub loose: bool,
}

impl Root {
    /// Opens the one of this path, as who asks for it.
    ///
    /// # Errors
    /// If it is not there, is no directory, or has a link in its path.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat2(rustix::fs::CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
        let device = fstat(&directory)?.st_dev;
        let mount = statx(&directory, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
        let table = std::fs::read_to_string("/proc/self/mountinfo")?;
        let (kind, loose) = mount_in(&table, mount).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { directory, device, kind, loose })
    }

    /// Opens a file below it, for reading, if it is this one, in this state.
    ///
    /// # Errors
    /// `ESTALE` if it is another one; `ELOOP` and `EXDEV` for what leads out of it, by a link or a mount; as open(2).
    pub fn open_file(&self, path: &Path, file: &SharedFile) -> io::Result<OwnedFd> {
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let is_it = |fd: &OwnedFd| look(fd, true).map(|found| found.is_some_and(|found| found.is(file)));
        let other = || io::Error::from(rustix::io::Errno::STALE);
        // Nothing but a file is opened: a pipe or a device would do something then.
        let found = openat2(&self.directory, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), inside)?;
        if !is_regular(&found)? {
            return Err(other());
        }
        let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found));
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opened = rustix::fs::open(again, flags, Mode::empty())?;
        // Only now the kernel here knows what the server has.
        if is_it(&opened)? { Ok(opened) } else { Err(other()) }
    }
}

fn is_regular(fd: &OwnedFd) -> io::Result<bool> {
    Ok(fstat(fd)?.st_mode & libc::S_IFMT == libc::S_IFREG)
}

/// What is seen of an open file here; nothing if it is no regular one. Without `asks`, what this kernel knows already, so that nobody waits for a server.
///
/// # Errors
/// As statx(2).
pub fn look(fd: impl AsFd, asks: bool) -> io::Result<Option<SharedFile>> {
    let how = if asks { AtFlags::EMPTY_PATH } else { AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC };
    let is = statx(&fd, "", how, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
    if u32::from(is.stx_mode) & libc::S_IFMT != libc::S_IFREG {
        return Ok(None);
    }
    let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
    Ok(Some(SharedFile {
        handle: handle::of(&fd).ok(),
        inode: is.stx_ino,
        born: (is.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(is.stx_btime)),
        size: is.stx_size,
        modified: time(is.stx_mtime),
        changed: time(is.stx_ctime),
    }))
}

/// The kind of a mount in a table, and whether an open does not ask its server.
fn mount_in(table: &str, mount: u64) -> Option<(String, bool)> {
    let number = mount.to_string();
    let line = table.lines().find(|line| line.split(' ').next() == Some(&number))?;
    let mut rest = line.split_once(" - ")?.1.split(' ');
    let kind = rest.next()?.to_owned();
    let loose = rest.nth(1).is_some_and(|options| options.split(',').any(|option| option == "nocto"));
    Some((kind, loose))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let at = std::env::temp_dir().join(format!("tern-shared-{name}-{}", std::process::id()));
            fs::create_dir_all(at.join("root/below")).unwrap();
            Self(at)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_that_file_is_opened_and_nothing_outside() {
        let place = Place::new("open");
        let path = place.0.join("root");
        fs::write(path.join("below/a"), "a").unwrap();
        fs::write(place.0.join("out"), "out").unwrap();
        symlink("below/a", path.join("link")).unwrap();
        symlink("below", path.join("down")).unwrap();
        let root = Root::open(&path).unwrap();
        let of = |path: PathBuf| look(fs::File::open(path).unwrap(), false).unwrap().unwrap();
        let (a, out) = (of(path.join("below/a")), of(place.0.join("out")));
        assert!(root.open_file("below/a".as_ref(), &a).is_ok());
        for (name, file) in [
            ("below/a", &out),
            ("link", &a),
            ("down/a", &a),
            ("../out", &out),
            ("below", &a),
            ("", &a),
            ("b", &a),
        ] {
            assert!(root.open_file(name.as_ref(), file).is_err(), "{name}");
        }
        let absolute = path.join("below/a");
        assert!(root.open_file(&absolute, &a).is_err(), "a whole path leads out");
        fs::write(&absolute, "ab").unwrap();
        assert!(root.open_file("below/a".as_ref(), &a).is_err(), "it has changed");
        assert!(Root::open(&path.join("down")).is_err(), "a link");
        assert!(look(&root.directory, false).unwrap().is_none(), "no file");
    }

    #[test]
    fn a_mount_says_its_kind_and_whether_opens_ask() {
        let table = "30 24 0:50 / /nfs/home rw,nosuid shared:1 - nfs4 server:/home rw,vers=4.2,nocto\n\
                     31 24 0:51 / /nfs/data rw - nfs4 server:/data rw,vers=4.2\n";
        assert_eq!(mount_in(table, 30), Some(("nfs4".into(), true)));
        assert_eq!(mount_in(table, 31), Some(("nfs4".into(), false)));
        assert_eq!(mount_in(table, 3), None);
    }
}
