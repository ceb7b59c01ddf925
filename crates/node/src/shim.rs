//! The shims of this node: starting them, and sending requests to them.
//!
//! Each shim holds one half of one family and listens on `RUN/shims/ID.sock`. It outlives ternd: it
//! has its own session, its log is `RUN/shims/ID.log`, and a new ternd finds it by its socket.

use crate::config::Config;
use crate::config::settings::read_settings;
use crate::os::spawn::{read_first_line, spawn_detached};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, pidfd_open};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tern_control::control_socket;
use tern_control::{Refusal, RefusalKind, ShimReply, ShimRequest, ShimRole, ShimStart, stream};
use tern_ids::{Epoch, Fingerprint, HomePid, NodeId, ShimId};

/// Timeout of a short request to a shim.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of shims on a node.
const MAX_SHIMS: usize = 4096;

/// Maximum number of logs that are kept of shims that have ended.
const MAX_LOGS: usize = 64;

fn directory(run_dir: &Path) -> PathBuf {
    run_dir.join("shims")
}

fn socket_path(run_dir: &Path, shim: ShimId) -> PathBuf {
    directory(run_dir).join(format!("{shim}.sock"))
}

/// Creates the directory, removes the files of dead shims, and watches the living shims, which are
/// not children of this process.
pub(crate) fn sweep(run_dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory(run_dir))?;
    for entry in fs::read_dir(directory(run_dir))?.flatten() {
        let path = entry.path();
        let socket = path.with_extension("sock");
        // A starting shim has a log before it has a socket, but no shim starts while ternd starts.
        if !is_listening(&socket) {
            let _gone = fs::remove_file(&path);
        } else if path == socket {
            watch_exit(socket);
        }
    }
    tern_cgroup::guests::remove_if_empty();
    Ok(())
}

/// Whether a process listens on this socket. A full backlog also proves that one does.
fn is_listening(socket: &Path) -> bool {
    match control_socket::connect(socket) {
        Ok(_) => true,
        Err(error) => !had_ended(&error),
    }
}

/// Whether this shim runs.
pub(crate) fn is_alive(run_dir: &Path, shim: ShimId) -> bool {
    is_listening(&socket_path(run_dir, shim))
}

/// Whether this shim runs and waits for this epoch of a process. A shim that does not answer counts
/// as waiting.
pub(crate) fn is_guest_awaited(run_dir: &Path, shim: ShimId, pid: HomePid, epoch: Epoch) -> bool {
    if !is_alive(run_dir, shim) {
        return false;
    }
    let answer = request(run_dir, shim, &ShimRequest::IsGuestAwaited { pid, epoch }, Some(REPLY_TIMEOUT));
    !matches!(answer, Ok(ShimReply::Refused(refusal)) if refusal.kind == RefusalKind::NotFound)
}

/// All shims that have a socket.
pub(crate) fn all(run_dir: &Path) -> Vec<ShimId> {
    let files = fs::read_dir(directory(run_dir)).into_iter().flatten().flatten();
    files.filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".sock")?.parse().ok()).collect()
}

/// Sends a request to one shim. Without a limit it waits for as long as the shim lives.
///
/// # Errors
/// If the shim is gone, or does not reply in time.
pub(crate) fn request(
    run_dir: &Path,
    shim: ShimId,
    request: &ShimRequest,
    limit: Option<Duration>,
) -> io::Result<ShimReply> {
    request_at(&socket_path(run_dir, shim), request, limit)
}

/// Sends a request to the program that listens on this socket.
///
/// # Errors
/// If no program listens, or it does not reply in time.
pub(crate) fn request_at(
    socket_path: &Path,
    request: &ShimRequest,
    limit: Option<Duration>,
) -> io::Result<ShimReply> {
    let mut socket = control_socket::connect(socket_path)?;
    socket.set_write_timeout(Some(REPLY_TIMEOUT))?;
    socket.set_read_timeout(limit)?;
    stream::write(&mut socket, request)?;
    stream::read(&mut socket)
}

