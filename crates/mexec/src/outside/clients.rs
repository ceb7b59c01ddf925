//! The keys of clients outside: a file for each in `CONFIG_DIR/outside`, readable by its owner only.
//!
//! The secret is there as it is: what proves that somebody has it must have it too. It is of no use anywhere else.

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

/// The longest name of a client.
const MOST_NAME: usize = 64;

/// What is written down of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Client {
    /// The local user as whom his jobs run.
    pub user: String,
    /// What only he and the gatekeeper know, in hexadecimal digits.
    pub(super) secret: String,
    /// When the key was made, in seconds since 1970, as all times here.
    pub made: u64,
    /// Until when it is good; for ever if absent.
    pub expires: Option<u64>,
    /// Since when it is not any more.
    pub revoked: Option<u64>,
    /// How many jobs at a time.
    pub jobs: Option<u32>,
    /// The user may be root.
    #[serde(default)]
    pub root: bool,
}

/// Where and when a client was seen last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// In seconds since 1970.
    pub at: u64,
    /// From this address.
    pub from: String,
}

/// What an administrator decides of a new key.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// The local user.
    pub user: String,
    /// How many jobs at a time.
    pub jobs: Option<u32>,
    /// For how many days.
    pub days: Option<u32>,
    /// The user may be root.
    pub root: bool,
}

/// All clients of a node's gatekeeper.
#[derive(Debug, Clone)]
pub struct Clients {
    keys: PathBuf,
    seen: PathBuf,
}

impl Client {
    /// What nobody but the tests makes by hand.
    #[cfg(test)]
    pub(super) fn of(user: &str) -> Self {
        let secret = HEXLOWER.encode(&[7; 32]);
        Self { user: user.into(), secret, made: 0, expires: None, revoked: None, jobs: None, root: false }
    }

    /// Why it is not good any more, if so.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        match (self.revoked, self.expires) {
            (Some(_), _) => Some("this key was revoked"),
            (None, Some(end)) if end <= now() => Some("this key has expired"),
            _ => None,
        }
    }
}

impl Clients {
    /// Those of this node. Their directory is made if there is none.
    ///
    /// # Errors
    /// If it cannot be made, or others could look into it.
    pub fn of(config: &Config) -> Result<Self> {
        let own = Self { keys: config.outside(), seen: config.cache_dir.join("outside") };
        for directory in [&own.keys, &own.seen] {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
            made.map_err(|e| failed(&e, directory))?;
        }
        only_ours(&own.keys)?;
        Ok(own)
    }

    /// Where the gatekeeper's own key is.
    #[must_use]
    pub fn gate_key(&self) -> PathBuf {
        // No name of a client has a point in it.
        self.keys.join("gatekeeper.pem")
    }

    /// Makes a key; its secret. A name is free again once its key is not good any more.
    ///
    /// # Errors
    /// If the name is none or not free, or the file cannot be written.
    pub fn add(&self, name: &str, wanted: &Wanted) -> Result<Secret> {
        check_name(name)?;
        if self.read(name)?.is_some_and(|known| known.fault().is_none()) {
            let said = format!("there is a key for {name} already");
            return Err(Refusal::new(RefusalKind::BadRequest, said)
                .hint(format!("tern outside revoke {name}"))
                .into());
        }
        let secret = Secret::generate()?;
        let client = Client {
            user: wanted.user.clone(),
            secret: HEXLOWER.encode(secret.reveal()),
            made: now(),
            expires: wanted.days.map(|days| now() + u64::from(days) * 86_400),
            revoked: None,
            jobs: wanted.jobs,
            root: wanted.root,
        };
        self.write(name, &client)?;
        // What is known of who had the name before.
        let _never_seen = fs::remove_file(self.seen.join(name));
        Ok(secret)
    }

    /// What is known of a client.
    ///
    /// # Errors
    /// If his file cannot be read, or others can read it.
    pub fn read(&self, name: &str) -> Result<Option<Client>> {
        check_name(name)?;
        let path = self.keys.join(name);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&error, &path).into()),
        };
        only_ours(&path)?;
        let client = toml::from_str(&text).with_context(|| format!("{} is malformed", path.display()))?;
        Ok(Some(client))
    }

    /// All of them, by name. Files that cannot be read are left out, and are of no use to anybody.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn all(&self) -> Result<Vec<(String, Client)>> {
        let entries = fs::read_dir(&self.keys).map_err(|e| failed(&e, &self.keys))?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut all: Vec<_> =
            names.filter_map(|name| Some((name.clone(), self.read(&name).ok()??))).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(all)
    }

    /// A key is not good any more.
    ///
    /// # Errors
    /// If there is none, or the file cannot be written.
    pub fn revoke(&self, name: &str) -> Result<()> {
        let Some(mut client) = self.read(name)? else {
            let said = format!("there is no key for {name}");
            return Err(Refusal::new(RefusalKind::NotFound, said).hint("tern outside list").into());
        };
        client.revoked = client.revoked.or_else(|| Some(now()));
        self.write(name, &client)
    }

    /// When a client was seen last.
    #[must_use]
    pub fn last_seen(&self, name: &str) -> Option<Seen> {
        check_name(name).ok()?;
        serde_json::from_slice(&fs::read(self.seen.join(name)).ok()?).ok()
    }

    /// He was seen now.
    pub(super) fn saw(&self, name: &str, from: IpAddr) {
        let seen = Seen { at: now(), from: from.to_string() };
        let written =
            serde_json::to_vec(&seen).map_err(Into::into).and_then(|seen| put(&self.seen, name, &seen));
        if let Err(error) = written {
            tracing::warn!(%error, "it cannot be written down when a client was seen");
        }
    }

    /// A client whose key is good now.
    pub(super) fn good(&self, name: &str) -> Result<Client> {
        let Some(client) = self.read(name)? else { bail!("this key was removed") };
        match client.fault() {
            Some(fault) => bail!(fault),
            None => Ok(client),
        }
    }

    /// The secret of a client, and whether there is one; else any.
    pub(super) fn secret(&self, name: &str) -> (Secret, bool) {
        let known = match self.read(name) {
            Ok(client) => {
                client.and_then(|client| HEXLOWER.decode(client.secret.as_bytes()).ok()?.try_into().ok())
            }
            Err(error) => {
                tracing::warn!("a key cannot be used: {error:#}");
                None
            }
        };
        (Secret::of(known.unwrap_or([0; 32])), known.is_some())
    }

    fn write(&self, name: &str, client: &Client) -> Result<()> {
        let text = toml::to_string(client).context("a key cannot be written")?;
        put(&self.keys, name, text.as_bytes()).map_err(|e| failed(&e, &self.keys).into())
    }
}

