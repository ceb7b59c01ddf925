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

    fn writable(&mut self, addr: u64, len: u64) -> u64 {
        self.0.mapped_len(addr, len)
    }
}
