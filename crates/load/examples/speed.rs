//! Prints the speed of this machine's CPU, and how long the measurement took.
#![allow(clippy::print_stdout, reason = "it is what it is for")]

use std::time::Instant;
use tern_load::Calibration;

fn main() {
    for _ in 0..std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1) {
        let began = Instant::now();
        let found = Calibration::measure();
        println!("speed {} in {:.1?}  ({})", found.speed, began.elapsed(), found.processor);
    }
}
