//! Commands that set up and administer the cluster and this node.

pub(crate) mod init;
pub(crate) mod join;
pub(crate) mod mosctl;
pub(crate) mod outside;
pub(crate) mod remove;
pub(crate) mod setpe;
pub(crate) mod token;
pub(crate) mod tune;
