//! The identity of a node: its key, its certificate, and the certificate of the authority that
//! signed it.
//!
//! A certificate names `node-N.CLUSTER.tern`. Nothing else in it is used.

use crate::Authority;
use crate::files::{self, read_certificate, write_certificate};
use crate::limits::MAX_CLUSTER_NAME;
use crate::members::Members;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData, SigningKey};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tern_ids::{Fingerprint, NodeId};

/// Bytes of an uncompressed point of P-256, and the first of them.
pub(crate) const PUBLIC_KEY_LEN: usize = 65;
pub(crate) const UNCOMPRESSED: u8 = 4;

/// Why an identity could not be created or loaded.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file exists, but its content is invalid.
    #[error("{} is malformed; join the cluster again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// The key does not belong to the certificate.
    #[error("{} is not the key of its certificate; join the cluster again", path.display())]
    OtherKey {
        /// The key's file.
        path: PathBuf,
    },
    /// The text is not a valid cluster name.
    #[error("a cluster's name is 1 to {MAX_CLUSTER_NAME} lower-case letters, digits and inner hyphens")]
    ClusterName,
    /// The public key has an unsupported type.
    #[error("the public key is not an uncompressed point of P-256")]
    PublicKey,
    /// The cryptographic library returned an error.
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// TLS cannot be set up with this identity.
    #[error("cannot use the certificate: {0}")]
    Tls(#[from] rustls::Error),
}

/// The name of a node in its certificate.
pub(crate) fn node_name(node: NodeId, cluster: &str) -> String {
    format!("node-{node}.{cluster}.tern")
}

/// The node and the cluster that a certificate names; `None` if it is not a certificate of Tern.
/// Meaningful only for a verified certificate.
pub(crate) fn node_in_certificate(certificate: &CertificateDer<'_>) -> Option<(NodeId, String)> {
    let parsed = webpki::EndEntityCert::try_from(certificate).ok()?;
    let mut names = parsed.valid_dns_names();
    let (name, None) = (names.next()?, names.next()) else { return None };
    let (node, rest) = name.strip_prefix("node-")?.split_once('.')?;
    let cluster = rest.strip_suffix(".tern")?;
    let id = node.parse().ok().filter(|id: &u16| *id != 0 && id.to_string() == node)?;
    check_cluster_name(cluster).ok()?;
    Some((NodeId(id), cluster.into()))
}

/// The fingerprint of the public key in a certificate; `None` if it is of another type than
/// [`NodeKey::public_key`]. Meaningful only for a verified certificate.
pub(crate) fn key_in_certificate(certificate: &CertificateDer<'_>) -> Option<Fingerprint> {
    Some(key_fingerprint(&public_key_in(certificate)?))
}

/// The public key in a certificate, in the form of [`NodeKey::public_key`], with which its key info ends.
fn public_key_in(certificate: &CertificateDer<'_>) -> Option<[u8; PUBLIC_KEY_LEN]> {
    let parsed = webpki::EndEntityCert::try_from(certificate).ok()?;
    parsed.subject_public_key_info().last_chunk().filter(|key| key[0] == UNCOMPRESSED).copied()
}

/// The SHA-256 of a public key in the form of [`NodeKey::public_key`].
pub fn key_fingerprint(public_key: &[u8]) -> Fingerprint {
    let digest = ring::digest::digest(&ring::digest::SHA256, public_key);
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest.as_ref());
    Fingerprint(bytes)
}

/// Checks that a text is a valid name of a cluster.
///
/// # Errors
/// If it is not.
pub fn check_cluster_name(name: &str) -> Result<(), IdentityError> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let fine = (1..=MAX_CLUSTER_NAME).contains(&name.len())
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
    /// Generates a new key.
    ///
    /// # Errors
    /// If the system's random generator fails.
    pub fn generate() -> Result<Self, IdentityError> {
        Ok(Self(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?))
    }

    /// Reads the key that [`Identity::save`] wrote.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn load(directory: &Path) -> Result<Self, IdentityError> {
        Ok(Self(KeyPair::from_pem(&files::read(&directory.join("node.key"))?)?))
    }

    /// The public key, which the authority signs: an uncompressed point of P-256.
    pub fn public_key(&self) -> &[u8] {
        self.0.der_bytes()
    }

    /// Signs a challenge of the peer, to prove possession of the key.
    ///
    /// # Errors
    /// If the system's random generator fails.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, IdentityError> {
        Ok(self.0.sign(message)?)
    }

    /// Whether `signature` over `message` was made with the private key of `public_key`.
    pub fn has_signed(public_key: &[u8], message: &[u8], signature: &[u8]) -> bool {
        ring::signature::UnparsedPublicKey::new(&ring::signature::ECDSA_P256_SHA256_ASN1, public_key)
            .verify(message, signature)
            .is_ok()
    }
}

