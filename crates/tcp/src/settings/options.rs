//! Values of the options in the table: read, checked, and set.

use super::table::{Row, TABLE};
use crate::error::{InCall, SystemError};
use crate::syscalls::{SockOpt, int_option, set_int_option};
use rustix::fd::BorrowedFd;
use serde::{Deserialize, Serialize};
use std::io::{Error, ErrorKind};

/// The value of one socket option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptionValue {
    /// Level of setsockopt(2), such as `SOL_SOCKET`.
    pub level: i32,
    /// Number of the option.
    pub option: i32,
    /// Its value.
    pub value: i32,
}

impl OptionValue {
    fn row(&self) -> Option<&'static Row> {
        TABLE.iter().find(|row| row.option == SockOpt(self.level, self.option))
    }
}

/// The values of all rows. An option that this kernel lacks, or whose value is not carried over, is
/// left out.
pub(super) fn read(socket: BorrowedFd<'_>, v6: bool) -> Vec<OptionValue> {
    let value = |row: &Row| {
        let value = int_option(socket, row.option).ok().filter(|value| row.range.contains(value))?;
        Some(OptionValue { level: row.option.0, option: row.option.1, value })
    };
    TABLE.iter().filter(|row| v6 || !row.v6_only()).filter_map(value).collect()
}

/// Whether each value is of a row, in its range, and the only one of its row.
pub(super) fn are_valid(values: &[OptionValue], v6: bool) -> bool {
    let mut seen = vec![false; TABLE.len()];
    values.len() <= TABLE.len()
        && values.iter().all(|value| {
            let place = TABLE.iter().position(|row| row.option == SockOpt(value.level, value.option));
            place.is_some_and(|place| {
                let row = &TABLE[place];
                !std::mem::replace(&mut seen[place], true)
                    && row.range.contains(&value.value)
                    && (v6 || !row.v6_only())
            })
        })
}

/// Sets the options whose value differs, in the order of the values, which is that of the table. An
/// option that this kernel lacks is left out if its value is 0.
///
/// # Errors
/// An option cannot be set. Those before it are set.
pub(super) fn write(socket: BorrowedFd<'_>, values: &[OptionValue]) -> Result<(), SystemError> {
    for value in values {
        let Some(row) = value.row() else {
            return Err(Error::from(ErrorKind::InvalidInput)).in_call("setsockopt");
        };
        match int_option(socket, row.option) {
            Ok(present) if present == value.value => {}
            Err(_) if value.value == 0 => {}
            _ => set_int_option(socket, row.option, value.value).in_call(row.name)?,
        }
    }
    Ok(())
}
