//! The shims of this node: starting them, and asking them.
//!
//! Each holds one half of one family, listens on `RUN/shims/ID.sock`, and outlives ternd: it is a session of
//! its own, its messages go to `RUN/shims/ID.log`, and a new ternd finds it by its socket.

use crate::config::Config;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, pidfd_open};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind, ShimReply, ShimRequest, ShimRole, ShimStart, door, stream};
use tern_ids::{Epoch, Fingerprint, HomePid, NodeId, ShimId};

/// How long a shim may take to start.
const START: Duration = Duration::from_secs(10);

/// How long one may take to say what it has.
pub(crate) const ANSWER: Duration = Duration::from_secs(2);

/// The most shims of a node.
const MOST: usize = 4096;

/// So many logs of shims that have ended are kept.
const MOST_LOGS: usize = 64;

fn directory(run_dir: &Path) -> PathBuf {
    run_dir.join("shims")
}

fn socket_of(run_dir: &Path, shim: ShimId) -> PathBuf {
    directory(run_dir).join(format!("{shim}.sock"))
}

/// Makes the directory, removes what dead shims have left in it, and watches over the living, who are not our
/// children.
pub(crate) fn sweep(run_dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory(run_dir))?;
    for entry in fs::read_dir(directory(run_dir))?.flatten() {
        let path = entry.path();
        let socket = path.with_extension("sock");
        // A shim that is just starting has a log already; nobody starts one while ternd starts.
        if !lives(&socket) {
            let _gone = fs::remove_file(&path);
        } else if path == socket {
            watch(socket);
        }
    }
    tern_cgroup::guests::tidy();
    Ok(())
}

/// Whether somebody listens there. A full queue of connections is a sign of life.
fn lives(socket: &Path) -> bool {
    match door::connect(socket) {
        Ok(_) => true,
        Err(e) => !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused),
    }
}

/// Whether this shim runs.
pub(crate) fn is_alive(run_dir: &Path, shim: ShimId) -> bool {
    lives(&socket_of(run_dir, shim))
}

/// Whether this shim runs and waits for this life of a process. One that does not answer might.
pub(crate) fn awaits(run_dir: &Path, shim: ShimId, pid: HomePid, epoch: Epoch) -> bool {
    if !is_alive(run_dir, shim) {
        return false;
    }
    let answer = ask(run_dir, shim, &ShimRequest::Awaits { pid, epoch }, Some(ANSWER));
    !matches!(answer, Ok(ShimReply::Refused(refusal)) if refusal.kind == RefusalKind::NotFound)
}

/// All shims that have a socket.
pub(crate) fn all(run_dir: &Path) -> Vec<ShimId> {
    let files = fs::read_dir(directory(run_dir)).into_iter().flatten().flatten();
    files.filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".sock")?.parse().ok()).collect()
}

/// Asks one shim; without a time limit it may take as long as it lives.
///
/// # Errors
/// If it is gone, or does not answer in time.
pub(crate) fn ask(
    run_dir: &Path,
    shim: ShimId,
    request: &ShimRequest,
    limit: Option<Duration>,
) -> io::Result<ShimReply> {
    ask_at(&socket_of(run_dir, shim), request, limit)
}

/// Asks whoever listens there.
///
/// # Errors
/// If nobody does, or does not answer in time.
pub(crate) fn ask_at(door: &Path, request: &ShimRequest, limit: Option<Duration>) -> io::Result<ShimReply> {
    let mut socket = door::connect(door)?;
    socket.set_write_timeout(Some(ANSWER))?;
    socket.set_read_timeout(limit)?;
    stream::write(&mut socket, request)?;
    stream::read(&mut socket)
}

/// Asks all shims at once; those that do not answer in time are left out.
pub(crate) fn ask_all(run_dir: &Path, request: &ShimRequest) -> Vec<(ShimId, ShimReply)> {
    let end = Instant::now() + ANSWER;
    let asked: Vec<_> = all(run_dir)
        .into_iter()
        .filter_map(|shim| {
            let mut socket = door::connect(&socket_of(run_dir, shim)).ok()?;
            socket.set_write_timeout(Some(ANSWER)).ok()?;
            stream::write(&mut socket, request).ok()?;
            Some((shim, socket))
        })
        .collect();
    let hear = |(shim, mut socket): (ShimId, UnixStream)| {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
        socket.set_read_timeout(Some(left)).ok()?;
        match stream::read(&mut socket) {
            Ok(reply) => Some((shim, reply)),
            Err(error) => {
                tracing::warn!(%shim, %error, "a shim does not answer");
                None
            }
        }
    };
    asked.into_iter().filter_map(hear).collect()
}

