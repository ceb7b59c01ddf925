//! Files and names of home that are cached or opened where the guest runs.

pub(crate) mod attributes;
pub(crate) mod connections;
pub(crate) mod content;
pub(crate) mod delegation;
mod epoll_sets;
mod exclusive;
pub(crate) mod names;
pub(crate) mod shared_fs;
pub(crate) mod timed_worker;
pub(crate) mod watches;
