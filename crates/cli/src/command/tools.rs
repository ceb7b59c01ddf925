//! Diagnosis, experiments, and generated documentation.

pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod lab;
pub(crate) mod man;
pub(crate) mod sim;
