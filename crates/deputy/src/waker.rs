//! Wakes the main loop from helper threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Wakes the main loop: a slow call has finished, or a helper thread has a result.
#[derive(Debug, Clone)]
pub(crate) struct Waker(Arc<OwnedFd>);

impl Waker {
    pub(crate) fn new() -> std::io::Result<Self> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(rustix::event::eventfd(0, flags)?)))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(crate) fn wake(&self) {
        let _overflow_is_awake = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        let _was_not_woken = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}
