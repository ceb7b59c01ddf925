//! The paths between this node and the homes of its guests.
//!
//! Both are found out by threads, since an examination and a link may take long in a network that drops
//! packets, and a guest's thread waits meanwhile.

use crate::link::Homes;
use crate::message::{NetReply, NetRequest};
use crate::packets::Packets;
use crate::path::TunnelInterface;
use crate::tunnel::{CarryError, Flushes, carry};
use anyhow::{Result, bail, ensure};
use rustix::rand::{GetRandomFlags, getrandom};
use std::cell::Cell;
use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_redirect::{PathProbe, TunnelEnd};
use tern_wire::Link;

/// How long a caller waits for a thread's result.
const RESULT_TIMEOUT: Duration = Duration::from_millis(200);

/// How long the result of an examination is used.
const EXAMINED_FOR: Duration = Duration::from_secs(300);

/// How long after a failure it is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// How often a packet is sent in each direction.
const ATTEMPTS: usize = 3;

/// How long a tunnel without connections is kept.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(60);

/// Intervals of the attempts to connect again.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);
const MAX_RECONNECT_INTERVAL: Duration = Duration::from_secs(5);

/// The paths of one node.
#[derive(Debug)]
pub(crate) struct Paths<H> {
    homes: Arc<H>,
    packets: Arc<Packets>,
    /// By the address as well, which a node may change.
    direct: Arc<Lookups<(NodeId, IpAddr), bool>>,
    tunnels: Arc<Lookups<NodeId, Arc<TunnelInterface>>>,
}

