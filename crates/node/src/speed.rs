//! The speed of this machine's CPUs: measured once, and kept.

use crate::files;
use std::path::Path;
use tern_load::Calibration;

/// Of one CPU; 10,000 is a standard one. What the file says holds as long as processor and kernel are the same; else it
/// is measured, which takes about a second of one CPU, and written there.
pub fn speed(file: &Path) -> u32 {
    let kept = std::fs::read(file).ok().and_then(|text| serde_json::from_slice::<Calibration>(&text).ok());
    if let Some(kept) = kept.filter(Calibration::holds_here) {
        return kept.speed;
    }
    let measured = Calibration::measure();
    tracing::info!(speed = measured.speed, "the speed of this machine's CPUs was measured");
    let text = serde_json::to_string(&measured).unwrap_or_default();
    if let Err(error) = files::replace(file, &text, 0o644) {
        tracing::warn!(%error, path = %file.display(), "it is measured again next time");
    }
    measured.speed
}
