//! Guests that depart, for home or for another node.

pub(crate) mod departing;
pub(crate) mod group;
pub(crate) mod send;