impl<H: Homes + 'static> Paths<H> {
    pub(crate) fn new(homes: Arc<H>, packets: Arc<Packets>) -> Self {
        let (direct, tunnels) = Default::default();
        Self { homes, packets, direct, tunnels }
    }

    /// Whether home's packets arrive here, and packets with home's address that this node sends arrive
    /// at home. This node reaches home at `address`.
    ///
    /// # Errors
    /// If this is not known yet. It is being examined then.
    pub(crate) fn is_direct(self: &Arc<Self>, home: NodeId, address: IpAddr) -> Result<bool> {
        self.begin_examination(home, address);
        self.direct.result(&(home, address), RESULT_TIMEOUT)
    }

    /// Examines the path to a home again if that was long ago. Does not wait.
    pub(crate) fn begin_examination(self: &Arc<Self>, home: NodeId, address: IpAddr) {
        let paths = self.clone();
        self.direct.begin((home, address), EXAMINED_FOR, move || {
            let direct = paths.examine(home, address)?;
            tracing::info!(%home, direct, "the path to a home was examined");
            Ok(direct)
        });
    }

    /// The result of the last examination. Waits up to `limit` for one that has begun.
    ///
    /// # Errors
    /// If there is none, or it has failed.
    pub(crate) fn last_examination(&self, home: NodeId, address: IpAddr, limit: Duration) -> Result<bool> {
        self.direct.result(&(home, address), limit)
    }

    /// The tunnel to a home.
    ///
    /// # Errors
    /// If there is none, or it has no link. This node is connecting it then.
    pub(crate) fn tunnel(self: &Arc<Self>, home: NodeId) -> Result<Arc<TunnelInterface>> {
        let paths = self.clone();
        self.tunnels.begin(home, Duration::MAX, move || paths.connect(home));
        let tunnel = self.tunnels.result(&home, RESULT_TIMEOUT)?;
        ensure!(tunnel.is_connected(), "the tunnel to home is interrupted");
        Ok(tunnel)
    }

    fn examine(&self, home: NodeId, address: IpAddr) -> Result<bool> {
        if !self.packets.is_neighbour(address)? {
            return Ok(false);
        }
        for _ in 0..ATTEMPTS {
            let mut token = [0; 16];
            getrandom(&mut token[..], GetRandomFlags::empty())?;
            let incoming = PathProbe::connection(address, token);
            let examination = self.packets.examine(address, incoming, token)?;
            match self.homes.call(home, &NetRequest::Examine { address, token })? {
                NetReply::Done => {}
                NetReply::Refused(why) => {
                    tracing::info!(%home, why, "a home does not examine the path");
                    return Ok(false);
                }
                NetReply::Taken(..) => bail!("home sent an unexpected reply"),
            }
            if examination.arrives() {
                examination.send()?;
                if self.homes.call(home, &NetRequest::HasArrived { token })? == NetReply::Done {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn connect(self: Arc<Self>, home: NodeId) -> Result<Arc<TunnelInterface>> {
        let link = self.homes.tunnel(home)?;
        let tunnel = self.packets.create_tunnel(&format!("terng{home}"), TunnelEnd::Guest)?;
        let tunnel = Arc::new(TunnelInterface::new(tunnel, self.packets.clone(), Some(Flushes::new()?)));
        tunnel.set_connected(true);
        let carried = tunnel.clone();
        let run = move || self.run_tunnel(home, &carried, link);
        std::thread::Builder::new().name("tunnel".into()).spawn(run)?;
        tracing::info!(%home, "packets of a home go through a tunnel");
        Ok(tunnel)
    }

    /// Carries the frames of a tunnel until no connection has used it for a while, or its interface is
    /// gone.
    fn run_tunnel(&self, home: NodeId, tunnel: &Arc<TunnelInterface>, mut link: Link) {
        let used_at = Cell::new(Instant::now());
        // This thread and `tunnels` have a reference each.
        let is_unused = |tunnel: &Arc<TunnelInterface>| Arc::strong_count(tunnel) <= 2;
        let is_kept = || {
            if !is_unused(tunnel) {
                used_at.set(Instant::now());
            }
            used_at.get().elapsed() < UNUSED_TIMEOUT
        };
        let mut interval = RECONNECT_INTERVAL;
        loop {
            let began = Instant::now();
            match carry(&mut link, tunnel, is_kept) {
                Ok(()) => {}
                Err(CarryError::Link(error)) => tracing::info!(%home, "a tunnel was interrupted: {error:#}"),
                Err(error @ CarryError::Interface(_)) => {
                    tracing::error!(%home, "the connections of a tunnel are lost: {error}");
                    self.tunnels.forget_if(&home, |_| true);
                    return;
                }
            }
            // A link that breaks at once is not repeated at once.
            if began.elapsed() > MAX_RECONNECT_INTERVAL {
                interval = RECONNECT_INTERVAL;
            }
            link = loop {
                if !is_kept() && self.tunnels.forget_if(&home, is_unused) {
                    return;
                }
                std::thread::sleep(interval);
                interval = (interval * 2).min(MAX_RECONNECT_INTERVAL);
                match self.homes.tunnel(home) {
                    Ok(link) => break link,
                    Err(error) => tracing::debug!(%home, "a tunnel cannot be connected: {error:#}"),
                }
            };
        }
    }
}

/// Values that threads find out, each for a key.
#[derive(Debug)]
struct Lookups<K, T> {
    all: Mutex<HashMap<K, Lookup<T>>>,
    /// Signalled when a thread has ended.
    changed: Condvar,
}

#[derive(Debug)]
struct Lookup<T> {
    /// A thread is finding it out.
    pending: bool,
    /// The last result, and when it was found out. It is used until there is a new one.
    last: Option<(Result<T, String>, Instant)>,
}

impl<K, T> Default for Lookups<K, T> {
    fn default() -> Self {
        Self { all: Mutex::default(), changed: Condvar::new() }
    }
}

impl<K: Copy + Eq + Hash + Send + 'static, T: Clone + Send + 'static> Lookups<K, T> {
    fn all(&self) -> MutexGuard<'_, HashMap<K, Lookup<T>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread find out a value, unless one does, or has less than `valid_for` ago.
    fn begin(
        self: &Arc<Self>,
        key: K,
        valid_for: Duration,
        find: impl FnOnce() -> Result<T> + Send + 'static,
    ) {
        let mut all = self.all();
        let lookup = all.entry(key).or_insert(Lookup { pending: false, last: None });
        let is_valid = lookup.last.as_ref().is_some_and(|(result, since)| {
            since.elapsed() < if result.is_ok() { valid_for } else { RETRY_INTERVAL }
        });
        if lookup.pending || is_valid {
            return;
        }
        let lookups = self.clone();
        let find = move || {
            let found = find().map_err(|error| format!("{error:#}"));
            let last = Some((found, Instant::now()));
            lookups.all().insert(key, Lookup { pending: false, last });
            lookups.changed.notify_all();
        };
        match std::thread::Builder::new().name("path".into()).spawn(find) {
            Ok(_) => lookup.pending = true,
            Err(error) => lookup.last = Some((Err(error.to_string()), Instant::now())),
        }
    }

    /// The last result for a key. If there is no success so far, waits up to `limit` for a thread.
    ///
    /// # Errors
    /// If there is none, or that of the thread.
    fn result(&self, key: &K, limit: Duration) -> Result<T> {
        let is_awaited = |all: &mut HashMap<K, Lookup<T>>| {
            let lookup = all.get(key);
            lookup.is_some_and(|lookup| lookup.pending && !matches!(lookup.last, Some((Ok(_), _))))
        };
        let waited = self.changed.wait_timeout_while(self.all(), limit, is_awaited);
        let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match all.get(key) {
            Some(Lookup { last: Some((Ok(value), _)), .. }) => Ok(value.clone()),
            Some(Lookup { pending: false, last: Some((Err(why), _)) }) => bail!("{why}"),
            _ => bail!("the path between this node and home is being examined"),
        }
    }

    /// Forgets the result for a key if it meets a condition. Returns whether it has.
    fn forget_if(&self, key: &K, condition: impl Fn(&T) -> bool) -> bool {
        let mut all = self.all();
        let last = all.get(key).and_then(|lookup| lookup.last.as_ref());
        let forgets = matches!(last, Some((Ok(value), _)) if condition(value));
        if forgets {
            all.remove(key);
        }
        forgets
    }
}
