//! What an administrator says of a node (`mosctl`).

use serde::{Deserialize, Serialize};

/// What can be switched on and off. Names and meanings are openMosix's (mosctl(1)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// No process leaves by itself, whoever's it is.
    Stay,
    /// No process whose home this is leaves by itself; guests may still be sent on.
    LocalStay,
    /// No guests arrive.
    Block,
    /// The node does not tell of its load, so that nobody's balancer sends anything.
    Quiet,
    /// No other node reaches this node's files.
    NoMfs,
    /// Changes of the map, and of who is there, are written to the kernel's log too.
    LogMap,
}

/// How the switches of a node stand, and what else was set by hand. Kept until the machine starts anew.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
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
    /// The speed of a CPU, 10,000 for a standard one, if it is not the measured one.
    pub speed: Option<u32>,
    /// How fast what is known of a process' habits is forgotten.
    pub decay: Decay,
}

impl Settings {
    /// The setting behind a switch.
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

/// How fast what is known of a process' habits is forgotten: of each interval, so many parts of a thousand stay
/// (`mosctl setdecay`; the defaults are openMosix's).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decay {
    /// Seconds, at least 1.
    pub interval: u32,
    /// Of those with `slowdecay`, and all others: 1 to 1000.
    pub slow: u16,
    /// Of those with `fastdecay`: 1 to 1000.
    pub fast: u16,
}

impl Default for Decay {
    fn default() -> Self {
        Self { interval: 1, slow: 975, fast: 926 }
    }
}

/// What takes a while: it is answered when it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evacuation {
    /// Guests go home or elsewhere, and none arrive: `block`.
    Expel,
    /// Processes whose home this is come back, and stay: `lstay`.
    Bring,
    /// Both.
    Isolate,
    /// Both, and the node tells nobody of itself any more: `quiet`.
    Shutdown,
}
