//! The guests' system calls.

pub(crate) mod fork;
pub(crate) mod forward;
pub(crate) mod procfs_view;
pub(crate) mod split;
pub(crate) mod thread_lifecycle;
