//! Processes that move: journeys, faults on the way, and programs that must not notice.
#![forbid(unsafe_code)]

mod busy;
mod crowd;
mod every_call;
mod faults;
mod grouped;
mod journeys;
mod leaks;
mod leaving;
mod native;
mod real;
mod recovers;
mod refused;
mod stopped;
