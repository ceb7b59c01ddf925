//! The members of a cluster: the key of each node, and the open links with them.
//!
//! A certificate proves that the authority once gave a node's number to a key. Whether that still holds
//! is written in the map, which binds each number to one key. So every link with a member checks the
//! key at its handshake, and is closed when the map binds that number to no key or to another.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tern_ids::{Fingerprint, NodeId};

/// The members that this process knows, and its open links with them. There are none until
/// [`set`](Self::set) is called.
#[derive(Debug, Default)]
pub struct Members(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    keys: HashMap<NodeId, Fingerprint>,
    links: Vec<MemberLink>,
}

#[derive(Debug)]
struct MemberLink {
    node: NodeId,
    key: Fingerprint,
    socket: Weak<TcpStream>,
}

impl Members {
    /// Replaces the keys, and closes the links with nodes that are no longer members.
    pub fn set(&self, keys: impl IntoIterator<Item = (NodeId, Fingerprint)>) {
        let keys = keys.into_iter().collect();
        let mut state = self.lock();
        state.keys = keys;
        let State { keys, links } = &mut *state;
        links.retain(|link| {
            let Some(socket) = link.socket.upgrade() else { return false };
            let is_member = keys.get(&link.node) == Some(&link.key);
            if !is_member {
                // It fails if the peer has closed the connection already.
                let _closed = socket.shutdown(Shutdown::Both);
            }
            is_member
        });
    }

    /// Whether this number is bound to a key.
    #[must_use]
    pub fn contains(&self, node: NodeId) -> bool {
        self.lock().keys.contains_key(&node)
    }

    /// Whether this number is bound to this key.
    #[must_use]
    pub fn is_member(&self, node: NodeId, key: Fingerprint) -> bool {
        self.lock().keys.get(&node) == Some(&key)
    }

    /// Registers a link, if its peer is a member.
    pub(crate) fn admit(&self, node: NodeId, key: Fingerprint, socket: &Arc<TcpStream>) -> bool {
        // Under one lock, so that `set` finds each link that it has to close.
        let mut state = self.lock();
        if state.keys.get(&node) != Some(&key) {
            return false;
        }
        state.links.retain(|link| link.socket.strong_count() > 0);
        state.links.push(MemberLink { node, key, socket: Arc::downgrade(socket) });
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
