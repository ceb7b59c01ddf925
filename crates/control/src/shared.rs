//! File systems that the nodes share, by NFS or the like, as the administrator has declared
//! (`shared` in `ternd.toml`), and the information by which two nodes identify the same file there
//! (docs/design/delegation.md).

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

/// A declared directory that exists, opened.
#[derive(Debug)]
pub struct SharedDir {
    /// The directory (`O_PATH`), for looking up files below it.
    pub directory: OwnedFd,
    /// Its device. A file on another device is on another mount.
    pub device: u64,
    /// The type of its file system.
    pub kind: String,
    /// It is mounted with `nocto`: an open does not ask the server, so other nodes' writes may stay
    /// unseen.
    pub is_nocto: bool,
    /// How long its mount caches names and attributes that others may have changed, in words;
    /// `None` if what it caches is never out of date.
    pub cache_time: Option<String>,
    /// No other file system is mounted below it.
    pub has_no_submounts: bool,
}

/// A declared directory in which programs on several nodes can work at once as on one machine:
/// changes by one of them are visible to the others' next look-up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedDirId {
    /// Its path, which is the same on all nodes that declare it.
    pub path: Vec<u8>,
    /// The type of its file system.
    pub kind: String,
    /// As [`SharedFile::handle`].
    pub handle: Option<(i32, Vec<u8>)>,
    /// Its inode number.
    pub inode: u64,
    /// Its birth time, if the file system has one.
    pub born: Option<(i64, u32)>,
}

impl SharedDirId {
    /// Whether both are the same directory, as far as two kernels can tell.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let identity = |root: &Self| (root.path.clone(), root.kind.clone(), root.inode);
        let handles = self.handle.as_ref().zip(other.handle.as_ref()).is_none_or(|(a, b)| a == b);
        let born = self.born.zip(other.born).is_none_or(|(a, b)| a == b);
        identity(self) == identity(other) && handles && born
    }
}

/// The declared directories in which several nodes can work at once. May block on their servers.
pub fn coherent_dirs(declared: &[PathBuf]) -> Vec<SharedDirId> {
    declared.iter().filter_map(|path| SharedDir::open(path).ok()?.coherent_id(path)).collect()
}

impl SharedDir {
    /// Opens a declared directory with the caller's rights.
    ///
    /// # Errors
    /// If it does not exist, is no directory, or its path contains a symbolic link.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat2(rustix::fs::CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
        let device = fstat(&directory)?.st_dev;
        let mount = statx(&directory, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
        let table = crate::procfs::read_text("/proc/self/mountinfo")?;
        let (kind, options) = mount_in(&table, mount).ok_or(io::ErrorKind::NotFound)?;
        let is_nocto = options.split(',').any(|option| option == "nocto");
        let (cache_time, has_no_submounts) = (cache_time(&kind, &options), has_no_submounts(&table, path));
        Ok(Self { directory, device, kind, is_nocto, cache_time, has_no_submounts })
    }

    /// The description sent to other nodes, if several nodes can work there at once.
    fn coherent_id(&self, path: &Path) -> Option<SharedDirId> {
        if self.is_nocto || self.cache_time.is_some() || !self.has_no_submounts {
            return None;
        }
        let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = statx(&self.directory, "", AtFlags::EMPTY_PATH, mask).ok()?;
        Some(SharedDirId {
            path: path.as_os_str().as_bytes().to_vec(),
            kind: self.kind.clone(),
            handle: handle::name_to_handle(&self.directory).ok(),
            inode: stat.stx_ino,
            born: birth_time(&stat),
        })
    }

