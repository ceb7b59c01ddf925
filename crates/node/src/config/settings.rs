//! The settings that the administrator makes with `mosctl`. They survive a restart of ternd, but
//! not of the machine.

use crate::os::sync::lock;
use crate::os::text_file;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tern_control::{NodeSettings, Refusal, RefusalKind, Reply};

/// Maximum size of the file in bytes.
const MAX_FILE_LEN: usize = 64 << 10;

/// The settings, in memory and in a file.
#[derive(Debug)]
pub(crate) struct SettingsStore {
    path: PathBuf,
    current: Mutex<NodeSettings>,
}

impl SettingsStore {
    /// Loads the settings that an earlier ternd stored, or the defaults.
    pub(crate) fn open(run_dir: &Path) -> Self {
        let path = run_dir.join("settings.json");
        let text = text_file::read_bounded(&path, MAX_FILE_LEN).unwrap_or_default();
        let current = serde_json::from_str(&text).unwrap_or_else(|error| {
            if !text.is_empty() {
                tracing::warn!(path = %path.display(), %error, "ignoring the stored settings, which are of another version");
            }
            NodeSettings::default()
        });
        Self { path, current: Mutex::new(current) }
    }

    /// The current settings.
    pub(crate) fn get(&self) -> NodeSettings {
        lock(&self.current).clone()
    }

    /// Changes the settings for as long as this ternd runs.
    pub(crate) fn change_until_exit(&self, change: impl FnOnce(&mut NodeSettings)) {
        change(&mut lock(&self.current));
    }

    /// Changes the settings and stores them; nothing changes if they cannot be stored.
    pub(crate) fn change(&self, change: impl FnOnce(&mut NodeSettings)) -> Result<Reply, Refusal> {
        let mut current = lock(&self.current);
        let mut updated = current.clone();
        change(&mut updated);
        let text = serde_json::to_string(&updated).unwrap_or_default();
        text_file::replace(&self.path, &text, 0o644).map_err(|e| {
            let path = self.path.display();
            Refusal::new(RefusalKind::Internal, format!("cannot write {path}: {e}"))
        })?;
        *current = updated;
        Ok(Reply::Done)
    }
}

/// Reads the stored settings of a node, for its other programs.
#[must_use]
pub fn read_settings(run_dir: &Path) -> NodeSettings {
    SettingsStore::open(run_dir).get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;

    #[test]
    fn settings_survive_a_restart_and_invalid_ones_are_dropped() {
        let dir = Scratch::new("settings");
        let store = SettingsStore::open(&dir.0);
        assert_eq!(store.get(), NodeSettings::default());
        store.change(|settings| (settings.block, settings.speed) = (true, Some(6500))).unwrap();
        let again = SettingsStore::open(&dir.0).get();
        assert!(again.block && !again.stay && again.speed == Some(6500));
        std::fs::write(dir.0.join("settings.json"), "{").unwrap();
        assert_eq!(SettingsStore::open(&dir.0).get(), NodeSettings::default());
        std::fs::remove_dir_all(&dir.0).unwrap();
        assert!(store.change(|settings| settings.stay = true).is_err());
        assert!(!store.get().stay, "settings that could not be stored have no effect");
        store.change_until_exit(|settings| settings.stay = true);
        assert!(store.get().stay);
    }
}
