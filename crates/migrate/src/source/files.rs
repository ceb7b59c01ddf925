//! The contents of mapped files that the receiver needs, sent one after the other.

use super::MigrationSource;
use std::collections::VecDeque;
use std::io;
use tern_image::FileRef;
use tern_image::content::ContentReader;

/// Number of files that the reader is given in advance, so that it opens the next one while pieces of
/// the last one are sent.
const FILES_AHEAD: usize = 8;

/// A piece of a file.
#[derive(Debug)]
pub(super) struct Piece {
    /// Index in the layout.
    pub(super) file: u32,
    pub(super) offset: u64,
    pub(super) content: Vec<u8>,
}

/// The files whose content is to be sent.
#[derive(Debug, Default)]
pub(super) struct FileQueue {
    /// Index in the layout and length of each file, and whether it may be shorter by now.
    files: VecDeque<(u32, (u64, bool))>,
    /// Offset of the next piece of the first file.
    offset: u64,
    /// Reads the files. It is started for the first file, and dropped after the last one.
    reader: Option<ContentReader>,
    /// Number of files, from the first one on, that the reader has been given.
    requested: usize,
    /// Whether any copy of the first file may be opened, since it was not found as it was
    /// identified.
    any_copy: bool,
}

impl FileQueue {
    pub(super) fn push(&mut self, index: u32, size: (u64, bool)) {
        self.files.push_back((index, size));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// The next piece. None if the queue is empty, or if the piece has not been read yet: then the
    /// reader wakes the caller.
    ///
    /// # Errors
    /// If the first file cannot be read. The queue must be dropped then.
    pub(super) fn next_piece(
        &mut self,
        layout: &[FileRef],
        process: &mut dyn MigrationSource,
    ) -> io::Result<Option<Piece>> {
        loop {
            let Some(&(index, (size, _))) = self.files.front() else { return Ok(None) };
            let mut reader = match self.reader.take() {
                Some(reader) => reader,
                None => process.start_reader()?,
            };
            while let Some(&(index, size)) =
                self.files.get(self.requested).filter(|_| self.requested < FILES_AHEAD)
            {
                let file = layout.get(index as usize).ok_or(io::ErrorKind::NotFound)?;
                let any_copy = self.any_copy && self.requested == 0;
                reader.request(process.open_content(file, any_copy)?, size);
                self.requested += 1;
            }
            match reader.next_piece() {
                Ok(None) => {
                    self.reader = Some(reader);
                    return Ok(None);
                }
                Ok(Some(content)) => {
                    let offset = self.offset;
                    self.offset += content.len() as u64;
                    if self.offset >= size {
                        self.files.pop_front();
                        (self.offset, self.requested, self.any_copy) = (0, self.requested - 1, false);
                    }
                    self.reader = Some(reader).filter(|_| !self.files.is_empty());
                    return Ok(Some(Piece { file: index, offset, content }));
                }
                Err(error) if self.any_copy || self.offset > 0 || error.kind() == io::ErrorKind::TimedOut => {
                    return Err(error);
                }
                // Tries again with a new reader: this one has ended.
                Err(_) => (self.requested, self.any_copy) = (0, true),
            }
        }
    }
}
