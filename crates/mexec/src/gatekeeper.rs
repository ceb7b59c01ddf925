//! The gatekeeper: accepts commands from machines outside of the cluster. Each client has a key.
//!
//! ```text
//!  mexec.py ══ TLS 1.3 ══▶ gatekeeper: one thread and one job for each connection
//!                            ├▶ authenticate  by a proof of the key's secret
//!                            ├▶ client_keys   the keys: name, local user, expiry
//!                            ├▶ job_task      the job's task, and what a client may set
//!                            ├▶ jobs          the running jobs
//!                            └▶ container ──▶ init ──▶ mexec, as that user; then as usual
//! ```
//! It runs as `tern-exec outside`, a process of its own, which ternd starts if `mexec_outside` in
//! ternd.toml has an address. The messages are in `messages.rs`.
//! docs/design/placing.md explains the design.

mod authenticate;
pub mod client_keys;
mod connection_limit;
mod control;
pub mod hostile;
mod job_task;
mod jobs;
mod messages;

use crate::away::containers::Containers;
use crate::away::job::Job;
use crate::messages::ExecReply;
use crate::{container, lock};
use anyhow::{Context, Result, bail};
use client_keys::ClientKeys;
use connection_limit::{ConnectionLimit, Permit};
use data_encoding::HEXLOWER;
pub use job_task::check_user;
use jobs::{Jobs, RunningJob};
pub(crate) use messages::ClientPeer;
use messages::{ClientJobRequest, JobLimits, encode_exit, encode_refusal, kind};
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_nodelay,
};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tern_ids::Fingerprint;
use tern_node::Config;
use tern_wire::limits::MAX_PAYLOAD;
use tern_wire::{GateKey, Link, Secret, ServerTls};

/// The key file for a client. It contains the secret.
///
/// # Errors
/// If the gatekeeper's own key cannot be read or created.
pub fn key_file(keys: &ClientKeys, name: &str, address: &str, secret: &Secret) -> Result<String> {
    let fingerprint = HEXLOWER.encode(&GateKey::load_or_create(&keys.gatekeeper_key_path())?.fingerprint().0);
    let secret = HEXLOWER.encode(secret.reveal());
    Ok(format!(
        "# A key for mexec.py: its holder runs commands as its user. Keep it as ~/.tern-key, mode 600.\n\
         address = {address}\nfingerprint = {fingerprint}\nclient = {name}\nsecret = {secret}\n"
    ))
}

/// Time limit for a connection's handshake and authentication together.
const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a client's request, and for sending a frame.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often the keys of running jobs are checked.
const KEY_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The gatekeeper of a node.
#[derive(Debug)]
pub struct Gatekeeper {
    address: SocketAddr,
    listener: TcpListener,
    control: Mutex<Option<UnixListener>>,
    config: Config,
    limits: JobLimits,
    fingerprint: Fingerprint,
    tls: ServerTls,
    keys: ClientKeys,
    jobs: Jobs,
    unauthenticated: ConnectionLimit,
    containers: Containers,
}

impl Gatekeeper {
    /// Starts to listen. `files` are the soft and hard limits of open files for jobs, which this
    /// process had at its start.
    ///
    /// # Errors
    /// If ternd.toml configures no gatekeeper, or it cannot start; nothing listens then.
    pub fn open(config: Config, files: (u64, u64)) -> Result<Self> {
        let Some(address) = config.file.mexec_outside else {
            bail!("mexec_outside is not set in ternd.toml")
        };
        if !rustix::process::geteuid().is_root() {
            bail!("mexec_outside needs root, since jobs run as the users of their keys");
        }
        let keys = ClientKeys::open(&config)?;
        let key = GateKey::load_or_create(&keys.gatekeeper_key_path())?;
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
        Ok(Self {
            address,
            listener,
            control: Mutex::new(Some(control::bind(&config.run_dir)?)),
            limits: JobLimits { open_files: files },
            fingerprint: key.fingerprint(),
            tls: key.server()?,
            keys,
            jobs: Jobs::default(),
            unauthenticated: ConnectionLimit::default(),
            containers: Containers::new(config.clone()),
            config,
        })
    }

    /// Serves clients for ever.
    ///
    /// # Errors
    /// If it cannot start.
    pub fn serve(self) -> Result<()> {
        let own = Arc::new(self);
        let control = lock(&own.control).take().context("it serves already")?;
        let (server, checker) = (own.clone(), own.clone());
        std::thread::Builder::new()
            .name("control".into())
            .spawn(move || control::serve(&server, &control))?;
        std::thread::Builder::new().name("key-check".into()).spawn(move || {
            loop {
                std::thread::sleep(KEY_CHECK_INTERVAL);
                checker.end_invalid_jobs();
            }
        })?;
        tracing::info!(address = %own.address, "the gatekeeper listens");
        let connections = Arc::new(AtomicUsize::new(0));
        loop {
            let (socket, from) = match own.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            // Over the limit: the connection is dropped at once, without a thread or a reply.
            let Some(permit) = own.unauthenticated.acquire(from.ip()) else { continue };
            let own = own.clone();
            crate::spawn("outside", &connections, move || own.serve_client(socket, from, permit));
        }
    }

