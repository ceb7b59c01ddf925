//! The tunable constants. docs/design/balancing.md gives the reasons for their values.

use serde::{Deserialize, Serialize};

/// The quantity that the balancer minimises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// The time that the moving process itself needs.
    #[default]
    Greedy,
    /// The sum over the nodes' resources of n to the power of utilisation (Amir, Awerbuch, Barak,
    /// Borgstrom and Keren, IEEE TPDS 11(7), 2000).
    Opportunity,
}

/// The balancer's parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// The minimised quantity.
    pub objective: Objective,
    /// Entries older than this are not used for a move (milliseconds). MOSIX-2's kernel required 4
    /// s.
    pub max_age_ms: u64,
    /// Standard CPU seconds that a process must have used. A process that has used t will use t
    /// more, as a median (Harchol-Balter and Downey, SIGMETRICS 1996), so shorter ones are not
    /// worth it. On a crowded node the threshold shrinks in proportion to the waiting there, down
    /// to `min_crowded_cpu_s`.
    pub min_cpu_s: f64,
    /// Lower bound of `min_cpu_s` on a crowded node.
    pub min_crowded_cpu_s: f64,
    /// Seconds of residence before the next move; about 1 in MOSIX. Doubles with each recent move.
    pub residence_s: f64,
    /// Upper bound of the residence after doubling.
    pub max_residence_s: f64,
    /// Half-life of a process's count of recent moves (milliseconds).
    pub recent_move_half_life_ms: u64,
    /// A process does not return to a node that it left less than this long ago (milliseconds),
    /// except by an urgent move.
    pub no_return_ms: u64,
    /// Fraction by which the pace elsewhere must be better. Smaller differences are measurement
    /// noise.
    pub margin: f64,
    /// Added to `margin` for a process that has moved recently. Loads are smoothed, so they do not
    /// show all effects of its own move and of others yet, and they include the CPU time of moves.
    pub moved_margin: f64,
    /// Fraction of the waiting for calls that is assumed not to be saved by going home if no CPU is
    /// idle there.
    pub call_wait_discount: f64,
    /// Seconds that a move must gain in total, after its cost.
    pub min_gain_s: f64,
    /// The expected remaining CPU time must be this many times the CPU time that the move costs.
    pub min_rest_per_cost: f64,
    /// The same factor for a process that goes home without being faster there.
    pub min_rest_per_home_cost: f64,
    /// Targets whose gain is within this fraction of the best gain are equivalent, and one of them
    /// is chosen at random, so that not all processes go to the same one.
    pub equivalent_gain: f64,
    /// For a program that starts: nodes whose load is within this many units of the least are
    /// equivalent, as in MOSIX.
    pub equivalent_load: f64,
    /// A target refuses if the process's pace there would be worse by this fraction than its home
    /// estimated.
    pub max_estimate_error: f64,
    /// Limit of simultaneous moves between two nodes.
    pub max_moves_per_pair: u32,
    /// Limit of simultaneous moves of this home.
    pub max_moves: u32,
    /// A move without any report for this long is dropped (milliseconds).
    pub move_timeout_ms: u64,
    /// Time constant with which sampled loads are assumed to follow a change: milliseconds to 63% of
    /// a step. The sampler's is 1,250 (tern-load), but a sample averages a whole second. So the first
    /// sample after a change shows, on average, what a constant of about 1,500 predicts.
    pub load_time_constant_ms: u64,
    /// Seconds that a forwarded call takes besides the round trip: trap, deputy, path to the link.
    /// docs/benchmarks.md: 46 µs.
    pub per_call_s: f64,
    /// Seconds that a process is frozen in a move without memory. docs/benchmarks.md: 5 to 12 ms.
    pub freeze_s: f64,
    /// Bytes that one second of a standard CPU sends or receives. docs/benchmarks.md: 630 to 780
    /// MB/s for both.
    pub bytes_per_cpu_s: f64,
    /// Fraction of its memory that a node keeps free.
    pub reserve_fraction: f64,
    /// Lower bound of the memory that a node keeps free, in bytes.
    pub min_reserve: u64,
    /// PSI memory pressure, in percent, above which a node counts as full.
    pub max_pressure: f64,
    /// Seconds by which a memory move (ushering) must start before the node is full: one decision,
    /// and the age of the information.
    pub usher_ahead_s: f64,
    /// Seconds of growth that must fit on the target of an urgent move: a memory move (ushering) or
    /// an eviction.
    pub usher_growth_s: f64,
    /// Seconds of growth that must fit on the target of any other move.
    pub ordinary_growth_s: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            objective: Objective::Greedy,
            max_age_ms: 5_000,
            min_cpu_s: 1.0,
            min_crowded_cpu_s: 0.05,
            residence_s: 1.0,
            max_residence_s: 64.0,
            recent_move_half_life_ms: 60_000,
            no_return_ms: 10_000,
            margin: 0.04,
            moved_margin: 0.36,
            call_wait_discount: 0.5,
            min_gain_s: 0.1,
            min_rest_per_cost: 2.0,
            min_rest_per_home_cost: 100.0,
            equivalent_gain: 0.05,
            equivalent_load: 5.0,
            max_estimate_error: 0.25,
            max_moves_per_pair: 2,
            max_moves: 8,
            move_timeout_ms: 600_000,
            load_time_constant_ms: 1_500,
            per_call_s: 50e-6,
            freeze_s: 0.015,
            bytes_per_cpu_s: 600e6,
            reserve_fraction: 0.05,
            min_reserve: 32 << 20,
            max_pressure: 10.0,
            usher_ahead_s: 3.0,
            usher_growth_s: 10.0,
            ordinary_growth_s: 60.0,
        }
    }
}
