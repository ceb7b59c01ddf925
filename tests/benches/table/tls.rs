//! Two peers of a tern-wire link on two nodes, with nothing behind them: the cost of TLS alone.

use crate::bench_lab::{BenchLab, Running};
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, Read, Write, stdin, stdout};
use std::net::TcpListener;
use std::time::{Duration, Instant};
use tern_ids::Fingerprint;
use tern_wire::limits::PREAMBLE_LEN;
use tern_wire::{Ephemeral, Link, Preamble, pinned_client, pinned_server};

const PORT: u16 = 7002;
/// Bytes of a frame of the stream, as in the migration of memory.
const FRAME_BYTES: usize = 256 << 10;
/// Frames of the stream: 1 GiB.
const FRAMES: u64 = 4096;

/// Nanoseconds of one exchange of 64 bytes between node 1 and node 2.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn ping_pong(lab: &BenchLab, seconds: f64) -> Result<f64> {
    between(lab, &["ping", &seconds.to_string()])
}

/// Bytes a second from node 1 into fresh memory of node 2.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn stream(lab: &BenchLab) -> Result<f64> {
    between(lab, &["stream"])
}

/// Starts both peers, exchanges their keys, and returns the number that the client prints.
fn between(lab: &BenchLab, what: &[&str]) -> Result<f64> {
    let (own, address) = (lab.own()?, lab.address(2));
    let begin = |node, side: &[&str]| -> Result<(Running, String)> {
        let words: Vec<&str> = [&*own, "tls"].into_iter().chain(side.iter().copied()).collect();
        let mut run_peer = lab.start(node, &words)?;
        let key = run_peer.line()?;
        Ok((run_peer, key))
    };
    let (mut server, servers) = begin(2, &["serve"])?;
    let (mut client, clients) = begin(1, &[&[&*address], what].concat())?;
    server.send(&clients)?;
    ensure!(server.line()? == "listening", "the server does not listen");
    client.send(&servers)?;
    Ok(client.line()?.parse()?)
}

/// One peer: `serve`, or `ADDRESS ping SECONDS`, or `ADDRESS stream`.
///
/// # Errors
/// If the link fails.
pub(crate) fn run_peer(words: &[&str]) -> Result<()> {
    let key = Ephemeral::generate()?;
    let hex: String = key.fingerprint().0.iter().map(|byte| format!("{byte:02x}")).collect();
    print_line(&hex)?;
    if let ["serve"] = words {
        return serve(&key);
    }
    let [address, what @ ..] = words else {
        bail!("tls serve | tls ADDRESS ping SECONDS | tls ADDRESS stream")
    };
    let tls = pinned_client(&key, read_key()?)?;
    let deadline = Instant::now() + Duration::from_secs(300);
    let mut link = Link::connect(&format!("{address}:{PORT}"), Preamble::Node, &tls, deadline)?;
    match what {
        ["ping", seconds] => {
            let (begun, limit) = (Instant::now(), Duration::from_secs_f64(seconds.parse()?));
            let mut rounds = 0u32;
            while begun.elapsed() < limit {
                link.send(1, 0, &[&[1; 64]], deadline)?;
                let frame = link.recv(deadline)?;
                link.recycle(frame.payload);
                rounds += 1;
            }
            print_line(&format!("{}", begun.elapsed().as_secs_f64() * 1e9 / f64::from(rounds)))
        }
        _ => {
            let (piece, begun) = (vec![1; FRAME_BYTES], Instant::now());
            for tag in 0..FRAMES {
                link.send(2, tag, &[&piece], deadline)?;
            }
            link.recv(deadline)?;
            print_line(&format!("{}", FRAMES as f64 * FRAME_BYTES as f64 / begun.elapsed().as_secs_f64()))
        }
    }
}

/// Echoes frames of kind 1; copies those of kind 2 into untouched memory, and replies to the last.
fn serve(key: &Ephemeral) -> Result<()> {
    let tls = pinned_server(key, &[read_key()?])?;
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    print_line("listening")?;
    let (mut socket, _) = listener.accept()?;
    socket.read_exact(&mut [0; PREAMBLE_LEN])?;
    let deadline = Instant::now() + Duration::from_secs(300);
    let mut link = Link::accept(socket, &tls, deadline)?;
    let mut memory = vec![0; FRAME_BYTES * FRAMES as usize];
    while let Ok(frame) = link.recv(deadline) {
        if frame.kind == 1 {
            link.send(1, 0, &[&frame.payload], deadline)?;
        } else {
            let at = frame.tag as usize % FRAMES as usize * FRAME_BYTES;
            memory[at..at + FRAME_BYTES].copy_from_slice(&frame.payload);
            if frame.tag + 1 == FRAMES {
                link.send(3, 0, &[], deadline)?;
            }
        }
        link.recycle(frame.payload);
    }
    std::hint::black_box(memory);
    Ok(())
}

fn print_line(line: &str) -> Result<()> {
    let mut out = stdout();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// The peer's key fingerprint, from standard input.
fn read_key() -> Result<Fingerprint> {
    let mut line = String::new();
    stdin().lock().read_line(&mut line)?;
    let line = line.trim();
    let mut bytes = [0; 32];
    ensure!(line.len() == 64 && line.is_ascii(), "{line:?} is no key");
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&line[at * 2..at * 2 + 2], 16).context("a key is hexadecimal")?;
    }
    Ok(Fingerprint(bytes))
}