/// The home shim that has this process.
pub(crate) fn owner(run_dir: &Path, pid: HomePid) -> Option<ShimId> {
    let replies = ask_all(run_dir, &ShimRequest::Owns { pid });
    replies.into_iter().find(|(_, reply)| matches!(reply, ShimReply::Done)).map(|(shim, _)| shim)
}

/// Whether others may have all of this node's files, as far as their users may.
fn serves_files(config: &Config) -> bool {
    config.file.mfs.unwrap_or(true)
        && config.file.mfs_paths.is_none()
        && !crate::settings(&config.run_dir).no_mfs
}

/// Starts a shim, and waits until it listens.
///
/// # Errors
/// If it does not start; nothing of it is left then.
pub(crate) fn start(config: &Config, node: NodeId, role: ShimRole) -> Result<(ShimId, Fingerprint), Refusal> {
    let failed = |why: String| {
        tracing::error!(shim = %config.shim.display(), why, "a shim did not start");
        Refusal::new(RefusalKind::Internal, format!("the shim did not start: {why}"))
    };
    if all(&config.run_dir).len() >= MOST {
        return Err(Refusal::new(RefusalKind::Unavailable, format!("{MOST} shims run on this node already")));
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
        hot_calls: config.hot_calls,
        guest_cpus: config.guest_cpus,
        shared: config.file.shared.clone().unwrap_or_default(),
        serves_files: serves_files(config),
    };
    let log = directory(&config.run_dir).join(format!("{id}.log"));
    let mut child = spawn(&config.shim, &log)
        .map_err(|e| failed(format!("{}: {e}", config.shim.display())))
        .inspect_err(|_| drop(fs::remove_file(&log)))?;
    match greet(&mut child, &start) {
        Ok(fingerprint) => {
            reap(child, id, log);
            Ok((id, fingerprint))
        }
        Err(why) => {
            let _ended = child.kill();
            let _status = child.wait();
            for left in [log, socket_of(&config.run_dir, id)] {
                let _gone = fs::remove_file(left);
            }
            Err(failed(why))
        }
    }
}

fn spawn(program: &Path, log: &Path) -> io::Result<Child> {
    let log = OpenOptions::new().append(true).create_new(true).mode(0o600).open(log)?;
    spawn_apart(&mut Command::new(program), log)
}

/// Starts a program that is to outlive us, in a session of its own, which answers on its standard output.
#[allow(unsafe_code, reason = "between fork and exec only setsid is called")]
pub(crate) fn spawn_apart(command: &mut Command, log: fs::File) -> io::Result<Child> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).current_dir("/");
    // SAFETY: the closure runs between fork and exec and makes one system call, which is async-signal-safe;
    // it touches no memory of this process.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(|_session| ()).map_err(io::Error::from));
    }
    command.spawn()
}

/// Tells the shim what it is to be, and hears its key.
fn greet(child: &mut Child, start: &ShimStart) -> Result<Fingerprint, String> {
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("it has no pipes".into());
    };
    let text = serde_json::to_vec(start).map_err(|e| e.to_string())?;
    stdin.write_all(&text).map_err(|e| format!("it does not listen: {e}"))?;
    drop(stdin);
    let line = read_line(stdout).map_err(|e| e.to_string())?;
    match line.split_once(' ') {
        Some(("ready", key)) => fingerprint(key).ok_or_else(|| "its key is malformed".into()),
        Some(("failed", why)) => Err(why.into()),
        _ => Err("it ended at once; its log says why".into()),
    }
}

/// The first line that a program says, within the time that it has to start.
pub(crate) fn read_line(mut from: ChildStdout) -> io::Result<String> {
    let end = Instant::now() + START;
    let mut line = Vec::new();
    while !line.contains(&b'\n') && line.len() < 4096 {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or_default();
        let ready = poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&timeout));
        match ready {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long")),
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
            Ok(_) => {}
        }
        let mut piece = [0; 512];
        match from.read(&mut piece)? {
            0 => break,
            count => line.extend_from_slice(&piece[..count]),
        }
    }
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}

