//! Links to guest shims and to ternd, and the messages that guest shims send.

pub(crate) mod messages;
pub(crate) mod peer;
pub(crate) mod peers;
pub(crate) mod reconnect;
pub(crate) mod ternd;
