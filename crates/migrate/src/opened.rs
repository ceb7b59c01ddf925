//! What comes with a file that has just been opened, and is in hand: what the program asks next, as a rule.

use serde::{Deserialize, Serialize};
use tern_syscall::ByteBuf;

/// What comes with an open file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beginning {
    /// What home's kernel says of it.
    pub about: About,
    /// What was read of it, from its first byte on, if it was not changing just then.
    pub content: Option<Content>,
}

/// The first bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// The bytes.
    pub bytes: ByteBuf,
    /// It ends behind them.
    pub ends: bool,
}

/// So much of a file may come with it at most.
pub const MOST_BROUGHT: u64 = 64 << 10;

/// What a statx may ask for of what is told of a file: not what newer kernels have besides.
pub const KNOWN: u32 = libc::STATX_BASIC_STATS | libc::STATX_BTIME;

/// Length of a `struct stat`.
pub const STAT: usize = 144;
/// Length of a `struct statx`.
pub const STATX: usize = 256;

/// What statx says of a file: as in `struct statx`, whose names these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the kernel's own fields")]
pub struct About {
    pub mask: u32,
    pub blksize: u32,
    pub attributes: u64,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub ino: u64,
    pub size: u64,
    pub blocks: u64,
    pub attributes_mask: u64,
    /// Of access, birth, change and modification: seconds, and nanoseconds.
    pub times: [(i64, u32); 4],
    /// Of what it is, if it is a device: major and minor.
    pub rdev: (u32, u32),
    /// Where it lies.
    pub dev: (u32, u32),
    pub mnt_id: u64,
}

/// The mode in a `struct stat` or a `struct statx`, by its length.
#[must_use]
pub fn mode_in(said: &[u8]) -> Option<u16> {
    let at = match said.len() {
        STAT => 24,
        STATX => 28,
        _ => return None,
    };
    said.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

/// A struct of the kernel's, written field by field.
struct Fields(Vec<u8>);

impl Fields {
    fn put(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn word(self, word: u64) -> Self {
        self.put(&word.to_le_bytes())
    }

    fn half(self, half: u32) -> Self {
        self.put(&half.to_le_bytes())
    }

    fn whole(mut self, length: usize) -> Vec<u8> {
        self.0.resize(length, 0);
        self.0
    }
}

impl About {
    /// The `struct stat` of it.
    #[must_use]
    pub fn stat(&self) -> Vec<u8> {
        // As the kernel puts them together.
        let device =
            |(major, minor): (u32, u32)| u64::from(minor & 0xff | major << 8 | (minor & !0xff) << 12);
        let [accessed, _, changed, modified] = self.times;
        let fields = Fields(Vec::with_capacity(STAT))
            .word(device(self.dev))
            .word(self.ino)
            .word(self.nlink.into())
            .half(self.mode.into())
            .half(self.uid)
            .half(self.gid)
            .half(0)
            .word(device(self.rdev))
            .word(self.size)
            .word(self.blksize.into())
            .word(self.blocks);
        let times = [accessed, modified, changed];
        let fields = times.iter().fold(fields, |fields, (seconds, nanos)| {
            fields.word(seconds.cast_unsigned()).word((*nanos).into())
        });
        fields.whole(STAT)
    }

    /// The `struct statx` of it.
    #[must_use]
    pub fn statx(&self) -> Vec<u8> {
        let fields = Fields(Vec::with_capacity(STATX))
            .half(self.mask)
            .half(self.blksize)
            .word(self.attributes)
            .half(self.nlink)
            .half(self.uid)
            .half(self.gid)
            .half(self.mode.into())
            .word(self.ino)
            .word(self.size)
            .word(self.blocks)
            .word(self.attributes_mask);
        let fields = self.times.iter().fold(fields, |fields, (seconds, nanos)| {
            fields.word(seconds.cast_unsigned()).half(*nanos).half(0)
        });
        let ((rdev_major, rdev_minor), (major, minor)) = (self.rdev, self.dev);
        fields.half(rdev_major).half(rdev_minor).half(major).half(minor).word(self.mnt_id).whole(STATX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_kernel_has_them() {
        let about = About {
            mask: 0x1fff,
            blksize: 4096,
            attributes: 0x10,
            nlink: 2,
            uid: 1000,
            gid: 100,
            mode: 0o100_644,
            ino: 77,
            size: 12345,
            blocks: 32,
            attributes_mask: 0x70,
            times: [(1, 2), (3, 4), (5, 6), (7, 8)],
            rdev: (0, 0),
            dev: (0x103, 0x12345),
            mnt_id: 99,
        };
        let (stat, statx) = (about.stat(), about.statx());
        let word = |of: &[u8], at: usize| u64::from_le_bytes(of[at..at + 8].try_into().unwrap());
        let half = |of: &[u8], at: usize| u32::from_le_bytes(of[at..at + 4].try_into().unwrap());
        assert_eq!((stat.len(), statx.len()), (size_of::<libc::stat>(), size_of::<libc::statx>()));
        let of = std::mem::offset_of!(libc::stat, st_mode);
        assert_eq!((half(&stat, of), half(&stat, of + 4), half(&stat, of + 8)), (0o100_644, 1000, 100));
        assert_eq!(word(&stat, 0), libc::makedev(0x103, 0x12345));
        let of = std::mem::offset_of!(libc::stat, st_size);
        assert_eq!((word(&stat, of), word(&stat, of + 8), word(&stat, of + 16)), (12345, 4096, 32));
        let of = std::mem::offset_of!(libc::stat, st_mtime);
        assert_eq!((word(&stat, of), word(&stat, of + 8), word(&stat, of + 16)), (7, 8, 5));
        let of = std::mem::offset_of!(libc::statx, stx_ino);
        assert_eq!((word(&statx, of), word(&statx, of + 8), word(&statx, of + 24)), (77, 12345, 0x70));
        let of = std::mem::offset_of!(libc::statx, stx_mtime);
        assert_eq!((word(&statx, of), half(&statx, of + 8)), (7, 8));
        let of = std::mem::offset_of!(libc::statx, stx_dev_minor);
        assert_eq!((half(&statx, of), word(&statx, of + 4)), (0x12345, 99));
    }
}
