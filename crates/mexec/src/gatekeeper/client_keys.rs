//! The keys of outside clients: a file for each in `CONFIG_DIR/outside`, readable by its owner
//! only.
//!
//! The secret is stored in clear, since verifying a proof needs it. It is of no use anywhere else.

use anyhow::{Context, Result, bail};
use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use tern_control::{Refusal, RefusalKind};
use tern_node::Config;
use tern_wire::Secret;

/// The maximum length of a client's name.
const MAX_NAME_LEN: usize = 64;

/// The contents of a key's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientKey {
    /// The local user that its jobs run as.
    pub user: String,
    /// The secret shared by client and gatekeeper, in hexadecimal digits.
    pub(super) secret: String,
    /// When the key was created, in seconds since 1970, as all times here.
    pub made: u64,
    /// When it expires; never if absent.
    pub expires: Option<u64>,
    /// When it was revoked.
    pub revoked: Option<u64>,
    /// The maximum number of concurrent jobs.
    pub jobs: Option<u32>,
    /// Whether the user may be root.
    #[serde(default)]
    pub root: bool,
}

/// The last connection of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastSeen {
    /// Time in seconds since 1970.
    pub at: u64,
    /// The client's address.
    pub from: String,
}

/// The options of a new key.
#[derive(Debug, Clone, Default)]
pub struct KeyOptions {
    /// The local user.
    pub user: String,
    /// The maximum number of concurrent jobs.
    pub jobs: Option<u32>,
    /// Days until it expires.
    pub days: Option<u32>,
    /// Whether the user may be root.
    pub root: bool,
}

/// All keys of a node's gatekeeper.
#[derive(Debug, Clone)]
pub struct ClientKeys {
    keys: PathBuf,
    seen: PathBuf,
}

impl ClientKey {
    /// A key for tests.
    #[cfg(test)]
    pub(super) fn of(user: &str) -> Self {
        let secret = HEXLOWER.encode(&[7; 32]);
        Self { user: user.into(), secret, made: 0, expires: None, revoked: None, jobs: None, root: false }
    }

    /// Why the key is not valid any more, if so.
    #[must_use]
    pub fn invalid_reason(&self) -> Option<&'static str> {
        match (self.revoked, self.expires) {
            (Some(_), _) => Some("this key was revoked"),
            (None, Some(end)) if end <= unix_time() => Some("this key has expired"),
            _ => None,
        }
    }
}

impl ClientKeys {
    /// The keys of this node. Creates their directory if there is none.
    ///
    /// # Errors
    /// If the directory cannot be created, or others can access it.
    pub fn open(config: &Config) -> Result<Self> {
        let opened = Self { keys: config.gatekeeper_dir(), seen: config.cache_dir.join("outside") };
        for directory in [&opened.keys, &opened.seen] {
            let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
            created.map_err(|e| failed(&e, directory))?;
        }
        check_private(&opened.keys)?;
        Ok(opened)
    }

    /// The path of the gatekeeper's own key.
    #[must_use]
    pub fn gatekeeper_key_path(&self) -> PathBuf {
        // It cannot clash with a client's, since names of clients contain no dot.
        self.keys.join("gatekeeper.pem")
    }

    /// Creates a key and returns its secret. The name of a key that is not valid any more can be
    /// reused.
    ///
    /// # Errors
    /// If the name is invalid or in use, or the file cannot be written.
    pub fn add(&self, name: &str, options: &KeyOptions) -> Result<Secret> {
        check_name(name)?;
        if self.read(name)?.is_some_and(|key| key.invalid_reason().is_none()) {
            let message = format!("there is a key for {name} already");
            return Err(Refusal::new(RefusalKind::BadRequest, message)
                .hint(format!("tern outside revoke {name}"))
                .into());
        }
        let secret = Secret::generate()?;
        let key = ClientKey {
            user: options.user.clone(),
            secret: HEXLOWER.encode(secret.reveal()),
            made: unix_time(),
            expires: options.days.map(|days| unix_time() + u64::from(days) * 86_400),
            revoked: None,
            jobs: options.jobs,
            root: options.root,
        };
        self.write(name, &key)?;
        // The record of the previous client of that name.
        let _never_seen = fs::remove_file(self.seen.join(name));
        Ok(secret)
    }

