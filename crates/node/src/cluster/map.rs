//! The map of the cluster, `/etc/mosix.map`: the number and the address of each node.
//!
//! ```text
//!  # version 7                 raised by each change; the highest version is the newest
//!  # signed …, # key …         the members' keys, see [`members`]
//!  1  10.0.0.1        4        nodes 1 to 4 at 10.0.0.1 to 10.0.0.4
//!  9  alpha:7102      1        node 9, with a port of its own
//!  9  alpha.example   ALIAS    another name for it
//! ```

mod members;

use crate::os::text_file;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs};
use std::path::Path;
use tern_ids::{Fingerprint, NodeId};

/// The default port of ternd.
pub const PORT: u16 = 7101;

/// How the line with the version begins.
const VERSION: &str = "# version ";

/// Maximum number of lines, not counting comments and blank lines.
pub(crate) const MAX_LINES: usize = 256;

/// Maximum length of the text in bytes.
pub const MAX_TEXT_LEN: usize = 256 << 10;

/// Why a text is not a valid map.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// A line is invalid.
    #[error("line {line}: {problem}")]
    Line {
        /// The number of the line, from 1.
        line: usize,
        /// The problem of that line.
        problem: String,
    },
    /// The map has more lines than any MOSIX map had.
    #[error("more than {MAX_LINES} lines")]
    TooManyLines,
    /// The text is too long.
    #[error("longer than {MAX_TEXT_LEN} bytes")]
    TooLong,
    /// The node that reads the map is not in it.
    #[error("the map is well formed, but this node, {0}, is not in it")]
    NodeMissing(NodeId),
}

/// A validated map.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Map {
    version: u64,
    text: String,
    ranges: Vec<Range>,
    aliases: Vec<(NodeId, String)>,
    keys: BTreeMap<NodeId, Fingerprint>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    line: usize,
    first: u16,
    span: u16,
    host: Host,
    port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    Ip(IpAddr),
    Name(String),
}

impl Map {
    /// Parses and validates a map.
    ///
    /// # Errors
    /// With the first invalid line.
    pub fn parse(text: &str) -> Result<Self, MapError> {
        if text.len() > MAX_TEXT_LEN {
            return Err(MapError::TooLong);
        }
        let mut map = Self { text: text.to_owned(), ..Self::default() };
        let (mut lines, mut aliases) = (0, Vec::new());
        for (at, whole) in text.lines().enumerate() {
            let line = at + 1;
            let wrong = |problem: String| MapError::Line { line, problem };
            if let Some(version) = whole.strip_prefix(VERSION) {
                map.version = version.trim().parse().unwrap_or(map.version);
            }
            map.read_key(whole);
            let words: Vec<_> = whole.split('#').next().unwrap_or_default().split_whitespace().collect();
            match words[..] {
                [] => continue,
                [id, host, "ALIAS"] => {
                    aliases.push((line, NodeId(parse_number(id).map_err(wrong)?), host.to_owned()));
                }
                [id, host, span] => {
                    let range = Range::parse(line, id, host, span).map_err(wrong)?;
                    map.add(range).map_err(wrong)?;
                }
                _ => return Err(wrong("expected three words: ID HOST COUNT".into())),
            }
            lines += 1;
            if lines > MAX_LINES {
                return Err(MapError::TooManyLines);
            }
        }
        // An alias may precede the node that it belongs to.
        for (line, node, alias) in aliases {
            let wrong = |problem: String| MapError::Line { line, problem };
            if map.range(node).is_none() {
                return Err(wrong(format!("an alias for node {node}, which is not in the map")));
            }
            if let Some(other) = map.find(&alias).filter(|other| *other != node) {
                return Err(wrong(format!("{alias} is node {other} already")));
            }
            map.aliases.push((node, alias));
        }
        let Self { keys, ranges, .. } = &mut map;
        keys.retain(|node, _| ranges.iter().any(|range| (range.first..=range.last()).contains(&node.0)));
        Ok(map)
    }

    /// Reads a map from a file; a missing file is an empty map.
    ///
    /// # Errors
    /// Those of the file; `InvalidData` if the text is not a valid map.
    pub fn read(path: &Path) -> io::Result<Self> {
        match text_file::read_bounded(path, MAX_TEXT_LEN) {
            Ok(text) => Self::parse(&text).map_err(|wrong| io::Error::new(io::ErrorKind::InvalidData, wrong)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e),
        }
    }

    fn add(&mut self, range: Range) -> Result<(), String> {
        for other in &self.ranges {
            let (first, last) = (range.first.max(other.first), range.last().min(other.last()));
            if first <= last {
                return Err(format!("node {first} is in line {} already", other.line));
            }
            if let Some(host) = range.shared_host(other) {
                return Err(format!("{host} is in line {} already", other.line));
            }
        }
        self.ranges.push(range);
        Ok(())
    }

