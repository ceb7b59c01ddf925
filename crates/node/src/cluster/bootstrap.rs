//! Founding a cluster (`tern init`) and joining one (`tern join`).

use crate::cluster::map::{Map, PORT};
use crate::cluster::token::{Token, Tokens};
use crate::cluster::users::UserList;
use crate::config::{self, Config, with_port};
use crate::os::clock::unix_seconds;
use crate::os::text_file;
use crate::peer::message::{
    Challenge, JoinReply, JoinRequest, PROTOCOL, PeerError, check_protocol, receive, send,
};
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_wire::{Authority, Identity, Link, NodeKey, Preamble, join_client};

/// Lifetime of the first token, in seconds.
const FIRST_TOKEN_LIFETIME_S: u32 = 3600;

/// The options of `tern init`.
#[derive(Debug, Clone, Default)]
pub struct InitOptions {
    /// This node's number; 1 if absent.
    pub node: Option<NodeId>,
    /// The cluster's name: letters, digits and hyphens; `tern-` and four random letters if absent.
    pub name: Option<String>,
    /// `HOST` or `HOST:PORT` at which other nodes reach this one; detected if absent.
    pub address: Option<String>,
    /// Replace an existing identity.
    pub force: bool,
    /// The directory to use instead of `/etc/tern` or `~/.config/tern`.
    pub config_dir: Option<PathBuf>,
}

/// The result of `tern init`.
#[derive(Debug, Clone)]
pub struct InitReport {
    /// The number of this node.
    pub node: NodeId,
    /// The cluster's name.
    pub cluster: String,
    /// As written into the map.
    pub address: String,
    /// Where identity and configuration were written.
    pub config_dir: PathBuf,
    /// Where the map was written.
    pub map: PathBuf,
    /// A token for the first node that joins, valid for an hour.
    pub token: String,
}

/// The options of `tern join`.
#[derive(Debug, Clone, Default)]
pub struct JoinOptions {
    /// `HOST[:PORT]` of the node that made the token.
    pub host: String,
    /// The token.
    pub token: String,
    /// The number that this node asks for; the lowest free one if absent.
    pub node: Option<NodeId>,
    /// The name under which this node is shown; its host name if absent.
    pub name: Option<String>,
    /// `HOST` or `HOST:PORT` at which other nodes reach this one; detected if absent.
    pub address: Option<String>,
    /// Replace an existing identity.
    pub force: bool,
    /// The directory to use instead of `/etc/tern` or `~/.config/tern`.
    pub config_dir: Option<PathBuf>,
}

/// The result of `tern join`.
#[derive(Debug, Clone)]
pub struct JoinReport {
    /// The number that this node got.
    pub node: NodeId,
    /// The cluster's name.
    pub cluster: String,
    /// As written into the map.
    pub address: String,
    /// Where identity and configuration were written.
    pub config_dir: PathBuf,
    /// The nodes of the cluster, this one included.
    pub nodes: Vec<NodeId>,
    /// Sentences about what will not work well, such as user databases that differ.
    pub warnings: Vec<String>,
}

/// Why a cluster was not founded or joined. If a file could not be written, earlier steps are not
/// undone.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct SetupError {
    /// One sentence.
    pub message: String,
    /// A suggestion for the user.
    pub hint: Option<String>,
}

impl SetupError {
    fn new(message: impl ToString) -> Self {
        Self { message: message.to_string(), hint: None }
    }

