//! Attacks on the port and the sockets of a node. They run inside a node: the test program starts
//! itself there, with the target in its environment.

use anyhow::{Context, Result, bail, ensure};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_wire::limits::MAX_PAYLOAD;
use tern_wire::{Authority, Identity, Preamble, frame};

/// The environment variable with the target, `HOST:PORT`.
pub(crate) const ADDRESS: &str = "TERN_TEST_ADDRESS";
/// The environment variable with the id of a shim of the target.
pub(crate) const SHIM: &str = "TERN_TEST_SHIM";

/// Longer than a handshake may take.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(15);

/// Accepts every server certificate.
#[derive(Debug)]
struct AcceptAnyServer;

impl ServerCertVerifier for AcceptAnyServer {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _more: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only 1.3".into()))
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// The identity that a stranger presents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PresentedIdentity {
    Nobody,
    Member,
    MemberOfAnother,
}

impl PresentedIdentity {
    /// The folder of its key and certificate.
    fn identity(self) -> Result<Option<PathBuf>> {
        match self {
            Self::Nobody => Ok(None),
            Self::Member => Ok(Some("/etc/tern".into())),
            Self::MemberOfAnother => {
                let folder = PathBuf::from("/tmp/another-cluster");
                std::fs::create_dir_all(&folder)?;
                let own = Identity::load(Path::new("/etc/tern"))?;
                // A cluster of the same name, and a node number of a member.
                let imposter = Authority::create(own.cluster())?;
                Identity::issued_by_authority(&imposter, own.node())?.save(&folder)?;
                Ok(Some(folder))
            }
        }
    }
}

type Stream = StreamOwned<ClientConnection, TcpStream>;

struct Target {
    address: String,
    shim: tern_ids::ShimId,
}

impl Target {
    fn from_environment() -> Result<Self> {
        let shim = std::env::var(SHIM)?.parse();
        let Ok(shim) = shim else { bail!("{SHIM} is no shim") };
        Ok(Self { address: std::env::var(ADDRESS)?, shim })
    }

    fn connect(&self) -> Result<TcpStream> {
        let socket = TcpStream::connect(&self.address).with_context(|| self.address.clone())?;
        socket.set_read_timeout(Some(SOCKET_TIMEOUT))?;
        socket.set_write_timeout(Some(SOCKET_TIMEOUT))?;
        Ok(socket)
    }

    fn tls(&self, preamble: Preamble, identity: PresentedIdentity) -> Result<Stream> {
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAnyServer));
        let config = match identity.identity()? {
            None => config.with_no_client_auth(),
            Some(folder) => {
                let certificate = CertificateDer::from_pem_file(folder.join("node.pem"))?;
                let key = PrivateKeyDer::from_pem_file(folder.join("node.key"))?;
                config.with_client_auth_cert(vec![certificate], key)?
            }
        };
        let client = ClientConnection::new(Arc::new(config), ServerName::try_from("node")?)?;
        let mut socket = self.connect()?;
        socket.write_all(&preamble.to_bytes())?;
        Ok(StreamOwned::new(client, socket))
    }
}

/// Checks that the other side closes the connection without a reply.
fn expect_closed(mut stream: impl Read + Write, said: &[u8]) -> Result<()> {
    // The other side may close it while this side still writes.
    let _ = stream.write_all(said).and_then(|()| stream.flush());
    let mut answer = [0; 64];
    match stream.read(&mut answer) {
        Ok(0) => Ok(()),
        Ok(count) => bail!("it replies: {:?}", &answer[..count]),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            bail!("it keeps the connection open")
        }
        Err(_refused) => Ok(()),
    }
}

