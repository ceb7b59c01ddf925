//! An administrator's settings of a node (`mosctl`).

use serde::{Deserialize, Serialize};

/// The switches of a node. Names and meanings are openMosix's (mosctl(1)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// No process leaves this node automatically.
    Stay,
    /// No process whose home is this node leaves automatically. Guests may still be sent on.
    LocalStay,
    /// No guests arrive.
    Block,
    /// The node does not publish its load, so that no other node's balancer sends processes here.
    Quiet,
    /// Other nodes cannot access this node's files.
    NoMfs,
    /// Changes of the map and of node states are written to the kernel's log too.
    LogMap,
}

/// The switches of a node and its other manual settings. Kept until the machine reboots.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSettings {
    /// See [`Switch::Stay`].
    pub stay: bool,
    /// See [`Switch::LocalStay`].
    pub local_stay: bool,
    /// See [`Switch::Block`].
    pub block: bool,
    /// See [`Switch::Quiet`].
    pub quiet: bool,
    /// See [`Switch::NoMfs`].
    #[serde(default)]
    pub no_mfs: bool,
    /// See [`Switch::LogMap`].
    #[serde(default)]
    pub log_map: bool,
    /// The manually set CPU speed (10,000 is a standard CPU); `None` if the measured one is used.
    pub speed: Option<u32>,
    /// How fast old observations of processes lose weight.
    pub decay: DecayRates,
}

impl NodeSettings {
    /// The field of a switch.
    pub fn of(&mut self, switch: Switch) -> &mut bool {
        match switch {
            Switch::Stay => &mut self.stay,
            Switch::LocalStay => &mut self.local_stay,
            Switch::Block => &mut self.block,
            Switch::Quiet => &mut self.quiet,
            Switch::NoMfs => &mut self.no_mfs,
            Switch::LogMap => &mut self.log_map,
        }
    }
}

/// How fast old observations of a process lose weight: the per mille that is kept of them after
/// each interval (`mosctl setdecay`; the defaults are openMosix's).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecayRates {
    /// Length of an interval in seconds, at least 1.
    pub interval: u32,
    /// For processes with `slowdecay`, and by default: 1 to 1000.
    pub slow: u16,
    /// For processes with `fastdecay`: 1 to 1000.
    pub fast: u16,
}

impl Default for DecayRates {
    fn default() -> Self {
        Self { interval: 1, slow: 975, fast: 926 }
    }
}

/// An evacuation of a node. The reply comes when it is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evacuation {
    /// Guests go home or to other nodes, and none arrive: turns `block` on.
    Expel,
    /// Processes whose home is this node come back, and stay: turns `lstay` on.
    Bring,
    /// Expel and bring. Also turns `stay` on.
    Isolate,
    /// Like `Isolate`, and then the node does not publish its load any more: turns `quiet` on.
    Shutdown,
}
