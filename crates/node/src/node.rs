//! The state of the daemon, shared by its threads. No lock in it is held while a thread waits for
//! another process or node.

use crate::balance::owner_state::OwnerState;
use crate::balance::state::BalancerState;
use crate::cluster::kernel_log;
use crate::cluster::link_costs::LinkCostStore;
use crate::cluster::map::{MAX_TEXT_LEN, Map, MapError};
use crate::cluster::membership;
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
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_wire::{Authority, Identity, ServerTls};

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
    /// When the map was last requested from each node.
    pub(crate) map_requests: Mutex<HashMap<NodeId, Instant>>,
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
        let map = authenticate_map(map, &identity, authority.as_ref(), &config)?;
        identity.members().set(map.keys());
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
            map_requests: Mutex::default(),
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

    /// Atomically replaces the current map by the result of `change`, signed; returns the new map.
    ///
    /// # Errors
    /// Those of `change`; `Unavailable` if this node is not the founder; `Internal` if the map cannot be
    /// written. Then the map has not changed. If it could not be written, tokens may be invalid, and the
    /// founder's own copy may be newer than the map: ternd makes a newer map of both when it starts.
    pub(crate) fn change_map(
        &self,
        change: impl FnOnce(&Map) -> Result<Map, Refusal>,
    ) -> Result<Arc<Map>, Refusal> {
        let internal = |e: &dyn std::fmt::Display| Refusal::new(RefusalKind::Internal, e.to_string());
        let authority = self.founding_authority("changes the map", "setpe")?;
        let _guard = lock(&self.map_update);
        let mut old = self.map();
        if old.nodes().is_empty() {
            old = last_signed_map(&self.config, &self.identity).into();
        }
        let (me, own_key) = self.identity.member();
        let map = change(&old)?.with_key(me, own_key).signed(authority).map_err(|e| internal(&e))?;
        if !membership::removed(&old, &map).is_empty() {
            // A token that a removed node knows must not bring it back.
            self.tokens
                .forget_all()
                .map_err(|e| internal(&format!("cannot make the tokens invalid: {e}")))?;
        }
        save_signed_map(&map, &self.config).map_err(|e| internal(&format!("cannot save the map: {e}")))?;
        self.install_map(map)
    }

    /// The authority, if this node has it.
    ///
    /// # Errors
    /// That only the founder does this, and by which command.
    pub(crate) fn founding_authority(&self, does: &str, command: &str) -> Result<&Authority, Refusal> {
        self.authority.as_ref().ok_or_else(|| {
            let founder = self.config.file.founder;
            let founder = founder.map_or_else(|| "the founding node".into(), |id| format!("node {id}"));
            let message = format!("only the node that founded the cluster {does}");
            Refusal::new(RefusalKind::Unavailable, message).hint(format!("{command}, on {founder}"))
        })
    }

    /// Installs a map that another node sent, if it is newer and signed; returns whether it was newer.
    pub(crate) fn adopt_map(&self, text: &str) -> Result<bool, Refusal> {
        let bad = |e: MapError| Refusal::new(RefusalKind::BadRequest, e.to_string());
        let map = Map::parse(text).and_then(|map| map.check_contains(self.me())).map_err(bad)?;
        let _guard = lock(&self.map_update);
        let old = self.map();
        if !map.replaces(&old) {
            return Ok(false);
        }
        if !map.is_signed(&self.identity) {
            let message = "the map is not signed by the cluster's authority";
            return Err(Refusal::new(RefusalKind::NotAllowed, message));
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
        self.identity.members().set(HashMap::new());
        Ok(())
    }

    fn install_map(&self, map: Map) -> Result<Arc<Map>, Refusal> {
        text_file::replace(&self.config.map, map.text(), 0o644).map_err(|e| self.map_write_error(&e))?;
        let map = Arc::new(map);
        let old = std::mem::replace(&mut *lock(&self.map), map.clone());
        membership::apply_changes(self, &old, &map);
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

/// Checks that the founder made this map. A map that was edited on the founder is signed there now.
fn authenticate_map(
    map: Map,
    identity: &Identity,
    authority: Option<&Authority>,
    config: &Config,
) -> Result<Map> {
    let (file, is_signed) = (config.map.display(), map.is_signed(identity));
    let Some(authority) = authority else {
        anyhow::ensure!(
            is_signed || map.nodes().is_empty(),
            "the map {file} was not made by the node that founded the cluster; run tern join again"
        );
        return Ok(map);
    };
    let last = last_signed_map(config, identity);
    if map.nodes().is_empty() || is_signed && map.version() >= last.version() {
        return Ok(map);
    }
    // Members are those of the last map, without the numbers that this one lacks.
    let version = map.version().max(last.version()).saturating_add(1);
    let map = map.with_keys_of(&last).with_key(identity.node(), identity.key());
    let map = map.with_version(version).signed(authority)?;
    let failed = || format!("cannot write {file}");
    save_signed_map(&map, config).with_context(failed)?;
    text_file::replace(&config.map, map.text(), 0o644).with_context(failed)?;
    Ok(map)
}

/// The last map that the founder signed: versions never go back, and keys are not lost with the map's
/// file. An empty map if there is none.
fn last_signed_map(config: &Config, identity: &Identity) -> Map {
    let saved = Map::read(&signed_map_path(config)).ok();
    saved.filter(|map| map.is_signed(identity)).unwrap_or_default()
}

fn save_signed_map(map: &Map, config: &Config) -> io::Result<()> {
    text_file::replace(&signed_map_path(config), map.text(), 0o600)
}

fn signed_map_path(config: &Config) -> PathBuf {
    config.config_dir.join("map.signed")
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
