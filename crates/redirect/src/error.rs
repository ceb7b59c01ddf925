//! Errors of this crate. Each message ends with a remedy.

use std::io;
use std::net::SocketAddr;

/// The remedy for a refused change of the network.
pub(crate) const NEEDS_NET_ADMIN: &str = "run it with CAP_NET_ADMIN, on a kernel with CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV and CONFIG_VETH";

/// The reason why an operation of this crate failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedirectError {
    /// The kernel refused a request.
    #[error("cannot {action}: {source}; {remedy}")]
    Refused {
        /// The operation, with the names of its objects.
        action: String,
        /// The kernel's answer.
        source: io::Error,
        /// The step that the operator or the caller can take.
        remedy: &'static str,
    },
    /// Another process owns the nftables table.
    #[error("another process owns the nftables table {table}; end the other tern-net of this machine")]
    TableInUse {
        /// Name of the table, of family netdev.
        table: String,
    },
    /// There is no interface of this name.
    #[error("there is no network interface {name}; `ip link` lists the names")]
    NoInterface {
        /// The missing name.
        name: String,
    },
    /// The name is empty, longer than 15 bytes, or has a character that the kernel does not permit.
    #[error("{name:?} is no name for a network interface; use 1 to 15 letters, digits, - or _")]
    BadName {
        /// The refused name.
        name: String,
    },
    /// The two ends of a connection, or a connection and its next hop, are of different IP versions.
    #[error("{first} and {second} are not of the same IP version; use two addresses of one version")]
    MixedFamilies {
        /// One of the two.
        first: SocketAddr,
        /// The other one.
        second: SocketAddr,
    },
    /// A new interface does not become operational.
    #[error("interface {name} does not become operational; check it with `ip -d link`")]
    NotOperational {
        /// Its name.
        name: String,
    },
    /// No route leads to the address.
    #[error("there is no route to {address}; relay the connection through home")]
    NoRoute {
        /// The destination.
        address: std::net::IpAddr,
    },
    /// The kernel's answer has another form than this crate expects.
    #[error("the kernel's answer to {request} is incomplete; report this with the output of `uname -r`")]
    Malformed {
        /// The request.
        request: &'static str,
    },
    /// More connections than one filter can match.
    #[error("{number} connections exceed the {max} of one hold; open several holds")]
    TooManyConnections {
        /// Number of connections in the request.
        number: usize,
        /// Maximum for one hold.
        max: usize,
    },
}

/// The result of an operation of this crate.
pub(crate) type Result<T> = std::result::Result<T, RedirectError>;

/// Adds the operation and the remedy to an error of the kernel.
pub(crate) trait WithRemedy<T> {
    /// `action` completes the sentence "cannot …".
    fn with_remedy(self, action: impl FnOnce() -> String, remedy: &'static str) -> Result<T>;
}

impl<T, E: Into<io::Error>> WithRemedy<T> for std::result::Result<T, E> {
    fn with_remedy(self, action: impl FnOnce() -> String, remedy: &'static str) -> Result<T> {
        self.map_err(|source| RedirectError::Refused { action: action(), source: source.into(), remedy })
    }
}
