//! The table: one row for every x86-64 system call. The filter and `docs/reference/syscalls.md` are
//! generated from it; the router, `gather` and `lay_out` look calls up in it.
//!
//! A row applies to a call from any address. Only the filter makes an exception: it also allows a
//! few calls from Tern's own `syscall` instruction (see filter.rs).

mod credentials;
mod descriptor;
mod event;
mod fcntl;
mod file;
mod ioctl;
mod ipc;
mod memory;
mod network;
mod prctl;
mod process;
mod signal;
mod system;
mod time;
mod vocabulary;

use crate::row::Row;

/// The highest number with a row, plus one.
pub const NUMBERS: u32 = 471;

const FILES: &[&[Row]] = &[
    credentials::ROWS,
    descriptor::ROWS,
    event::ROWS,
    file::ROWS,
    ipc::ROWS,
    memory::ROWS,
    network::ROWS,
    process::ROWS,
    signal::ROWS,
    system::ROWS,
    time::ROWS,
];

static BY_NUMBER: [Option<Row>; NUMBERS as usize] = {
    let mut by_number = [None; NUMBERS as usize];
    let mut file = 0;
    while file < FILES.len() {
        let mut at = 0;
        while at < FILES[file].len() {
            let row = FILES[file][at];
            assert!(by_number[row.nr as usize].is_none(), "two rows with one number");
            by_number[row.nr as usize] = Some(row);
            at += 1;
        }
        file += 1;
    }
    by_number
};

/// The row of a call, if there is one.
#[must_use]
pub fn row(nr: u32) -> Option<&'static Row> {
    BY_NUMBER.get(nr as usize)?.as_ref()
}

/// All rows, by number.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    BY_NUMBER.iter().flatten()
}

#[cfg(test)]
mod tests;
