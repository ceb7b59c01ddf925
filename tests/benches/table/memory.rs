//! Throughput of memory transfer.

use crate::bench_lab::BenchLab;
use crate::table::{Aim, Series, Table};
use crate::tls;
use anyhow::{Context, Result};
use std::thread::JoinHandle;
use std::time::Duration;

/// Number of measurements of each, taken alternately.
const TURNS: u32 = 3;
/// Bytes of memory of the process, and of the stream it is compared with.
const HEAP: usize = 1 << 30;
/// Bytes freed at a time.
const CHUNK: usize = 64 << 20;

/// Adds its rows.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn measure(table: &mut Table) -> Result<()> {
    against(table, "switch:4gbit", "4 Gbit/s", "iperf3", Aim::AtLeast(0.9), iperf)?;
    against(table, "switch", "unlimited", "TLS into fresh memory", Aim::AtLeast(0.7), tls::stream)
}

fn against(
    table: &mut Table,
    link: &str,
    name: &str,
    other: &str,
    aim: Aim,
    stream: fn(&BenchLab) -> Result<f64>,
) -> Result<()> {
    let lab = BenchLab::make(2, link)?;
    let (mut moved, mut streamed) = <(Series, Series)>::default();
    for _ in 0..TURNS {
        let mut program = lab.program(1, &["dirty", "1024", "0"])?;
        program.line()?;
        let warmth = warm();
        let report = lab.migrate(program.pid, "2").context("a heap of 1 GiB")?;
        let _cold = warmth.join();
        moved.add(report.bytes as f64 / report.total_ms / 1e3);
        drop(program);
        let warmth = warm();
        streamed.add(stream(&lab)? / 1e6);
        let _cold = warmth.join();
    }
    let ratio = moved.median() / streamed.median();
    let what = format!("1 GiB process moved, link {name}");
    table.compare(&what, &moved.text(" MB/s"), other, &streamed.text(" MB/s"), ratio, aim)
}

/// Keeps this machine's free memory backed by its host's memory for the next seconds. The host of a
/// virtual machine takes back pages that have been free for two seconds (free page reporting). To
/// get such a page again costs more than to send its content (0.3 GB/s instead of 2). Without this
/// function, the first measurement of a turn would include this cost, and the second would not.
fn warm() -> JoinHandle<()> {
    let mut held: Vec<Vec<u8>> = (0..3 * HEAP / CHUNK).map(|_| vec![1; CHUNK]).collect();
    std::thread::spawn(move || {
        while let Some(chunk) = held.pop() {
            drop(std::hint::black_box(chunk));
            std::thread::sleep(Duration::from_millis(40));
        }
    })
}

/// Bytes a second received.
fn iperf(lab: &BenchLab) -> Result<f64> {
    let mut server = lab.start(2, &["iperf3", "-s", "-1", "--forceflush"])?;
    while !server.line()?.contains("listening") {}
    let address = lab.address(2);
    let out = lab.run(1, &["iperf3", "-c", &address, "-n", "1G", "--json"])?;
    let report: serde_json::Value = serde_json::from_slice(&out)?;
    let bits = report.pointer("/end/sum_received/bits_per_second").and_then(serde_json::Value::as_f64);
    Ok(bits.context("iperf3 reports no speed")? / 8.0)
}
