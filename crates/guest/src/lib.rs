//! The away half of a family: runs the programs, answers what may be answered here, forwards the rest.
//!
//! * [`sandbox`]: the namespaces that hold guests, and the helper that is their first process
//! * [`member`]: one guest;  [`thread`]: one of its threads;  [`halt`]: they come to a stand, and go on
//! * [`arrive`]: an empty process becomes a guest, with its `crew` of threads;  [`depart`]: a guest goes home or onward
//! * [`forward`]: trapped calls to the deputy and their results back;  [`special`]: calls with a local part
//! * `own`: what /proc says of its memory;  [`near`]: files that its node has;  `homes`: large ones of its home that it maps
//! * `vdso`: where a guest must not stand still;  [`foreign`]: where its home has another, with [`stubs`] instead
//! * [`signal`]: signals from home, and the guest's own faults
//! * [`aside`]: what takes long, in threads
//! * [`fork`]: both halves fork;  [`births`]: threads are born, and end;  `clone`: the call that both are made with
//! * [`cpu`]: CPU time of both halves;  [`watch`]: that home waits for
//! * `family`: its guests and its link home;  `arrivals`, `departures`: who comes and goes;  `stops`, `messages`,
//!   `asked`: what the kernel, home and the node say
//! * [`run`]: the one loop that waits for all of it

#![deny(unsafe_code)]

mod arrivals;
pub mod arrive;
pub mod aside;
mod asked;
pub mod births;
mod clocks;
mod clone;
pub mod company;
pub mod cpu;
mod crew;
pub mod depart;
mod departures;
pub mod direct;
mod empty;
mod family;
pub mod foreign;
pub mod fork;
pub mod forward;
pub mod halt;
mod homes;
pub mod hot;
pub mod inhand;
pub mod member;
mod messages;
pub mod names;
pub mod near;
pub mod opened;
mod own;
pub mod run;
pub mod sandbox;
pub mod signal;
pub mod space;
pub mod special;
mod stops;
pub mod stubs;
pub mod thread;
#[cfg(test)]
mod trial;
mod vdso;
pub mod watch;

pub use run::run;
