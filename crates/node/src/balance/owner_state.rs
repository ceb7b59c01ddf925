//! The use of this node by its own processes and by its guests, as of the last scan.

use crate::config::Config;
use crate::os::clock::boot_ms;
use crate::os::sync::lock;
use std::sync::Mutex;

/// The result of the last scan.
#[derive(Debug, Default)]
pub(crate) struct OwnerState {
    pub(super) usage: Mutex<OwnerUsage>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OwnerUsage {
    /// No guest is accepted before this time, in milliseconds since boot.
    pub(super) no_guests_until_ms: u64,
    pub(super) requested_ms: Option<u64>,
    /// The share, 0 to 1, of guests and placed commands in the demand for CPUs.
    pub(super) guest_demand_share: f64,
    /// Bytes of memory that guests and placed commands use.
    pub(super) guests_memory: u64,
}

impl OwnerState {
    /// Whether own processes need the node, or needed it a moment ago.
    pub(crate) fn needs_node(&self) -> bool {
        boot_ms() < lock(&self.usage).no_guests_until_ms
    }

    /// The part of this node that its guests may use, in the balancer's form.
    pub(crate) fn guest_share(
        &self,
        config: &Config,
        whole: tern_balancer::NodeSnapshot,
    ) -> tern_balancer::NodeSnapshot {
        let usage = *lock(&self.usage);
        let mem_free = match config.guest_memory_bytes() {
            Some(limit) => whole.mem_free.min(limit.saturating_sub(usage.guests_memory)),
            None => whole.mem_free,
        };
        let Some(cpus) = config.guest_cpus.filter(|cpus| *cpus < whole.cpus) else {
            return tern_balancer::NodeSnapshot { mem_free, ..whole };
        };
        // Own processes use the other CPUs first.
        let of_guests = whole.load * usage.guest_demand_share;
        let in_the_way = (whole.load - of_guests - (whole.cpus - cpus) * 100.0).max(0.0);
        tern_balancer::NodeSnapshot { mem_free, cpus, load: of_guests + in_the_way, ..whole }
    }
}
