//! Commands that start a program which may migrate afterwards.

pub(crate) mod bestnode;
pub(crate) mod mosrun;
pub(crate) mod nomig;
pub(crate) mod presets;
pub(crate) mod runhome;
pub(crate) mod runon;
