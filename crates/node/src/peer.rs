//! Communication with the daemons of other nodes.

pub(crate) mod client;
pub(crate) mod connection_limit;
pub(crate) mod link_pool;
pub(crate) mod listener;
pub(crate) mod message;
pub(crate) mod server;
mod strangers;
