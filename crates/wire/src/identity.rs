//! Who a node is: its key, its certificate, and the authority that signed it.
//!
//! A certificate says `node-N.CLUSTER.tern`, and nothing else of it is ever looked at.

use crate::Authority;
use crate::files::{self, read_certificate, write_certificate};
use crate::limits::MOST_CLUSTER_NAME;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData, SigningKey};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use tern_ids::NodeId;

/// Why an identity could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is there but holds something else.
    #[error("{} is malformed; join the cluster again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// Key and certificate do not belong together.
    #[error("{} is not the key of its certificate; join the cluster again", path.display())]
    OtherKey {
        /// The key's file.
        path: PathBuf,
    },
    /// Not a name for a cluster.
    #[error("a cluster's name is 1 to {MOST_CLUSTER_NAME} lower-case letters, digits and inner hyphens")]
    ClusterName,
    /// Not a key that nodes have.
    #[error("the public key is not an uncompressed point of P-256")]
    PublicKey,
    /// The cryptographic library refused.
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// TLS cannot be set up with it.
    #[error("cannot use the certificate: {0}")]
    Tls(#[from] rustls::Error),
}

/// The name of a node in its certificate.
pub(crate) fn node_name(node: NodeId, cluster: &str) -> String {
    format!("node-{node}.{cluster}.tern")
}

/// The node and the cluster that a certificate names; `None` if it is not one of ours. Only of worth if the
/// certificate has been verified.
pub(crate) fn named_in(certificate: &CertificateDer<'_>) -> Option<(NodeId, String)> {
    let parsed = webpki::EndEntityCert::try_from(certificate).ok()?;
    let mut names = parsed.valid_dns_names();
    let (name, None) = (names.next()?, names.next()) else { return None };
    let (node, rest) = name.strip_prefix("node-")?.split_once('.')?;
    let cluster = rest.strip_suffix(".tern")?;
    let id = node.parse().ok().filter(|id: &u16| *id != 0 && id.to_string() == node)?;
    check_cluster_name(cluster).ok()?;
    Some((NodeId(id), cluster.into()))
}

/// Whether a text can be a cluster's name.
///
/// # Errors
/// If not.
pub fn check_cluster_name(name: &str) -> Result<(), IdentityError> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let fine = (1..=MOST_CLUSTER_NAME).contains(&name.len())
        && name.chars().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-');
    if fine { Ok(()) } else { Err(IdentityError::ClusterName) }
}

/// A node's private key.
pub struct NodeKey(KeyPair);

impl fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeKey")
    }
}

impl NodeKey {
    /// Makes a new key.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn generate() -> Result<Self, IdentityError> {
        Ok(Self(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?))
    }

    /// What the authority signs: an uncompressed point of P-256.
    pub fn public_key(&self) -> &[u8] {
        self.0.der_bytes()
    }

    /// Proves possession: a signature over something that the other side chose.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, IdentityError> {
        Ok(self.0.sign(message)?)
    }

    /// Whether the owner of `public_key` has signed `message`.
    pub fn has_signed(public_key: &[u8], message: &[u8], signature: &[u8]) -> bool {
        ring::signature::UnparsedPublicKey::new(&ring::signature::ECDSA_P256_SHA256_ASN1, public_key)
            .verify(message, signature)
            .is_ok()
    }
}

/// A node's place in its cluster.
pub struct Identity {
    node: NodeId,
    cluster: String,
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) authority: CertificateDer<'static>,
    key: KeyPair,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", node_name(self.node, &self.cluster))
    }
}

impl Identity {
    /// Puts together what a node got when it joined.
    ///
    /// # Errors
    /// If the certificate is not for this key, or names no node.
    pub fn new(
        key: NodeKey,
        certificate: CertificateDer<'static>,
        authority: CertificateDer<'static>,
    ) -> Result<Self, IdentityError> {
        let path = PathBuf::from("node.key");
        let Some((node, cluster)) = named_in(&certificate) else {
            return Err(IdentityError::Malformed { path });
        };
        let parsed = webpki::EndEntityCert::try_from(&certificate)
            .map_err(|_parse| IdentityError::Malformed { path: path.clone() })?;
        if parsed.subject_public_key_info().as_ref() != key.0.subject_public_key_info() {
            return Err(IdentityError::OtherKey { path });
        }
        drop(parsed);
        Ok(Self { node, cluster, certificate, authority, key: key.0 })
    }

    /// The first node's identity, from the authority beside it.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn issued_by(authority: &Authority, node: NodeId) -> Result<Self, IdentityError> {
        let key = NodeKey::generate()?;
        let certificate = authority.issue_own(node, &key)?;
        Self::new(key, certificate, authority.certificate().clone())
    }

    /// This node.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The cluster's name.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Writes `node.key`, `node.pem` and `ca.pem` into a directory.
    ///
    /// # Errors
    /// If a file cannot be written; others may have been.
    pub fn save(&self, directory: &Path) -> Result<(), IdentityError> {
        files::write(&directory.join("node.key"), &self.key.serialize_pem(), 0o600)?;
        write_certificate(&directory.join("node.pem"), &self.certificate)?;
        write_certificate(&directory.join("ca.pem"), &self.authority)
    }

    /// Reads what [`Self::save`] wrote.
    ///
    /// # Errors
    /// If a file is missing or malformed, or they do not belong together.
    pub fn load(directory: &Path) -> Result<Self, IdentityError> {
        let key = KeyPair::from_pem(&files::read(&directory.join("node.key"))?)?;
        let certificate = read_certificate(&directory.join("node.pem"))?;
        Self::new(NodeKey(key), certificate, read_certificate(&directory.join("ca.pem"))?)
    }

    pub(crate) fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.serialize_der()).into()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A directory that goes with the test.
    pub(crate) struct Scratch(pub(crate) PathBuf);

    impl Scratch {
        pub(crate) fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tern-wire-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _gone = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_identity_survives_its_files() {
        let directory = Scratch::new("identity");
        let authority = Authority::create("alpha").unwrap();
        Identity::issued_by(&authority, NodeId(7)).unwrap().save(&directory.0).unwrap();
        let loaded = Identity::load(&directory.0).unwrap();
        assert_eq!((loaded.node(), loaded.cluster()), (NodeId(7), "alpha"));
    }

    #[test]
    fn a_certificate_for_another_key_is_refused() {
        let authority = Authority::create("alpha").unwrap();
        let certificate = authority.issue_own(NodeId(1), &NodeKey::generate().unwrap()).unwrap();
        let own = NodeKey::generate().unwrap();
        let made = Identity::new(own, certificate, authority.certificate().clone());
        assert!(matches!(made, Err(IdentityError::OtherKey { .. })));
    }

    #[test]
    fn possession_of_a_key_can_be_proved() {
        let (mine, other) = (NodeKey::generate().unwrap(), NodeKey::generate().unwrap());
        let proof = mine.sign(b"challenge").unwrap();
        assert!(NodeKey::has_signed(mine.public_key(), b"challenge", &proof));
        assert!(!NodeKey::has_signed(mine.public_key(), b"another", &proof));
        assert!(!NodeKey::has_signed(other.public_key(), b"challenge", &proof));
        assert!(!NodeKey::has_signed(b"", b"challenge", &proof));
    }
}
