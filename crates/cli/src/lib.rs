//! The command-line tools: `tern` and the MOSIX commands, one file each under `command/`.
//!
//! All tools are one binary, which selects the tool by the name it was called with (`tool`). Tools
//! reach the cluster only through the node's daemon (`client`). The file of each tool produces its
//! output on success; a failure is a `Failure`: one sentence, a hint on a second line, and an exit
//! code that the help lists.
#![deny(unsafe_code)]

mod client;
mod command;
mod doctor;
mod failure;
mod help;
mod job;
mod node_name;
mod output;
mod progress;
pub mod tool;

use failure::Failure;
