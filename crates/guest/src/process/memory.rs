//! A guest's memory, for the syscall marshaller.

use tern_tracee::Memory;

/// A guest's memory, for the syscall marshaller.
#[derive(Debug)]
pub(crate) struct GuestMemory<'a>(pub(crate) &'a Memory);

impl tern_syscall::UserMemory for GuestMemory<'_> {
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> std::result::Result<(), tern_syscall::Fault> {
        match self.0.read_some(addr, buf) {
            Ok(n) if n == buf.len() => Ok(()),
            _ => Err(tern_syscall::Fault),
        }
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.write(addr, data).map_err(|_e| tern_syscall::Fault)
    }

    fn writable(&mut self, addr: u64, len: u64) -> bool {
        // Reading a byte of each page shows that the page is mapped. Writing the byte back would
        // race with the page's other users, so a read-only page is found only when the result is
        // written.
        let mut byte = [0];
        let pages = (addr & !4095..addr.saturating_add(len)).step_by(4096);
        pages.into_iter().all(|page| self.0.read_some(page.max(addr), &mut byte).is_ok_and(|n| n == 1))
    }
}
