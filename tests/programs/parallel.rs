//! Proves: a work-stealing thread pool (rayon): sums, sorts, recursion, scopes and channels have
//! the same results as with one thread. The output is the same each time.
#![forbid(unsafe_code)]

use rayon::prelude::*;
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

/// A pseudo-random number.
fn mixed(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

fn fibonacci(n: u64) -> u64 {
    if n < 2 {
        return n;
    }
    let (a, b) = if n < 12 {
        (fibonacci(n - 1), fibonacci(n - 2))
    } else {
        rayon::join(|| fibonacci(n - 1), || fibonacci(n - 2))
    };
    a + b
}

/// In each part of the pool, in all its threads at once, and one by one.
fn work(round: u64) -> u64 {
    let sum = (0..2_000_000u64).into_par_iter().map(|n| mixed(n ^ round)).reduce(|| 0, u64::wrapping_add);

    let mut numbers: Vec<u64> = (0..300_000).into_par_iter().map(|n| mixed(n + round)).collect();
    numbers.par_sort_unstable();
    let sorted = numbers.par_windows(2).all(|pair| pair[0] <= pair[1]);
    let mut words: Vec<String> = numbers.par_iter().map(|n| format!("{:x}", n % 99_991)).collect();
    words.par_sort();
    let middle = words.get(words.len() / 2).map_or(0, |word| u64::from_str_radix(word, 16).unwrap_or(0));

    let slots: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
    rayon::scope(|scope| {
        for (at, slot) in slots.iter().enumerate() {
            scope.spawn(move |inner| {
                inner.spawn(move |_| {
                    slot.fetch_add(mixed(at as u64), Ordering::Relaxed);
                });
                slot.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    let slots: u64 = slots.iter().map(|slot| slot.load(Ordering::Relaxed)).fold(0, u64::wrapping_add);

    let (send, receive) = mpsc::channel();
    rayon::scope(|scope| {
        for n in 0..200u64 {
            let send = send.clone();
            scope.spawn(move |_| {
                // The receiver outlives the sender.
                let _sent = send.send(fibonacci(n % 20));
            });
        }
        drop(send);
    });
    let received: u64 = receive.into_iter().sum();

    sum ^ u64::from(sorted) ^ middle.rotate_left(7) ^ slots.rotate_left(13) ^ received ^ fibonacci(27)
}

fn main() -> Result<(), Box<dyn Error>> {
    for threads in [1, 2, 5, 16] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        let all = (0..2).map(|round| pool.install(|| work(round))).fold(0, u64::wrapping_add);
        println!("{threads} threads: {all:016x}");
        println!("each of them: {:?}", pool.broadcast(|me| me.index()));
    }
    Ok(())
}
