//! Opening the mapped files of a process at its home, to send their content or to map them again.

use super::identify::{Identifier, stamp};
use super::reader::OpenContent;
use super::untraced::Descriptors;
use super::{FileContent, HomeFiles};
use crate::layout::FileRef;
use rustix::fs::OFlags;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use tern_ids::ContentHash;
use tern_tracee::procfs::{self, Mapping};

impl HomeFiles {
    /// Whether a file that was unmapped after it was identified still has its name.
    #[must_use]
    pub fn has_name(&self, file: &FileRef) -> bool {
        self.identifier.look_up(&file.path, file.inode).is_ok()
    }

    /// The identified files with this content.
    pub fn by_hash(&self, hash: ContentHash) -> impl Iterator<Item = &FileRef> {
        self.identified.values().map(|identified| &identified.file).filter(move |file| file.hash == hash)
    }

    /// Opens the content that a file had when it was identified: its copy, if one was made,
    /// otherwise the file, if its mapping and its stamp are unchanged. If that fails,
    /// [`open_any`](Self::open_any) may still find the content.
    pub fn open_content(&self, file: &FileRef) -> OpenContent {
        let known = self.identified.get(&(file.device, file.inode)).filter(|k| k.file.hash == file.hash);
        let Some(known) = known else { return self.open_any(file) };
        if let Some(copy) = &known.copy {
            let copy = copy.try_clone().map(FileContent::File);
            return Box::new(|| copy);
        }
        let (identifier, expected) = (self.identifier.clone(), known.stamp.clone());
        let (mapping, descriptor) = (known.mapping.clone(), known.descriptor);
        Box::new(move || {
            let found = identifier.look(&mapping)?;
            let is_same = expected == Some(stamp(&found.metadata()?));
            if is_same {
                identifier.content(&mapping, &found, descriptor)
            } else {
                Err(io::ErrorKind::NotFound.into())
            }
        })
    }

    /// Opens a file wherever it is mapped now, or by its name; or opens another file with the same
    /// content.
    pub fn open_any(&self, file: &FileRef) -> OpenContent {
        let mut same = self.identified.values().filter(|known| known.file.hash == file.hash);
        if let Some(copy) = same.find_map(|known| known.copy.as_ref()) {
            let copy = copy.try_clone().map(FileContent::File);
            return Box::new(|| copy);
        }
        let candidates: Vec<FileRef> = [file].into_iter().chain(self.by_hash(file.hash)).cloned().collect();
        let identifier = self.identifier.clone();
        Box::new(move || {
            let maps = procfs::maps(identifier.pid).map_err(io::Error::other)?;
            identifier.open_any(&candidates, &by_file(&maps), |m| {
                let found = identifier.look(m)?;
                let descriptor = Descriptors::of(identifier.pid).get(&found.metadata()?);
                identifier.content(m, &found, descriptor)
            })
        })
    }

    /// Opens a file, or another file with the same content, which neither the guest's node nor the
    /// program can distinguish. `mapped` are the process's current mappings, by file.
    ///
    /// # Errors
    /// If no file with this content can be opened any more.
    pub fn open_like(&self, file: &FileRef, mapped: &HashMap<(u64, u64), &Mapping>) -> io::Result<File> {
        let descriptors = OnceCell::new();
        let list = || descriptors.get_or_init(|| Descriptors::of(self.identifier.pid));
        self.identifier.open_any([file].into_iter().chain(self.by_hash(file.hash)), mapped, |m| {
            let meta = self.identifier.look(m)?.metadata()?;
            let duplicate = list().get(&meta).and_then(|number| self.identifier.duplicate(number, &meta));
            duplicate.map_or_else(|| self.identifier.open(m), Ok)
        })
    }
}

impl Identifier {
    /// Opens the first of these files that can be opened, by its mapping (`open_mapped`) or by its
    /// name.
    fn open_any<'a, T: From<File>>(
        &self,
        files: impl IntoIterator<Item = &'a FileRef>,
        mapped: &HashMap<(u64, u64), &Mapping>,
        open_mapped: impl Fn(&Mapping) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut first_error = None;
        for file in files {
            let opened = match mapped.get(&(file.device, file.inode)) {
                Some(mapping) => open_mapped(mapping),
                None => self.open_named(&file.path, file.inode, OFlags::RDONLY).map(T::from),
            };
            match opened {
                Ok(file) => return Ok(file),
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        Err(first_error.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
    }
}

/// The first mapping of each file, by device and inode.
#[must_use]
pub fn by_file(maps: &[Mapping]) -> HashMap<(u64, u64), &Mapping> {
    let mut mapped = HashMap::new();
    for m in maps.iter().filter(|m| !m.is_anonymous()) {
        mapped.entry((m.device, m.inode)).or_insert(m);
    }
    mapped
}
