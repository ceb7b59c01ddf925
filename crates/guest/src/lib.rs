//! The away half of a family: runs the programs, answers what may be answered here, forwards the rest.
//!
//! * [`sandbox`]: the namespaces that hold guests, and the helper that is their first process
//! * [`member`]: one guest
//! * [`arrive`]: an empty process becomes a guest;  [`depart`]: a guest goes home or onward
//! * [`forward`]: trapped calls to the deputy and their results back;  [`special`]: calls with a local part
//! * `vdso`: where a guest must not stand still
//! * [`signal`]: signals from home, and the guest's own faults
//! * [`aside`]: what takes long, in threads
//! * [`fork`]: both halves fork;  [`cpu`]: CPU time of both halves
//! * `family`: its guests and its link home;  `arrivals`, `departures`: who comes and goes;  `stops`, `messages`,
//!   `asked`: what the kernel, home and the node say
//! * [`run`]: the one loop that waits for all of it

#![deny(unsafe_code)]

mod arrivals;
pub mod arrive;
pub mod aside;
mod asked;
mod clocks;
pub mod cpu;
pub mod depart;
mod departures;
mod family;
pub mod fork;
pub mod forward;
pub mod member;
mod messages;
pub mod run;
pub mod sandbox;
pub mod signal;
pub mod space;
pub mod special;
mod stops;
mod vdso;

pub use run::run;
