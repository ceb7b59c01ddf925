//! The members: the map binds the number of each node to the key of one machine. The authority signs the
//! map, so only the founder adds and removes members.
//!
//! ```text
//!  # signed MEUCIQ…            the authority's signature of all other lines
//!  # key 9 3fa9…               the SHA-256 of the public key of node 9
//! ```
//! MOSIX and people read these lines as comments.

use super::{Host, PORT};
use super::{Map, MapError, Range, VERSION, add_offset};
use data_encoding::{BASE64, HEXLOWER};
use std::collections::HashMap;
use std::fmt::Write;
use tern_ids::{Fingerprint, NodeId};
use tern_wire::{Authority, Identity, IdentityError};

const SIGNED: &str = "# signed ";
const KEY: &str = "# key ";

/// The beginning of the signed message. The cluster's name follows.
const PURPOSE: &str = "tern 2026-11-30 map of ";

impl Map {
    /// Reads a line that binds a number to a key. Other comments, and malformed ones, mean nothing.
    pub(super) fn read_key(&mut self, line: &str) {
        let parse = |text: &str| {
            let (node, key) = text.split_once(' ')?;
            let key = HEXLOWER.decode(key.trim().as_bytes()).ok()?;
            Some((NodeId(node.parse().ok()?), Fingerprint(key.try_into().ok()?)))
        };
        if let Some((node, key)) = line.strip_prefix(KEY).and_then(parse) {
            self.keys.insert(node, key);
        }
    }

    /// The key of a node; `None` if no machine has joined with its number.
    pub fn key(&self, node: NodeId) -> Option<Fingerprint> {
        self.keys.get(&node).copied()
    }

    /// The keys of all members.
    pub(crate) fn keys(&self) -> HashMap<NodeId, Fingerprint> {
        self.keys.iter().map(|(node, key)| (*node, *key)).collect()
    }

    /// The map with a number bound to a key.
    #[must_use]
    pub(crate) fn with_key(mut self, node: NodeId, key: Fingerprint) -> Self {
        self.keys.insert(node, key);
        self.with_new_header()
    }

    /// The map with the keys of another, for the numbers that both have, and no others.
    #[must_use]
    pub fn with_keys_of(mut self, other: &Self) -> Self {
        self.keys = other.keys.iter().filter(|(n, _)| self.contains(**n)).map(|(n, k)| (*n, *k)).collect();
        self.with_new_header()
    }

