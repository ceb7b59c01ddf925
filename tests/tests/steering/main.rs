//! Tests of control and security: balancing, commands, the administration tree, and access by
//! strangers.
#![forbid(unsafe_code)]

mod admin_tree;
mod balancing;
mod isolation;
mod manual_control;
mod membership;
mod rights;
mod stranger;
