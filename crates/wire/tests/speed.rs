//! Measures the speed of a link; not a check. `cargo test --release -p tern-wire --test speed --
//! --ignored --nocapture`.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};
use tern_wire::limits::PREAMBLE_LEN;
use tern_wire::*;

/// CPU seconds that this thread has used.
fn cpu() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

fn pair() -> (Link, Link) {
    let (a, b) = (Ephemeral::generate().unwrap(), Ephemeral::generate().unwrap());
    let client = pinned_client(&a, b.fingerprint()).unwrap();
    let server = pinned_server(&b, &[a.fingerprint()]).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let deadline = Instant::now() + Duration::from_secs(10);
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let (mut socket, _) = listener.accept().unwrap();
            std::io::Read::read_exact(&mut socket, &mut [0; PREAMBLE_LEN]).unwrap();
            Link::accept(socket, &server, deadline).unwrap()
        });
        (Link::connect(&address, Preamble::Node, &client, deadline).unwrap(), accepted.join().unwrap())
    })
}

#[test]
#[ignore = "a measurement, not a check"]
fn bulk() {
    let frames = 16_384u64; // 4 GiB
    for _ in 0..3 {
        let (mut a, mut b) = pair();
        let far = Instant::now() + Duration::from_secs(300);
        let payload = vec![1; 256 << 10];
        let begin = Instant::now();
        let (sender, receiver) = thread::scope(|scope| {
            let sender = scope.spawn(move || {
                for tag in 0..frames {
                    a.send(1, tag, &[&payload], far).unwrap();
                }
                a.recv(far).unwrap();
                cpu()
            });
            let before = cpu();
            for _ in 0..frames {
                let frame = b.recv(far).unwrap();
                b.recycle(frame.payload);
            }
            b.send(2, 0, &[], far).unwrap();
            (sender.join().unwrap(), cpu() - before)
        });
        let rate = |seconds: f64| frames as f64 / 4096.0 / seconds;
        let wall = rate(begin.elapsed().as_secs_f64());
        let (sender, receiver) = (rate(sender), rate(receiver));
        println!(
            "256 KiB frames: {wall:.2} GiB/s; per CPU second: sender {sender:.2}, receiver {receiver:.2}"
        );
    }
}

#[test]
#[ignore = "a measurement, not a check"]
fn small_frames() {
    let (mut a, mut b) = pair();
    let far = Instant::now() + Duration::from_secs(300);
    let rounds = 50_000u64;
    thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..rounds {
                let frame = b.recv(far).unwrap();
                b.queue(2, frame.tag, &[&frame.payload]).unwrap();
            }
            b
        });
        let begin = Instant::now();
        for tag in 0..rounds {
            a.queue(1, tag, &[&[1; 100]]).unwrap();
            assert_eq!(a.recv(far).unwrap().tag, tag);
        }
        println!(
            "round trip, frames of 100 bytes: {:.1} µs",
            begin.elapsed().as_secs_f64() * 1e6 / rounds as f64
        );
    });
}

#[test]
#[ignore = "a measurement, not a check"]
fn handshakes() {
    let begin = Instant::now();
    for _ in 0..200 {
        pair();
    }
    println!("keys, connection and handshake: {:.2} ms", begin.elapsed().as_secs_f64() * 5.0);
}
