//! The live cluster on a terminal: `mon`, a bar per node, and `mtop`, the processes with their nodes.
//!
//! Both are one program on one model; `mtop` begins with the list that `mon` opens for a node.
//!
//! ```text
//!  source ──Event──▶ update ──▶ model ──▶ view ──▶ screen
//!     ▲                │                             (terminal: takes it over, gives it back)
//!     └──── run ◀──Effect (ask ternd, send a signal, stop, end)
//! ```
//!
//! `update` and `view` do no I/O and read no clock, so tests drive the one with events and compare what the other
//! draws. `run` is the loop between them and the world; `once` prints a single picture.
//!
//! The cluster is reached through whoever calls this: it gives an [`Ask`].
#![forbid(unsafe_code)]

pub mod appearance;
pub mod ask;
pub mod event;
pub mod layout;
pub mod model;
pub mod once;
pub mod run;
pub mod source;
pub mod terminal;
pub mod update;
pub mod users;
pub mod view;

pub use ask::{Ask, Trouble};
pub use model::list::Order;
pub use model::{Display, Settings, Width};
pub use run::{Subject, print_once, show};
