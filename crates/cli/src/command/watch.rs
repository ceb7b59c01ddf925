//! Commands that show the state of the cluster.

pub(crate) mod mon;
pub(crate) mod mtop;
pub(crate) mod status;
