//! The state of the daemon, shared by its threads. No lock in it is held while a thread waits for
//! another process or node.

use crate::balance::owner_state::OwnerState;
use crate::balance::state::BalancerState;
use crate::cluster::kernel_log;
use crate::cluster::link_costs::LinkCostStore;
use crate::cluster::map::{MAX_TEXT_LEN, Map, MapError};
use crate::cluster::state::ClusterState;
use crate::cluster::token::Tokens;
use crate::config::Config;
use crate::config::settings::SettingsStore;
use crate::os::clock::unix_ns;
use crate::os::sync::lock;
use crate::os::text_file;
use crate::peer::link_pool::LinkPool;
use crate::peer::message::{Hello, PROTOCOL};
use crate::process::node_choices::NodeChoices;
use crate::process::registry::Registry;
use anyhow::{Context, Result};
use std::collections::HashSet;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_wire::{Authority, Identity, ServerTls};

/// The most by which one update may raise the version of the map. A member that sends more is
/// broken or hostile.
const MAX_VERSION_STEP: u64 = 1 << 20;

/// One node's daemon.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) config: Config,
    pub(crate) identity: Identity,
    /// TLS for members of the cluster.
    pub(crate) member_tls: ServerTls,
    /// TLS for machines that join; only on the node that has the authority.
    pub(crate) join_tls: Option<ServerTls>,
    pub(crate) authority: Option<Authority>,
    pub(crate) tokens: Tokens,
    pub(crate) registry: Registry,
    pub(crate) settings: SettingsStore,
    pub(crate) link_pool: LinkPool,
    pub(crate) cluster: ClusterState,
    pub(crate) link_costs: LinkCostStore,
    pub(crate) balancing: BalancerState,
    pub(crate) owner: OwnerState,
    /// The nodes that `/mfs/selected` and `/mfs/magic` stand for in each process.
    pub(crate) selected: NodeChoices,
    pub(crate) magic: NodeChoices,
    /// Processes whose home this node is, and which are being fetched home in the background or
    /// moved off a node that asked for it. None is moved twice at a time.
    pub(crate) moving_off: Mutex<HashSet<i32>>,
    /// Processes whose first move is in progress, so that only one shim is started for each.
    pub(crate) first_moves: Mutex<HashSet<i32>>,
    /// Set while a newer map is being fetched.
    pub(crate) fetching_map: AtomicBool,
    map: Mutex<Arc<Map>>,
    /// Serialises changes of the map. Held while its file is written, never during network I/O.
    map_update: Mutex<()>,
    boot_id: String,
}

impl Node {
    /// Loads the state that the node keeps on disk.
    pub(crate) fn open(config: Config) -> Result<Self> {
        let identity = Identity::load(&config.config_dir).with_context(|| {
            format!(
                "this node has no usable identity in {}; tern init founds a cluster, tern join enters one",
                config.config_dir.display()
            )
        })?;
        if let Some(node) = config.file.node.filter(|node| *node != identity.node().0) {
            anyhow::bail!(
                "ternd.toml has node {node}, but the certificate is for node {}; run tern join again",
                identity.node()
            );
        }
        let authority = config.config_dir.join("ca.key").exists();
        let authority =
            authority.then(|| Authority::load(&config.config_dir, identity.cluster())).transpose()?;
        let map = match text_file::read_bounded(&config.map, MAX_TEXT_LEN) {
            Ok(text) => Map::parse(&text)
                .and_then(|map| map.check_contains(identity.node()))
                .with_context(|| format!("the map {} is wrong", config.map.display()))?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Map::default(),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", config.map.display())),
        };
        let registry = Registry::open(&config.run_dir)
            .with_context(|| format!("cannot use {}", config.run_dir.display()))?;
        let choices = |name| {
            let failed = || format!("cannot use {}", config.run_dir.display());
            NodeChoices::open(&config.run_dir, name).with_context(failed)
        };
        let (selected, magic) = (choices("selected")?, choices("magic")?);
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").context("no boot id")?;
        let link_costs = LinkCostStore::open(&config.cache_dir);
        Ok(Self {
            member_tls: identity.cluster_server()?,
            join_tls: authority.as_ref().map(|_| identity.join_server()).transpose()?,
            authority,
            tokens: Tokens::new(&config.config_dir),
            selected,
            magic,
            registry,
            settings: SettingsStore::open(&config.run_dir),
            moving_off: Mutex::default(),
            link_pool: LinkPool::default(),
            cluster: ClusterState::new(identity.node(), link_costs.all().values()),
            link_costs,
            balancing: BalancerState::default(),
            owner: OwnerState::default(),
            first_moves: Mutex::default(),
            fetching_map: AtomicBool::new(false),
            map: Mutex::new(Arc::new(map)),
            map_update: Mutex::new(()),
            boot_id: boot.trim().into(),
            identity,
            config,
        })
    }