    fn hint(mut self, hint: &str) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Makes this node the first of a new cluster.
///
/// # Errors
/// If it belongs to a cluster already (without `force`), or a file cannot be written.
pub fn init(options: &InitOptions) -> Result<InitReport, SetupError> {
    let files_of_node = NodeFiles::find(options.config_dir.as_deref(), options.force)?;
    let node = options.node.unwrap_or(NodeId(1));
    let cluster = options.name.clone().unwrap_or_else(random_name);
    let address = with_port(&options.address.clone().unwrap_or_else(|| local_ip().to_string()));
    let authority = Authority::create(&cluster).map_err(SetupError::new)?;
    let identity = Identity::issued_by_authority(&authority, node).map_err(SetupError::new)?;
    let map = Map::default()
        .with_node(node, &address, None)
        .map_err(|e| SetupError::new(format!("{address}: {e}")))?;
    let map = map.with_key(node, identity.key()).signed(&authority).map_err(SetupError::new)?;
    files_of_node.prepare()?;
    authority.save(&files_of_node.config_dir).map_err(SetupError::new)?;
    identity.save(&files_of_node.config_dir).map_err(SetupError::new)?;
    let file = files_of_node.config_file(node, node, &address);
    files_of_node.write(&file, &map)?;
    let token = Tokens::new(&files_of_node.config_dir)
        .create(node, authority.fingerprint(), FIRST_TOKEN_LIFETIME_S, 1)
        .map_err(|e| SetupError::new(format!("the cluster was founded, but no token could be made: {e}")))?;
    Ok(InitReport {
        node,
        cluster,
        address,
        config_dir: files_of_node.config_dir,
        map: files_of_node.map,
        token: token.to_string(),
    })
}

/// Makes this node a member of the cluster that made the token.
///
/// # Errors
/// If the token is refused, the other node is not reached, or this node belongs to a cluster
/// already.
pub fn join(options: &JoinOptions) -> Result<JoinReport, SetupError> {
    let files_of_node = NodeFiles::find(options.config_dir.as_deref(), options.force)?;
    let token: Token = options.token.parse().map_err(SetupError::new)?;
    if token.expires.saturating_add(60) <= unix_seconds() {
        return Err(SetupError::new("the token has expired").hint("tern token, on the node that made it"));
    }
    let host = with_port(&options.host);
    let unreachable = |e: &dyn std::fmt::Display| {
        SetupError::new(format!("cannot join at {host}: {e}"))
            .hint("check that ternd runs there, and that the token is that cluster's")
    };
    let tls = join_client(token.authority, token.node).map_err(SetupError::new)?;
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut link = Link::connect(&host, Preamble::Join, &tls, deadline).map_err(|e| unreachable(&e))?;
    let address = match &options.address {
        Some(address) => with_port(address),
        // The local end of this connection is an address that the cluster can reach.
        None => with_port(&link.local_address().map_err(|e| unreachable(&e))?.ip().to_string()),
    };
    // A machine that joins again is the same one if it has the same key.
    let key = NodeKey::load(&files_of_node.config_dir).or_else(|_none| NodeKey::generate());
    let key = key.map_err(SetupError::new)?;
    let name = options.name.clone().or_else(host_name);
    let admission = request_admission(&mut link, &token, &key, options.node, &address, name, deadline);
    let admission = admission.map_err(|e| unreachable(&e))?;
    let (node, certificate, authority, text, warnings) = match admission {
        JoinReply::Admitted { node, certificate, authority, map, warnings } => {
            (node, certificate, authority, map, warnings)
        }
        JoinReply::Refused(refusal) => {
            return Err(SetupError { message: refusal.message, hint: refusal.hint });
        }
    };
    let identity = Identity::new(key, certificate.into(), authority.into()).map_err(SetupError::new)?;
    let map = Map::parse(&text).and_then(|map| map.check_contains(node)).map_err(SetupError::new)?;
    if !map.is_signed(&identity) {
        return Err(SetupError::new("the cluster's map is not signed by its authority"));
    }
    files_of_node.prepare()?;
    identity.save(&files_of_node.config_dir).map_err(SetupError::new)?;
    // Removes the authority of a cluster that this node founded earlier.
    let _no_authority = std::fs::remove_file(files_of_node.config_dir.join("ca.key"));
    let file = files_of_node.config_file(node, token.node, &address);
    files_of_node.write(&file, &map)?;
    Ok(JoinReport {
        node,
        cluster: identity.cluster().into(),
        address,
        config_dir: files_of_node.config_dir,
        nodes: map.nodes(),
        warnings,
    })
}

fn request_admission(
    link: &mut Link,
    token: &Token,
    key: &NodeKey,
    node: Option<NodeId>,
    address: &str,
    name: Option<String>,
    deadline: Instant,
) -> Result<JoinReply, PeerError> {
    let challenge: Challenge = receive(link, deadline)?;
    check_protocol(challenge.protocol)?;
    let signature = key.sign(&challenge.signed_bytes(&token.secret));
    let request = JoinRequest {
        protocol: PROTOCOL,
        secret: token.secret,
        public_key: key.public_key().to_vec(),
        // The receiver refuses an empty signature, with an error message.
        signature: signature.unwrap_or_default(),
        node,
        address: address.into(),
        name,
        users: UserList::of_this_node(),
    };
    send(link, &request, deadline)?;
    receive(link, deadline)
}

/// The files of the node that `init` and `join` write.
struct NodeFiles {
    config_dir: PathBuf,
    map: PathBuf,
    /// The existing configuration; keys that `init` and `join` do not set are kept.
    file: config::File,
}

impl NodeFiles {
    fn find(config_dir: Option<&Path>, force: bool) -> Result<Self, SetupError> {
        let config_dir =
            config_dir.map_or_else(config::config_dir, |dir| Ok(dir.to_owned())).map_err(SetupError::new)?;
        let config = Config::load(&config_dir).map_err(SetupError::new)?;
        let identity = config_dir.join("node.key");
        if let Some(taken) = [&identity, &config.map].into_iter().find(|path| !force && path.exists()) {
            let message = format!("this node is in a cluster already: {} exists", taken.display());
            return Err(SetupError::new(message).hint("--force, to leave that cluster"));
        }
        Ok(Self { config_dir, map: config.map, file: config.file })
    }

