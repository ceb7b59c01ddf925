//! The gatekeeper: takes commands of machines that are not in the cluster, from clients that have a key.
//!
//! ```text
//!  mexec.py ══ TLS 1.3 ══▶ outside: one thread a connection, one job a connection
//!                            ├▶ admit    who it is: a proof that he has his key's secret, before anything else is heard
//!                            ├▶ clients  the keys: whose, as which user, how long
//!                            ├▶ order    what he wants, and what of it he may say
//!                            ├▶ jobs     what runs, for lists and for the end of those whose key is revoked
//!                            └▶ room ──▶ init ──▶ mexec, as that user; and so on as any other
//! ```
//! It is `tern-exec outside`, a process of its own: ternd has it run if `mexec_outside` in ternd.toml says where it listens. What is said
//! is in [`words`](self::words); why it is so, in docs/design/placing.md.

mod admit;
pub mod clients;
mod desk;
pub mod hostile;
mod jobs;
mod order;
mod unknown;
mod words;

use crate::away::job::Job;
use crate::away::rooms::Rooms;
use crate::words::Said;
use crate::{lock, room};
use anyhow::{Context, Result, bail};
pub use order::check_user;

use clients::Clients;
use data_encoding::HEXLOWER;
use jobs::{Jobs, Running};
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
use tern_wire::limits::MOST_PAYLOAD;
use tern_wire::{GateKey, Link, Secret, ServerTls};
use unknown::Unknown;
pub(crate) use words::FromOutside;
use words::{Limits, ended, kind, refused};

/// The file that a client gets: what it must know, and nobody else may.
///
/// # Errors
/// If the gatekeeper's own key cannot be read or made.
pub fn key_file(clients: &Clients, name: &str, address: &str, secret: &Secret) -> Result<String> {
    let fingerprint = HEXLOWER.encode(&GateKey::at(&clients.gate_key())?.fingerprint().0);
    let secret = HEXLOWER.encode(secret.reveal());
    Ok(format!(
        "# A key for mexec.py: who has it runs commands as its user. Keep it as ~/.tern-key, mode 600.\n\
         address = {address}\nfingerprint = {fingerprint}\nclient = {name}\nsecret = {secret}\n"
    ))
}

/// How long a stranger may take to say who he is, all in all.
const STRANGER: Duration = Duration::from_secs(10);

/// How long a client may take to say what he wants, and a word to leave.
const SOON: Duration = Duration::from_secs(10);

/// How often it is looked whether the keys of running jobs are still good.
const LOOK: Duration = Duration::from_secs(2);

/// The gatekeeper of a node.
#[derive(Debug)]
pub struct Outside {
    address: SocketAddr,
    listener: TcpListener,
    desk: Mutex<Option<UnixListener>>,
    config: Config,
    limits: Limits,
    fingerprint: Fingerprint,
    tls: ServerTls,
    clients: Clients,
    jobs: Jobs,
    unknown: Unknown,
    rooms: Rooms,
}

impl Outside {
    /// Begins to listen. `files` is how many descriptors a job may have open, as this process found it.
    ///
    /// # Errors
    /// If the node is to have none, or it cannot begin; nothing listens then.
    pub fn open(config: Config, files: (u64, u64)) -> Result<Self> {
        let Some(address) = config.file.mexec_outside else {
            bail!("mexec_outside is not set in ternd.toml")
        };
        if !rustix::process::geteuid().is_root() {
            bail!("mexec_outside takes root: jobs run as the users of their keys");
        }
        let clients = Clients::of(&config)?;
        let key = GateKey::at(&clients.gate_key())?;
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
        Ok(Self {
            address,
            listener,
            desk: Mutex::new(Some(desk::open(&config.run_dir)?)),
            limits: Limits { files },
            fingerprint: key.fingerprint(),
            tls: key.server()?,
            clients,
            jobs: Jobs::default(),
            unknown: Unknown::default(),
            rooms: Rooms::new(config.clone()),
            config,
        })
    }

