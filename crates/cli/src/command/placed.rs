//! Commands that place short commands on other nodes without migrating them.

pub(crate) mod mexec;
pub(crate) mod mpmake;
