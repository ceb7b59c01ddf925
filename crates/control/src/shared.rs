//! File systems that the nodes share, by NFS or the like, as the administrator has declared (`shared` in `ternd.toml`): what two nodes must know
//! to find the same file there (docs/design/direct.md).

use crate::handle;
use rustix::fs::{
    AtFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags, StatxTimestamp, fstat, openat2, statx,
};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
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
    /// For how long it believes names and attributes that others may have changed meanwhile, in words; nothing if it does not.
    pub believes: Option<String>,
    /// Nothing else is mounted below it.
    pub whole: bool,
}

/// A declared directory in which programs of several nodes can work at once as on one machine: what one of them makes, the others see with
/// their next look.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedRoot {
    /// Where it is, on all nodes that declare it.
    pub path: Vec<u8>,
    /// The kind of its file system.
    pub kind: String,
    /// As [`SharedFile::handle`].
    pub handle: Option<(i32, Vec<u8>)>,
    /// Its number there.
    pub inode: u64,
    /// When it was made, where that is told.
    pub born: Option<(i64, u32)>,
}

impl SharedRoot {
    /// Whether both are the same directory, as far as two kernels can tell.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let place = |root: &Self| (root.path.clone(), root.kind.clone(), root.inode);
        let handles = self.handle.as_ref().zip(other.handle.as_ref()).is_none_or(|(a, b)| a == b);
        let born = self.born.zip(other.born).is_none_or(|(a, b)| a == b);
        place(self) == place(other) && handles && born
    }
}

/// Of these declared directories, those in which several nodes can work at once. It may wait for their servers.
pub fn for_several(declared: &[PathBuf]) -> Vec<SharedRoot> {
    declared.iter().filter_map(|path| Root::open(path).ok()?.for_several(path)).collect()
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
        let (kind, options) = mount_in(&table, mount).ok_or(io::ErrorKind::NotFound)?;
        let loose = options.split(',').any(|option| option == "nocto");
        let (believes, whole) = (believes(&kind, &options), is_whole(&table, path));
        Ok(Self { directory, device, kind, loose, believes, whole })
    }

    /// What other nodes are told of it, if several can work there at once.
    fn for_several(&self, path: &Path) -> Option<SharedRoot> {
        if self.loose || self.believes.is_some() || !self.whole {
            return None;
        }
        let how = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let is = statx(&self.directory, "", AtFlags::EMPTY_PATH, how).ok()?;
        Some(SharedRoot {
            path: path.as_os_str().as_bytes().to_vec(),
            kind: self.kind.clone(),
            handle: handle::of(&self.directory).ok(),
            inode: is.stx_ino,
            born: born(&is),
        })
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
    Ok(Some(SharedFile {
        handle: handle::of(&fd).ok(),
        inode: is.stx_ino,
        born: born(&is),
        size: is.stx_size,
        modified: time(is.stx_mtime),
        changed: time(is.stx_ctime),
    }))
}

fn time(time: StatxTimestamp) -> (i64, u32) {
    (time.tv_sec, time.tv_nsec)
}

fn born(is: &Statx) -> Option<(i64, u32)> {
    (is.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(is.stx_btime))
}

/// The kind of a mount in a table, and the options of its file system.
fn mount_in(table: &str, mount: u64) -> Option<(String, String)> {
    let number = mount.to_string();
    let line = table.lines().find(|line| line.split(' ').next() == Some(&number))?;
    let mut rest = line.split_once(" - ")?.1.split(' ');
    Some((rest.next()?.to_owned(), rest.nth(1).unwrap_or_default().to_owned()))
}