/// Writes a file that its owner alone may read; whoever reads it finds the old or the new one.
fn put(directory: &Path, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let fresh = directory.join(format!(".{name}.{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&fresh, directory.join(name))
}

/// Passes if nobody but its owner, who is us, can read or change it.
fn only_ours(path: &Path) -> Result<()> {
    let file = path.metadata().map_err(|e| failed(&e, path))?;
    if file.mode() & 0o077 != 0 || file.uid() != rustix::process::geteuid().as_raw() {
        let said = format!("{} can be read by others", path.display());
        let hint = format!("chown root, chmod go= {}; and revoke what was in it", path.display());
        return Err(Refusal::new(RefusalKind::NotAllowed, said).hint(hint).into());
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

/// Passes if a client can be called so: letters, digits, `-` and `_`, a letter or digit first.
fn check_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let fine = (1..=MOST_NAME).contains(&name.len())
        && name.chars().all(plain)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if fine {
        return Ok(());
    }
    let said = format!("a client's name is 1 to {MOST_NAME} letters, digits, - and _");
    Err(Refusal::new(RefusalKind::BadRequest, said).into())
}

/// Seconds since 1970.
#[must_use]
pub fn now() -> u64 {
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

    fn clients(name: &str) -> (Clients, Scratch) {
        let place = std::env::temp_dir().join(format!("tern-outside-{name}-{}", std::process::id()));
        fs::create_dir_all(&place).unwrap();
        let mut config = Config::load(&place).unwrap();
        config.cache_dir = place.join("cache");
        (Clients::of(&config).unwrap(), Scratch(place))
    }

    fn wanted() -> Wanted {
        Wanted { user: "anna".into(), ..Wanted::default() }
    }

    #[test]
    fn a_key_lives_from_add_to_revoke() {
        let (clients, _place) = clients("life");
        let secret = clients.add("laptop", &wanted()).unwrap();
        assert_eq!(clients.secret("laptop").0.reveal(), secret.reveal());
        assert!(clients.secret("laptop").1 && !clients.secret("other").1);
        assert_eq!(clients.good("laptop").unwrap().user, "anna");
        assert!(clients.add("laptop", &wanted()).unwrap_err().to_string().contains("already"));
        clients.revoke("laptop").unwrap();
        assert_eq!(clients.good("laptop").unwrap_err().to_string(), "this key was revoked");
        assert!(clients.revoke("other").is_err());
        // The name is free again, the old secret is of no use.
        let fresh = clients.add("laptop", &wanted()).unwrap();
        assert!(fresh.reveal() != secret.reveal() && clients.good("laptop").is_ok());
        let one = clients.all().unwrap();
        assert_eq!(one.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), ["laptop"]);
        assert_eq!(clients.last_seen("laptop"), None);
        clients.saw("laptop", IpAddr::from([10, 0, 0, 1]));
        assert_eq!(clients.last_seen("laptop").unwrap().from, "10.0.0.1");
    }

    #[test]
    fn a_key_expires() {
        let (clients, _place) = clients("expires");
        clients.add("a", &Wanted { days: Some(1), ..wanted() }).unwrap();
        assert!(clients.good("a").is_ok());
        let gone = Client { expires: Some(now()), ..clients.good("a").unwrap() };
        clients.write("a", &gone).unwrap();
        assert_eq!(clients.good("a").unwrap_err().to_string(), "this key has expired");
    }

    #[test]
    fn names_are_no_paths() {
        let (clients, _place) = clients("names");
        for name in
            ["", "..", "a/b", "/etc/passwd", "gatekeeper.pem", ".hidden", "a b", "-a", "ä", &"a".repeat(65)]
        {
            assert!(clients.add(name, &wanted()).is_err() && clients.read(name).is_err(), "{name}");
            assert!(!clients.secret(name).1, "{name}");
        }
    }

    #[test]
    fn what_others_can_read_is_no_secret() {
        let (clients, _place) = clients("mode");
        clients.add("a", &wanted()).unwrap();
        let path = clients.keys.join("a");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(clients.good("a").unwrap_err().to_string().contains("read by others"));
        assert!(!clients.secret("a").1);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "user = \"anna\"\nuid = 0\n").unwrap();
        assert!(clients.good("a").is_err(), "malformed");
    }
}