    /// The map without a node, and the next version.
    ///
    /// # Errors
    /// If the node is not in the map. Also if it is not the last node of a line that begins with a host
    /// name: the nodes behind it have no names of their own.
    pub(crate) fn without(&self, node: NodeId) -> Result<Self, String> {
        let range = self.range(node).ok_or_else(|| format!("there is no node {node} in the map"))?;
        let mut text = String::new();
        for line in self.text.lines() {
            let words: Vec<_> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
            match words[..] {
                [id, _, "ALIAS"] if id.parse() == Ok(node.0) => {}
                [id, _, _] if id.parse() == Ok(range.first) => text.push_str(&range.lines_without(node.0)?),
                _ => {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        let mut map = Self::parse(&text).map_err(|error: MapError| error.to_string())?;
        map.keys.clone_from(&self.keys);
        map.keys.remove(&node);
        Ok(map.with_version(self.version.saturating_add(1)))
    }

    /// The map with the authority's signature.
    ///
    /// # Errors
    /// Those of [`Authority::sign`].
    pub fn signed(self, authority: &Authority) -> Result<Self, IdentityError> {
        let map = self.with_new_header();
        let signature = authority.sign(&map.message(authority.cluster()))?;
        Ok(map.with_signature(&BASE64.encode(&signature)))
    }

    fn with_signature(mut self, signature: &str) -> Self {
        let (version, rest) = self.text.split_once('\n').unwrap_or((&self.text, ""));
        self.text = format!("{version}\n{SIGNED}{signature}\n{rest}");
        self
    }

    /// Whether the authority has signed this map, in the form that [`signed`](Self::signed) gives it: a text
    /// in another form would be another map with the same version.
    pub(crate) fn is_signed(&self, identity: &Identity) -> bool {
        let Some(text) = self.text.lines().find_map(|line| line.strip_prefix(SIGNED)) else { return false };
        BASE64.decode(text.as_bytes()).is_ok_and(|signature| {
            identity.is_signed_by_authority(&self.message(identity.cluster()), &signature)
                && self.clone().with_new_header().with_signature(text).text == self.text
        })
    }

    /// All that the authority signs.
    pub(super) fn signed_lines(&self) -> String {
        let mut signed = String::with_capacity(self.text.len());
        for line in self.text.lines().filter(|line| !line.starts_with(SIGNED)) {
            signed.push_str(line);
            signed.push('\n');
        }
        signed
    }

    fn message(&self, cluster: &str) -> Vec<u8> {
        format!("{PURPOSE}{cluster}\n{}", self.signed_lines()).into_bytes()
    }

    /// The same map with a text that states its version and keys, and is not signed.
    pub(super) fn with_new_header(mut self) -> Self {
        let mut text = format!("{VERSION}{}\n", self.version);
        for (node, key) in &self.keys {
            // Writing into a String cannot fail.
            let _written = writeln!(text, "{KEY}{node} {}", HEXLOWER.encode(&key.0));
        }
        let is_header = |line: &&str| [VERSION, SIGNED, KEY].iter().any(|prefix| line.starts_with(prefix));
        for line in self.text.lines().filter(|line| !is_header(line)) {
            text.push_str(line);
            text.push('\n');
        }
        self.text = text;
        self
    }
}

impl Range {
    /// The lines of the map for this range without one of its nodes.
    fn lines_without(&self, node: u16) -> Result<String, String> {
        let mut lines = String::new();
        let parts = [(Some(self.first), node.checked_sub(1)), (node.checked_add(1), Some(self.last()))];
        for (first, last) in parts.into_iter().filter_map(|(first, last)| Some((first?, last?))) {
            if first > last {
                continue;
            }
            let host = match &self.host {
                Host::Name(name) if first == self.first => name.clone(),
                Host::Name(name) => {
                    return Err(format!("its line begins with the name {name}; change the map with setpe"));
                }
                Host::Ip(ip) => {
                    let ip = add_offset(*ip, first - self.first).ok_or("its line is invalid")?;
                    if ip.is_ipv6() && self.port != PORT { format!("[{ip}]") } else { ip.to_string() }
                }
            };
            let port = if self.port == PORT { String::new() } else { format!(":{}", self.port) };
            let _written = writeln!(lines, "{first}\t{host}{port}\t{}", last - first + 1);
        }
        Ok(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(text: &str) -> Map {
        Map::parse(text).unwrap()
    }

    #[test]
    fn node_is_removed_from_any_place() {
        let left = |text: &str, node| map(text).without(NodeId(node)).map(|map| map.text);
        let all = "1 10.0.0.1 4\n2 b ALIAS\n9 c:7102 1 # a note\n";
        let kept = |middle: &str| Ok(format!("# version 1\n{middle}"));
        assert_eq!(left(all, 1), kept("2\t10.0.0.2\t3\n2 b ALIAS\n9 c:7102 1 # a note\n"));
        assert_eq!(left(all, 2), kept("1\t10.0.0.1\t1\n3\t10.0.0.3\t2\n9 c:7102 1 # a note\n"));
        assert_eq!(left(all, 4), kept("1\t10.0.0.1\t3\n2 b ALIAS\n9 c:7102 1 # a note\n"));
        assert_eq!(left(all, 9), kept("1 10.0.0.1 4\n2 b ALIAS\n"));
        assert_eq!(left("5 [::1]:9 2\n", 5), kept("6\t[::2]:9\t1\n"));
        assert!(left(all, 5).is_err() && left("1 a 3\n", 2).is_err());
        assert_eq!(left("1 a 3\n", 3), kept("1\ta\t2\n"));
        assert_eq!(left("65535 10.0.0.1 1\n1 a 1\n", 65535), kept("1 a 1\n"));
    }

    #[test]
    fn only_the_authority_binds_keys() {
        let (authority, other) = (Authority::create("alpha").unwrap(), Authority::create("alpha").unwrap());
        let one = Identity::issued_by_authority(&authority, NodeId(1)).unwrap();
        let bound = map("1 a 1\n2 b 1\n").with_key(NodeId(1), one.key());
        assert!(!bound.is_signed(&one));
        let signed = bound.clone().signed(&authority).unwrap();
        assert!(signed.is_signed(&one) && map(signed.text()).is_signed(&one));
        assert_eq!((map(signed.text()).key(NodeId(1)), signed.key(NodeId(2))), (Some(one.key()), None));
        assert!(!bound.signed(&other).unwrap().is_signed(&one));
        let changed = signed.text().replace("2 b 1", "2 c 1");
        assert!(!map(&changed).is_signed(&one));
        // A new version is not signed by the signature of the old one.
        assert!(!signed.clone().with_version(9).is_signed(&one));
        // No other text of the same version can be made from it.
        for added in ["# signed AAAA\n", "# key 7 00\n", "# version 0\n"] {
            assert!(!map(&format!("{}{added}", signed.text())).is_signed(&one), "{added}");
        }
        // Signing anew replaces the signature.
        let again = signed.clone().signed(&authority).unwrap();
        assert_eq!(again.text().lines().filter(|line| line.starts_with(SIGNED)).count(), 1);
        assert!(again.is_signed(&one));
    }

    #[test]
    fn keys_follow_their_numbers_only() {
        let keys = [1, 2].map(|byte| Fingerprint([byte; 32]));
        let old = map("1 a 1\n2 b 1\n").with_key(NodeId(1), keys[0]).with_key(NodeId(2), keys[1]);
        let new = map(&format!("# key 3 {}\n1 a 1\n3 c 1\n", "00".repeat(32))).with_keys_of(&old);
        assert_eq!(new.keys(), HashMap::from([(NodeId(1), keys[0])]));
        // A key of a number that is not in the map means nothing, also when the number is.
        let stale = map(&format!("# key 2 {}\n1 a 1\n", "01".repeat(32)));
        assert_eq!(stale.with_node(NodeId(2), "b", None).unwrap().key(NodeId(2)), None);
        // A number that is given again is not bound to the key that it had.
        let removed = old.without(NodeId(2)).unwrap();
        let back = removed.with_node(NodeId(2), "b", None).unwrap();
        assert_eq!((back.key(NodeId(2)), back.key(NodeId(1))), (None, Some(keys[0])));
    }
}
