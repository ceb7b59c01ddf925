//! Guests that arrive: from the offer to the start.

pub(crate) mod build;
pub(crate) mod threads;
