//! Guests that arrive: from the offer to the start.

pub(crate) mod build;
mod messages;
pub(crate) mod threads;
