//! Each system call: its arguments, and where it must run.
//!
//! ```text
//!  guest's node                                    home
//!  filter    lets Here pass, notifies the rest
//!  route     Here · Home · Both · Homeward · Refuse
//!  gather    registers and memory ──▶ Call  ═════▶ Call::lay_out ──▶ Layout
//!            (Landings stay)                       Layout::fill      ──▶ mailbox
//!                                                  the deputy makes the call
//!  scatter   Landings ◀──────────── Outcome ◀═════ Layout::collect   ◀── mailbox
//! ```
//!
//! All of it comes from one table with a row for each call. No I/O, no clock, no unsafe code; what arrives
//! from the other side can neither panic nor allocate more than [`limits`] allow.
#![forbid(unsafe_code)]

mod bytes;
mod call;
mod docs;
mod filter;
mod gather;
mod layout;
pub mod limits;
mod memory;
mod route;
mod row;
mod scatter;
mod shape;
mod table;

pub use bytes::ByteBuf;
pub use call::{Area, Arg, Call, Message, Outcome, Segments};
pub use docs::markdown;
pub use filter::{SockFilter, filter};
pub use gather::{Gather, Gathered, gather, gather_after};
pub use layout::{Layout, Malformed};
pub use memory::{Fault, Memory, read_text};
pub use route::{Route, Rule, Special, Test, reason, route, waits_here};
pub use row::{Arguments, Flow, Interrupted, Row, Timeout, Wait};
pub use scatter::{Landing, scatter};
pub use shape::{Amount, Count, Inside, Len, Over, Shape, Way, When, Width};
pub use table::{NUMBERS, row, rows};
