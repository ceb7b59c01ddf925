//! TLS with peers that are identified by a fingerprint. Two ternds exchange the fingerprints of
//! their shims' ephemeral certificates. A joining machine has the fingerprint of the cluster's
//! authority in its token.

use crate::identity::{IdentityError, node_in_certificate};
use crate::tls::{ClientTls, ServerTls, Trust, client_builder, provider, server_config, without_resumption};
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::verify_tls13_signature;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible, RootCertStore,
    SignatureScheme,
};
use std::fmt;
use std::sync::Arc;
use tern_ids::{Fingerprint, NodeId};

/// The SHA-256 of a certificate's DER.
pub fn fingerprint_of(certificate: &CertificateDer<'_>) -> Fingerprint {
    let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest.as_ref());
    Fingerprint(bytes)
}

/// A key and a certificate of one shim process. They are never stored.
pub struct Ephemeral {
    certificate: CertificateDer<'static>,
    key: KeyPair,
}

impl fmt::Debug for Ephemeral {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ephemeral({:?})", self.fingerprint())
    }
}

impl Ephemeral {
    /// Generates a key and a self-signed certificate.
    ///
    /// # Errors
    /// If the system's random generator fails.
    pub fn generate() -> Result<Self, IdentityError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let certificate = CertificateParams::new(vec!["shim.tern".into()])?.self_signed(&key)?;
        Ok(Self { certificate: certificate.der().clone(), key })
    }

    /// The fingerprint, which the peer must receive over a trusted channel.
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of(&self.certificate)
    }

    fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.serialize_der()).into()
    }
}

/// TLS for connecting to the peer whose certificate has the fingerprint `expect`. This side
/// authenticates with `own`.
///
/// # Errors
/// If the key is unusable.
pub fn pinned_client(own: &Ephemeral, expect: Fingerprint) -> Result<ClientTls, IdentityError> {
    let config = client_builder()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedCerts(vec![expect])))
        .with_client_auth_cert(vec![own.certificate.clone()], own.private_key())?;
    key_only(without_resumption(config))
}

/// TLS for accepting connections only from peers whose certificates have these fingerprints.
///
/// # Errors
/// If the key is unusable.
pub fn pinned_server(own: &Ephemeral, accepted_keys: &[Fingerprint]) -> Result<ServerTls, IdentityError> {
    let verifier = Arc::new(PinnedCerts(accepted_keys.to_vec()));
    let config = server_config(verifier, vec![own.certificate.clone()], own.private_key())?;
    Ok(ServerTls { config, trust: Trust::KeyOnly })
}

/// TLS for a machine that joins: the server must be `node`, certified by the authority with this
/// fingerprint.
///
/// # Errors
/// If TLS cannot be set up.
pub fn join_client(authority: Fingerprint, node: NodeId) -> Result<ClientTls, IdentityError> {
    let config = client_builder()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Founder { authority, node }))
        .with_no_client_auth();
    key_only(without_resumption(config))
}

fn key_only(config: Arc<rustls::ClientConfig>) -> Result<ClientTls, IdentityError> {
    // The verifiers here ignore the name, but TLS needs one.
    let name = ServerName::try_from("shim.tern").map_err(|_not_dns| IdentityError::ClusterName)?;
    Ok(ClientTls { config, name, trust: Trust::KeyOnly })
}

fn signature(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    verify_tls13_signature(message, certificate, signed, &provider().signature_verification_algorithms)
}

fn schemes() -> Vec<SignatureScheme> {
    provider().signature_verification_algorithms.supported_schemes()
}

const ONLY_TLS13: Error = Error::PeerIncompatible(PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig);
const UNEXPECTED: Error = Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);

/// Accepts exactly the certificates with these fingerprints. TLS itself checks by a signature that
/// the peer holds the private key.
#[derive(Debug)]
struct PinnedCerts(Vec<Fingerprint>);

impl PinnedCerts {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        if self.0.contains(&fingerprint_of(certificate)) { Ok(()) } else { Err(UNEXPECTED) }
    }
}

impl ServerCertVerifier for PinnedCerts {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(ONLY_TLS13)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        schemes()
    }
}

impl ClientCertVerifier for PinnedCerts {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(ONLY_TLS13)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        schemes()
    }
}

/// Accepts the founding node of the cluster whose authority has this fingerprint.
#[derive(Debug)]
struct Founder {
    authority: Fingerprint,
    node: NodeId,
}

impl ServerCertVerifier for Founder {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let authority =
            intermediates.iter().find(|c| fingerprint_of(c) == self.authority).ok_or(UNEXPECTED)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = provider().signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &[], now, algorithms)?;
        match node_in_certificate(end_entity) {
            Some((node, _)) if node == self.node => Ok(ServerCertVerified::assertion()),
            _ => Err(UNEXPECTED),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(ONLY_TLS13)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        schemes()
    }
}
