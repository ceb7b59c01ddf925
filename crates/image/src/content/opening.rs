//! Opening the mapped files of a process at its home, to send their content or to map them again.

use super::HomeFiles;
use super::identify::{Identifier, stamp};
use super::leases::Leases;
use super::reader::OpenContent;
use crate::layout::FileRef;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use tern_ids::ContentHash;
use tern_tracee::procfs::{self, Mapping};

impl HomeFiles {
    /// Opens a file that was unmapped after it was identified.
    ///
    /// # Errors
    /// If its name refers to another file now.
    pub fn open_by_name(&self, file: &FileRef) -> io::Result<File> {
        self.identifier.open_named(&file.path, file.inode)
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
            let copy = copy.try_clone();
            return Box::new(|| copy);
        }
        let (identifier, file) = (self.identifier.clone(), file.clone());
        let (mapped_at, expected) = (known.mapped_at, known.stamp.clone());
        Box::new(move || {
            let key = (file.device, file.inode);
            let found = identifier.open_mapped(mapped_at, &file.path, key, &Leases::now())?;
            let is_same = expected == Some(stamp(&found.metadata()?));
            if is_same { Ok(found) } else { Err(io::ErrorKind::NotFound.into()) }
        })
    }

    /// Opens a file wherever it is mapped now, or by its name; or opens another file with the same
    /// content.
    pub fn open_any(&self, file: &FileRef) -> OpenContent {
        let mut same = self.identified.values().filter(|known| known.file.hash == file.hash);
        if let Some(copy) = same.find_map(|known| known.copy.as_ref()) {
            let copy = copy.try_clone();
            return Box::new(|| copy);
        }
        let candidates: Vec<FileRef> = [file].into_iter().chain(self.by_hash(file.hash)).cloned().collect();
        let identifier = self.identifier.clone();
        Box::new(move || {
            let maps = procfs::maps(identifier.pid).map_err(io::Error::other)?;
            identifier.open_any(&candidates, &by_file(&maps))
        })
    }

    /// Opens a file, or another file with the same content, which neither the guest's node nor the
    /// program can distinguish. `mapped` are the process's current mappings, by file.
    ///
    /// # Errors
    /// If no file with this content can be opened any more.
    pub fn open_like(&self, file: &FileRef, mapped: &HashMap<(u64, u64), &Mapping>) -> io::Result<File> {
        self.identifier.open_any([file].into_iter().chain(self.by_hash(file.hash)), mapped)
    }
}

impl Identifier {
    /// Opens the first of these files that can be opened, by its mapping or by its name.
    fn open_any<'a>(
        &self,
        files: impl IntoIterator<Item = &'a FileRef>,
        mapped: &HashMap<(u64, u64), &Mapping>,
    ) -> io::Result<File> {
        let (mut first_error, leases) = (None, Leases::now());
        for file in files {
            let opened = match mapped.get(&(file.device, file.inode)) {
                Some(mapping) => self.open(mapping, &leases),
                None => self.open_named(&file.path, file.inode),
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
