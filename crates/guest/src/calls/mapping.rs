//! mmap of a file: home maps the file in the deputy, and this node maps the same content in the guest.

use crate::error::GuestResult;
use crate::process::Guest;
use crate::process::outbox::Outbox;
use crate::process::shared::Process;
use crate::process::space::GuestSpace;
use crate::process::thread::{PendingCall, Thread};
use tern_ids::{ContentHash, HomePid};
use tern_image::FileRef;
use tern_image::content::ContentCache;
use tern_migrate::message::{CallResult, Mapped, Message};
use tern_syscall::{ByteBuf, reason};
use tern_tracee::inject::{Injection, Site};

impl Thread {
    /// Begins to map a file. Returns the file if this node must first open it itself
    /// ([`FileRef::location`]).
    pub(super) fn begin_mapping(
        &mut self,
        mut pending: PendingCall,
        result: CallResult,
        process: &mut Process,
        cache: &mut ContentCache,
        home: &mut Outbox,
    ) -> GuestResult<Option<FileRef>> {
        let mut content = None;
        let file = match result.file {
            Some(Mapped::File(file)) => file,
            Some(Mapped::Shared(file, pieces)) => {
                content = Some(pieces);
                file
            }
            Some(Mapped::Zero) => {
                self.inject_mmap(&pending, None, process, cache)?;
                return Ok(None);
            }
            None => {
                self.reply(pending.trap.id, -i64::from(libc::ENODEV))?;
                return Ok(None);
            }
        };
        if file.is_object
            && let Err(error) = create_object(cache, &file, content.as_deref())
        {
            tracing::warn!(pid = %process.pid, %error, "memory that is to be shared could not be created");
            // Home counts on the object, so the process must not run on without it.
            self.request_home(pending.trap, reason::SHARED_MEMORY, process, home);
            return Ok(None);
        }
        let (hash, to_open) = (file.hash, file.location.is_some() && !cache.has(&file));
        pending.file = Some(file.clone());
        self.pending = Some(pending);
        if to_open {
            return Ok(Some(file));
        }
        self.continue_mapping(hash, process, cache, home)?;
        Ok(None)
    }

    /// Makes the mapping of the file with this hash if it is here, and requests its content if not.
    fn continue_mapping(
        &mut self,
        hash: ContentHash,
        process: &mut Process,
        cache: &mut ContentCache,
        home: &mut Outbox,
    ) -> GuestResult {
        let file = self.pending.as_ref().and_then(|pending| pending.file.as_ref());
        let Some(file) = file.filter(|file| file.hash == hash) else { return Ok(()) };
        if cache.has(file) {
            return Ok(self.map_received(process, cache)?);
        }
        home.send(self.tid, Message::RequestContent(hash));
        Ok(())
    }

    /// Receives a piece of the content that a mapping waits for.
    ///
    /// # Errors
    /// If the content does not match its hash, or the guest is gone.
    pub(crate) fn receive_content(
        &mut self,
        hash: ContentHash,
        offset: u64,
        piece: &[u8],
        process: &mut Process,
        cache: &mut ContentCache,
    ) -> GuestResult {
        let file = self.pending.as_ref().and_then(|o| o.file.as_ref()).filter(|f| f.hash == hash);
        let Some(file) = file else { return Ok(()) };
        let complete = cache.put(file, self.tid, offset, piece);
        let inconsistent =
            |e: std::io::Error| tern_tracee::Error::Inconsistent { what: e.to_string(), pid: self.host_tid };
        if complete.map_err(inconsistent)? {
            self.map_received(process, cache)?;
        }
        Ok(())
    }

    /// Home cannot read the content that a mapping waits for: the call fails.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn fail_mapping(&mut self, hash: ContentHash) -> GuestResult {
        let waits = |pending: &mut PendingCall| pending.file.as_ref().is_some_and(|file| file.hash == hash);
        let Some(pending) = self.pending.take_if(waits) else { return Ok(()) };
        self.reply(pending.trap.id, -i64::from(libc::ENODEV))?;
        Ok(())
    }

    /// Makes the mapping whose content has arrived, in the thread's place.
    fn map_received(&mut self, process: &mut Process, cache: &ContentCache) -> tern_tracee::Result<()> {
        let Some(mut pending) = self.pending.take() else { return Ok(()) };
        let Some(file) = pending.file.take() else { return Ok(()) };
        self.inject_mmap(&pending, Some(file), process, cache)
    }

    /// Makes a mapping in the thread's place: of this file, or of anonymous memory for /dev/zero.
    fn inject_mmap(
        &mut self,
        pending: &PendingCall,
        file: Option<FileRef>,
        process: &mut Process,
        cache: &ContentCache,
    ) -> tern_tracee::Result<()> {
        // `self.pending` is empty, so stopping the thread does not restart the call.
        let Some(stopped) = self.stop_in_call(pending.trap.id, process)? else { return Ok(()) };
        let mut injection = Injection::begin(stopped, Site(process.reserve.start))?;
        let mut registers = *injection.saved_registers();
        let mut space = GuestSpace::for_single_calls(&mut injection, &self.listener, cache);
        let [addr, length, prot, flags, ..] = pending.trap.args;
        let at = match &file {
            Some(file) => space.map(file, pending.trap.args)?,
            None => {
                let flags = flags | libc::MAP_ANONYMOUS as u64;
                space.call_through(libc::SYS_mmap, [addr, length, prot, flags, u64::MAX, 0])?
            }
        };
        if at < 0 {
            tracing::warn!(pid = %process.pid, errno = -at, args = ?pending.trap.args, "a file could not be mapped here");
        }
        if let Some(file) = file.filter(|_| at > 0) {
            let mapping = tern_tracee::procfs::mapping_at(self.host_tid, at.cast_unsigned())?;
            // Another thread may have unmapped it since, or mapped private memory there.
            if let Some(mapping) = mapping.filter(|mapping| !mapping.is_anonymous()) {
                process.mapped_files.insert((mapping.device, mapping.inode), file);
            }
        }
        registers.rax = at.cast_unsigned();
        registers.orig_rax = u64::MAX;
        let mask = injection.saved_mask();
        let stopped = injection.finish_with(&registers, mask)?;
        self.resume_or_hold(stopped, process)
    }
}

impl Guest {
    /// Continues a thread's mmap of the file with this hash, which is open if it could be opened.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn continue_mapping(
        &mut self,
        tid: HomePid,
        hash: ContentHash,
        cache: &mut ContentCache,
        home: &mut Outbox,
    ) -> GuestResult {
        let Self { process, threads } = self;
        threads.get_mut(&tid).map_or(Ok(()), |thread| thread.continue_mapping(hash, process, cache, home))
    }
}

/// Creates shared memory that home has just mapped, or enlarges it. `content` is that of a file which
/// has become shared memory: whatever this node still has of it is old.
fn create_object(
    cache: &mut ContentCache,
    file: &FileRef,
    content: Option<&[(u64, ByteBuf)]>,
) -> std::io::Result<()> {
    let Some(content) = content else { return cache.objects.create(file) };
    let id = (file.device, file.inode);
    cache.objects.remove(id);
    let mut pieces = content.iter();
    let created = cache
        .objects
        .create(file)
        .and_then(|()| pieces.try_for_each(|(offset, piece)| cache.objects.write(file, *offset, piece)));
    if created.is_err() {
        cache.objects.remove(id);
    }
    created
}
