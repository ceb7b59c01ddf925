//! The key of a gatekeeper, by which machines outside of the cluster identify it.
//!
//! This key is not the node's own, for two reasons. Clients receive its fingerprint once, whereas a
//! node that joins its cluster again gets a new certificate. And the certificate shown to outside
//! machines must not name the cluster or the node.

use crate::files;
use crate::identity::IdentityError;
use crate::pin::fingerprint_of;
use crate::tls::{ServerTls, Trust, server_config};
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use std::fmt;
use std::path::Path;
use tern_ids::Fingerprint;

/// The name in the gatekeeper's certificate; clients do not check it.
const NAME: &str = "gatekeeper.tern";

/// Key and certificate of a gatekeeper.
pub struct GateKey {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl fmt::Debug for GateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GateKey({:?})", self.fingerprint())
    }
}

impl GateKey {
    /// Reads the key, or creates it if the file does not exist. Key and certificate are in one
    /// file, so that two processes that create it at once end up with the same key.
    ///
    /// # Errors
    /// If the file cannot be read or written, or is malformed.
    pub fn load_or_create(path: &Path) -> Result<Self, IdentityError> {
        if !path.exists() {
            let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
            let certificate = CertificateParams::new(vec![NAME.into()])?.self_signed(&key)?;
            files::write_new(path, &format!("{}{}", key.serialize_pem(), certificate.pem()), 0o600)?;
        }
        let text = files::read(path)?;
        let malformed = |_pem| IdentityError::Malformed { path: path.to_owned() };
        Ok(Self {
            certificate: CertificateDer::from_pem_slice(text.as_bytes()).map_err(malformed)?,
            key: PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(malformed)?,
        })
    }

    /// The fingerprint that clients expect.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of(&self.certificate)
    }

    /// TLS for accepting connections from any client. Clients authenticate themselves inside of the
    /// encrypted connection.
    ///
    /// # Errors
    /// If the key is unusable.
    pub fn server(&self) -> Result<ServerTls, IdentityError> {
        let chain = vec![self.certificate.clone()];
        let config = server_config(WebPkiClientVerifier::no_client_auth(), chain, self.key.clone_key())?;
        Ok(ServerTls { config, trust: Trust::KeyOnly })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::tests::TempDir;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn gate_key_is_created_once_with_mode_0600() {
        let directory = TempDir::new("gatekeeper");
        let path = directory.0.join("outside.pem");
        let first = GateKey::load_or_create(&path).unwrap();
        assert_eq!(GateKey::load_or_create(&path).unwrap().fingerprint(), first.fingerprint());
        assert!(first.server().is_ok());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        // An existing file is kept.
        files::write_new(&path, "other", 0o600).unwrap();
        assert_eq!(GateKey::load_or_create(&path).unwrap().fingerprint(), first.fingerprint());
        std::fs::write(&path, "other").unwrap();
        assert!(GateKey::load_or_create(&path).is_err());
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 1, "nothing else is left");
    }
}