/// Sends a request to all shims at once; shims that do not reply in time are left out.
pub(crate) fn request_all(run_dir: &Path, request: &ShimRequest) -> Vec<(ShimId, ShimReply)> {
    let mut replies = Vec::new();
    request_until(run_dir, request, REPLY_TIMEOUT, |shim, reply| {
        replies.push((shim, reply));
        false
    });
    replies
}

/// Sends a request to all shims at once, and receives their replies as they come, until `is_last`
/// accepts one or the time is over.
fn request_until(
    run_dir: &Path,
    request: &ShimRequest,
    timeout: Duration,
    mut is_last: impl FnMut(ShimId, ShimReply) -> bool,
) {
    let end = Instant::now() + timeout;
    let send = |shim| {
        let mut socket = control_socket::connect(&socket_path(run_dir, shim)).ok()?;
        socket.set_write_timeout(Some(REPLY_TIMEOUT)).ok()?;
        stream::write(&mut socket, request).ok()?;
        Some((shim, socket))
    };
    let mut asked: Vec<(ShimId, UnixStream)> = all(run_dir).into_iter().filter_map(send).collect();
    while !asked.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        let mut sockets: Vec<_> = asked.iter().map(|(_, s)| PollFd::new(s, PollFlags::IN)).collect();
        let ready = match poll(&mut sockets, Timespec::try_from(left).ok().as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(0) | Err(_) => break,
            Ok(_) => sockets.iter().map(|socket| !socket.revents().is_empty()).collect::<Vec<_>>(),
        };
        let (replied, waiting) = asked.into_iter().zip(ready).partition::<Vec<_>, _>(|(_, ready)| *ready);
        asked = waiting.into_iter().map(|(one, _)| one).collect();
        for ((shim, mut socket), _) in replied {
            // A shim may be stopped in the middle of its reply.
            let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
            match socket.set_read_timeout(Some(left)).and_then(|()| stream::read(&mut socket)) {
                Ok(reply) => {
                    if is_last(shim, reply) {
                        return;
                    }
                }
                Err(error) => tracing::warn!(%shim, %error, "a shim does not answer"),
            }
        }
    }
    for (shim, _) in asked {
        tracing::warn!(%shim, "a shim does not answer in time");
    }
}

/// The home shim that holds this process. A shim that does not answer delays this only if no other
/// shim holds the process.
pub(crate) fn home_shim_of(run_dir: &Path, pid: HomePid) -> Option<ShimId> {
    owner_of(run_dir, pid, REPLY_TIMEOUT)
}

fn owner_of(run_dir: &Path, pid: HomePid, timeout: Duration) -> Option<ShimId> {
    let mut owner = None;
    request_until(run_dir, &ShimRequest::Owns { pid }, timeout, |shim, reply| {
        owner = matches!(reply, ShimReply::Done).then_some(shim);
        owner.is_some()
    });
    owner
}

