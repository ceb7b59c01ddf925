//! Decides which process runs on which node. A decision depends only on its input: a view of the
//! cluster, the home's processes, and the state kept from earlier decisions. Its output is moves,
//! with the numbers behind them. There is no I/O, no clock, and no randomness but from the given
//! seed, so the daemon, the simulator (`tern sim`) and the tests run the same code.
//!
//! ```text
//!  view            the nodes as a home sees them: load, memory, links, each with its age
//!  process         the home's own processes, wherever they run
//!  policy          the tunable constants
//!  state           kept between decisions: moves under way, charged in advance; memory trends
//!  effective_view  the view adjusted for that state
//!  candidate       one process on one node: pace, cost of the move, gain, obstacles
//!  remote_waits    how long a process waits for calls made at home and for files of other nodes
//!  decide          once a second: evictions, then memory, then CPU and communication
//!  memory          ushering: a process leaves a node before its memory runs out
//!  place           the best node for a program that starts
//!  admit           the target's side: answers to offers, and the expected load
//!  explain         `migrate --why`: each node as a candidate, and the last decision
//!  decay           decaying statistics of a process
//!  trend           how fast a node's memory fills
//! ```
//!
//! docs/design/balancing.md describes the algorithm on one page, with the measurements behind the
//! constants.
#![forbid(unsafe_code)]

mod admit;
mod candidate;
mod decay;
mod decide;
mod effective_view;
mod explain;
mod memory;
mod place;
mod policy;
mod process;
mod remote_waits;
mod rng;
mod state;
mod trend;
mod view;

pub use admit::{MoveOffer, OfferRefusal, OfferReply, PendingChanges, reply_to_offer};
pub use candidate::{Candidate, MoveCost, Obstacle};
pub use decay::{Decay, DecayingRate};
pub use decide::{Move, MoveReason, decide};
pub use effective_view::memory_to_keep_free;
pub use explain::{Explanation, explain};
pub use place::{PlacementRequest, place};
pub use policy::{Objective, Policy};
pub use process::{Hint, ProcessSnapshot, Traffic};
pub use state::{Decision, DecisionState, StayReason};
pub use view::{Cluster, LinkCost, NodeSnapshot};
