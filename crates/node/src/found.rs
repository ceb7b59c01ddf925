//! Founding a cluster (`tern init`) and entering one (`tern join`).

use crate::config::{self, Config, with_port};
use crate::files;
use crate::map::{Map, PORT};
use crate::message::{Admission, Application, Challenge, PROTOCOL, TalkError, check_protocol, hear, say};
use crate::token::{Token, Tokens, now};
use crate::users::Users;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_wire::{Authority, Identity, Link, NodeKey, Preamble, join_client};

/// How long the first token is valid.
const FIRST_TOKEN: u32 = 3600;

/// What `tern init` decides.
#[derive(Debug, Clone, Default)]
pub struct InitOptions {
    /// This node's number; the first is 1.
    pub node: Option<NodeId>,
    /// The cluster's name, letters, digits and hyphens; `tern` and a few random letters if absent.
    pub name: Option<String>,
    /// `HOST` or `HOST:PORT` under which other nodes reach this one; found out if absent.
    pub address: Option<String>,
    /// Replace an identity that is already there.
    pub force: bool,
    /// Instead of `/etc/tern` or `~/.config/tern`.
    pub config_dir: Option<PathBuf>,
}

/// What `tern init` did.
#[derive(Debug, Clone)]
pub struct InitReport {
    /// This node.
    pub node: NodeId,
    /// The cluster's name.
    pub cluster: String,
    /// As written into the map.
    pub address: String,
    /// Where identity and configuration are.
    pub config_dir: PathBuf,
    /// The map.
    pub map: PathBuf,
    /// A token for the first node that joins, valid for an hour.
    pub token: String,
}

/// What `tern join` decides.
#[derive(Debug, Clone, Default)]
pub struct JoinOptions {
    /// `HOST[:PORT]` of the node that made the token.
    pub host: String,
    /// The token.
    pub token: String,
    /// The number that this node wishes; the lowest free one if absent.
    pub node: Option<NodeId>,
    /// The name under which this node is shown; its host name if absent.
    pub name: Option<String>,
    /// `HOST` or `HOST:PORT` under which other nodes reach this one; found out if absent.
    pub address: Option<String>,
    /// Replace an identity that is already there.
    pub force: bool,
    /// Instead of `/etc/tern` or `~/.config/tern`.
    pub config_dir: Option<PathBuf>,
}

/// What `tern join` did.
#[derive(Debug, Clone)]
pub struct JoinReport {
    /// The number that this node got.
    pub node: NodeId,
    /// The cluster's name.
    pub cluster: String,
    /// As written into the map.
    pub address: String,
    /// Where identity and configuration are.
    pub config_dir: PathBuf,
    /// Nodes in the cluster now.
    pub nodes: Vec<NodeId>,
    /// Sentences about what will not work well, such as user databases that differ.
    pub warnings: Vec<String>,
}

/// Why a cluster was not founded or entered. Nothing has been changed, unless the text says so.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct SetupError {
    /// One sentence.
    pub message: String,
    /// What to try.
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
/// If it belongs to one already (without `force`), or a file cannot be written; the text then says which.
pub fn init(options: &InitOptions) -> Result<InitReport, SetupError> {
    let place = Place::find(options.config_dir.as_deref(), options.force)?;
    let node = options.node.unwrap_or(NodeId(1));
    let cluster = options.name.clone().unwrap_or_else(random_name);
    let address = with_port(&options.address.clone().unwrap_or_else(|| own_ip().to_string()));
    let authority = Authority::create(&cluster).map_err(SetupError::new)?;
    let identity = Identity::issued_by(&authority, node).map_err(SetupError::new)?;
    let map = Map::default()
        .adding(node, &address, None)
        .map_err(|e| SetupError::new(format!("{address}: {e}")))?;
    place.prepare()?;
    authority.save(&place.config_dir).map_err(SetupError::new)?;
    identity.save(&place.config_dir).map_err(SetupError::new)?;
    let file = place.config_file(node, node, &address);
    place.write(&file, &map)?;
    let token = Tokens::new(&place.config_dir)
        .make(node, authority.fingerprint(), FIRST_TOKEN, 1)
        .map_err(|e| SetupError::new(format!("the cluster was founded, but no token could be made: {e}")))?;
    Ok(InitReport {
        node,
        cluster,
        address,
        config_dir: place.config_dir,
        map: place.map,
        token: token.to_string(),
    })
}