    /// Serves one connection, from its handshake to its end.
    fn serve_client(&self, socket: TcpStream, from: SocketAddr, permit: Permit) -> Result<()> {
        let deadline = Instant::now() + AUTHENTICATION_TIMEOUT;
        let connection = socket.try_clone()?;
        let mut link = Link::accept(socket, &self.tls, deadline)?;
        link.limit_payload(messages::MAX_UNAUTHENTICATED_FRAME);
        let name = match authenticate::authenticate(&mut link, &self.keys, self.fingerprint, deadline) {
            Ok(name) => name,
            Err(error) => {
                tracing::warn!(%from, "a client was not authenticated: {error:#}");
                return Ok(());
            }
        };
        drop(permit);
        link.limit_payload(MAX_PAYLOAD);
        set_keepalive(&connection)?;
        let refusal = match self.run(&mut link, &name, from, &connection) {
            Ok(()) => None,
            Err(error) => {
                tracing::info!(client = name, %from, "a job was refused, or was ended: {error:#}");
                Some(format!("{error:#}"))
            }
        };
        if let Some(message) = refusal {
            link.send(kind::REFUSED, 0, &[&encode_refusal(&message)], Instant::now() + CLIENT_TIMEOUT)?;
        }
        Ok(link.finish(Instant::now() + CLIENT_TIMEOUT)?)
    }

    /// Runs one job. If this fails, the job has ended, and the caller sends the error to the
    /// client.
    fn run(&self, link: &mut Link, name: &str, from: SocketAddr, connection: &TcpStream) -> Result<()> {
        let key = self.keys.valid(name)?;
        let running = self.jobs.add(name, &key, from, connection)?;
        link.send(kind::ADMITTED, 0, &[b"{}"], Instant::now() + CLIENT_TIMEOUT)?;
        self.keys.record_seen(name, from.ip());
        let frame = link.recv(Instant::now() + CLIENT_TIMEOUT)?;
        if frame.kind != kind::JOB_REQUEST {
            bail!("a frame of kind {} instead of a job request", frame.kind);
        }
        let request = ClientJobRequest::read(&frame.payload)?;
        running.set_command(&request.summary());
        let user = job_task::user(&key)?;
        let (task, credentials) = job_task::task(&request, &user, &self.config, &self.limits)?;
        // A revocation before this check is found here; a later one ends the job through `jobs`.
        self.keys.valid(name)?;
        let started = Instant::now();
        tracing::info!(client = name, user = key.user, %from, job = running.number(), command = request.summary(), "a job has started");
        let container = self.containers.get(container::LOCAL, Vec::new)?;
        let mut job = Job::start(&task, &credentials, container).context("it cannot be started")?;
        let reply = job.run(link, &ClientPeer::default());
        drop(job);
        let seconds = started.elapsed().as_secs_f32();
        tracing::info!(
            client = name,
            job = running.number(),
            seconds,
            "a job has ended: {}",
            messages::describe_end(&reply)
        );
        self.send_end(link, &running, reply)
    }

    fn send_end(&self, link: &mut Link, running: &RunningJob<'_>, reply: Result<ExecReply>) -> Result<()> {
        if let Some(reason) = running.end_reason() {
            bail!("{reason}");
        }
        match reply? {
            ExecReply::Exited(report) => Ok(link.send(
                kind::ENDED,
                0,
                &[&encode_exit(report.status)],
                Instant::now() + CLIENT_TIMEOUT,
            )?),
            ExecReply::StartFailed(what, errno) => bail!("{}", job_task::start_failure(what, errno)),
            other => bail!("an unexpected reply of a job: {other:?}"),
        }
    }

    /// Ends the jobs whose keys are not valid any more. Returns their number.
    fn end_invalid_jobs(&self) -> usize {
        self.jobs.end_where(|name| self.keys.valid(name).err().map(|error| format!("{error:#}")))
    }
}

/// Enables TCP keepalive: the kernel probes the client's machine even while the client is stopped
/// and sends no heartbeats.
fn set_keepalive(connection: &TcpStream) -> Result<()> {
    set_tcp_nodelay(connection, true)?;
    set_socket_keepalive(connection, true)?;
    set_tcp_keepidle(connection, Duration::from_secs(10))?;
    set_tcp_keepintvl(connection, Duration::from_secs(5))?;
    set_tcp_keepcnt(connection, 4)?;
    Ok(())
}
