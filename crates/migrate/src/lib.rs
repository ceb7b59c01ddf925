//! One process from node to node.
//!
//! ```text
//!   home shim                                   guest shim
//!   ─────────                                   ──────────
//!   Offer      ─────────────────────────────▶   can it run here? make an empty guest
//!              ◀─────────────────────────────   Accepted | Declined
//!   Space      ─────────────────────────────▶   give the guest this address space
//!              ◀─────────────────────────────   Want: files whose content is not here
//!   File…      ─────────────────────────────▶
//!   Pages…     ───────── the process runs ──▶   write them                          (pre-copy, rounds)
//!   ■ freeze
//!   Forget, Pages, Image ───────────────────▶   the last differences, registers
//!              ◀─────────────────────────────   Ready
//!   ■ hand over: home records the new epoch. From here on only that life's calls are performed
//!   Go         ─────────────────────────────▶   resume
//!              ◀─────────────────────────────   Running
//!   ■ home drops the memory that it kept
//! ```
//! On the journeys Home and Onward the sender is the guest's shim, told by home with `Depart`; home still
//! decides: it resumes the process, or sends Go to its next node, and tells the old one to `Drop` its copy.
//! Until then that copy is kept, frozen, and `Thaw` brings it back.
#![forbid(unsafe_code)]

pub mod cpu;
pub mod fault;
pub mod journey;
pub mod machine;
pub mod message;
pub mod names;
pub mod opened;
pub mod partial;
pub mod source;
pub mod target;
pub mod usage;
pub mod wall;

pub use cpu::{CpuTime, Demand};
pub use journey::{Journey, Phase};
pub use message::{Inbox, Message};
pub use partial::Partial;
pub use source::Source;
