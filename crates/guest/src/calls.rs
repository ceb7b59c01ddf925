//! The guests' system calls.

mod announce;
pub(crate) mod fork;
pub(crate) mod forward;
mod mapping;
pub(crate) mod procfs_view;
pub(crate) mod request;
pub(crate) mod split;
pub(crate) mod thread_lifecycle;
pub(crate) mod uncreated;
