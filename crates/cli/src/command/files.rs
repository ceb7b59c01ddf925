//! Commands for the files of other nodes.

pub(crate) mod mount_mfs;
