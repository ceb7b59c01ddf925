//! Tests of MFS: the files of other nodes below /mfs.
#![forbid(unsafe_code)]

mod cached_names;
mod coherence;
mod compression;
mod concurrency;
mod copying;
mod exclusive_create;
mod listing;
mod locks;
mod own_files;
mod programs;
mod random;
mod special_names;
mod tree;
mod unmounting;
