//! Calls that the shim itself makes at home.

use crate::files::cache::{Fill, noop_call};
use std::time::Instant;
use tern_migrate::message::Message;
use tern_syscall::Call;

/// A call that the shim makes at home for a process's delegated files.
#[derive(Debug)]
pub(crate) struct InternalCall {
    pub(crate) number: u64,
    /// The number of calls in its prelude.
    pub(crate) prelude_len: usize,
    /// The request, which may have to be sent again.
    pub(crate) message: Message,
    /// Its purpose, other than a flush.
    pub(crate) purpose: Option<CallPurpose>,
    pub(crate) sent_at: Instant,
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
    pub(crate) fn call(self) -> Call {
        match self {
            Self::Fill(fill) => fill.call(),
            Self::Revalidate(fd) => noop_call(fd),
        }
    }
}
