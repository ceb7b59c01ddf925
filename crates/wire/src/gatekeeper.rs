//! The key of a gatekeeper: what machines outside of the cluster know it by.
//!
//! It is not the node's own. They are told its fingerprint once, and a node that joins its cluster again gets another certificate; and
//! what is shown to strangers names neither the cluster nor the node.

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

/// What its certificate says; nobody looks at it.
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
    /// Reads it, and makes it first if there is none yet. It is one file, so that two who make it at once end with the same.
    ///
    /// # Errors
    /// If the file cannot be read or written, or holds something else.
    pub fn at(path: &Path) -> Result<Self, IdentityError> {
        if !path.exists() {
            let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
            let certificate = CertificateParams::new(vec![NAME.into()])?.self_signed(&key)?;
            files::write_first(path, &format!("{}{}", key.serialize_pem(), certificate.pem()), 0o600)?;
        }
        let text = files::read(path)?;
        let malformed = |_pem| IdentityError::Malformed { path: path.to_owned() };
        Ok(Self {
            certificate: CertificateDer::from_pem_slice(text.as_bytes()).map_err(malformed)?,
            key: PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(malformed)?,
        })
    }

    /// What clients expect.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of(&self.certificate)
    }

    /// For connections from anybody: who they are is asked once they are encrypted.
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
    use crate::identity::tests::Scratch;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn it_is_made_once_and_for_its_owner_only() {
        let directory = Scratch::new("gatekeeper");
        let path = directory.0.join("outside.pem");
        let first = GateKey::at(&path).unwrap();
        assert_eq!(GateKey::at(&path).unwrap().fingerprint(), first.fingerprint());
        assert!(first.server().is_ok());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        // Who comes second leaves what is there.
        files::write_first(&path, "other", 0o600).unwrap();
        assert_eq!(GateKey::at(&path).unwrap().fingerprint(), first.fingerprint());
        std::fs::write(&path, "other").unwrap();
        assert!(GateKey::at(&path).is_err());
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 1, "nothing else is left");
    }
}