    /// Returns the map if this node is in it or it is empty.
    ///
    /// # Errors
    /// If the node is not in the map.
    pub(crate) fn check_contains(self, me: NodeId) -> Result<Self, MapError> {
        if self.ranges.is_empty() || self.range(me).is_some() {
            Ok(self)
        } else {
            Err(MapError::NodeMissing(me))
        }
    }

    /// The version, which each change raises by one; 0 if the text states none.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The text in which the map is stored and sent.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether this map replaces the other one. A higher version does. If two nodes made maps with
    /// the same version at the same time, every node keeps the same one of the two.
    pub(crate) fn replaces(&self, old: &Self) -> bool {
        (self.version, self.signed_lines()) > (old.version, old.signed_lines())
    }

    /// The same map with another version, not signed.
    #[must_use]
    pub(crate) fn with_version(mut self, version: u64) -> Self {
        self.version = version;
        self.with_new_header()
    }

    /// The map with one more node, and the next version.
    ///
    /// # Errors
    /// If the new text is not a valid map: the node, its host or its alias is in the map already,
    /// the address is invalid, or the map is full.
    pub(crate) fn with_node(
        &self,
        node: NodeId,
        address: &str,
        alias: Option<&str>,
    ) -> Result<Self, MapError> {
        let mut text = self.text.clone();
        // The words come from another machine. None may be more than a word, or a comment.
        let line = text.lines().count() + 1;
        for word in [Some(address), alias].into_iter().flatten() {
            Host::parse(word).map_err(|problem| MapError::Line { line, problem })?;
        }
        // Writing into a String cannot fail.
        let _written = writeln!(text, "{node}\t{address}\t1");
        if let Some(alias) = alias {
            let _written = writeln!(text, "{node}\t{alias}\tALIAS");
        }
        // No line of the text binds the number to a key yet.
        let map = Self { keys: self.keys.clone(), ..Self::parse(&text)? };
        Ok(map.with_version(self.version.saturating_add(1)))
    }

    /// The numbers of all nodes, sorted.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut nodes: Vec<_> =
            self.ranges.iter().flat_map(|range| (range.first..=range.last()).map(NodeId)).collect();
        nodes.sort_unstable();
        nodes
    }

    /// Whether the node is in the map.
    pub fn contains(&self, node: NodeId) -> bool {
        self.range(node).is_some()
    }

    /// The lowest free node number.
    pub(crate) fn lowest_free_number(&self) -> Option<NodeId> {
        (1..=u16::MAX).map(NodeId).find(|node| !self.contains(*node))
    }

    /// The node with this host name, address, `HOST:PORT` or alias.
    pub fn find(&self, word: &str) -> Option<NodeId> {
        if let Some((node, _)) = self.aliases.iter().find(|(_, alias)| alias == word) {
            return Some(*node);
        }
        let (host, port) = Host::parse(word).ok()?;
        self.ranges.iter().filter(|range| port.is_none_or(|port| port == range.port)).find_map(|range| {
            range.host.offset_of(&host, range.span).map(|offset| NodeId(range.first + offset))
        })
    }

    /// Whether the map has this address. Names are not looked up.
    pub(crate) fn has_address(&self, ip: IpAddr) -> bool {
        let ip = Host::Ip(ip);
        self.ranges.iter().any(|range| range.host.offset_of(&ip, range.span).is_some())
    }

    /// The host of the node: its name or address. For a later node of a span that begins with a
    /// name it is `NAME+OFFSET`, which is only for display.
    pub(crate) fn host(&self, node: NodeId) -> Option<String> {
        let range = self.range(node)?;
        let offset = node.0 - range.first;
        let host = match &range.host {
            Host::Ip(ip) => add_offset(*ip, offset)?.to_string(),
            Host::Name(name) if offset == 0 => name.clone(),
            Host::Name(name) => format!("{name}+{offset}"),
        };
        Some(host)
    }

    /// `HOST:PORT` to connect to. If a span begins with a host name, its nodes after the first need
    /// a name lookup.
    ///
    /// # Errors
    /// `NotFound` if the node is not in the map; those of the lookup.
    pub fn address(&self, node: NodeId) -> io::Result<String> {
        let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("node {node} is not in the map"));
        let range = self.range(node).ok_or_else(unknown)?;
        let offset = node.0 - range.first;
        let first = match &range.host {
            Host::Name(name) if offset == 0 => return Ok(format!("{name}:{}", range.port)),
            Host::Name(name) => {
                (name.as_str(), range.port).to_socket_addrs()?.next().ok_or_else(unknown)?.ip()
            }
            Host::Ip(ip) => *ip,
        };
        match add_offset(first, offset).ok_or_else(unknown)? {
            IpAddr::V4(ip) => Ok(format!("{ip}:{}", range.port)),
            IpAddr::V6(ip) => Ok(format!("[{ip}]:{}", range.port)),
        }
    }

    /// The port of the node's daemon.
    pub(crate) fn port(&self, node: NodeId) -> Option<u16> {
        self.range(node).map(|range| range.port)
    }

    fn range(&self, node: NodeId) -> Option<&Range> {
        self.ranges.iter().find(|range| (range.first..=range.last()).contains(&node.0))
    }
}

