//! The cluster: its map, founding and joining it, and the load of its nodes.

pub(crate) mod admission;
pub(crate) mod bootstrap;
pub(crate) mod follow;
pub(crate) mod gossip;
pub(crate) mod kernel_log;
pub(crate) mod link_costs;
pub(crate) mod load_entry;
pub mod map;
pub(crate) mod membership;
pub(crate) mod speed;
pub(crate) mod state;
pub mod token;
pub(crate) mod tune;
pub(crate) mod users;
pub(crate) mod view;
