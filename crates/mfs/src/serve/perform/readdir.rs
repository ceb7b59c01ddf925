//! Reading a directory, and looking up its entries.

use super::{OpContext, OpError};
use crate::lock;
use crate::message::{DirEntry, FileReply, MAX_DATA, MAX_READDIR_LOOKUPS, Name, OpenId};
use crate::serve::export;
use crate::serve::session::OpenFile;
use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

impl OpContext<'_> {
    /// Reads entries of a directory from a cookie on, and looks them up if `lookup` is set.
    pub(super) fn read_dir(
        &self,
        opened: OpenId,
        cookie: u64,
        max_bytes: u32,
        lookup: bool,
    ) -> Result<FileReply, OpError> {
        let file = self.open_file(opened)?;
        // The lease is granted before the directory is read, since it covers only what is read
        // after that.
        let lease = if lookup { self.name_lease(&file.fd)?.lease } else { 0 };
        let max_entries = if lookup { MAX_READDIR_LOOKUPS } else { usize::MAX };
        let (mut entries, is_end) = self.entries(&file, cookie, max_bytes, max_entries)?;
        for entry in entries.iter_mut().filter(|entry| lookup && entry.name.is_component()) {
            entry.found = self.lookup_entry(&file, &entry.name).ok();
        }
        Ok(FileReply::Entries { entries, lease, is_end })
    }

    fn lookup_entry(&self, dir: &OpenFile, name: &Name) -> Result<crate::message::Found, OpError> {
        let position = self.export.child(&dir.position, name.as_os())?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&dir.fd, name.as_os(), flags, Mode::empty())?;
        export::check_exportable(&fd)?;
        self.hold(fd, position)
    }

    fn entries(
        &self,
        file: &OpenFile,
        cookie: u64,
        max_bytes: u32,
        max_entries: usize,
    ) -> Result<(Vec<DirEntry>, bool), OpError> {
        let _guard = lock(&file.reading);
        rustix::fs::seek(&file.fd, SeekFrom::Start(cookie))?;
        let max_bytes = (max_bytes as usize).clamp(4096, MAX_DATA / 4);
        let mut buffer = vec![MaybeUninit::uninit(); max_bytes];
        let mut dir = RawDir::new(&file.fd, &mut buffer);
        let (mut entries, mut size) = (Vec::new(), 0);
        while let Some(entry) = dir.next() {
            let entry = entry?;
            let name = Name::from(OsStr::from_bytes(entry.file_name().to_bytes()));
            let is_visible = !name.is_component() || self.export.child(&file.position, name.as_os()).is_ok();
            size += 32 + name.as_os().len();
            if is_visible {
                let kind = entry.file_type();
                let kind = if kind == FileType::Unknown { 0 } else { kind.as_raw_mode() };
                let (inode, cookie) = (entry.ino(), entry.next_entry_cookie());
                entries.push(DirEntry { name, inode, kind, cookie, found: None });
            }
            // Stop after a buffer from the kernel if the entries fill half of `max_bytes`.
            // Otherwise read another buffer: usually the directory ends there.
            if dir.is_buffer_empty() && size > max_bytes / 2 && !entries.is_empty()
                || entries.len() >= max_entries
            {
                return Ok((entries, false));
            }
        }
        Ok((entries, true))
    }
}
