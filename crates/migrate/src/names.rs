//! Directories whose names a guest knows: what home says of them, and which calls ask for no more (docs/design/direct.md,
//! "Names").

use crate::opened::{About, KNOWN};
use serde::{Deserialize, Serialize};
use tern_syscall::ByteBuf;

/// What home says of names. A directory goes by the words in front of the last part of a path, as the program writes them:
/// `/usr/include/` of `/usr/include/stdio.h`, and nothing of `stdio.h`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NameWord {
    /// These names are in a directory, and no others. From now on home says what changes.
    Listed(Box<Listing>),
    /// Of this name in a directory nothing is known any more.
    Changed(ByteBuf, ByteBuf),
    /// So of a whole directory,
    Forget(ByteBuf),
    /// or of all.
    ForgetAll,
}

/// What is in a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// The directory.
    pub directory: ByteBuf,
    /// What it is like itself: until something changes in it.
    pub about: Box<About>,
    /// No link leads to it from where the way to it ends: so it is like this also for who does not follow one.
    pub direct: bool,
    /// Its names.
    pub names: Vec<(ByteBuf, Named)>,
    /// How long ago it was looked at, in microseconds.
    pub age: u32,
}

/// What a name is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Named {
    /// A regular file that has no other name.
    File(Box<About>),
    /// A symbolic link: where it leads.
    Link(ByteBuf),
    /// Something else, which is no symbolic link. What it is like home says, or, of a directory, its own listing.
    Other,
    /// Home is to be asked.
    Unknown,
}

/// So many names of a directory are told at most.
pub const MOST_NAMES: usize = 4096;

/// A call on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnPath {
    /// Which of its arguments is the path.
    pub path: usize,
    /// What it asks for.
    pub asks: Asks,
}

/// What a call on a path asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asks {
    /// A descriptor of what is there, if it is.
    Open,
    /// Whether it is there at all.
    Access,
    /// Where a link leads: into which argument.
    Link(usize),
    /// What it is like: into which argument; whether that of a link itself.
    Stat(usize, bool),
    /// The same in a `struct statx`.
    Statx(bool),
}

/// The options of a look at what a path names that change nothing for files which are there.
const HARMLESS: u64 = (libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT) as u64;
/// Of a file that was to be there, and none that is made.
const MAKES: u64 = (libc::O_CREAT | libc::O_TMPFILE) as u64;

impl OnPath {
    /// What a call asks for, if it may be answered by a listing. Relative paths only if they begin where the process is.
    #[must_use]
    pub fn of(nr: u32, args: &[u64; 6]) -> Option<Self> {
        let [_, second, third, fourth, fifth, _] = *args;
        let on = |path, asks| Some(Self { path, asks });
        let nofollow = |flags: u64| flags & libc::AT_SYMLINK_NOFOLLOW as u64 != 0;
        let exists = |mode: u64| mode == libc::F_OK as u64;
        match i64::from(nr) {
            libc::SYS_open if second & MAKES == 0 => on(0, Asks::Open),
            libc::SYS_openat if third & MAKES == 0 => on(1, Asks::Open),
            libc::SYS_stat => on(0, Asks::Stat(1, false)),
            libc::SYS_lstat => on(0, Asks::Stat(1, true)),
            libc::SYS_newfstatat if fourth & !HARMLESS == 0 => on(1, Asks::Stat(2, nofollow(fourth))),
            libc::SYS_statx if third & !HARMLESS == 0 && fourth as u32 & !KNOWN == 0 && fifth != 0 => {
                on(1, Asks::Statx(nofollow(third)))
            }
            libc::SYS_access if exists(second) => on(0, Asks::Access),
            libc::SYS_faccessat if exists(third) => on(1, Asks::Access),
            libc::SYS_faccessat2 if exists(third) && fourth == 0 => on(1, Asks::Access),
            libc::SYS_readlink if third as i32 > 0 => on(0, Asks::Link(1)),
            libc::SYS_readlinkat if fourth as i32 > 0 => on(1, Asks::Link(2)),
            _ => None,
        }
    }

    /// Whether a path, as this call has it, says by itself where it begins: from the root, or where the process is.
    #[must_use]
    pub fn begins(&self, args: &[u64; 6], path: &[u8]) -> bool {
        path.first() == Some(&b'/') || self.path == 0 || args[0] as i32 == libc::AT_FDCWD
    }
}

/// A path as its directory and a name in that, if the name is a plain one.
#[must_use]
pub fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let (directory, name) = path.split_at(at);
    let plain = !matches!(name, b"" | b"." | b"..") && name.len() <= 255;
    plain.then_some((directory, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_directory_and_a_plain_name() {
        let parts: &[(&[u8], &[u8], &[u8])] =
            &[(b"a", b"", b"a"), (b"/a", b"/", b"a"), (b"./b//c", b"./b//", b"c"), (b"../x", b"../", b"x")];
        for (path, directory, name) in parts {
            assert_eq!(split(path), Some((*directory, *name)));
        }
        for path in ["", "/", "a/", ".", "..", "a/.", "b/..", &"x".repeat(256)] {
            assert_eq!(split(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn only_calls_that_ask_for_nothing_else_are_answered() {
        let of = |nr: i64, args: [u64; 6]| OnPath::of(nr as u32, &args).map(|on| on.asks);
        let cwd = u64::from(libc::AT_FDCWD.cast_unsigned());
        assert_eq!(of(libc::SYS_open, [1, libc::O_RDONLY as u64, 0, 0, 0, 0]), Some(Asks::Open));
        assert_eq!(of(libc::SYS_open, [1, libc::O_CREAT as u64, 0, 0, 0, 0]), None);
        assert_eq!(of(libc::SYS_openat, [cwd, 1, libc::O_TMPFILE as u64, 0, 0, 0]), None);
        assert_eq!(of(libc::SYS_newfstatat, [cwd, 1, 2, 0, 0, 0]), Some(Asks::Stat(2, false)));
        let empty = libc::AT_EMPTY_PATH as u64;
        assert_eq!(of(libc::SYS_newfstatat, [3, 1, 2, empty, 0, 0]), None);
        assert_eq!(of(libc::SYS_statx, [cwd, 1, 0x100, 0xfff, 5, 0]), Some(Asks::Statx(true)));
        assert_eq!(of(libc::SYS_statx, [cwd, 1, 0x2000, 0xfff, 5, 0]), None, "asks its server anew");
        assert_eq!(of(libc::SYS_access, [1, libc::R_OK as u64, 0, 0, 0, 0]), None);
        assert_eq!(of(libc::SYS_readlink, [1, 2, 0, 0, 0, 0]), None, "no room is an error");
    }

    #[test]
    fn relative_paths_begin_where_the_process_is() {
        let (cwd, three) = ([u64::from(libc::AT_FDCWD.cast_unsigned()), 1, 0, 0, 0, 0], [3, 1, 0, 0, 0, 0]);
        let on = OnPath::of(libc::SYS_openat as u32, &cwd).unwrap();
        assert!(on.begins(&cwd, b"a") && !on.begins(&three, b"a") && on.begins(&three, b"/a"));
        let old = OnPath::of(libc::SYS_open as u32, &three).unwrap();
        assert!(old.begins(&three, b"a"));
    }
}
