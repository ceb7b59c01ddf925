//! The kernel's log, which a console shows also where nobody reads ternd's (`mosctl logmap`). MOSIX, being of the kernel,
//! wrote there unless told not to; a daemon has a log of its own, and writes there if told to.

use crate::state::Node;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// `<29>`: a notice of a daemon.
const PREFIX: &str = "<29>tern: ";

/// Says what has changed, if that is wanted.
pub(crate) fn note(node: &Node, change: &str) {
    if !node.settings.now().log_map {
        return;
    }
    if let Err(error) = write(Path::new("/dev/kmsg"), change) {
        tracing::warn!(%error, "the kernel's log cannot be written to; mosctl nologmap stops the attempts");
    }
}

/// Each write is a line there, whatever it ends in.
fn write(log: &Path, change: &str) -> io::Result<()> {
    let line = format!("{PREFIX}{change}\n");
    OpenOptions::new().append(true).open(log)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_change_is_one_line() {
        let dir = Scratch::new("kernel-log");
        let log = dir.0.join("kmsg");
        assert!(write(&log, "node 2 is dead").is_err(), "it makes no file of its own where there is no log");
        std::fs::write(&log, "").unwrap();
        write(&log, "node 2 is there").unwrap();
        write(&log, "node 2 is dead").unwrap();
        let said = std::fs::read_to_string(&log).unwrap();
        assert_eq!(said, "<29>tern: node 2 is there\n<29>tern: node 2 is dead\n");
    }
}