    /// Opens the regular file at `path` below the directory for reading, if it is `file`,
    /// unchanged.
    ///
    /// # Errors
    /// `ESTALE` if it is another file or has changed; `ELOOP` if the path contains a symbolic link;
    /// `EXDEV` if it leads out of the directory or into another mount; else as open(2).
    pub fn open_file(&self, path: &Path, file: &SharedFile) -> io::Result<OwnedFd> {
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let is_expected =
            |fd: &OwnedFd| stat_file(fd, true).map(|found| found.is_some_and(|found| found.is(file)));
        let stale = || io::Error::from(rustix::io::Errno::STALE);
        // Only a regular file is really opened, since opening a FIFO or a device has effects.
        let found = openat2(&self.directory, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), inside)?;
        if !is_regular(&found)? {
            return Err(stale());
        }
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found));
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opened = rustix::fs::open(path, flags, Mode::empty())?;
        // Only an open makes this kernel fetch the server's current attributes.
        if is_expected(&opened)? { Ok(opened) } else { Err(stale()) }
    }
}

fn is_regular(fd: &OwnedFd) -> io::Result<bool> {
    Ok(fstat(fd)?.st_mode & libc::S_IFMT == libc::S_IFREG)
}

/// Identity and state of an open file; `None` if it is no regular file. Without `sync` the kernel's
/// cached attributes are used, so that the call never waits for a server.
///
/// # Errors
/// As statx(2).
pub fn stat_file(fd: impl AsFd, sync: bool) -> io::Result<Option<SharedFile>> {
    let flags = if sync { AtFlags::EMPTY_PATH } else { AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC };
    let stat = statx(&fd, "", flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
    if u32::from(stat.stx_mode) & libc::S_IFMT != libc::S_IFREG {
        return Ok(None);
    }
    Ok(Some(SharedFile {
        handle: handle::name_to_handle(&fd).ok(),
        inode: stat.stx_ino,
        born: birth_time(&stat),
        size: stat.stx_size,
        modified: timestamp(stat.stx_mtime),
        changed: timestamp(stat.stx_ctime),
    }))
}

fn timestamp(time: StatxTimestamp) -> (i64, u32) {
    (time.tv_sec, time.tv_nsec)
}

fn birth_time(stat: &Statx) -> Option<(i64, u32)> {
    (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| timestamp(stat.stx_btime))
}

/// The type of a mount in a mount table, and its file system's options.
fn mount_in(table: &str, mount: u64) -> Option<(String, String)> {
    let number = mount.to_string();
    let line = table.lines().find(|line| line.split(' ').next() == Some(&number))?;
    let mut rest = line.split_once(" - ")?.1.split(' ');
    Some((rest.next()?.to_owned(), rest.nth(1).unwrap_or_default().to_owned()))
}

/// How long a mount of this type, with these options, caches names and attributes, in words.
/// Network file systems show the time in their options unless it is the default (nfs(5): 60 s;
/// mount.cifs(8): 1 s). The time is unknown for 9p and FUSE. Cluster file systems and local disks
/// cache coherently.
fn cache_time(kind: &str, options: &str) -> Option<String> {
    let has = |name: &str| options.split(',').any(|option| option == name);
    let value = |name: &str| {
        options
            .split(',')
            .find_map(|option| option.strip_prefix(name)?.strip_prefix('=')?.parse::<u32>().ok())
    };
    let maximum = |default: u32| {
        let limit = |name| value(name).or_else(|| value("actimeo")).unwrap_or(default);
        limit("acregmax").max(limit("acdirmax"))
    };
    let seconds = match kind {
        "nfs" | "nfs4" if has("noac") => 0,
        "nfs" | "nfs4" => maximum(60),
        "cifs" | "smb3" => maximum(1),
        "9p" => return Some("an unknown time".into()),
        program if program.starts_with("fuse") => return Some("an unknown time".into()),
        _ => 0,
    };
    (seconds > 0).then(|| format!("up to {seconds} s"))
}

/// Whether a table has no mount below a directory.
fn has_no_submounts(table: &str, directory: &Path) -> bool {
    // proc_pid_mountinfo(5) writes these bytes of paths as octal escapes.
    let mut escaped = Vec::new();
    for byte in directory.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").into_bytes()),
            _ => escaped.push(*byte),
        }
    }
    escaped.push(b'/');
    !table.lines().any(|line| line.split(' ').nth(4).is_some_and(|at| at.as_bytes().starts_with(&escaped)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let at = std::env::temp_dir().join(format!("tern-shared-{name}-{}", std::process::id()));
            fs::create_dir_all(at.join("root/below")).unwrap();
            Self(at)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_the_expected_file_below_the_root_is_opened() {
        let scratch = Scratch::new("open");
        let path = scratch.0.join("root");
        fs::write(path.join("below/a"), "a").unwrap();
        fs::write(scratch.0.join("out"), "out").unwrap();
        symlink("below/a", path.join("link")).unwrap();
        symlink("below", path.join("down")).unwrap();
        let root = SharedDir::open(&path).unwrap();
        let of = |path: PathBuf| stat_file(fs::File::open(path).unwrap(), false).unwrap().unwrap();
        let (a, out) = (of(path.join("below/a")), of(scratch.0.join("out")));
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
        assert!(SharedDir::open(&path.join("down")).is_err(), "a link");
        assert!(stat_file(&root.directory, false).unwrap().is_none(), "no file");
    }

    #[test]
    fn mount_type_and_options_are_found_by_id() {
        let table = "30 24 0:50 / /nfs/home rw,nosuid shared:1 - nfs4 server:/home rw,vers=4.2,nocto\n\
                     31 24 0:51 / /nfs/data rw - nfs4 server:/data rw,vers=4.2\n";
        assert_eq!(mount_in(table, 30), Some(("nfs4".into(), "rw,vers=4.2,nocto".into())));
        assert_eq!(mount_in(table, 31), Some(("nfs4".into(), "rw,vers=4.2".into())));
        assert_eq!(mount_in(table, 3), None);
    }

    #[test]
    fn cache_time_follows_mount_options() {
        for (kind, options, wanted) in [
            ("nfs4", "rw,vers=4.2", Some("up to 60 s")),
            ("nfs", "rw,acregmin=0,acregmax=0,acdirmin=0,acdirmax=0", None),
            ("nfs", "rw,acregmax=0", Some("up to 60 s")),
            ("nfs4", "rw,sync,noac", None),
            ("nfs4", "rw,acregmax=5,acdirmax=7", Some("up to 7 s")),
            ("cifs", "rw,actimeo=1", Some("up to 1 s")),
            ("cifs", "rw", Some("up to 1 s")),
            ("smb3", "rw,actimeo=0", None),
            ("fuse.sshfs", "rw", Some("an unknown time")),
            ("gfs2", "rw", None),
            ("ext4", "rw", None),
        ] {
            assert_eq!(cache_time(kind, options).as_deref(), wanted, "{kind} {options}");
        }
    }

    #[test]
    fn submounts_are_found() {
        let table = "30 24 0:50 / /nfs/my\\040home rw - nfs4 server:/home rw\n\
                     31 24 0:51 / /nfs/home2 rw - nfs4 server:/data rw\n\
                     32 30 0:52 / /nfs/my\\040home/a rw - nfs4 server:/a rw\n";
        let whole = |path: &str| has_no_submounts(table, path.as_ref());
        assert!(!whole("/nfs/my home") && whole("/nfs/my home/a") && whole("/nfs/home") && !whole("/nfs"));
    }

    #[test]
    fn directory_is_the_same_as_itself_only() {
        let scratch = Scratch::new("several");
        let (root, below) = (scratch.0.join("root"), scratch.0.join("root/below"));
        let all = coherent_dirs(&[root.clone(), below, scratch.0.join("none")]);
        assert!(
            all.len() == 2 && all[0].is_same(&coherent_dirs(&[root])[0]) && !all[0].is_same(&all[1]),
            "{all:?}"
        );
        let elsewhere = SharedDirId { path: b"/other".to_vec(), ..all[0].clone() };
        let unknown = SharedDirId { handle: None, born: None, ..all[0].clone() };
        assert!(!all[0].is_same(&elsewhere) && all[0].is_same(&unknown));
    }
}
