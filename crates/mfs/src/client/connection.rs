//! The connections to other nodes.
//!
//! * [`peer`]: sends requests and receives their replies; reconnects; the callback channel
//! * [`pending_release`]: files and objects that the server is to release; sent with other requests
//! * [`validate`]: rejects replies that the kernel would reject

pub(crate) mod peer;
pub(crate) mod pending_release;
pub(crate) mod validate;
