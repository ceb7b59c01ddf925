//! Calls that guests request, performed by their deputies.

pub(crate) mod compound;
pub(crate) mod current;
pub(crate) mod exec;
pub(crate) mod fork;
pub(crate) mod internal;
pub(crate) mod kinds;
pub(crate) mod mapping;
pub(crate) mod perform;
pub(crate) mod prefetch;
pub(crate) mod procfs_view;
pub(crate) mod result;
pub(crate) mod uncreated;
