//! The arguments of each system call, and where it must run.
//!
//! ```text
//!  guest's node                                    home
//!  filter    allows Here, notifies the shim of the rest
//!  route     Here · Home · Both · Homeward · Refuse
//!  gather    registers and memory ──▶ Call  ═════▶ Call::lay_out ──▶ MailboxLayout
//!            (output buffers stay)                 MailboxLayout::fill    ──▶ mailbox
//!                                                  the deputy makes the call
//!  scatter   memory ◀────────────── Outcome ◀═════ MailboxLayout::collect ◀── mailbox
//! ```
//!
//! All of this follows one table with a row for each call. No I/O, no clock, no unsafe code. Data
//! from the other side cannot cause a panic, or allocations above [`limits`].
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
pub use call::{Arg, Call, MessageBuffer, Outcome, Segments, SocketMessage};
pub use docs::markdown;
pub use filter::{NATIVE_CALL_DISTANCE, NATIVE_CALL_SITES, SockFilter, filter};
pub use gather::{GatherError, Gathered, gather, gather_after};
pub use layout::{MailboxLayout, Malformed};
pub use memory::{Fault, UserMemory, read_c_string};
pub use route::{ArgTest, Route, Rule, SplitCall, is_transfer, reason, route, waits_here};
pub use row::{Arguments, Flow, Interrupted, Row, Timeout, WaitRule};
pub use scatter::{OutputBuffer, scatter};
pub use shape::{Amount, Count, Direction, EmbeddedLen, Len, OverLimit, Shape, When, Width};
pub use table::{NUMBERS, row, rows};