    /// Serves for ever.
    ///
    /// # Errors
    /// If it cannot begin.
    pub fn serve(self) -> Result<()> {
        let own = Arc::new(self);
        let desk = lock(&own.desk).take().context("it serves already")?;
        let (asked, looks) = (own.clone(), own.clone());
        std::thread::Builder::new().name("desk".into()).spawn(move || desk::serve(&asked, &desk))?;
        std::thread::Builder::new().name("look".into()).spawn(move || {
            loop {
                std::thread::sleep(LOOK);
                looks.look();
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
            // Dropped at once: who floods us gets neither a thread nor a word.
            let Some(stranger) = own.unknown.enter(from.ip()) else { continue };
            let own = own.clone();
            crate::in_thread("outside", &connections, move || own.attend(socket, from, stranger));
        }
    }

    /// One connection, from its handshake to its end.
    fn attend(&self, socket: TcpStream, from: SocketAddr, stranger: unknown::Entered) -> Result<()> {
        let deadline = Instant::now() + STRANGER;
        let line = socket.try_clone()?;
        let mut link = Link::accept(socket, &self.tls, deadline)?;
        link.limit(words::MOST_OF_STRANGER);
        let name = match admit::admit(&mut link, &self.clients, self.fingerprint, deadline) {
            Ok(name) => name,
            Err(error) => {
                tracing::warn!(%from, "not let in: {error:#}");
                return Ok(());
            }
        };
        drop(stranger);
        link.limit(MOST_PAYLOAD);
        watch_over(&line)?;
        let refusal = match self.run(&mut link, &name, from, &line) {
            Ok(()) => None,
            Err(error) => {
                tracing::info!(client = name, %from, "refused, or ended: {error:#}");
                Some(format!("{error:#}"))
            }
        };
        if let Some(message) = refusal {
            link.send(kind::REFUSED, 0, &[&refused(&message)], Instant::now() + SOON)?;
        }
        Ok(link.finish(Instant::now() + SOON)?)
    }

    /// One job. An error is said to the client; the job has ended then.
    fn run(&self, link: &mut Link, name: &str, from: SocketAddr, line: &TcpStream) -> Result<()> {
        let client = self.clients.good(name)?;
        let running = self.jobs.enter(name, &client, from, line)?;
        link.send(kind::ADMITTED, 0, &[b"{}"], Instant::now() + SOON)?;
        self.clients.saw(name, from.ip());
        let frame = link.recv(Instant::now() + SOON)?;
        if frame.kind != kind::ORDER {
            bail!("a frame of kind {} where an order was to come", frame.kind);
        }
        let order = words::Order::read(&frame.payload)?;
        running.is(&order.shown());
        let user = order::user(&client)?;
        let (task, who) = order::task(&order, &user, &self.config, &self.limits)?;
        // Who was revoked while we looked has been told to end by then, or is found here.
        self.clients.good(name)?;
        let begun = Instant::now();
        tracing::info!(client = name, user = client.user, %from, job = running.number(), command = order.shown(), "begins");
        let room = self.rooms.of(room::OWN, Vec::new)?;
        let mut job = Job::begin(&task, &who, room).context("it cannot be begun")?;
        let said = job.attend(link, &FromOutside::default());
        drop(job);
        let seconds = begun.elapsed().as_secs_f32();
        tracing::info!(client = name, job = running.number(), seconds, "ends: {}", words::shown(&said));
        self.say_end(link, &running, said)
    }

    fn say_end(&self, link: &mut Link, running: &Running<'_>, said: Result<Said>) -> Result<()> {
        if let Some(why) = running.why() {
            bail!("{why}");
        }
        match said? {
            Said::Ended(end) => {
                Ok(link.send(kind::ENDED, 0, &[&ended(end.status)], Instant::now() + SOON)?)
            }
            Said::NotStarted(what, errno) => bail!("{}", order::not_started(what, errno)),
            other => bail!("{other:?} was said of a job"),
        }
    }

    /// Ends the jobs whose keys are not good any more; how many.
    fn look(&self) -> usize {
        self.jobs.end_if(|name| self.clients.good(name).err().map(|error| format!("{error:#}")))
    }
}

/// The kernel looks whether the other machine is there also while its client has been stopped and says nothing.
fn watch_over(line: &TcpStream) -> Result<()> {
    set_tcp_nodelay(line, true)?;
    set_socket_keepalive(line, true)?;
    set_tcp_keepidle(line, Duration::from_secs(10))?;
    set_tcp_keepintvl(line, Duration::from_secs(5))?;
    set_tcp_keepcnt(line, 4)?;
    Ok(())
}