    /// Reads a client's key.
    ///
    /// # Errors
    /// If its file cannot be read, or others can access it.
    pub fn read(&self, name: &str) -> Result<Option<ClientKey>> {
        check_name(name)?;
        let path = self.keys.join(name);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&error, &path).into()),
        };
        check_private(&path)?;
        let key = toml::from_str(&text).with_context(|| format!("{} is malformed", path.display()))?;
        Ok(Some(key))
    }

    /// All keys, by name. Unreadable files are left out; they cannot be used by clients either.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn all(&self) -> Result<Vec<(String, ClientKey)>> {
        let entries = fs::read_dir(&self.keys).map_err(|e| failed(&e, &self.keys))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut all: Vec<_> =
            names.filter_map(|name| Some((name.clone(), self.read(&name).ok()??))).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(all)
    }

    /// Revokes a key.
    ///
    /// # Errors
    /// If there is no such key, or the file cannot be written.
    pub fn revoke(&self, name: &str) -> Result<()> {
        let Some(mut key) = self.read(name)? else {
            let message = format!("there is no key for {name}");
            return Err(Refusal::new(RefusalKind::NotFound, message).hint("tern outside list").into());
        };
        key.revoked = key.revoked.or_else(|| Some(unix_time()));
        self.write(name, &key)
    }

    /// The last connection of a client.
    #[must_use]
    pub fn last_seen(&self, name: &str) -> Option<LastSeen> {
        check_name(name).ok()?;
        serde_json::from_slice(&fs::read(self.seen.join(name)).ok()?).ok()
    }

    /// Records a connection of a client.
    pub(super) fn record_seen(&self, name: &str, from: IpAddr) {
        let seen = LastSeen { at: unix_time(), from: from.to_string() };
        let written = serde_json::to_vec(&seen)
            .map_err(Into::into)
            .and_then(|seen| write_private(&self.seen, name, &seen));
        if let Err(error) = written {
            tracing::warn!(%error, "the time of a client's connection cannot be recorded");
        }
    }

    /// The key of a client, if it is valid now.
    pub(super) fn valid(&self, name: &str) -> Result<ClientKey> {
        let Some(key) = self.read(name)? else { bail!("this key was removed") };
        match key.invalid_reason() {
            Some(reason) => bail!(reason),
            None => Ok(key),
        }
    }

    /// The secret of a client, and whether the client exists. If not, the secret is a dummy.
    pub(super) fn secret(&self, name: &str) -> (Secret, bool) {
        let known = match self.read(name) {
            Ok(key) => key.and_then(|key| HEXLOWER.decode(key.secret.as_bytes()).ok()?.try_into().ok()),
            Err(error) => {
                tracing::warn!("a key cannot be used: {error:#}");
                None
            }
        };
        (Secret::from_bytes(known.unwrap_or([0; 32])), known.is_some())
    }

    fn write(&self, name: &str, key: &ClientKey) -> Result<()> {
        let text = toml::to_string(key).context("a key cannot be written")?;
        write_private(&self.keys, name, text.as_bytes()).map_err(|e| failed(&e, &self.keys).into())
    }
}