fn fingerprint(text: &str) -> Option<Fingerprint> {
    let bytes = data_encoding::HEXLOWER_PERMISSIVE.decode(text.trim().as_bytes()).ok()?;
    Some(Fingerprint(bytes.try_into().ok()?))
}

/// Waits for the shim's end, so that no zombie stays; a later ternd's shims are init's to reap.
fn reap(mut child: Child, id: ShimId, log: PathBuf) {
    let wait = move || {
        let status = child.wait();
        // One that was killed has left its socket, and its guests' group.
        let _gone = fs::remove_file(log.with_extension("sock"));
        tern_cgroup::guests::tidy();
        match status {
            Ok(status) if status.success() => tracing::debug!(shim = %id, "a shim has ended"),
            status => tracing::warn!(shim = %id, ?status, log = %log.display(), "a shim has failed"),
        }
        if fs::metadata(&log).is_ok_and(|log| log.len() == 0) {
            let _gone = fs::remove_file(&log);
        }
        log.parent().map(tidy_logs).unwrap_or_default();
    };
    let thread = std::thread::Builder::new().name("reap".into()).stack_size(64 << 10).spawn(wait);
    if let Err(error) = thread {
        tracing::warn!(%error, "nobody waits for a shim");
    }
}

/// Removes all but the newest logs of shims that have ended: each move has its own, and nobody reads thousands.
fn tidy_logs(directory: &Path) {
    let logs = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let over = logs.filter(|path| {
        path.extension().is_some_and(|extension| extension == "log") && !path.with_extension("sock").exists()
    });
    let written = |path: &PathBuf| fs::metadata(path).and_then(|log| log.modified()).ok();
    let mut over: Vec<PathBuf> = over.collect();
    if over.len() > MOST_LOGS {
        over.sort_by_cached_key(|path| std::cmp::Reverse(written(path)));
        for log in over.drain(MOST_LOGS..) {
            let _gone_already = fs::remove_file(log);
        }
    }
}

/// Waits for the end of a shim that an earlier ternd has started, to remove what it leaves if it is killed.
fn watch(socket: PathBuf) {
    // Who listens, the kernel says. That the number has not come to mean another process, the look below shows.
    let listener = door::connect(&socket).and_then(|peer| {
        let process = rustix::net::sockopt::socket_peercred(&peer)?.pid;
        Ok(pidfd_open(process, PidfdFlags::empty())?)
    });
    let Ok(process) = listener.inspect_err(|error| tracing::warn!(%error, "nobody waits for a shim")) else {
        return;
    };
    let wait = move || {
        while lives(&socket) {
            match poll(&mut [PollFd::new(&process, PollFlags::IN)], None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
        if !lives(&socket) && fs::remove_file(&socket).is_ok() {
            tracing::warn!(socket = %socket.display(), "a shim was killed");
        }
    };
    let thread = std::thread::Builder::new().name("watch".into()).stack_size(64 << 10).spawn(wait);
    if let Err(error) = thread {
        tracing::warn!(%error, "nobody waits for a shim");
    }
}

/// Passes a connection on to a shim, which authenticates it.
///
/// # Errors
/// If there is no such shim; the connection is closed then.
pub(crate) fn hand_over(run_dir: &Path, shim: ShimId, connection: &TcpStream) -> io::Result<()> {
    hand_to(&socket_of(run_dir, shim), connection)
}

/// Passes a connection on to whoever listens there.
///
/// # Errors
/// If nobody does; the connection is closed then.
pub(crate) fn hand_to(door: &Path, connection: &TcpStream) -> io::Result<()> {
    let mut socket = door::connect(door)?;
    socket.set_write_timeout(Some(ANSWER))?;
    socket.set_read_timeout(Some(ANSWER))?;
    stream::write(&mut socket, &ShimRequest::Connection)?;
    tern_control::door::pass(&socket, connection.as_fd())?;
    // It answers when it has the descriptor.
    stream::read::<ShimReply>(&mut socket).map(|_done| ())
}
