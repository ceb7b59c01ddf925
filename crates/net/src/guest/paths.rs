//! The paths between this node and the homes of its guests.
//!
//! Both are found out by threads, since an examination and a link may take long in a network that drops
//! packets, and a guest's thread waits meanwhile.

use crate::link::Homes;
use crate::message::{NetReply, NetRequest};
use crate::packets::Packets;
use crate::path::TunnelInterface;
use crate::tunnel::{Flushes, carry};
use anyhow::{Result, bail};
use rustix::rand::{GetRandomFlags, getrandom};
use std::cell::Cell;
use std::collections::HashMap;
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
    direct: Arc<Results<bool>>,
    tunnels: Arc<Results<Arc<TunnelInterface>>>,
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
        self.is_direct_within(home, address, RESULT_TIMEOUT)
    }

    /// As [`is_direct`](Self::is_direct), and waits for the result up to `limit`.
    ///
    /// # Errors
    /// As `is_direct`.
    pub(crate) fn is_direct_within(
        self: &Arc<Self>,
        home: NodeId,
        address: IpAddr,
        limit: Duration,
    ) -> Result<bool> {
        let paths = self.clone();
        self.direct.get(home, (EXAMINED_FOR, limit), move || {
            let direct = paths.examine(home, address)?;
            tracing::info!(%home, direct, "the path to a home was examined");
            Ok(direct)
        })
    }

    /// The tunnel to a home.
    ///
    /// # Errors
    /// If there is none. This node is connecting it then.
    pub(crate) fn tunnel(self: &Arc<Self>, home: NodeId) -> Result<Arc<TunnelInterface>> {
        let paths = self.clone();
        self.tunnels.get(home, (Duration::MAX, RESULT_TIMEOUT), move || paths.connect(home))
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
        let carried = tunnel.clone();
        std::thread::Builder::new().name("tunnel".into()).spawn(move || self.keep(home, &carried, link))?;
        tracing::info!(%home, "packets of a home go through a tunnel");
        Ok(tunnel)
    }

    /// Carries the frames of a tunnel until no connection has used it for a while.
    fn keep(&self, home: NodeId, tunnel: &Arc<TunnelInterface>, mut link: Link) {
        let used_at = Cell::new(Instant::now());
        // This thread and `tunnels` have a reference each.
        let is_unused = |tunnel: &Arc<TunnelInterface>| Arc::strong_count(tunnel) <= 2;
        let is_kept = || {
            if !is_unused(tunnel) {
                used_at.set(Instant::now());
            }
            used_at.get().elapsed() < UNUSED_TIMEOUT
        };
        loop {
            if let Err(error) = carry(&mut link, tunnel, is_kept) {
                tracing::info!(%home, "a tunnel was interrupted: {error:#}");
            }
            let mut interval = RECONNECT_INTERVAL;
            link = loop {
                if !is_kept() && self.tunnels.forget_if(home, is_unused) {
                    return;
                }
                match self.homes.tunnel(home) {
                    Ok(link) => break link,
                    Err(error) => tracing::debug!(%home, "a tunnel cannot be connected: {error:#}"),
                }
                std::thread::sleep(interval);
                interval = (interval * 2).min(MAX_RECONNECT_INTERVAL);
            };
        }
    }
}

/// Results for each home. Each is found out by a thread of its own.
#[derive(Debug)]
struct Results<T> {
    all: Mutex<HashMap<NodeId, Outcome<T>>>,
    /// Signalled when a thread has ended.
    changed: Condvar,
}

#[derive(Debug)]
enum Outcome<T> {
    Pending,
    Found(T, Instant),
    Failed(String, Instant),
}

impl<T> Default for Results<T> {
    fn default() -> Self {
        Self { all: Mutex::default(), changed: Condvar::new() }
    }
}

impl<T: Clone + Send + 'static> Results<T> {
    fn all(&self) -> MutexGuard<'_, HashMap<NodeId, Outcome<T>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result for a home, which is valid for a time. If there is none, a thread finds it out.
    ///
    /// # Errors
    /// If that takes longer than `limit`, or has failed.
    fn get(
        self: &Arc<Self>,
        home: NodeId,
        (valid_for, limit): (Duration, Duration),
        find: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut all = self.all();
        let is_current = match all.get(&home) {
            None => false,
            Some(Outcome::Pending) => true,
            Some(Outcome::Found(_, since)) => since.elapsed() < valid_for,
            Some(Outcome::Failed(_, since)) => since.elapsed() < RETRY_INTERVAL,
        };
        if !is_current {
            let results = self.clone();
            let find = move || {
                let outcome = match find() {
                    Ok(value) => Outcome::Found(value, Instant::now()),
                    Err(error) => Outcome::Failed(format!("{error:#}"), Instant::now()),
                };
                results.all().insert(home, outcome);
                results.changed.notify_all();
            };
            std::thread::Builder::new().name("path".into()).spawn(find)?;
            all.insert(home, Outcome::Pending);
        }
        let is_pending = |all: &mut HashMap<_, _>| matches!(all.get(&home), Some(Outcome::Pending));
        let waited = self.changed.wait_timeout_while(all, limit, is_pending);
        let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match all.get(&home) {
            Some(Outcome::Found(value, _)) => Ok(value.clone()),
            Some(Outcome::Failed(why, _)) => bail!("{why}"),
            Some(Outcome::Pending) | None => bail!("the path between this node and home is being examined"),
        }
    }

    /// Forgets the result for a home if it meets a condition. Returns whether it has.
    fn forget_if(&self, home: NodeId, condition: impl Fn(&T) -> bool) -> bool {
        let mut all = self.all();
        let forgets = matches!(all.get(&home), Some(Outcome::Found(value, _)) if condition(value));
        if forgets {
            all.remove(&home);
        }
        forgets
    }
}
