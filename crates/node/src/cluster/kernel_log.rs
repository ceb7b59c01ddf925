//! Messages in the kernel's log (`mosctl logmap`), which a console shows even if nobody reads the
//! log of ternd. MOSIX was part of the kernel and wrote there by default; ternd has its own log,
//! and writes there on request.

use crate::config::settings::SettingsStore;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// `<29>` is priority notice, facility daemon.
const PREFIX: &str = "<29>tern: ";

/// Logs a change of the cluster, if the setting `log_map` is on.
pub(crate) fn log_change(settings: &SettingsStore, change: &str) {
    if !settings.get().log_map {
        return;
    }
    if let Err(error) = write(Path::new("/dev/kmsg"), change) {
        tracing::warn!(%error, "cannot write to the kernel's log; mosctl nologmap turns this off");
    }
}

/// Appends one record; each write is one record.
fn write(log: &Path, change: &str) -> io::Result<()> {
    let line = format!("{PREFIX}{change}\n");
    OpenOptions::new().append(true).open(log)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;

    #[test]
    fn each_change_is_one_record() {
        let dir = Scratch::new("kernel-log");
        let log = dir.0.join("kmsg");
        assert!(write(&log, "node 2 is dead").is_err(), "it does not create the file");
        std::fs::write(&log, "").unwrap();
        write(&log, "node 2 is there").unwrap();
        write(&log, "node 2 is dead").unwrap();
        let message = std::fs::read_to_string(&log).unwrap();
        assert_eq!(message, "<29>tern: node 2 is there\n<29>tern: node 2 is dead\n");
    }
}
