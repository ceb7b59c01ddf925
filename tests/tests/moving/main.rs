//! Tests of migration: journeys, faults on the way, and programs that must not notice.
#![forbid(unsafe_code)]

mod busy;
mod control_group;
mod every_call;
mod faults;
mod full_disk;
mod home_load;
mod journeys;
mod leaks;
mod many_mappings;
mod many_threads;
mod native;
mod real_programs;
mod recovery;
mod refusals;
mod shared_memory;
mod shutdown;
mod stopped;
mod time_limits;
mod time_namespace;
mod uncreated;
mod uninterruptible;
mod unreturnable;
mod zerocopy;
