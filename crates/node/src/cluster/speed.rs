//! The speed of this machine's CPUs: measured once and stored.

use crate::os::text_file;
use std::path::Path;
use tern_load::Calibration;

/// The speed of one CPU; 10,000 is a standard CPU. The value in the file is used if processor and
/// kernel are the same. Otherwise it is measured, which takes about a second of CPU time, and
/// stored.
pub fn cpu_speed(file: &Path) -> u32 {
    let kept = std::fs::read(file).ok().and_then(|text| serde_json::from_slice::<Calibration>(&text).ok());
    if let Some(kept) = kept.filter(Calibration::is_valid_here) {
        return kept.speed;
    }
    let measured = Calibration::measure();
    tracing::info!(speed = measured.speed, "the speed of this machine's CPUs was measured");
    let text = serde_json::to_string(&measured).unwrap_or_default();
    if let Err(error) = text_file::replace(file, &text, 0o644) {
        tracing::warn!(%error, path = %file.display(), "cannot store the speed; it will be measured again");
    }
    measured.speed
}
