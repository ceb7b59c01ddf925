//! Connections are moved between two network namespaces while a client in a third uses them. Needs
//! root and /dev/net/tun.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod established;
mod half_closed;
mod host;
mod hostile;
mod options;
mod placeholders;
mod refusals;
mod router;
mod traffic;
