//! Settings of the calling thread's network namespace, below `/proc/sys/net`.

use crate::error::{Result, WithRemedy};

/// Writes a setting, such as `ipv4/conf/lo/rp_filter`.
///
/// # Errors
/// If the setting does not exist or may not be written.
pub(crate) fn write(setting: &str, value: u32) -> Result<()> {
    let path = format!("/proc/sys/net/{setting}");
    std::fs::write(&path, format!("{value}\n"))
        .with_remedy(|| format!("write {value} to {path}"), "mount /proc/sys writable, and run it as root")
}

/// Writes a setting of IPv6. Without IPv6 in this kernel it does not exist; then nothing is to be set.
///
/// # Errors
/// If the setting may not be written.
pub(crate) fn write_ipv6(setting: &str, value: u32) -> Result<()> {
    if std::path::Path::new("/proc/sys/net/ipv6").exists() { write(setting, value) } else { Ok(()) }
}
