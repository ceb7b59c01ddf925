//! Prints a sample of this node each second, as JSON: `sample [SECONDS]`.
#![allow(clippy::print_stdout, reason = "it is what it is for")]

use std::time::Duration;
use tern_load::{Calibration, Sampler};

fn main() -> Result<(), serde_json::Error> {
    let seconds = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(10);
    let mut sampler = Sampler::new(Calibration::measure().speed);
    sampler.sample();
    for _ in 0..seconds {
        std::thread::sleep(Duration::from_secs(1));
        println!("{}", serde_json::to_string(&sampler.sample())?);
    }
    Ok(())
}