    fn prepare(&self) -> Result<(), SetupError> {
        for dir in [Some(&*self.config_dir), self.map.parent()].into_iter().flatten() {
            std::fs::create_dir_all(dir)
                .map_err(|e| SetupError::new(format!("cannot create {}: {e}", dir.display())))?;
        }
        Ok(())
    }

    fn config_file(&self, node: NodeId, founder: NodeId, address: &str) -> config::File {
        config::File {
            node: Some(node.0),
            address: Some(address.into()),
            founder: Some(founder.0),
            ..self.file.clone()
        }
    }

    fn write(&self, file: &config::File, map: &Map) -> Result<(), SetupError> {
        let text = toml::to_string(file).map_err(SetupError::new)?;
        for (path, text) in [(&self.config_dir.join(config::FILE), &*text), (&self.map, map.text())] {
            text_file::replace(path, text, 0o644)
                .map_err(|e| SetupError::new(format!("cannot write {}: {e}", path.display())))?;
        }
        Ok(())
    }
}

fn random_name() -> String {
    let letters = rand::random::<[u8; 4]>().map(|byte| char::from(b'a' + byte % 26));
    format!("tern-{}", String::from_iter(letters))
}

fn host_name() -> Option<String> {
    rustix::system::uname().nodename().to_str().ok().map(str::to_owned)
}

/// The address of the interface with the default route. Connecting a UDP socket sends nothing.
fn local_ip() -> IpAddr {
    let probe = |bind: &str, to: &str| {
        let socket = UdpSocket::bind((bind, 0)).ok()?;
        socket.connect((to, PORT)).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    };
    probe("0.0.0.0", "192.0.2.1").or_else(|| probe("::", "2001:db8::1")).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;

    #[test]
    fn init_refuses_a_second_cluster_without_force() {
        let dir = Scratch::new("init");
        let options = InitOptions {
            name: Some("alpha".into()),
            address: Some("127.0.0.1".into()),
            config_dir: Some(dir.0.clone()),
            ..InitOptions::default()
        };
        let report = init(&options).unwrap();
        assert_eq!((report.node, &*report.address), (NodeId(1), "127.0.0.1:7101"));
        let config = Config::load(&dir.0).unwrap();
        assert_eq!((config.file.node, config.file.founder), (Some(1), Some(1)));
        let map = Map::parse(&std::fs::read_to_string(&config.map).unwrap()).unwrap();
        assert_eq!((map.nodes(), map.version()), (vec![NodeId(1)], 1));
        assert_eq!(Identity::load(&dir.0).unwrap().cluster(), "alpha");
        assert_eq!(report.token.parse::<Token>().unwrap().node, NodeId(1));
        assert!(init(&options).unwrap_err().message.contains("in a cluster already"));
        assert!(init(&InitOptions { force: true, ..options }).is_ok());
    }

    #[test]
    fn failed_setup_leaves_no_files() {
        let dir = Scratch::new("nonsense");
        let config_dir = dir.0.join("config");
        let options = InitOptions { config_dir: Some(config_dir.clone()), ..InitOptions::default() };
        assert!(init(&InitOptions { name: Some("A B".into()), ..options.clone() }).is_err());
        assert!(init(&InitOptions { address: Some("a/b".into()), ..options }).is_err());
        let join_options = JoinOptions { config_dir: Some(config_dir.clone()), ..JoinOptions::default() };
        assert!(join(&join_options).unwrap_err().message.contains("not a token"));
        assert!(!config_dir.exists());
    }
}
