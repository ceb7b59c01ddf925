//! The migration of one process from node to node: messages, phases, the sending and the receiving
//! half.
//!
//! ```text
//!   home shim                                   guest shim
//!   ─────────                                   ──────────
//!   Offer      ─────────────────────────────▶   can it run here? make an empty guest
//!              ◀─────────────────────────────   Accepted | Declined
//!   Space      ─────────────────────────────▶   build this address space in the guest
//!              ◀─────────────────────────────   RequestFiles: files whose content is needed
//!   File…      ─────────────────────────────▶
//!   Pages…     ───────── the process runs ──▶   write them               (pre-copy, in rounds)
//!   ■ freeze
//!   DiscardPages, Pages, Image ─────────────▶   the last differences, registers
//!              ◀─────────────────────────────   Ready
//!   ■ hand-over: home records the new epoch, and from here on performs only that epoch's calls
//!   Go         ─────────────────────────────▶   resume
//!              ◀─────────────────────────────   Running
//!   ■ home frees the memory that it kept
//! ```
//! On the journeys Home and Onward the sender is the guest's shim, which home starts with `Depart`.
//! Home still decides the hand-over: it resumes the process itself, or sends `Go` to the next node,
//! and then sends `Drop` to the old one. Until `Drop` arrives, the old guest's copy is kept,
//! frozen; `Thaw` resumes it.
#![forbid(unsafe_code)]

pub mod cpu;
pub mod departure_failure;
pub mod fault;
pub mod journey;
pub mod machine;
pub mod message;
pub mod names;
pub mod partial;
pub mod prefetch;
pub mod source;
pub mod target;
pub mod usage;
pub mod wall;

pub use cpu::{CpuTime, GuestDemand};
pub use journey::{Journey, Phase};
pub use message::{Message, Reassembler};
pub use partial::Partial;
pub use source::MemorySender;
