//! TLS between members of a cluster: version 1.3 only, certificates on both sides, no resumption.

use crate::identity::{Identity, IdentityError, node_name};
use crate::members::Members;
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{self, cipher_suite};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, ServerConfig, WantsVerifier};
use std::sync::{Arc, OnceLock};
use tern_ids::NodeId;

/// The identity that the verified certificate of the peer proves.
#[derive(Debug, Clone)]
pub(crate) enum Trust {
    /// The peer is one of these members of this cluster; the certificate names its node.
    Cluster(String, Arc<Members>),
    /// The peer holds an expected key, or it is anonymous.
    KeyOnly,
}

/// TLS settings of a client: its own credentials, and the server that it expects.
#[derive(Debug, Clone)]
pub struct ClientTls {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) name: ServerName<'static>,
    pub(crate) trust: Trust,
}

/// TLS settings of a server: its own credentials, and the clients that it accepts.
#[derive(Debug, Clone)]
pub struct ServerTls {
    pub(crate) config: Arc<ServerConfig>,
    pub(crate) trust: Trust,
}

/// AES-128 comes first: it is the fastest on CPUs with AES instructions.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    let make = || {
        Arc::new(CryptoProvider {
            cipher_suites: vec![
                cipher_suite::TLS13_AES_128_GCM_SHA256,
                cipher_suite::TLS13_AES_256_GCM_SHA384,
                cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
            ],
            ..ring::default_provider()
        })
    };
    PROVIDER.get_or_init(make).clone()
}

pub(crate) fn client_builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, rustls::Error> {
    ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&rustls::version::TLS13])
}

pub(crate) fn server_config(
    verifier: Arc<dyn ClientCertVerifier>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}

pub(crate) fn without_resumption(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    Arc::new(config)
}

impl Identity {
    fn roots(&self) -> Result<Arc<RootCertStore>, IdentityError> {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.clone())?;
        Ok(Arc::new(roots))
    }

    /// TLS for connecting to the cluster's member `peer`.
    ///
    /// # Errors
    /// If the identity's certificates are unusable.
    pub fn cluster_client(&self, peer: NodeId) -> Result<ClientTls, IdentityError> {
        let config = client_builder()?
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(vec![self.certificate.clone()], self.private_key())?;
        let name = ServerName::try_from(node_name(peer, self.cluster()))
            .map_err(|_not_dns| IdentityError::ClusterName)?;
        Ok(ClientTls {
            config: without_resumption(config),
            name,
            trust: Trust::Cluster(self.cluster().into(), self.members().clone()),
        })
    }

    /// TLS for accepting connections from members of the cluster only.
    ///
    /// # Errors
    /// If the identity's certificates are unusable.
    pub fn cluster_server(&self) -> Result<ServerTls, IdentityError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots()?, provider())
            .build()
            .map_err(|e| rustls::Error::General(e.to_string()))?;
        let config = server_config(verifier, vec![self.certificate.clone()], self.private_key())?;
        Ok(ServerTls { config, trust: Trust::Cluster(self.cluster().into(), self.members().clone()) })
    }

    /// TLS for accepting connections from joining machines. They receive the authority's
    /// certificate and compare it with the fingerprint in their token. They have no certificate
    /// themselves.
    ///
    /// # Errors
    /// If the identity's certificates are unusable.
    pub fn join_server(&self) -> Result<ServerTls, IdentityError> {
        let chain = vec![self.certificate.clone(), self.authority.clone()];
        let config = server_config(WebPkiClientVerifier::no_client_auth(), chain, self.private_key())?;
        Ok(ServerTls { config, trust: Trust::KeyOnly })
    }
}
