//! Attributes and first bytes of a file, sent with the result of the open, since most programs ask
//! for them next.

use serde::{Deserialize, Serialize};
use tern_syscall::ByteBuf;

/// Attributes and content sent with a newly opened, delegated file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenPrefetch {
    /// Its attributes as home's kernel reports them.
    pub attributes: FileAttributes,
    /// Its content from the first byte on, unless the file was being changed.
    pub content: Option<PrefetchedContent>,
}

/// The first bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefetchedContent {
    /// The bytes.
    pub bytes: ByteBuf,
    /// The file ends after them.
    pub at_eof: bool,
}

/// Maximum number of bytes of content sent with an open file.
pub const MAX_PREFETCH: u64 = 64 << 10;

/// The statx fields that [`FileAttributes`] holds. A call that asks for fields of newer kernels is
/// forwarded.
pub const SUPPORTED_STATX: u32 = libc::STATX_BASIC_STATS | libc::STATX_BTIME;

/// Length of a `struct stat`.
pub const STAT_LEN: usize = 144;
/// Length of a `struct statx`.
pub const STATX_LEN: usize = 256;

/// File attributes, with the field names of `struct statx`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the kernel's own fields")]
pub struct FileAttributes {
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
    /// Access, birth, change and modification time: seconds and nanoseconds.
    pub times: [(i64, u32); 4],
    /// Major and minor number, if it is a device.
    pub rdev: (u32, u32),
    /// Major and minor number of the device that holds it.
    pub dev: (u32, u32),
    pub mnt_id: u64,
}

/// The mode in a `struct stat` or a `struct statx`, distinguished by their length.
#[must_use]
pub fn stat_mode(stat: &[u8]) -> Option<u16> {
    let at = match stat.len() {
        STAT_LEN => 24,
        STATX_LEN => 28,
        _ => return None,
    };
    stat.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

/// A struct of the kernel, written field by field.
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

impl FileAttributes {
    /// Encodes a `struct stat`.
    #[must_use]
    pub fn stat(&self) -> Vec<u8> {
        // The kernel's encoding of dev_t.
        let device =
            |(major, minor): (u32, u32)| u64::from(minor & 0xff | major << 8 | (minor & !0xff) << 12);
        let [accessed, _, changed, modified] = self.times;
        let fields = Fields(Vec::with_capacity(STAT_LEN))
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
        fields.whole(STAT_LEN)
    }

    /// Encodes a `struct statx`.
    #[must_use]
    pub fn statx(&self) -> Vec<u8> {
        let fields = Fields(Vec::with_capacity(STATX_LEN))
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
        fields.half(rdev_major).half(rdev_minor).half(major).half(minor).word(self.mnt_id).whole(STATX_LEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_structs_have_the_kernels_layout() {
        let attributes = FileAttributes {
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
        let (stat, statx) = (attributes.stat(), attributes.statx());
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
