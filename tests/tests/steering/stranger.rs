//! What strangers try, on the port of a node and on its sockets. It runs inside a node: the test program starts
//! itself there, with whom to attack in its environment.

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
use tern_wire::limits::MOST_PAYLOAD;
use tern_wire::{Authority, Identity, Preamble, frame};

/// Whom to attack: `HOST:PORT`.
pub(crate) const ADDRESS: &str = "TERN_TEST_ADDRESS";
/// A shim that lives there.
pub(crate) const SHIM: &str = "TERN_TEST_SHIM";

/// Longer than a handshake may take.
const PATIENCE: Duration = Duration::from_secs(15);

/// Believes everybody: a stranger would.
#[derive(Debug)]
struct Credulous;

impl ServerCertVerifier for Credulous {
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

/// As whom a stranger comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum As {
    Nobody,
    Member,
    MemberOfAnother,
}

impl As {
    /// The folder of its key and certificate.
    fn identity(self) -> Result<Option<PathBuf>> {
        match self {
            Self::Nobody => Ok(None),
            Self::Member => Ok(Some("/etc/tern".into())),
            Self::MemberOfAnother => {
                let folder = PathBuf::from("/tmp/another-cluster");
                std::fs::create_dir_all(&folder)?;
                let own = Identity::load(Path::new("/etc/tern"))?;
                // Of the same name, and by the number of a member.
                let imposter = Authority::create(own.cluster())?;
                Identity::issued_by(&imposter, own.node())?.save(&folder)?;
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
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(socket)
    }

    fn tls(&self, preamble: Preamble, who: As) -> Result<Stream> {
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Credulous));
        let config = match who.identity()? {
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

/// Whatever is said, the other side closes without having said anything itself.
fn is_closed(mut stream: impl Read + Write, said: &[u8]) -> Result<()> {
    // It may be closed while we still speak.
    let _ = stream.write_all(said).and_then(|()| stream.flush());
    let mut answer = [0; 64];
    match stream.read(&mut answer) {
        Ok(0) => Ok(()),
        Ok(count) => bail!("it answers: {:?}", &answer[..count]),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            bail!("it keeps the connection")
        }
        Err(_refused) => Ok(()),
    }
}

/// Everything that is tried over the network.
///
/// # Errors
/// What was not refused.
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
        ("noise to one who joins", [&Preamble::Join.to_bytes()[..], &[7; 3000]].concat()),
        ("noise to a shim", [&shim.to_bytes()[..], &[0xee; 50_000]].concat()),
    ];
    for (what, bytes) in plain {
        let mut socket = target.connect()?;
        let _closed_already = socket.write_all(&bytes);
        let _closed_already = socket.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let end = socket.read_to_end(&mut answer);
        let timed_out = |e: &std::io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        ensure!(!end.as_ref().is_err_and(timed_out), "{what}: it keeps the connection");
        // A TLS alert at most.
        ensure!(answer.len() < 16 && !answer.starts_with(&[0x16]), "{what}: it answers {answer:?}");
    }
    let ping = frame::header(1, 0, 1, 0)?;
    for preamble in [node, shim, random] {
        for who in [As::Nobody, As::MemberOfAnother] {
            is_closed(target.tls(preamble, who)?, &ping)
                .with_context(|| format!("{who:?} to {preamble:?}"))?;
        }
    }
    for preamble in [shim, random] {
        // A member holds no key that this shim was told of.
        is_closed(target.tls(preamble, As::Member)?, &ping)
            .with_context(|| format!("a member to {preamble:?}"))?;
    }
    // Who connects and says nothing holds up nobody else.
    let silent = || -> Result<TcpStream> {
        let mut socket = target.connect()?;
        socket.write_all(&shim.to_bytes())?;
        Ok(socket)
    };
    let silent = (0..8).map(|_| silent()).collect::<Result<Vec<_>>>()?;
    let begun = Instant::now();
    is_closed(target.tls(shim, As::Nobody)?, &ping).context("behind those who are silent")?;
    ensure!(
        begun.elapsed() < Duration::from_secs(4),
        "behind those who are silent it took {:?}",
        begun.elapsed()
    );
    drop(silent);
    let mut endless = ping;
    endless[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut too_long = ping;
    too_long[4..8].copy_from_slice(&u32::try_from(MOST_PAYLOAD + 1)?.to_le_bytes());
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
        is_closed(target.tls(node, As::Member)?, bytes).with_context(|| format!("a member says {what}"))?;
    }
    // A frame that ends in the middle.
    let mut link = target.tls(node, As::Member)?;
    link.write_all(&[&frame::header(1, 0, 1, 1000)?[..], &[0; 10]].concat())?;
    link.conn.send_close_notify();
    link.flush()?;
    link.sock.shutdown(Shutdown::Write)?;
    is_closed(link, b"").context("a member says half a frame")
}

/// What another user of the node tries with its sockets.
///
/// # Errors
/// What was not refused.
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
        socket.set_read_timeout(Some(PATIENCE))?;
        let _closed_already = socket.write_all(bytes);
        let _closed_already = socket.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let end = socket.read_to_end(&mut answer);
        let timed_out = |e: &std::io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        ensure!(!end.as_ref().is_err_and(timed_out), "the control socket keeps the connection");
        let text = String::from_utf8_lossy(&answer);
        ensure!(answer.is_empty() || text.contains("efused"), "it answers {text:?}");
    }
    Ok(())
}
