//! Who should run where. Pure functions: a view of the cluster and a home's processes go in, moves come out,
//! with their numbers. No I/O, no clock, no randomness but from the given seed, so the daemon, the simulator
//! (`tern sim`) and the tests run the very same code.
//!
//! ```text
//!  view      what a home knows of the nodes: load, memory, links, each with its age
//!  process   what it knows of its own processes, wherever they run
//!  policy    the knobs, each with its source
//!  state     what it remembers: moves under way, charged in advance; how memory shrinks
//!  ground    the view with all of that counted in
//!  prospect  one process on one node: its pace there, what the way costs, what is gained, or why not
//!  talk      what it waits for that is made elsewhere: by home, on files of other nodes
//!  decide    once a second: evictions, memory before it runs out, then CPU and communication
//!  place     the best node for a program that starts
//!  admit     the other side: what a node says to an offer, and its load as it will be once all has settled
//!  explain   `migrate --why`: one process on each node, and the last word about it
//!  decay     a process' statistics, which fade
//!  trend     how fast a node's memory fills
//! ```
//!
//! docs/design/balancing.md has the algorithm on one page, and the measurements behind the constants.
#![forbid(unsafe_code)]

mod admit;
mod decay;
mod decide;
mod explain;
mod ground;
mod memory;
mod place;
mod policy;
mod process;
mod prospect;
mod seed;
mod state;
mod talk;
mod trend;
mod view;

pub use admit::{Answer, Offer, Refusal, Settling, accepts};
pub use decay::{Decay, Decayed};
pub use decide::{Move, Reason, decide};
pub use explain::{Why, explain};
pub use ground::reserve;
pub use place::{Placement, place};
pub use policy::{Objective, Policy};
pub use process::{Hint, Process, Traffic};
pub use prospect::{Bar, Passage, Prospect};
pub use state::{State, Stay, Verdict};
pub use view::{Cluster, LinkCost, Node};
