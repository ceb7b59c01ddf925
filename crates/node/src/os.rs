//! Clocks, locks, files, programs and threads of this machine.

pub(crate) mod clock;
#[cfg(test)]
pub(crate) mod scratch;
pub(crate) mod spawn;
pub(crate) mod sync;
pub(crate) mod text_file;
