//! Generates `docs/reference/syscalls.md` from the table.

use crate::limits;
use crate::route::{Route, Rule};
use crate::row::{Arguments, Row};
use crate::table;
use std::fmt::Write;

/// The page: every call, by number, with its route, its arguments and the reason.
#[must_use]
pub fn markdown() -> String {
    let mut page = format!(
        "# Where each system call runs\n\n\
         Generated from `crates/syscall/src/table/` by `make docs`. Do not edit.\n\n\
         * **Here**: natively, where the guest is; not trapped.\n\
         * **Home**: performed by the deputy; for delegated files and cached names possibly earlier or later than the program's call\n\
         \x20\x20([delegation.md](../design/delegation.md)).\n\
         * **Both**: a local and a home part that agree.\n\
         * **Homeward**: brings the process home, for the reason that `mps` shows.\n\
         * **Refuse**: answered with this errno.\n\n\
         A number without a row is refused with ENOSYS. Arguments are shown for calls that can be made at \
         home; what is not shown is ignored there.\n\n\
         What differs from a local call:\n\n\
         * One message carries at most {} MiB of data. A longer read, write, pread64, pwrite64 or sendto goes in \
         pieces, and the program gets the sum; other calls are cut to that, as the kernel itself cuts at 2 GiB.\n\
         * An output that cannot be written to the guest's memory answers EFAULT after the call was made. \
         Calls that consume what they read are checked before: their buffer ends where the memory ends. A \
         datagram or message that does not fit there is cut, where the kernel answers EFAULT; in segments \
         (readv, recvmsg) it is not.\n\
         * Padding between directory entries or control messages is overwritten with zeros; the kernel leaves \
         it unchanged.\n\
         * A write from one buffer of which only the beginning can be read answers EFAULT instead of writing \
         the beginning.\n\
         * A call that fails writes nothing to memory. The kernel writes the numbers of a socketpair that it then \
         refuses.\n\n\
         | nr | call | route | arguments | why |\n|---:|---|---|---|---|\n",
        limits::MAX_DATA >> 20
    );
    for row in table::rows() {
        let (nr, name, note) = (row.nr, row.name, row.note);
        // Writing to a String cannot fail.
        let _ = writeln!(page, "| {nr} | `{name}` | {} | {} | {note} |", rule(&row.rule), arguments(row));
    }
    page
}

fn rule(rule: &Rule) -> String {
    match rule {
        Rule::Always(Route::Here | Route::Timed) => "Here".into(),
        Rule::Always(Route::Home) => "Home".into(),
        Rule::Always(Route::Both(split_call)) => format!("Both ({split_call:?})"),
        Rule::Always(Route::Homeward(reason)) => format!("Homeward: {reason}"),
        Rule::Always(Route::Refuse(errno)) => format!("Refuse: {}", errno_name(*errno)),
        Rule::HereIf(_, _, words) | Rule::By(_, words) => (*words).into(),
    }
}

fn arguments(row: &Row) -> String {
    if row.rule.is_native() {
        return "–".into();
    }
    match row.arguments {
        Arguments::Fixed([]) => "none".into(),
        Arguments::Fixed(shapes) => shapes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" · "),
        Arguments::By(_, words) => words.into(),
    }
}

fn errno_name(errno: i32) -> String {
    match errno {
        libc::ENOSYS => "ENOSYS".into(),
        libc::ENOSPC => "ENOSPC".into(),
        libc::EINVAL => "EINVAL".into(),
        libc::EOPNOTSUPP => "EOPNOTSUPP".into(),
        other => format!("errno {other}"),
    }
}