/// A node's membership in a cluster.
pub struct Identity {
    node: NodeId,
    cluster: String,
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) authority: CertificateDer<'static>,
    key: KeyPair,
    members: Arc<Members>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", node_name(self.node, &self.cluster))
    }
}

impl Identity {
    /// Combines a key with the certificates received when the node joined.
    ///
    /// # Errors
    /// If the certificate is not for this key, or does not name a node.
    pub fn new(
        key: NodeKey,
        certificate: CertificateDer<'static>,
        authority: CertificateDer<'static>,
    ) -> Result<Self, IdentityError> {
        let path = PathBuf::from("node.key");
        let Some((node, cluster)) = node_in_certificate(&certificate) else {
            return Err(IdentityError::Malformed { path });
        };
        let parsed = webpki::EndEntityCert::try_from(&certificate)
            .map_err(|_parse| IdentityError::Malformed { path: path.clone() })?;
        if parsed.subject_public_key_info().as_ref() != key.0.subject_public_key_info() {
            return Err(IdentityError::OtherKey { path });
        }
        drop(parsed);
        Ok(Self { node, cluster, certificate, authority, key: key.0, members: Arc::default() })
    }

    /// The identity of the founder, with a certificate from its own authority.
    ///
    /// # Errors
    /// If the system's random generator fails.
    pub fn issued_by_authority(authority: &Authority, node: NodeId) -> Result<Self, IdentityError> {
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

    /// The fingerprint of the node's public key.
    pub fn key(&self) -> Fingerprint {
        key_fingerprint(self.key.der_bytes())
    }

    /// This node and its key, as they are in the map.
    pub fn member(&self) -> (NodeId, Fingerprint) {
        (self.node, self.key())
    }

    /// The members of the cluster with which [`cluster_client`](Self::cluster_client) and
    /// [`cluster_server`](Self::cluster_server) make links. There are none until they are set.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// Whether the cluster's authority has signed a message.
    pub fn is_signed_by_authority(&self, message: &[u8], signature: &[u8]) -> bool {
        public_key_in(&self.authority).is_some_and(|key| NodeKey::has_signed(&key, message, signature))
    }

    /// Writes `node.key`, `node.pem` and `ca.pem` into a directory.
    ///
    /// # Errors
    /// If a file cannot be written. Others may have been written.
    pub fn save(&self, directory: &Path) -> Result<(), IdentityError> {
        files::write(&directory.join("node.key"), &self.key.serialize_pem(), 0o600)?;
        write_certificate(&directory.join("node.pem"), &self.certificate)?;
        write_certificate(&directory.join("ca.pem"), &self.authority)
    }

    /// Reads the files that [`Self::save`] wrote.
    ///
    /// # Errors
    /// If a file is missing or malformed, or key and certificate do not match.
    pub fn load(directory: &Path) -> Result<Self, IdentityError> {
        let key = NodeKey::load(directory)?;
        let certificate = read_certificate(&directory.join("node.pem"))?;
        Self::new(key, certificate, read_certificate(&directory.join("ca.pem"))?)
    }

    pub(crate) fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.serialize_der()).into()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A directory that is removed at the end of the test.
    pub(crate) struct TempDir(pub(crate) PathBuf);

    impl TempDir {
        pub(crate) fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tern-wire-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _gone = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn identity_round_trips_through_files() {
        let directory = TempDir::new("identity");
        let authority = Authority::create("alpha").unwrap();
        Identity::issued_by_authority(&authority, NodeId(7)).unwrap().save(&directory.0).unwrap();
        let loaded = Identity::load(&directory.0).unwrap();
        assert_eq!((loaded.node(), loaded.cluster()), (NodeId(7), "alpha"));
    }

    #[test]
    fn certificate_for_another_key_is_refused() {
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
