//! Servers whose connections move with them, to nodes chosen at random, while their clients check
//! each byte.

use crate::connections::{RUN_TIMEOUT, Scene, await_progress, nothing_is_left};
use crate::waiting::{LOOP, SERVER, THREADS, WORKERS};
use anyhow::{Context, Result, bail, ensure};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tern_tests::runs::running::Running;

/// Moves of each server. There are six.
const MOVES: usize = 200;
/// Bytes that the clients send at a time.
const SIZES: [u64; 8] = [100, 1000, 20_000, 300_000, 100, 1000, 20_000, 300_000];
/// The longest rest between two moves.
const MAX_REST_MS: u64 = 200;

/// Numbers that look random (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

fn server_moves_at_random(name: &str, program: &str, options: &[&str]) -> Result<()> {
    let mut scene = Scene::with_server(name, program, options)?;
    let mut clients = SIZES.iter().map(|size| scene.client(*size)).collect::<Result<Vec<Running>>>()?;
    for client in &clients {
        await_progress(&scene, client, 1)?;
    }
    let (mut numbers, mut at, mut longest) = (Numbers(0x9e37_79b9), "home", Duration::ZERO);
    for _ in 0..MOVES {
        let others: Vec<&str> = ["home", "2", "3"].into_iter().filter(|to| *to != at).collect();
        at = others[numbers.below(2) as usize];
        let begun = Instant::now();
        scene.migrate(at)?;
        longest = longest.max(begun.elapsed());
        sleep(Duration::from_millis(numbers.below(MAX_REST_MS)));
        if let Some(client) = clients.iter_mut().find_map(|client| client.has_ended().then_some(client)) {
            bail!("a client has ended: {}\n{}", client.output_so_far(), scene.diagnostics());
        }
    }
    for client in &clients {
        await_progress(&scene, client, 1)?;
    }
    scene.cluster.run(3, &["touch", "/tmp/stop"])?;
    for client in &mut clients {
        let outcome = client.finish(RUN_TIMEOUT).with_context(|| scene.diagnostics())?;
        let text = String::from_utf8_lossy(&outcome.out).into_owned();
        let total =
            text.lines().find_map(|line| line.strip_prefix("done ")).context("a client has failed")?;
        scene.server.await_output(&format!("served {total}"))?;
    }
    eprintln!("{name}: {MOVES} moves, the longest took {longest:?}");
    scene.cluster.run(1, &["sh", "-c", "echo end > /tmp/lines"])?;
    let outcome = scene.server.finish(RUN_TIMEOUT)?;
    ensure!(outcome.status == 0, "{outcome:?}");
    nothing_is_left(&scene)
}

mod thousand_moves {
    use super::*;

    #[test]
    fn server_that_selects() -> Result<()> {
        server_moves_at_random("random-select", SERVER, &["select"])
    }

    #[test]
    fn server_that_polls() -> Result<()> {
        server_moves_at_random("random-poll", SERVER, &["poll", "timer"])
    }

    #[test]
    fn server_with_an_epoll_set() -> Result<()> {
        server_moves_at_random("random-epoll", SERVER, &["epoll", "timer"])
    }

    #[test]
    fn server_with_a_thread_for_each_client() -> Result<()> {
        server_moves_at_random("random-threads", THREADS, &[])
    }

    #[test]
    fn server_with_an_event_loop_and_threads() -> Result<()> {
        server_moves_at_random("random-loop", LOOP, &[])
    }

    #[test]
    fn server_with_an_epoll_set_for_each_thread() -> Result<()> {
        server_moves_at_random("random-workers", WORKERS, &[])
    }
}
