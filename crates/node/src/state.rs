//! What one daemon knows, shared by its threads. Each lock here is held for a few statements, never over a
//! wait for somebody else.

use crate::balancing::Balancing;
use crate::cluster::Known;
use crate::config::Config;
use crate::costs::Measured;
use crate::files;
use crate::map::{MOST_TEXT, Map};
use crate::message::{Hello, PROTOCOL};
use crate::owner::{self, Owner};
use crate::peers::Idle;
use crate::places::Places;
use crate::registry::Registry;
use crate::settings::Kept;
use crate::slots::lock;
use crate::token::Tokens;
use anyhow::{Context, Result};
use std::collections::HashSet;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_wire::{Authority, Identity, ServerTls};

/// The most that the version of a map may grow at once; a member that sends more is broken or hostile.
const MOST_STEPS: u64 = 1 << 20;

/// One node's daemon.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) config: Config,
    pub(crate) identity: Identity,
    /// For members of the cluster.
    pub(crate) members: ServerTls,
    /// For machines that join; only where the authority is.
    pub(crate) newcomers: Option<ServerTls>,
    pub(crate) authority: Option<Authority>,
    pub(crate) tokens: Tokens,
    pub(crate) registry: Registry,
    pub(crate) settings: Kept,
    pub(crate) idle: Idle,
    pub(crate) cluster: Known,
    pub(crate) measured: Measured,
    pub(crate) balancing: Balancing,
    pub(crate) owner: Owner,
    /// What processes mean by `/mfs/selected`, and by `/mfs/magic`.
    pub(crate) selected: Places,
    pub(crate) magic: Places,
    /// Processes of ours that a node is rid of just now, or that come home.
    pub(crate) leaving: Mutex<HashSet<i32>>,
    /// Processes whose first move is under way, so that no second shim is started for them.
    pub(crate) moving: Mutex<HashSet<i32>>,
    /// A refresh of the map is under way.
    pub(crate) refreshing: AtomicBool,
    map: Mutex<Arc<Map>>,
    /// Changes of the map take turns; held over writing its file, never over the network.
    map_turn: Mutex<()>,
    boot: String,
}

impl Node {
    /// Reads all that the node has on disk.
    pub(crate) fn open(config: Config) -> Result<Self> {
        let identity = Identity::load(&config.config_dir).with_context(|| {
            format!(
                "this node has no usable identity in {}; tern init founds a cluster, tern join enters one",
                config.config_dir.display()
            )
        })?;
        if let Some(node) = config.file.node.filter(|node| *node != identity.node().0) {
            anyhow::bail!(
                "ternd.toml says node {node}, but the certificate is node {}'s; tern join again",
                identity.node()
            );
        }
        let authority = config.config_dir.join("ca.key").exists();
        let authority =
            authority.then(|| Authority::load(&config.config_dir, identity.cluster())).transpose()?;
        let map = match files::read_bounded(&config.map, MOST_TEXT) {
            Ok(text) => Map::parse(&text)
                .and_then(|map| map.with(identity.node()))
                .with_context(|| format!("the map {} is wrong", config.map.display()))?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Map::default(),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", config.map.display())),
        };
        let registry = Registry::open(&config.run_dir)
            .with_context(|| format!("cannot use {}", config.run_dir.display()))?;
        let places = |name| {
            let failed = || format!("cannot use {}", config.run_dir.display());
            Places::open(&config.run_dir, name).with_context(failed)
        };
        let (selected, magic) = (places("selected")?, places("magic")?);
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").context("no boot id")?;
        let measured = Measured::open(&config.cache_dir);
        Ok(Self {
            members: identity.cluster_server()?,
            newcomers: authority.as_ref().map(|_| identity.join_server()).transpose()?,
            authority,
            tokens: Tokens::new(&config.config_dir),
            selected,
            magic,
            registry,
            settings: Kept::open(&config.run_dir),
            leaving: Mutex::default(),
            idle: Idle::default(),
            cluster: Known::new(identity.node(), measured.all().values()),
            measured,
            balancing: Balancing::default(),
            owner: Owner::default(),
            moving: Mutex::default(),
            refreshing: AtomicBool::new(false),
            map: Mutex::new(Arc::new(map)),
            map_turn: Mutex::new(()),
            boot: boot.trim().into(),
            identity,
            config,
        })
    }