/// Writes a file that only its owner can read. Replaces the old file atomically.
fn write_private(directory: &Path, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = directory.join(format!(".{name}.{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, directory.join(name))
}

/// Fails unless the file belongs to this user and is inaccessible to all others.
fn check_private(path: &Path) -> Result<()> {
    let file = path.metadata().map_err(|e| failed(&e, path))?;
    if file.mode() & 0o077 != 0 || file.uid() != rustix::process::geteuid().as_raw() {
        let message = format!("{} can be read by others", path.display());
        let hint = format!("chown root, chmod go= {}; and revoke what was in it", path.display());
        return Err(Refusal::new(RefusalKind::NotAllowed, message).hint(hint).into());
    }
    Ok(())
}

fn failed(error: &std::io::Error, path: &Path) -> Refusal {
    let kind = match error.kind() {
        ErrorKind::PermissionDenied => RefusalKind::NotAllowed,
        _ => RefusalKind::Unavailable,
    };
    Refusal::new(kind, format!("{}: {error}", path.display()))
}

/// Fails unless this is a valid name of a client: letters, digits, `-` and `_`, with a letter or
/// digit first.
fn check_name(name: &str) -> Result<()> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let is_valid = (1..=MAX_NAME_LEN).contains(&name.len())
        && name.chars().all(is_allowed)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if is_valid {
        return Ok(());
    }
    let message = format!("a client's name is 1 to {MAX_NAME_LEN} letters, digits, - and _");
    Err(Refusal::new(RefusalKind::BadRequest, message).into())
}

/// Seconds since 1970.
#[must_use]
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    struct Scratch(PathBuf);

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    fn client_keys(name: &str) -> (ClientKeys, Scratch) {
        let dir = std::env::temp_dir().join(format!("tern-outside-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut config = Config::load(&dir).unwrap();
        config.cache_dir = dir.join("cache");
        (ClientKeys::open(&config).unwrap(), Scratch(dir))
    }

    fn options() -> KeyOptions {
        KeyOptions { user: "anna".into(), ..KeyOptions::default() }
    }

    #[test]
    fn key_is_valid_from_add_to_revoke() {
        let (keys, _dir) = client_keys("life");
        let secret = keys.add("laptop", &options()).unwrap();
        assert_eq!(keys.secret("laptop").0.reveal(), secret.reveal());
        assert!(keys.secret("laptop").1 && !keys.secret("other").1);
        assert_eq!(keys.valid("laptop").unwrap().user, "anna");
        assert!(keys.add("laptop", &options()).unwrap_err().to_string().contains("already"));
        keys.revoke("laptop").unwrap();
        assert_eq!(keys.valid("laptop").unwrap_err().to_string(), "this key was revoked");
        assert!(keys.revoke("other").is_err());
        // The name can be reused, and the old secret is not valid.
        let new_secret = keys.add("laptop", &options()).unwrap();
        assert!(new_secret.reveal() != secret.reveal() && keys.valid("laptop").is_ok());
        let one = keys.all().unwrap();
        assert_eq!(one.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), ["laptop"]);
        assert_eq!(keys.last_seen("laptop"), None);
        keys.record_seen("laptop", IpAddr::from([10, 0, 0, 1]));
        assert_eq!(keys.last_seen("laptop").unwrap().from, "10.0.0.1");
    }

    #[test]
    fn key_expires() {
        let (keys, _dir) = client_keys("expires");
        keys.add("a", &KeyOptions { days: Some(1), ..options() }).unwrap();
        assert!(keys.valid("a").is_ok());
        let expired = ClientKey { expires: Some(unix_time()), ..keys.valid("a").unwrap() };
        keys.write("a", &expired).unwrap();
        assert_eq!(keys.valid("a").unwrap_err().to_string(), "this key has expired");
    }

    #[test]
    fn client_names_cannot_be_paths() {
        let (keys, _dir) = client_keys("names");
        for name in
            ["", "..", "a/b", "/etc/passwd", "gatekeeper.pem", ".hidden", "a b", "-a", "ä", &"a".repeat(65)]
        {
            assert!(keys.add(name, &options()).is_err() && keys.read(name).is_err(), "{name}");
            assert!(!keys.secret(name).1, "{name}");
        }
    }

    #[test]
    fn key_readable_by_others_is_refused() {
        let (keys, _dir) = client_keys("mode");
        keys.add("a", &options()).unwrap();
        let path = keys.keys.join("a");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(keys.valid("a").unwrap_err().to_string().contains("read by others"));
        assert!(!keys.secret("a").1);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "user = \"anna\"\nuid = 0\n").unwrap();
        assert!(keys.valid("a").is_err(), "malformed");
    }
}
