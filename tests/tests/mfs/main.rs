//! Tests of MFS: the files of other nodes below /mfs.
#![forbid(unsafe_code)]

mod cached_names;
mod coherence;
mod compression;
mod concurrency;
mod exclusive_create;
mod listing;
mod locks;
mod passthrough;
mod programs;
mod random;
mod special_names;
mod tree;