    /// The number of this node.
    pub(crate) fn me(&self) -> NodeId {
        self.identity.node()
    }

    /// The current map.
    pub(crate) fn map(&self) -> Arc<Map> {
        lock(&self.map).clone()
    }

    /// Every node but this one.
    pub(crate) fn other_nodes(&self) -> Vec<NodeId> {
        let me = self.me();
        self.map().nodes().into_iter().filter(|node| *node != me).collect()
    }

    /// Atomically replaces the current map by the result of `change`; returns the new map.
    pub(crate) fn change_map(
        &self,
        change: impl FnOnce(&Map) -> Result<Map, Refusal>,
    ) -> Result<Arc<Map>, Refusal> {
        let _guard = lock(&self.map_update);
        let map = change(&self.map())?;
        self.install_map(map)
    }

    /// Installs a map that another node sent, if it is newer; returns whether it was.
    pub(crate) fn adopt_map(&self, text: &str) -> Result<bool, Refusal> {
        let bad = |e: MapError| Refusal::new(RefusalKind::BadRequest, e.to_string());
        let map = Map::parse(text).and_then(|map| map.check_contains(self.me())).map_err(bad)?;
        let _guard = lock(&self.map_update);
        let old = self.map();
        if !map.replaces(&old) {
            return Ok(false);
        }
        if map.version() - old.version() > MAX_VERSION_STEP {
            return Err(Refusal::new(RefusalKind::BadRequest, "the version of the map is too far ahead"));
        }
        let map = self.install_map(map)?;
        tracing::info!(version = map.version(), nodes = map.nodes().len(), "took a newer map");
        Ok(true)
    }

    /// Removes the map, so that this node is in no cluster.
    pub(crate) fn remove_map(&self) -> Result<(), Refusal> {
        let _guard = lock(&self.map_update);
        match std::fs::remove_file(&self.config.map) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(self.map_write_error(&e)),
            _ => {}
        }
        *lock(&self.map) = Arc::default();
        Ok(())
    }

    fn install_map(&self, map: Map) -> Result<Arc<Map>, Refusal> {
        text_file::replace(&self.config.map, map.text(), 0o644).map_err(|e| self.map_write_error(&e))?;
        let map = Arc::new(map);
        *lock(&self.map) = map.clone();
        let (version, nodes) = (map.version(), map.nodes().len());
        kernel_log::log_change(&self.settings, &format!("the map is version {version}, with {nodes} nodes"));
        Ok(map)
    }

    fn map_write_error(&self, error: &io::Error) -> Refusal {
        let map = self.config.map.display();
        Refusal::new(RefusalKind::Internal, format!("cannot write the map {map}: {error}"))
    }

    /// The greeting that this node sends first on each link.
    pub(crate) fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            boot_id: self.boot_id.clone(),
            map_version: self.map().version(),
            clock_ns: unix_ns(),
        }
    }

    /// Checks that this node accepts guests; the refusal says why it does not.
    pub(crate) fn check_accepts_guests(&self) -> Result<(), Refusal> {
        if self.settings.get().block {
            let message = format!("node {} takes no guests: it is blocked", self.me());
            return Err(Refusal::new(RefusalKind::Unavailable, message).hint("mosctl noblock, on that node"));
        }
        if !self.config.guests {
            return Err(Refusal::new(
                RefusalKind::Unavailable,
                format!("node {} takes no guests", self.me()),
            )
            .hint("guests = true in its ternd.toml"));
        }
        if self.owner.needs_node() {
            let message = format!("node {} takes no guests: its own processes need it", self.me());
            return Err(Refusal::new(RefusalKind::Unavailable, message)
                .hint("try again in a minute; owner_share in its ternd.toml is the threshold"));
        }
        let kernel = kernel_release();
        if parse_release(&kernel).is_some_and(|version| version < (5, 19)) {
            let message =
                format!("node {} takes no guests: its kernel {kernel} is older than 5.19", self.me());
            return Err(Refusal::new(RefusalKind::Unsupported, message));
        }
        Ok(())
    }
}

/// The release of the running kernel.
pub(crate) fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_compared_as_numbers() {
        assert_eq!(parse_release("6.1.0-13-amd64"), Some((6, 1)));
        assert_eq!(parse_release("5.4-custom"), Some((5, 4)));
        assert!(parse_release("5.9.1") < Some((5, 19)) && parse_release("6.0") > Some((5, 19)));
        assert_eq!(parse_release("unknown"), None);
    }
}