/// For how long such a mount believes names and attributes. Network file systems say it in their options if it is not what their manuals
/// have (nfs(5): 60 s; mount.cifs(8): 1 s); of those that a program makes nobody knows. Those of clusters do not, nor does the disk of
/// one machine.
fn believes(kind: &str, options: &str) -> Option<String> {
    let has = |name: &str| options.split(',').any(|option| option == name);
    let value = |name: &str| {
        options
            .split(',')
            .find_map(|option| option.strip_prefix(name)?.strip_prefix('=')?.parse::<u32>().ok())
    };
    let most = |usual: u32| {
        let each = |name| value(name).or_else(|| value("actimeo")).unwrap_or(usual);
        each("acregmax").max(each("acdirmax"))
    };
    let seconds = match kind {
        "nfs" | "nfs4" if has("noac") => 0,
        "nfs" | "nfs4" => most(60),
        "cifs" | "smb3" => most(1),
        "9p" => return Some("nobody knows how long".into()),
        program if program.starts_with("fuse") => return Some("nobody knows how long".into()),
        _ => 0,
    };
    (seconds > 0).then(|| format!("up to {seconds} s"))
}

/// Whether a table has no mount below a directory.
fn is_whole(table: &str, directory: &Path) -> bool {
    // As proc_pid_mountinfo(5) writes paths.
    let mut written = Vec::new();
    for byte in directory.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => written.extend(format!("\\{byte:03o}").into_bytes()),
            _ => written.push(*byte),
        }
    }
    written.push(b'/');
    !table.lines().any(|line| line.split(' ').nth(4).is_some_and(|at| at.as_bytes().starts_with(&written)))
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
        assert_eq!(mount_in(table, 30), Some(("nfs4".into(), "rw,vers=4.2,nocto".into())));
        assert_eq!(mount_in(table, 31), Some(("nfs4".into(), "rw,vers=4.2".into())));
        assert_eq!(mount_in(table, 3), None);
    }

    #[test]
    fn a_mount_that_believes_names_is_known() {
        for (kind, options, wanted) in [
            ("nfs4", "rw,vers=4.2", Some("up to 60 s")),
            ("nfs", "rw,acregmin=0,acregmax=0,acdirmin=0,acdirmax=0", None),
            ("nfs", "rw,acregmax=0", Some("up to 60 s")),
            ("nfs4", "rw,sync,noac", None),
            ("nfs4", "rw,acregmax=5,acdirmax=7", Some("up to 7 s")),
            ("cifs", "rw,actimeo=1", Some("up to 1 s")),
            ("cifs", "rw", Some("up to 1 s")),
            ("smb3", "rw,actimeo=0", None),
            ("fuse.sshfs", "rw", Some("nobody knows how long")),
            ("gfs2", "rw", None),
            ("ext4", "rw", None),
        ] {
            assert_eq!(believes(kind, options).as_deref(), wanted, "{kind} {options}");
        }
    }

    #[test]
    fn what_is_mounted_below_is_seen() {
        let table = "30 24 0:50 / /nfs/my\\040home rw - nfs4 server:/home rw\n\
                     31 24 0:51 / /nfs/home2 rw - nfs4 server:/data rw\n\
                     32 30 0:52 / /nfs/my\\040home/a rw - nfs4 server:/a rw\n";
        let whole = |path: &str| is_whole(table, path.as_ref());
        assert!(!whole("/nfs/my home") && whole("/nfs/my home/a") && whole("/nfs/home") && !whole("/nfs"));
    }

    #[test]
    fn a_directory_is_itself_and_no_other() {
        let place = Place::new("several");
        let (root, below) = (place.0.join("root"), place.0.join("root/below"));
        let all = for_several(&[root.clone(), below, place.0.join("none")]);
        assert!(all.len() == 2 && all[0].is(&for_several(&[root])[0]) && !all[0].is(&all[1]), "{all:?}");
        let elsewhere = SharedRoot { path: b"/other".to_vec(), ..all[0].clone() };
        let untold = SharedRoot { handle: None, born: None, ..all[0].clone() };
        assert!(!all[0].is(&elsewhere) && all[0].is(&untold));
    }
}
