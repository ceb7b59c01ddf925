//! Reading a directory, and looking its entries up on the way.

use super::{Fault, Performance};
use crate::lock;
use crate::message::{Answer, Entry, MOST_DATA, MOST_LOOKED_UP, Name, Opened};
use crate::serve::export;
use crate::serve::session::OpenFile;
use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

impl Performance<'_> {
    /// Entries of a directory from a place on, looked up if that is wanted.
    pub(super) fn list(&self, opened: Opened, after: u64, most: u32, look: bool) -> Result<Answer, Fault> {
        let file = self.file(opened)?;
        // Before it is read: the promise is of what is read then.
        let lease = if look { self.names(&file.fd)?.lease } else { 0 };
        let most_entries = if look { MOST_LOOKED_UP } else { usize::MAX };
        let (mut entries, ends) = self.entries(&file, after, most, most_entries)?;
        for entry in entries.iter_mut().filter(|entry| look && entry.name.is_one_step()) {
            entry.found = self.look_at(&file, &entry.name).ok();
        }
        Ok(Answer::Entries { entries, lease, ends })
    }

    fn look_at(&self, dir: &OpenFile, name: &Name) -> Result<crate::message::Found, Fault> {
        let place = self.export.step(&dir.place, name.as_os())?;
        let how = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&dir.fd, name.as_os(), how, Mode::empty())?;
        export::admit(&fd)?;
        self.found(fd, place)
    }

    fn entries(
        &self,
        file: &OpenFile,
        after: u64,
        most: u32,
        most_entries: usize,
    ) -> Result<(Vec<Entry>, bool), Fault> {
        let _alone = lock(&file.reading);
        rustix::fs::seek(&file.fd, SeekFrom::Start(after))?;
        let most = (most as usize).clamp(4096, MOST_DATA / 4);
        let mut buffer = vec![MaybeUninit::uninit(); most];
        let mut dir = RawDir::new(&file.fd, &mut buffer);
        let (mut entries, mut size) = (Vec::new(), 0);
        while let Some(entry) = dir.next() {
            let entry = entry?;
            let name = Name::from(OsStr::from_bytes(entry.file_name().to_bytes()));
            let shown = !name.is_one_step() || self.export.step(&file.place, name.as_os()).is_ok();
            size += 32 + name.as_os().len();
            if shown {
                let kind = entry.file_type();
                let kind = if kind == FileType::Unknown { 0 } else { kind.as_raw_mode() };
                let (inode, after) = (entry.ino(), entry.next_entry_cookie());
                entries.push(Entry { name, inode, kind, after, found: None });
            }
            // All of what one buffer of the kernel's has, and what follows if that is little: the end as a rule.
            if dir.is_buffer_empty() && size > most / 2 && !entries.is_empty()
                || entries.len() >= most_entries
            {
                return Ok((entries, false));
            }
        }
        Ok((entries, true))
    }
}
