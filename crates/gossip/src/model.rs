//! How old information gets: the published model (Amar, Barak, Drezner and Okun, "Randomized gossip
//! algorithms for maintaining a distributed bulletin board with guaranteed age properties", CCPE
//! 21:1907–1927, 2009), with the formulas of MOSIX's information daemon.
//!
//! There are n nodes. In each step each node sends to one random other node the w newest entries it
//! has, including its own. An entry spreads like a rumour until, at age `T`, w newer entries exist.
//! By then w nodes have the entry, and it is no longer passed on. After that, an entry in a view is
//! replaced when a message happens to carry a newer entry of the same node. On average a view
//! receives w entries in each step, each of a random one of the n - 1 other nodes.
//!
//! Ages are in steps, measured when the messages of a step have arrived. For n ≤ w every node
//! passes on every entry, and the formulas do not apply.

/// Euler's constant.
const GAMMA: f64 = 0.577_215_664_901_532_9;

/// The age up to which entries are passed on (`T`).
fn relay_age(n: f64, w: f64) -> f64 {
    (w * (n - 1.0) / (n - w)).ln() * (n - 1.0) / n
}

/// The average age of the entries in a message (`Aw`).
fn mean_age_in_messages(n: f64, w: f64) -> f64 {
    let last = relay_age(n, w);
    let grown = (n * last / (n - 1.0)).exp();
    let known_to = n * grown / (n - 1.0 + grown);
    last - (n - 1.0) / known_to * ((n - 1.0 + grown).ln() - n.ln())
}

/// The chance that a step passes without news of a given node.
fn chance_of_no_update(n: f64, w: f64) -> f64 {
    (1.0 - 1.0 / (n - 1.0)).powf(w)
}

/// The average age of the entries in a view, in steps.
#[must_use]
pub fn average_age(nodes: usize, window: usize) -> f64 {
    let (n, w) = (nodes as f64, window as f64);
    1.0 / (1.0 - chance_of_no_update(n, w)) + mean_age_in_messages(n, w)
}

/// The age that the oldest entry in a view is expected to have, in steps.
#[must_use]
pub fn worst_age(nodes: usize, window: usize) -> f64 {
    let (n, w) = (nodes as f64, window as f64);
    -(n.ln() + GAMMA) / chance_of_no_update(n, w).ln()
}

/// The smallest window for which the average age is at most `average` steps, if there is one below
/// the number of nodes.
#[must_use]
pub fn window_for(nodes: usize, average: f64) -> Option<usize> {
    (2..nodes).find(|window| average_age(nodes, *window) <= average)
}

/// How often each node sends urgent news, so that all nodes receive it: 2 ln n (MOSIX: 1.386 log2
/// n).
#[must_use]
pub fn piggyback_sends(nodes: usize) -> u8 {
    // At most 2 ln 65,535 = 22.2.
    (2.0 * (nodes.max(2) as f64).ln()).ceil() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_give_the_published_ages() {
        // Nodes, window, average and worst age.
        let published = [
            (32, 16, 4.49, 7.71),
            (64, 16, 6.35, 18.5),
            (128, 20, 8.94, 34.3),
            (256, 16, 18.3, 97.4),
            (512, 32, 19.0, 109.0),
            (1024, 16, 66.3, 480.0),
            (2048, 16, 130.0, 1049.0),
        ];
        for (nodes, window, average, worst) in published {
            let near = |got: f64, wanted: f64| (got / wanted - 1.0).abs() < 0.005;
            assert!(near(average_age(nodes, window), average), "{nodes}: {}", average_age(nodes, window));
            assert!(near(worst_age(nodes, window), worst), "{nodes}: {}", worst_age(nodes, window));
        }
    }

    #[test]
    fn window_for_an_age_is_the_smallest() {
        let window = window_for(256, 11.0).unwrap();
        assert!(average_age(256, window) <= 11.0 && average_age(256, window - 1) > 11.0);
        assert_eq!(window_for(256, 0.5), None);
    }
}