/// Whether a request failed because the shim had ended before the request was sent.
pub(crate) fn had_ended(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Whether other nodes may reach all files of this node, as far as their users' rights go.
fn serves_files(config: &Config) -> bool {
    config.file.mfs.unwrap_or(true)
        && config.file.mfs_paths.is_none()
        && !read_settings(&config.run_dir).no_mfs
}

/// Starts a shim and waits until it listens.
///
/// # Errors
/// If it does not start; its files are removed then.
pub(crate) fn start(config: &Config, node: NodeId, role: ShimRole) -> Result<(ShimId, Fingerprint), Refusal> {
    let failed = |why: String| {
        tracing::error!(shim = %config.shim.display(), why, "a shim did not start");
        Refusal::new(RefusalKind::Internal, format!("the shim did not start: {why}"))
    };
    if all(&config.run_dir).len() >= MAX_SHIMS {
        return Err(Refusal::new(
            RefusalKind::Unavailable,
            format!("{MAX_SHIMS} shims run on this node already"),
        ));
    }
    let id = ShimId(rand::random());
    let start = ShimStart {
        id,
        node,
        run_dir: config.run_dir.clone(),
        cache_dir: config.cache_dir.clone(),
        role,
        suspend_after: config.suspend_after,
        give_up_after: config.give_up_after,
        guest_nice: config.guest_nice,
        fastpath: config.fastpath,
        guest_cpus: config.guest_cpus,
        shared: config.file.shared.clone().unwrap_or_default(),
        serves_files: serves_files(config),
        shares_files: config.file.shared_files.unwrap_or(true),
    };
    let log = directory(&config.run_dir).join(format!("{id}.log"));
    let mut child = spawn(&config.shim, &log)
        .map_err(|e| failed(format!("{}: {e}", config.shim.display())))
        .inspect_err(|_| drop(fs::remove_file(&log)))?;
    match handshake(&mut child, &start) {
        Ok(fingerprint) => {
            reap(child, id, log);
            Ok((id, fingerprint))
        }
        Err(why) => {
            let _ended = child.kill();
            let _status = child.wait();
            for left in [log, socket_path(&config.run_dir, id)] {
                let _gone = fs::remove_file(left);
            }
            Err(failed(why))
        }
    }
}

fn spawn(program: &Path, log: &Path) -> io::Result<Child> {
    let log = OpenOptions::new().append(true).create_new(true).mode(0o600).open(log)?;
    spawn_detached(&mut Command::new(program), log)
}

/// Sends the shim its role and receives the fingerprint of its key.
fn handshake(child: &mut Child, start: &ShimStart) -> Result<Fingerprint, String> {
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("it has no pipes".into());
    };
    let text = serde_json::to_vec(start).map_err(|e| e.to_string())?;
    stdin.write_all(&text).map_err(|e| format!("it does not listen: {e}"))?;
    drop(stdin);
    let line = read_first_line(stdout).map_err(|e| e.to_string())?;
    match line.split_once(' ') {
        Some(("ready", key)) => parse_fingerprint(key).ok_or_else(|| "its key is malformed".into()),
        Some(("failed", why)) => Err(why.into()),
        _ => Err("it ended at once; its log says why".into()),
    }
}

fn parse_fingerprint(text: &str) -> Option<Fingerprint> {
    let bytes = data_encoding::HEXLOWER_PERMISSIVE.decode(text.trim().as_bytes()).ok()?;
    Some(Fingerprint(bytes.try_into().ok()?))
}

/// Waits for the end of the shim, so that it leaves no zombie. Shims of an earlier ternd were
/// adopted by init.
fn reap(mut child: Child, id: ShimId, log: PathBuf) {
    let wait = move || {
        let status = child.wait();
        // A shim that was killed has not removed its socket and the control group of its guests.
        let _gone = fs::remove_file(log.with_extension("sock"));
        tern_cgroup::guests::remove_if_empty();
        match status {
            Ok(status) if status.success() => tracing::debug!(shim = %id, "a shim has ended"),
            status => tracing::warn!(shim = %id, ?status, log = %log.display(), "a shim has failed"),
        }
        if fs::metadata(&log).is_ok_and(|log| log.len() == 0) {
            let _gone = fs::remove_file(&log);
        }
        log.parent().map(prune_logs).unwrap_or_default();
    };
    let thread = std::thread::Builder::new().name("reap".into()).stack_size(64 << 10).spawn(wait);
    if let Err(error) = thread {
        tracing::warn!(%error, "cannot watch a shim");
    }
}

/// Removes all but the newest logs of shims that have ended.
fn prune_logs(directory: &Path) {
    let logs = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let ended = logs.filter(|path| {
        path.extension().is_some_and(|extension| extension == "log") && !path.with_extension("sock").exists()
    });
    let written = |path: &PathBuf| fs::metadata(path).and_then(|log| log.modified()).ok();
    let mut ended: Vec<PathBuf> = ended.collect();
    if ended.len() > MAX_LOGS {
        ended.sort_by_cached_key(|path| std::cmp::Reverse(written(path)));
        for log in ended.drain(MAX_LOGS..) {
            let _gone_already = fs::remove_file(log);
        }
    }
}