/// Makes this node a member of the cluster that made the token.
///
/// # Errors
/// If the token is refused, the other node is not reached, or this one belongs to a cluster already.
pub fn join(options: &JoinOptions) -> Result<JoinReport, SetupError> {
    let place = Place::find(options.config_dir.as_deref(), options.force)?;
    let token: Token = options.token.parse().map_err(SetupError::new)?;
    if token.expires.saturating_add(60) <= now() {
        return Err(SetupError::new("the token has expired").hint("tern token, on the node that made it"));
    }
    let host = with_port(&options.host);
    let unreached = |e: &dyn std::fmt::Display| {
        SetupError::new(format!("cannot join at {host}: {e}"))
            .hint("check that ternd runs there, and that the token is that cluster's")
    };
    let tls = join_client(token.authority, token.node).map_err(SetupError::new)?;
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut link = Link::connect(&host, Preamble::Join, &tls, deadline).map_err(|e| unreached(&e))?;
    let address = match &options.address {
        Some(address) => with_port(address),
        // The way to the founder shows which of our addresses the cluster can reach.
        None => with_port(&link.local_address().map_err(|e| unreached(&e))?.ip().to_string()),
    };
    let key = NodeKey::generate().map_err(SetupError::new)?;
    let name = options.name.clone().or_else(host_name);
    let admission = apply(&mut link, &token, &key, options.node, &address, name, deadline);
    let admission = admission.map_err(|e| unreached(&e))?;
    let (node, certificate, authority, text, warnings) = match admission {
        Admission::Admitted { node, certificate, authority, map, warnings } => {
            (node, certificate, authority, map, warnings)
        }
        Admission::Refused(refusal) => {
            return Err(SetupError { message: refusal.message, hint: refusal.hint });
        }
    };
    let identity = Identity::new(key, certificate.into(), authority.into()).map_err(SetupError::new)?;
    let map = Map::parse(&text).and_then(|map| map.with(node)).map_err(SetupError::new)?;
    place.prepare()?;
    identity.save(&place.config_dir).map_err(SetupError::new)?;
    // Left over from a cluster that this node had founded itself.
    let _no_authority = std::fs::remove_file(place.config_dir.join("ca.key"));
    let file = place.config_file(node, token.node, &address);
    place.write(&file, &map)?;
    Ok(JoinReport {
        node,
        cluster: identity.cluster().into(),
        address,
        config_dir: place.config_dir,
        nodes: map.nodes(),
        warnings,
    })
}

fn apply(
    link: &mut Link,
    token: &Token,
    key: &NodeKey,
    node: Option<NodeId>,
    address: &str,
    name: Option<String>,
    deadline: Instant,
) -> Result<Admission, TalkError> {
    let challenge: Challenge = hear(link, deadline)?;
    check_protocol(challenge.protocol)?;
    let signature = key.sign(&challenge.to_sign(&token.secret));
    let application = Application {
        protocol: PROTOCOL,
        secret: token.secret,
        public_key: key.public_key().to_vec(),
        // An empty one is refused there, with a sentence.
        signature: signature.unwrap_or_default(),
        node,
        address: address.into(),
        name,
        users: Users::of_this_node(),
    };
    say(link, &application, deadline)?;
    hear(link, deadline)
}

/// Where a node's files go.
struct Place {
    config_dir: PathBuf,
    map: PathBuf,
    /// The configuration that is there, whose other keys are kept.
    file: config::File,
}

impl Place {
    fn find(config_dir: Option<&Path>, force: bool) -> Result<Self, SetupError> {
        let config_dir =
            config_dir.map_or_else(config::config_dir, |dir| Ok(dir.to_owned())).map_err(SetupError::new)?;
        let config = Config::load(&config_dir).map_err(SetupError::new)?;
        let identity = config_dir.join("node.key");
        if let Some(taken) = [&identity, &config.map].into_iter().find(|path| !force && path.exists()) {
            let said = format!("this node is in a cluster already: {} exists", taken.display());
            return Err(SetupError::new(said).hint("--force, to leave that cluster"));
        }
        Ok(Self { config_dir, map: config.map, file: config.file })
    }

    fn prepare(&self) -> Result<(), SetupError> {
        for dir in [Some(&*self.config_dir), self.map.parent()].into_iter().flatten() {
            std::fs::create_dir_all(dir)
                .map_err(|e| SetupError::new(format!("cannot make {}: {e}", dir.display())))?;
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
            files::replace(path, text, 0o644)
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

/// The address from which this node would speak to the world: connecting a UDP socket sends nothing.
fn own_ip() -> IpAddr {
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
    use crate::scratch::Scratch;

    #[test]
    fn a_cluster_is_founded_once() {
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
    fn nonsense_leaves_nothing_behind() {
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
