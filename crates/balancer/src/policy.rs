//! The knobs. Where a constant comes from stands beside it; ALG-n are the rows of the collection of published
//! algorithms, "measured" means a table in docs/design/balancing.md.

use serde::{Deserialize, Serialize};

/// What is made small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// The time that the mover itself needs.
    #[default]
    Greedy,
    /// The sum over the nodes' resources of n to the power of utilisation (Amir, Awerbuch, Barak, Borgstrom and
    /// Keren, IEEE TPDS 11(7), 2000; ALG-28).
    Opportunity,
}

/// How willing the balancer is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// What is made small.
    pub objective: Objective,
    /// Older entries are no basis for a move (milliseconds). MOSIX-2's kernel asked for 4 s (ALG-13).
    pub max_age_ms: u64,
    /// Standard CPU seconds that a process must have used. A process that has used t will use t more, as a median
    /// (Harchol-Balter and Downey, SIGMETRICS 1996), so shorter ones are not worth it. On a crowded node it is
    /// this much less what it waits there, down to `least_cpu_s`.
    pub young_cpu_s: f64,
    /// The floor of that.
    pub least_cpu_s: f64,
    /// Seconds of residence before the next move (ALG-25). Doubles with each move of late.
    pub residence_s: f64,
    /// The same, most it can become by doubling.
    pub longest_residence_s: f64,
    /// After so long one earlier move is forgotten (milliseconds).
    pub forget_move_ms: u64,
    /// No return to a node that was left less than so long ago (milliseconds), except before an emergency.
    pub return_ms: u64,
    /// The pace elsewhere must be better by this part. Differences below it are noise of measurement.
    pub margin: f64,
    /// The part of the waiting for calls that is not believed to be gained by going home to where no CPU is idle.
    pub talk_doubt: f64,
    /// Seconds that a move must gain in all, its cost subtracted.
    pub least_gain_s: f64,
    /// The expected rest must be so many times the CPU time that the move costs.
    pub rest_per_cost: f64,
    /// The same for a process that goes home though it is no faster there.
    pub rest_per_home_cost: f64,
    /// Targets whose pace is so near to the best (as a part of it) are as good, and one of them is taken at
    /// random, so that not everybody goes to the same (ALG-23).
    pub like_best: f64,
    /// The same for programs that start, in units of load (ALG-23).
    pub like_best_load: f64,
    /// A target refuses if the process' pace there would be worse by this part than its home believed.
    pub surprise: f64,
    /// Moves under way between two nodes at one time.
    pub moves_per_pair: u32,
    /// Moves of this home under way at one time.
    pub moves_at_once: u32,
    /// Moves are forgotten if nothing was heard of them for so long (milliseconds).
    pub lost_after_ms: u64,
    /// How slowly the sampled load follows the real one: milliseconds to 63% of a step.
    pub load_settle_ms: u64,
    /// Seconds by which a forwarded call delays its caller besides the round trip: trap, deputy, way to the link.
    /// docs/benchmarks.md: 46 µs.
    pub per_call_s: f64,
    /// Seconds that a process stands still in a move without memory. docs/benchmarks.md: 5 to 12 ms.
    pub freeze_s: f64,
    /// Bytes that one second of a standard CPU sends or takes in. docs/benchmarks.md: 630 to 780 MB/s for both.
    pub bytes_per_cpu_s: f64,
    /// The part of its memory that a node keeps free.
    pub reserve: f64,
    /// At least so many bytes of it.
    pub least_reserve: u64,
    /// Percent of PSI memory pressure from which on a node counts as full.
    pub full_pressure: f64,
    /// Seconds that a memory move must be ahead: one decision, and information that is old.
    pub usher_ahead_s: f64,
    /// Seconds for which what grows must fit where memory moves go.
    pub usher_room_s: f64,
    /// The same, for all other moves.
    pub calm_room_s: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            objective: Objective::Greedy,
            max_age_ms: 5_000,
            young_cpu_s: 1.0,
            least_cpu_s: 0.05,
            residence_s: 1.0,
            longest_residence_s: 64.0,
            forget_move_ms: 60_000,
            return_ms: 10_000,
            margin: 0.04,
            talk_doubt: 0.5,
            least_gain_s: 0.1,
            rest_per_cost: 2.0,
            rest_per_home_cost: 100.0,
            like_best: 0.05,
            like_best_load: 5.0,
            surprise: 0.25,
            moves_per_pair: 2,
            moves_at_once: 8,
            lost_after_ms: 600_000,
            load_settle_ms: 1_500,
            per_call_s: 50e-6,
            freeze_s: 0.015,
            bytes_per_cpu_s: 600e6,
            reserve: 0.05,
            least_reserve: 32 << 20,
            full_pressure: 10.0,
            usher_ahead_s: 3.0,
            usher_room_s: 10.0,
            calm_room_s: 60.0,
        }
    }
}
