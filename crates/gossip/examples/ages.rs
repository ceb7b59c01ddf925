//! Prints the table of ages in `docs/design/gossip.md`: the model beside an experiment with the
//! daemon's own code.
//!
//! `cargo run --release -p tern-gossip --example ages [NODES…]`

use tern_gossip::ages::{Experiment, Phases, measure};
use tern_gossip::model;

fn main() {
    let chosen: Vec<u16> = std::env::args().skip(1).filter_map(|nodes| nodes.parse().ok()).collect();
    let sizes = if chosen.is_empty() { vec![32, 64, 128, 256, 512, 1024, 2048] } else { chosen };
    println!(
        "| nodes | window | phases | average: model | measured | | worst: model | measured | | bytes | longest |"
    );
    println!("|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    for nodes in sizes {
        for window in [16, 32].into_iter().filter(|window| *window < usize::from(nodes)) {
            for phases in [Phases::Together, Phases::Spread] {
                let all = usize::from(nodes);
                let (average, worst) = (model::average_age(all, window), model::worst_age(all, window));
                let warm_up = 100 + 2 * worst as u64;
                // The same precision at every size: about 20,000 views, and at least 16
                // measurements.
                let measurements = (20_000 / u64::from(nodes)).max(16);
                let ages = measure(Experiment { nodes, window, phases, warm_up, measurements, seed: 1 });
                let off = |got: f64, model: f64| (got / model - 1.0) * 100.0;
                println!(
                    "| {nodes} | {window} | {phases:?} | {average:.2} | {:.2} | {:+.1}% | {worst:.1} | {:.1} | {:+.1}% | {:.0} | {} |",
                    ages.average_age,
                    off(ages.average_age, average),
                    ages.worst_age,
                    off(ages.worst_age, worst),
                    ages.bytes_per_step,
                    ages.longest_message
                );
            }
        }
    }
}