    /// This node.
    pub(crate) fn me(&self) -> NodeId {
        self.identity.node()
    }

    /// The map in use.
    pub(crate) fn map(&self) -> Arc<Map> {
        lock(&self.map).clone()
    }

    /// Every node but this one.
    pub(crate) fn others(&self) -> Vec<NodeId> {
        let me = self.me();
        self.map().nodes().into_iter().filter(|node| *node != me).collect()
    }

    /// Makes a map of the one in use and takes it, as one act; returns it.
    pub(crate) fn change_map(
        &self,
        change: impl FnOnce(&Map) -> Result<Map, Refusal>,
    ) -> Result<Arc<Map>, Refusal> {
        let _turn = lock(&self.map_turn);
        let map = change(&self.map())?;
        self.put(map)
    }

    /// Takes a map that another node sent, if it is newer; true if it was.
    pub(crate) fn adopt(&self, text: &str) -> Result<bool, Refusal> {
        let bad = |e: crate::map::MapError| Refusal::new(RefusalKind::BadRequest, e.to_string());
        let map = Map::parse(text).and_then(|map| map.with(self.me())).map_err(bad)?;
        let _turn = lock(&self.map_turn);
        let old = self.map();
        if !map.replaces(&old) {
            return Ok(false);
        }
        if map.version() - old.version() > MOST_STEPS {
            return Err(Refusal::new(RefusalKind::BadRequest, "the map's version is out of all bounds"));
        }
        let map = self.put(map)?;
        tracing::info!(version = map.version(), nodes = map.nodes().len(), "took a newer map");
        Ok(true)
    }

    /// Forgets the map.
    pub(crate) fn forget_map(&self) -> Result<(), Refusal> {
        let _turn = lock(&self.map_turn);
        match std::fs::remove_file(&self.config.map) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(self.unwritable(&e)),
            _ => {}
        }
        *lock(&self.map) = Arc::default();
        Ok(())
    }

    fn put(&self, map: Map) -> Result<Arc<Map>, Refusal> {
        files::replace(&self.config.map, map.text(), 0o644).map_err(|e| self.unwritable(&e))?;
        let map = Arc::new(map);
        *lock(&self.map) = map.clone();
        let (version, nodes) = (map.version(), map.nodes().len());
        crate::kernel_log::note(self, &format!("the map is version {version}, with {nodes} nodes"));
        Ok(map)
    }

    fn unwritable(&self, error: &io::Error) -> Refusal {
        let map = self.config.map.display();
        Refusal::new(RefusalKind::Internal, format!("cannot write the map {map}: {error}"))
    }

    /// What this node says of itself.
    pub(crate) fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            boot: self.boot.clone(),
            map: self.map().version(),
            clock: clock(),
        }
    }

    /// Whether this node takes guests; else why not.
    pub(crate) fn takes_guests(&self) -> Result<(), Refusal> {
        if self.settings.now().block {
            let said = format!("node {} takes no guests: it is blocked", self.me());
            return Err(Refusal::new(RefusalKind::Unavailable, said).hint("mosctl noblock, on that node"));
        }
        if !self.config.guests {
            return Err(Refusal::new(
                RefusalKind::Unavailable,
                format!("node {} takes no guests", self.me()),
            )
            .hint("guests = true in its ternd.toml"));
        }
        if owner::needs_it(self) {
            let said = format!("node {} takes no guests: its own processes need it", self.me());
            return Err(Refusal::new(RefusalKind::Unavailable, said)
                .hint("try again in a minute; owner_share in its ternd.toml is the threshold"));
        }
        let kernel = kernel();
        if version(&kernel).is_some_and(|version| version < (5, 19)) {
            let said = format!("node {} takes no guests: its kernel {kernel} is older than 5.19", self.me());
            return Err(Refusal::new(RefusalKind::Unsupported, said));
        }
        Ok(())
    }
}

/// The wall clock, nanoseconds since 1970.
pub(crate) fn clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The kernel's release.
pub(crate) fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_compared_as_numbers() {
        assert_eq!(version("6.1.0-13-amd64"), Some((6, 1)));
        assert_eq!(version("5.4-custom"), Some((5, 4)));
        assert!(version("5.9.1") < Some((5, 19)) && version("6.0") > Some((5, 19)));
        assert_eq!(version("unknown"), None);
    }
}
