//! The certificate authority of a cluster. `tern init` creates it, and it stays on that node, where
//! it signs the keys of joining nodes.

use crate::files::{self, read_certificate, write_certificate};
use crate::fingerprint_of;
use crate::identity::{IdentityError, NodeKey, PUBLIC_KEY_LEN, UNCOMPRESSED, check_cluster_name, node_name};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm, SigningKey,
};
use rustls::pki_types::CertificateDer;
use std::fmt;
use std::path::Path;
use tern_ids::{Fingerprint, NodeId};

/// The authority with its private key.
pub struct Authority {
    cluster: String,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

/// The parameters of the authority's certificate. They name the authority as the issuer of all
/// certificates that it signs.
fn parameters(cluster: &str) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::CommonName, format!("tern cluster {cluster}"));
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    parameters
}

impl Authority {
    /// Creates the authority of a new cluster. Its certificates do not expire: an unattended
    /// cluster must not stop working at some date. A node is expelled by removing it from the map.
    ///
    /// # Errors
    /// If the name is not a valid name of a cluster.
    pub fn create(cluster: &str) -> Result<Self, IdentityError> {
        check_cluster_name(cluster)?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let parameters = parameters(cluster);
        let certificate = parameters.self_signed(&key)?.der().clone();
        Ok(Self { cluster: cluster.into(), certificate, issuer: Issuer::new(parameters, key) })
    }

    /// The cluster's name.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// The authority's certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The fingerprint that join tokens contain.
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of(&self.certificate)
    }

    /// Writes `ca.pem` and `ca.key` into a directory.
    ///
    /// # Errors
    /// If a file cannot be written. The other may have been written.
    pub fn save(&self, directory: &Path) -> Result<(), IdentityError> {
        files::write(&directory.join("ca.key"), &self.issuer.key().serialize_pem(), 0o600)?;
        write_certificate(&directory.join("ca.pem"), &self.certificate)
    }

    /// Reads the files that [`Self::save`] wrote. `cluster` must be the name given to
    /// [`Self::create`].
    ///
    /// # Errors
    /// If a file is missing or malformed, or key and certificate do not match.
    pub fn load(directory: &Path, cluster: &str) -> Result<Self, IdentityError> {
        check_cluster_name(cluster)?;
        let key_path = directory.join("ca.key");
        let key = KeyPair::from_pem(&files::read(&key_path)?)?;
        let certificate = read_certificate(&directory.join("ca.pem"))?;
        let parsed = webpki::EndEntityCert::try_from(&certificate)
            .map_err(|_parse| IdentityError::Malformed { path: directory.join("ca.pem") })?;
        if parsed.subject_public_key_info().as_ref() != key.subject_public_key_info() {
            return Err(IdentityError::OtherKey { path: key_path });
        }
        Ok(Self { cluster: cluster.into(), certificate, issuer: Issuer::new(parameters(cluster), key) })
    }

    /// Issues the certificate of a node for its public key, in the form of [`NodeKey::public_key`].
    /// The caller must have checked that the node holds the private key ([`NodeKey::has_signed`]).
    ///
    /// # Errors
    /// If the key is not an uncompressed point of P-256.
    pub fn issue(&self, node: NodeId, public_key: &[u8]) -> Result<CertificateDer<'static>, IdentityError> {
        if public_key.len() != PUBLIC_KEY_LEN || public_key[0] != UNCOMPRESSED {
            return Err(IdentityError::PublicKey);
        }
        let name = node_name(node, &self.cluster);
        let mut parameters = CertificateParams::new(vec![name.clone()])?;
        parameters.distinguished_name = rcgen::DistinguishedName::new();
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.use_authority_key_identifier_extension = true;
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Ok(parameters.signed_by(&Point(public_key), &self.issuer)?.der().clone())
    }

    /// Signs a message; [`Identity::is_signed_by_authority`](crate::Identity::is_signed_by_authority)
    /// checks that.
    ///
    /// # Errors
    /// If the system's random generator fails.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, IdentityError> {
        Ok(self.issuer.key().sign(message)?)
    }

    /// Issues a certificate for a key of this process.
    ///
    /// # Errors
    /// Those of [`Self::issue`].
    pub fn issue_own(&self, node: NodeId, key: &NodeKey) -> Result<CertificateDer<'static>, IdentityError> {
        self.issue(node, key.public_key())
    }
}

struct Point<'a>(&'a [u8]);

impl PublicKeyData for Point<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authority_round_trips_through_files() {
        let directory = crate::identity::tests::TempDir::new("authority");
        let made = Authority::create("alpha").unwrap();
        made.save(&directory.0).unwrap();
        let loaded = Authority::load(&directory.0, "alpha").unwrap();
        assert_eq!(loaded.fingerprint(), made.fingerprint());
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(directory.0.join("ca.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn foreign_key_is_detected() {
        let directory = crate::identity::tests::TempDir::new("foreign");
        Authority::create("alpha").unwrap().save(&directory.0).unwrap();
        let other = KeyPair::generate().unwrap().serialize_pem();
        std::fs::write(directory.0.join("ca.key"), other).unwrap();
        assert!(matches!(Authority::load(&directory.0, "alpha"), Err(IdentityError::OtherKey { .. })));
    }

    #[test]
    fn bad_keys_and_names_are_refused() {
        let authority = Authority::create("alpha").unwrap();
        assert!(authority.issue(NodeId(1), b"short").is_err());
        assert!(authority.issue(NodeId(1), &[4; 64]).is_err());
        for name in ["", "a.b", "Ä", "-a", "a-", "A", &"a".repeat(41)] {
            assert!(Authority::create(name).is_err(), "{name:?}");
        }
    }
}
