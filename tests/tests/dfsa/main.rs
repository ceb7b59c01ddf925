//! Calls on files that are made where the guest runs.
#![forbid(unsafe_code)]

mod homes;
mod names;
mod near;
mod opened;
mod shared_files;