impl Range {
    fn parse(line: usize, id: &str, host: &str, span: &str) -> Result<Self, String> {
        let first = parse_number(id)?;
        let span: u16 = span
            .parse()
            .ok()
            .filter(|span| *span > 0)
            .ok_or_else(|| format!("'{span}' is neither a count of nodes nor ALIAS"))?;
        if first.checked_add(span - 1).is_none() {
            return Err(format!("{span} nodes from {first} on go beyond node 65535"));
        }
        let (host, port) = Host::parse(host)?;
        if let Host::Ip(ip) = host
            && add_offset(ip, span - 1).is_none()
        {
            return Err(format!("{span} addresses from {ip} on go beyond the last one"));
        }
        Ok(Self { line, first, span, host, port: port.unwrap_or(PORT) })
    }

    fn last(&self) -> u16 {
        self.first + (self.span - 1)
    }

    fn shared_host(&self, other: &Self) -> Option<String> {
        if self.port != other.port {
            return None;
        }
        match (&self.host, &other.host) {
            (Host::Name(a), Host::Name(b)) if a == b => Some(a.clone()),
            (Host::Ip(a), Host::Ip(b)) if other.host.offset_of(&self.host, other.span).is_some() => {
                Some(a.max(b).to_string())
            }
            (Host::Ip(_), Host::Ip(b)) if self.host.offset_of(&other.host, self.span).is_some() => {
                Some(b.to_string())
            }
            _ => None,
        }
    }
}

impl Host {
    /// Parses a host name or address with an optional port; an IPv6 address with a port needs
    /// brackets.
    fn parse(word: &str) -> Result<(Self, Option<u16>), String> {
        if let Ok(ip) = word.parse() {
            return Ok((Self::Ip(ip), None));
        }
        let bracketed = |host: &str| host.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok();
        let (host, port) = match word.rsplit_once(':') {
            None => (word, None),
            Some((host, port)) => {
                let port = port.parse().ok().filter(|port| *port != 0);
                (host, Some(port.ok_or_else(|| format!("'{word}' has no valid port"))?))
            }
        };
        if let Some(ip) = bracketed(host) {
            return Ok((Self::Ip(ip.into()), port));
        }
        if let Ok(ip) = host.parse::<Ipv4Addr>() {
            return Ok((Self::Ip(ip.into()), port));
        }
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        // Digits and dots that are not an address are a mistake, not a name.
        let is_numeric = host.chars().all(|c| c.is_ascii_digit() || c == '.');
        if host.is_empty()
            || host.len() > 253
            || !host.chars().all(fits)
            || is_numeric
            || host.starts_with('-')
        {
            return Err(format!("'{word}' is not a host name or address"));
        }
        Ok((Self::Name(host.to_ascii_lowercase()), port))
    }

    /// The offset of `host` from this one, if it is within the span.
    fn offset_of(&self, host: &Self, span: u16) -> Option<u16> {
        match (self, host) {
            (Self::Name(a), Self::Name(b)) => (a == b).then_some(0),
            (Self::Ip(IpAddr::V4(a)), Self::Ip(IpAddr::V4(b))) => {
                let offset = b.to_bits().checked_sub(a.to_bits())?;
                u16::try_from(offset).ok().filter(|offset| *offset < span)
            }
            (Self::Ip(IpAddr::V6(a)), Self::Ip(IpAddr::V6(b))) => {
                let offset = b.to_bits().checked_sub(a.to_bits())?;
                u16::try_from(offset).ok().filter(|offset| *offset < span)
            }
            _ => None,
        }
    }
}

fn parse_number(word: &str) -> Result<u16, String> {
    let id = word.parse().ok().filter(|id| *id != 0);
    id.ok_or_else(|| format!("'{word}' is not a node number: nodes are 1 to 65535"))
}

fn add_offset(ip: IpAddr, offset: u16) -> Option<IpAddr> {
    Some(match ip {
        IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits().checked_add(offset.into())?).into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits().checked_add(offset.into())?).into(),
    })
}

#[cfg(test)]
mod tests;
