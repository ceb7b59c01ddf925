//! Two ends of a link of ours in two nodes, with nothing behind them: what TLS alone takes.

use crate::bed::{Bed, Running};
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, Read, Write, stdin, stdout};
use std::net::TcpListener;
use std::time::{Duration, Instant};
use tern_ids::Fingerprint;
use tern_wire::limits::PREAMBLE;
use tern_wire::{Ephemeral, Link, Preamble, pinned_client, pinned_server};

const PORT: u16 = 7002;
/// Bytes of a frame of the stream, as the migration of memory has them.
const PIECE: usize = 256 << 10;
/// Frames of the stream: 1 GiB.
const PIECES: u64 = 4096;

/// Nanoseconds of one exchange of 64 bytes between node 1 and node 2.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn ping_pong(bed: &Bed, seconds: f64) -> Result<f64> {
    between(bed, &["ping", &seconds.to_string()])
}

/// Bytes a second from node 1 into fresh memory of node 2.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn stream(bed: &Bed) -> Result<f64> {
    between(bed, &["stream"])
}

/// Starts both ends, shows each the other's key, and takes the number that the client says.
fn between(bed: &Bed, what: &[&str]) -> Result<f64> {
    let (own, address) = (bed.own()?, bed.lab.node(2).address().to_string());
    let begin = |node, side: &[&str]| -> Result<(Running, String)> {
        let words: Vec<&str> = [&*own, "tls"].into_iter().chain(side.iter().copied()).collect();
        let mut end = bed.start(node, &words)?;
        let key = end.line()?;
        Ok((end, key))
    };
    let (mut server, servers) = begin(2, &["serve"])?;
    let (mut client, clients) = begin(1, &[&[&*address], what].concat())?;
    server.tell(&clients)?;
    ensure!(server.line()? == "listening", "the server does not listen");
    client.tell(&servers)?;
    Ok(client.line()?.parse()?)
}

/// One end: `serve`, or `ADDRESS ping SECONDS`, or `ADDRESS stream`.
///
/// # Errors
/// If the link fails.
pub(crate) fn end(words: &[&str]) -> Result<()> {
    let key = Ephemeral::generate()?;
    let hex: String = key.fingerprint().0.iter().map(|byte| format!("{byte:02x}")).collect();
    say(&hex)?;
    if let ["serve"] = words {
        return serve(&key);
    }
    let [address, what @ ..] = words else {
        bail!("tls serve | tls ADDRESS ping SECONDS | tls ADDRESS stream")
    };
    let tls = pinned_client(&key, heard()?)?;
    let far = Instant::now() + Duration::from_secs(300);
    let mut link = Link::connect(&format!("{address}:{PORT}"), Preamble::Node, &tls, far)?;
    match what {
        ["ping", seconds] => {
            let (begun, limit) = (Instant::now(), Duration::from_secs_f64(seconds.parse()?));
            let mut rounds = 0u32;
            while begun.elapsed() < limit {
                link.send(1, 0, &[&[1; 64]], far)?;
                let frame = link.recv(far)?;
                link.recycle(frame.payload);
                rounds += 1;
            }
            say(&format!("{}", begun.elapsed().as_secs_f64() * 1e9 / f64::from(rounds)))
        }
        _ => {
            let (piece, begun) = (vec![1; PIECE], Instant::now());
            for tag in 0..PIECES {
                link.send(2, tag, &[&piece], far)?;
            }
            link.recv(far)?;
            say(&format!("{}", PIECES as f64 * PIECE as f64 / begun.elapsed().as_secs_f64()))
        }
    }
}

/// Echoes frames of kind 1; puts those of kind 2 into memory that nobody has touched, and answers the last.
fn serve(key: &Ephemeral) -> Result<()> {
    let tls = pinned_server(key, &[heard()?])?;
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    say("listening")?;
    let (mut socket, _) = listener.accept()?;
    socket.read_exact(&mut [0; PREAMBLE])?;
    let far = Instant::now() + Duration::from_secs(300);
    let mut link = Link::accept(socket, &tls, far)?;
    let mut memory = vec![0; PIECE * PIECES as usize];
    while let Ok(frame) = link.recv(far) {
        if frame.kind == 1 {
            link.send(1, 0, &[&frame.payload], far)?;
        } else {
            let at = frame.tag as usize % PIECES as usize * PIECE;
            memory[at..at + PIECE].copy_from_slice(&frame.payload);
            if frame.tag + 1 == PIECES {
                link.send(3, 0, &[], far)?;
            }
        }
        link.recycle(frame.payload);
    }
    std::hint::black_box(memory);
    Ok(())
}

fn say(line: &str) -> Result<()> {
    let mut out = stdout();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// The other's key, from standard input.
fn heard() -> Result<Fingerprint> {
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
