//! Files of home that are read and written here, without a round trip for each call.

pub(crate) mod cache;
pub(crate) mod connections;
pub(crate) mod internal_call;
pub(crate) mod io;
pub(crate) mod limits;
pub(crate) mod local;
mod local_calls;
pub(crate) mod names;
mod prefetch;
pub(crate) mod remote_map;
