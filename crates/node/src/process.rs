//! The processes of this node: their list, how they were started, and permissions to move them.

pub(crate) mod credentials;
pub(crate) mod node_choices;
pub(crate) mod permission;
pub(crate) mod process_list;
pub(crate) mod procfs;
pub(crate) mod registry;
