//! Calls that the shim itself makes at home.

use crate::files::cache::{Fill, noop_call};
use std::time::Instant;
use tern_migrate::message::Message;
use tern_syscall::Call;

/// A call that the shim makes at home for a process's delegated files.
#[derive(Debug)]
pub(crate) struct InternalCall {
    pub(super) number: u64,
    /// The number of calls in its prelude.
    pub(super) prelude_len: usize,
    /// The request, which may have to be sent again.
    pub(super) message: Message,
    /// Its purpose, other than a flush.
    pub(super) purpose: Option<CallPurpose>,
    pub(super) sent_at: Instant,
}

/// The purpose of an internal call, other than a flush.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CallPurpose {
    /// To read a piece of a file ahead.
    Fill(Fill),
    /// To find out whether this shared file has changed.
    Revalidate(i32),
}

impl CallPurpose {
    /// The call that serves it.
    pub(super) fn call(self) -> Call {
        match self {
            Self::Fill(fill) => fill.call(),
            Self::Revalidate(fd) => noop_call(fd),
        }
    }
}
