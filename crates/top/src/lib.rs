//! The live cluster on a terminal: `mon`, a bar per node, and `mtop`, the processes with their
//! nodes.
//!
//! Both are one program with one model; `mtop` starts with the list that `mon` opens for a node.
//!
//! ```text
//!  source ──UiEvent▶ update ──▶ model ──▶ view ──▶ screen
//!     ▲                │                             (terminal: enters and restores it)
//!     └──── run ◀──Effect (query ternd, send a signal, stop, end)
//! ```
//!
//! `update` and `view` do no I/O and read no clock: tests send events to `update` and compare what
//! `view` draws. `run` is the event loop; `once` renders a single picture.
//!
//! The caller provides the access to the cluster: a [`RequestFn`].
#![forbid(unsafe_code)]

pub mod appearance;
pub mod event;
pub mod layout;
pub mod model;
pub mod once;
pub mod request;
pub mod run;
pub mod source;
pub mod terminal;
pub mod update;
pub mod users;
pub mod view;

pub use model::list::SortOrder;
pub use model::{ColumnWidth, Display, ViewSettings};
pub use request::{RequestFn, TopError};
pub use run::{InitialView, print_once, show};
