//! `make bench`: one table, each row with the reference it is compared with, measured in the same
//! run.
//!
//! ```text
//!  calls     a forwarded getppid        against   a TCP ping-pong between the same nodes
//!  memory    a process of 1 GiB moved   against   iperf3, and TLS streaming into fresh memory
//!  freeze    freeze time, by heap size and write rate
//!  threads   the freeze with 100 threads   against   the same with one
//!  home      a program under mosrun     against   the same alone
//!  rates     calls, signals, forks and execs a second away   against   the same at home
//! ```
//! `TERN_BENCH=calls,freeze` selects rows. The program is also the peer of the streams and
//! ping-pongs over TLS (`tls`), and times program starts (`start`): these run inside a node.
#![forbid(unsafe_code)]

mod bench_lab;
mod calls;
mod freeze;
mod home;
mod memory;
mod rates;
mod start;
mod table;
mod threads;
mod tls;

use anyhow::{Result, bail};
use table::Table;

/// A measurement that adds rows to the table.
type Measure = fn(&mut Table) -> Result<()>;

/// All measurements, by name.
const ALL: [(&str, Measure); 6] = [
    ("calls", calls::measure),
    ("memory", memory::measure),
    ("freeze", freeze::measure),
    ("threads", threads::measure),
    ("home", home::measure),
    ("rates", rates::measure),
];

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => {}
        ["tls", ref rest @ ..] => return tls::run_peer(rest),
        ["start", count] => return start::count(count.parse()?),
        _ => bail!(
            "this program is called without arguments; TERN_BENCH=calls,memory,freeze,threads,home,rates chooses"
        ),
    }
    let chosen = std::env::var("TERN_BENCH").unwrap_or_default();
    let mut table = Table::begin()?;
    let mut failures = Vec::new();
    for (name, measure) in ALL {
        if (chosen.is_empty() || chosen.split(',').any(|word| word == name))
            && let Err(error) = measure(&mut table)
        {
            table.failed(name, &error)?;
            failures.push(name);
        }
    }
    table.end()?;
    if !failures.is_empty() {
        bail!("not measured: {}", failures.join(", "));
    }
    Ok(())
}
