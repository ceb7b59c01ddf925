//! What the administrator has set by hand (`mosctl`), kept over restarts of ternd, but not of the machine.

use crate::files;
use crate::slots::lock;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tern_control::{Refusal, RefusalKind, Reply, Settings};

/// No settings are longer.
const MOST: usize = 64 << 10;

/// The settings, in memory and in a file.
#[derive(Debug)]
pub(crate) struct Kept {
    path: PathBuf,
    now: Mutex<Settings>,
}

impl Kept {
    /// Those that an earlier ternd left, or the defaults.
    pub(crate) fn open(run_dir: &Path) -> Self {
        let path = run_dir.join("settings.json");
        let text = files::read_bounded(&path, MOST).unwrap_or_default();
        let now = serde_json::from_str(&text).unwrap_or_else(|error| {
            if !text.is_empty() {
                tracing::warn!(path = %path.display(), %error, "settings of another version are forgotten");
            }
            Settings::default()
        });
        Self { path, now: Mutex::new(now) }
    }

    /// As they are.
    pub(crate) fn now(&self) -> Settings {
        lock(&self.now).clone()
    }

    /// Changes them for as long as this ternd runs.
    pub(crate) fn change_for_now(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut lock(&self.now));
    }

    /// Changes them, if that can be written down.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Settings)) -> Result<Reply, Refusal> {
        let mut now = lock(&self.now);
        let mut then = now.clone();
        change(&mut then);
        let text = serde_json::to_string(&then).unwrap_or_default();
        files::replace(&self.path, &text, 0o644).map_err(|e| {
            let path = self.path.display();
            Refusal::new(RefusalKind::Internal, format!("cannot write {path}: {e}"))
        })?;
        *now = then;
        Ok(Reply::Done)
    }
}

/// The settings of a node as they are kept, for its other programs.
#[must_use]
pub fn settings(run_dir: &Path) -> Settings {
    Kept::open(run_dir).now()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn settings_survive_a_restart_and_nonsense_does_not() {
        let dir = Scratch::new("settings");
        let kept = Kept::open(&dir.0);
        assert_eq!(kept.now(), Settings::default());
        kept.change(|settings| (settings.block, settings.speed) = (true, Some(6500))).unwrap();
        let again = Kept::open(&dir.0).now();
        assert!(again.block && !again.stay && again.speed == Some(6500));
        std::fs::write(dir.0.join("settings.json"), "{").unwrap();
        assert_eq!(Kept::open(&dir.0).now(), Settings::default());
        std::fs::remove_dir_all(&dir.0).unwrap();
        assert!(kept.change(|settings| settings.stay = true).is_err());
        assert!(!kept.now().stay, "what could not be written down is not in force");
        kept.change_for_now(|settings| settings.stay = true);
        assert!(kept.now().stay);
    }
}
