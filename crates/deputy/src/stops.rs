//! Wait statuses of traced processes, and the quiescing of processes and deputies.

pub(crate) mod events;
pub(crate) mod quiesce;
pub(crate) mod resident;