/// All attacks over the network.
///
/// # Errors
/// If one was not refused.
pub(crate) fn at_the_port() -> Result<()> {
    let target = Target::from_environment()?;
    let random = Preamble::Shim(tern_ids::ShimId([0x5a; 16]));
    let (node, shim) = (Preamble::Node, Preamble::Shim(target.shim));
    let plain: [(&str, Vec<u8>); 8] = [
        ("nothing", vec![]),
        ("another protocol", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("half a preamble", node.to_bytes()[..16].to_vec()),
        ("noise", vec![0xff; 100_000]),
        ("a truncated record", [&node.to_bytes()[..], &[0x16, 3, 1, 0xff, 0xff]].concat()),
        ("no record", [&node.to_bytes()[..], &[0; 70_000]].concat()),
        ("noise to the join service", [&Preamble::Join.to_bytes()[..], &[7; 3000]].concat()),
        ("noise to a shim", [&shim.to_bytes()[..], &[0xee; 50_000]].concat()),
    ];
    for (what, bytes) in plain {
        let mut socket = target.connect()?;
        let _closed_already = socket.write_all(&bytes);
        let _closed_already = socket.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let end = socket.read_to_end(&mut answer);
        let timed_out = |e: &std::io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        ensure!(!end.as_ref().is_err_and(timed_out), "{what}: it keeps the connection open");
        // At most a TLS alert.
        ensure!(answer.len() < 16 && !answer.starts_with(&[0x16]), "{what}: it replies {answer:?}");
    }
    let ping = frame::header(1, 0, 1, 0)?;
    for preamble in [node, shim, random] {
        for identity in [PresentedIdentity::Nobody, PresentedIdentity::MemberOfAnother] {
            expect_closed(target.tls(preamble, identity)?, &ping)
                .with_context(|| format!("{identity:?} to {preamble:?}"))?;
        }
    }
    for preamble in [shim, random] {
        // A member does not have the key that this shim expects.
        expect_closed(target.tls(preamble, PresentedIdentity::Member)?, &ping)
            .with_context(|| format!("a member to {preamble:?}"))?;
    }
    // Connections that stay silent delay no other connection.
    let silent = || -> Result<TcpStream> {
        let mut socket = target.connect()?;
        socket.write_all(&shim.to_bytes())?;
        Ok(socket)
    };
    let silent = (0..8).map(|_| silent()).collect::<Result<Vec<_>>>()?;
    let begun = Instant::now();
    expect_closed(target.tls(shim, PresentedIdentity::Nobody)?, &ping)
        .context("behind silent connections")?;
    ensure!(
        begun.elapsed() < Duration::from_secs(4),
        "behind silent connections it took {:?}",
        begun.elapsed()
    );
    drop(silent);
    let mut endless = ping;
    endless[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut too_long = ping;
    too_long[4..8].copy_from_slice(&u32::try_from(MAX_PAYLOAD + 1)?.to_le_bytes());
    let mut version = ping;
    version[0] ^= 0xff;
    let nonsense = [&frame::header(1, 0, 1, 200_000)?[..], &[0xff; 200_000]].concat();
    let empty = frame::header(1, 0, 1, 0)?;
    let kind = [&frame::header(0xee, 0, 1, 3)?[..], b"abc"].concat();
    for (what, bytes) in [
        ("an endless frame", &endless[..]),
        ("a frame too long", &too_long),
        ("another version", &version),
        ("nonsense", &nonsense),
        ("an empty request", &empty),
        ("an unknown kind", &kind),
    ] {
        expect_closed(target.tls(node, PresentedIdentity::Member)?, bytes)
            .with_context(|| format!("a member sends {what}"))?;
    }
    // A truncated frame.
    let mut link = target.tls(node, PresentedIdentity::Member)?;
    link.write_all(&[&frame::header(1, 0, 1, 1000)?[..], &[0; 10]].concat())?;
    link.conn.send_close_notify();
    link.flush()?;
    link.sock.shutdown(Shutdown::Write)?;
    expect_closed(link, b"").context("a member sends half a frame")
}

/// Attacks of another user of the node on its sockets.
///
/// # Errors
/// If one was not refused.
pub(crate) fn at_the_sockets() -> Result<()> {
    for file in ["/run/tern/shims", "/etc/tern/node.key", "/etc/tern/ca.key"] {
        match std::fs::File::open(file) {
            Err(e) if e.kind() == ErrorKind::PermissionDenied => {}
            other => bail!("{file} is open to another user: {other:?}"),
        }
    }
    let shim = format!("/run/tern/shims/{}.sock", std::env::var(SHIM)?);
    match UnixStream::connect(&shim) {
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {}
        other => bail!("a shim is open to another user: {other:?}"),
    }
    let long = [&u32::MAX.to_le_bytes()[..], &[0x20; 5000]].concat();
    let other_end = [&u32::MAX.to_be_bytes()[..], &[0x20; 5000]].concat();
    let request = br#"{"prepare":{"node":1,"migration":[],"accept":[],"uid":0,"gid":0}}"#;
    let little = [&u32::try_from(request.len())?.to_le_bytes()[..], request].concat();
    for bytes in [&long[..], &other_end, &[0xff; 70_000], b"{", &little] {
        let mut socket = match UnixStream::connect("/run/tern/control") {
            Ok(socket) => socket,
            Err(e) if e.kind() == ErrorKind::PermissionDenied => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        socket.set_read_timeout(Some(SOCKET_TIMEOUT))?;
        let _closed_already = socket.write_all(bytes);
        let _closed_already = socket.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let end = socket.read_to_end(&mut answer);
        let timed_out = |e: &std::io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        ensure!(!end.as_ref().is_err_and(timed_out), "the control socket keeps the connection open");
        let text = String::from_utf8_lossy(&answer);
        ensure!(answer.is_empty() || text.contains("efused"), "it replies {text:?}");
    }
    Ok(())
}