/// Watches a shim that an earlier ternd started, to remove its socket if it is killed.
fn watch_exit(socket: PathBuf) {
    // The pid is that of the listener (SO_PEERCRED). If it was reused meanwhile, the loop below
    // finds that nobody listens.
    let listener = control_socket::connect(&socket).and_then(|peer| {
        let process = rustix::net::sockopt::socket_peercred(&peer)?.pid;
        Ok(pidfd_open(process, PidfdFlags::empty())?)
    });
    let Ok(process) = listener.inspect_err(|error| tracing::warn!(%error, "cannot watch a shim")) else {
        return;
    };
    let wait = move || {
        while is_listening(&socket) {
            match poll(&mut [PollFd::new(&process, PollFlags::IN)], None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
        if !is_listening(&socket) && fs::remove_file(&socket).is_ok() {
            tracing::warn!(socket = %socket.display(), "a shim was killed");
        }
    };
    let thread = std::thread::Builder::new().name("watch".into()).stack_size(64 << 10).spawn(wait);
    if let Err(error) = thread {
        tracing::warn!(%error, "cannot watch a shim");
    }
}

/// Passes a connection on to a shim, which authenticates it.
///
/// # Errors
/// If there is no such shim; the connection is closed then.
pub(crate) fn pass_connection(run_dir: &Path, shim: ShimId, connection: &TcpStream) -> io::Result<()> {
    pass_connection_to(&socket_path(run_dir, shim), connection)
}

/// Passes a connection on to the program that listens on this socket.
///
/// # Errors
/// If no program listens; the connection is closed then.
pub(crate) fn pass_connection_to(socket_path: &Path, connection: &TcpStream) -> io::Result<()> {
    let mut socket = control_socket::connect(socket_path)?;
    socket.set_write_timeout(Some(REPLY_TIMEOUT))?;
    socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
    stream::write(&mut socket, &ShimRequest::Connection)?;
    control_socket::send_fd(&socket, connection.as_fd())?;
    // The reply confirms that it has received the descriptor.
    stream::read::<ShimReply>(&mut socket).map(|_done| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;
    use std::os::unix::net::UnixListener;

    fn listen(run_dir: &Path, number: u8) -> (ShimId, UnixListener) {
        let id = ShimId([number; 16]);
        (id, UnixListener::bind(socket_path(run_dir, id)).unwrap())
    }

    #[test]
    fn stopped_shim_does_not_delay_the_search_for_an_owner() {
        let Scratch(run_dir) = &Scratch::new("owner");
        fs::create_dir_all(directory(run_dir)).unwrap();
        let _stopped = [1, 3].map(|number| listen(run_dir, number));
        let (owner, listener) = listen(run_dir, 2);
        let serve = std::thread::spawn(move || {
            let (mut caller, _) = listener.accept().unwrap();
            let _request: ShimRequest = stream::read(&mut caller).unwrap();
            stream::write(&mut caller, &ShimReply::Done).unwrap();
        });
        let begun = Instant::now();
        assert_eq!(owner_of(run_dir, HomePid(7), Duration::from_secs(600)), Some(owner));
        assert!(begun.elapsed() < Duration::from_secs(300));
        serve.join().unwrap();
    }

    #[test]
    fn request_to_a_shim_that_has_ended_was_not_sent() {
        let Scratch(run_dir) = &Scratch::new("ended");
        fs::create_dir_all(directory(run_dir)).unwrap();
        let send = |shim| request(run_dir, shim, &ShimRequest::Owns { pid: HomePid(7) }, None).unwrap_err();
        // It has removed its socket.
        assert!(had_ended(&send(ShimId([1; 16]))));
        // It was killed.
        let (killed, listener) = listen(run_dir, 2);
        drop(listener);
        assert!(had_ended(&send(killed)));
        // It ended with the request.
        let (ending, listener) = listen(run_dir, 3);
        let end = std::thread::spawn(move || drop(listener.accept().unwrap()));
        assert!(!had_ended(&send(ending)));
        end.join().unwrap();
    }
}
