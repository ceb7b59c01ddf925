//! What people run: `tern` and the MOSIX commands, one file each under `command/`.
//!
//! All of it is one binary, which acts by the name it was called with (`tool`). Tools reach the cluster only
//! through the node's daemon (`client`); what they say on success is in their own file, what they say on
//! failure is a `Failure`: one sentence, a hint on a second line, an exit code that their help names.
#![deny(unsafe_code)]

pub mod client;
pub mod command;
pub mod doctor;
pub mod failure;
pub mod help;
pub mod job;
pub mod output;
pub mod place;
pub mod progress;
pub mod tool;

pub use failure::Failure;
