//! Connections whose packets are redirected, between three machines that are network namespaces.
//! The tests need root, iproute2, and the kernel features that `tern_redirect::probe` lists.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on has failed")]

mod direct;
mod hold;
mod isolation;
mod lifetime;
mod scene;
mod tunnel;
