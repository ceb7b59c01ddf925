//! The control socket: requests of the tools and shims of this node.

mod explain;
mod one_process;
mod status;

use crate::balance::{owner, query};
use crate::cluster::map::{Map, MapError};
use crate::cluster::{tune, view};
use crate::migrate::{self, GuestPreparation, evacuation, expel};
use crate::node::Node;
use crate::peer::client;
use crate::peer::connection_limit::{ConnectionLimit, ConnectionPermit};
use crate::process::permission::Caller;
use crate::process::{credentials, process_list};
use crate::programs::{HelperProgram, file_server};
use anyhow::{Context, Result};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tern_control::{Refusal, RefusalKind, Reply, Request, Switch, stream};
use tern_ids::NodeId;

/// Maximum number of simultaneous connections, in total and of one user.
const MAX_CONNECTIONS: (usize, usize) = (1024, 256);

/// Timeout of reading a request, and of writing the reply.
const IO_TIMEOUT: Duration = Duration::from_secs(5);

/// Removes an old socket, and creates the socket, which all users may connect to. The caller holds
/// the lock of the run directory, so no other ternd uses the old socket.
pub(crate) fn bind(node: &Node) -> Result<UnixListener> {
    let path = node.config.run_dir.join("control");
    let _left_over = fs::remove_file(&path);
    let listener =
        UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
    fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Accepts connections; never returns.
pub(crate) fn run(listener: &UnixListener, node: &Arc<Node>) -> ! {
    let limit = ConnectionLimit::new(MAX_CONNECTIONS.0, MAX_CONNECTIONS.1);
    loop {
        match listener.accept() {
            Ok((socket, _)) => accept(node, &limit, socket),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a request");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn accept(node: &Arc<Node>, limit: &Arc<ConnectionLimit<u32>>, socket: UnixStream) {
    let caller = match credentials::peer_caller(&socket) {
        Ok(caller) => caller,
        Err(error) => return tracing::warn!(%error, "cannot read the credentials of a caller"),
    };
    let Some(permit) = limit.acquire(caller.uid) else {
        return tracing::warn!(uid = caller.uid, "too many requests at once; one was dropped");
    };
    let node = node.clone();
    let serve = move || {
        let permit: ConnectionPermit<u32> = permit;
        if let Err(error) = serve(&node, caller, socket) {
            tracing::debug!(uid = caller.uid, %error, "a request failed");
        }
        drop(permit);
    };
    if let Err(error) = thread::Builder::new().name("control".into()).spawn(serve) {
        tracing::warn!(%error, "cannot start a thread for a request");
    }
}

fn serve(node: &Arc<Node>, caller: Caller, mut socket: UnixStream) -> Result<()> {
    socket.set_read_timeout(Some(IO_TIMEOUT))?;
    socket.set_write_timeout(Some(IO_TIMEOUT))?;
    let request = match stream::read::<Request>(&mut socket) {
        Ok(request) => request,
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
            let message = "unknown request; ternd may be of another version than the tool";
            let refusal = Refusal::new(RefusalKind::BadRequest, message);
            return Ok(stream::write(&mut socket, &Reply::Refused(refusal))?);
        }
        Err(e) => return Err(e.into()),
    };
    let reply = handle(node, caller, request).unwrap_or_else(Reply::Refused);
    Ok(stream::write(&mut socket, &reply)?)
}

fn handle(node: &Arc<Node>, caller: Caller, request: Request) -> Result<Reply, Refusal> {
    match request {
        Request::Migrate { pid, to } => migrate::migrate_for_caller(node, caller, pid, to),
        Request::Continue { pid } => migrate::continue_frozen(node, caller, pid),
        Request::LeaveNode { pid, from } => expel::expel(node, caller, pid, from),
        Request::Tune { node: peer } => {
            caller.check_owns_node("measure the links")?;
            tune::measure(node, peer).map(Reply::Tuned)
        }
        Request::KeepCosts(measured) => {
            caller.check_owns_node("measure the links")?;
            tune::store(node, measured).map(|()| Reply::Done)
        }
        Request::Links => Ok(Reply::Links(tune::rows(node))),
        Request::Best { advice } => match query::best_node_for_start(node, &advice) {
            Some(best) => Ok(Reply::Best(best)),
            None => Err(Refusal::new(RefusalKind::Unavailable, "no node can take it")
                .hint("mon shows the load and memory of all nodes")),
        },
        Request::AtExec { candidates, lock, advice } => {
            migrate::migrate_at_exec(node, caller, &candidates, lock, advice)
        }
        Request::AtBest { lock, advice } => migrate::migrate_to_best_at_exec(node, caller, lock, advice),
        Request::Register { lock, never, advice } => {
            migrate::register_caller(node, caller, lock, never, advice).map(|()| Reply::Done)
        }
        Request::Processes => Ok(Reply::Processes(process_list::all(node))),
        Request::ProcessesOf { node: on } => process_list::of_node(node, on).map(Reply::Processes),
        Request::Connections => Ok(Reply::Connections(process_list::connections(node, caller))),
        Request::Process { pid } => one_process::row(node, caller, pid).map(|row| Reply::Process(row.into())),
        Request::ResolveNode { pid, name: of } => {
            Ok(Reply::ResolvedNode(one_process::resolve_node(node, pid, of)))
        }
        Request::SetSymbolicNode { pid, name: of, node: to } => {
            one_process::set_symbolic_node(node, caller, pid, of, to)
        }
        Request::FileTraffic(reports) => {
            caller.check_owns_node("report file traffic")?;
            node.balancing.file_traffic.add(&reports);
            Ok(Reply::Done)
        }
        Request::SetLock { pid, lock } => one_process::set_lock(node, caller, pid, lock),
        Request::Advise { pid, advice } => one_process::advise(node, caller, pid, advice),
        Request::For { uid, gid, request } => handle(node, caller.on_behalf_of(uid, gid)?, *request),
        Request::Why { pid } => explain::report(node, pid),
        Request::Cluster => Ok(Reply::Cluster(view::report(node))),
        Request::Status => Ok(Reply::Status(status::report(node))),
        Request::GetMap => Ok(Reply::Map(node.map().text().into())),
        Request::SetMap { text } => {
            caller.check_owns_node("change the map")?;
            set_map(node, &text)
        }
        Request::RemoveNode { node: removed } => {
            caller.check_owns_node("remove nodes")?;
            remove_node(node, removed)
        }
        Request::MapOff => {
            caller.check_owns_node("take the node out of the cluster")?;
            let (away, guests) = process_list::counts(node);
            if away + guests > 0 {
                let message = format!("{away} processes are away and {guests} guests are here");
                return Err(Refusal::new(RefusalKind::Unavailable, message).hint("mps shows them"));
            }
            node.remove_map().map(|()| Reply::Done)
        }
        Request::StartMexec => {
            let failed = |e: anyhow::Error| Refusal::new(RefusalKind::Internal, format!("{e:#}"));
            HelperProgram::command_server(&node.config).ensure_running().map(|()| Reply::Done).map_err(failed)
        }
        Request::StartRemoteMaps { home } => {
            caller.check_owns_node("start the file tree of guests")?;
            let failed = |e: anyhow::Error| Refusal::new(RefusalKind::Internal, format!("{e:#}"));
            HelperProgram::home_tree(&node.config, home)
                .ensure_running()
                .map(|()| Reply::Done)
                .map_err(failed)
        }
        Request::HasCapacity => owner::check_can_take_command(node).map(|()| Reply::Done),
        Request::Placed => Ok(Reply::Placed(HelperProgram::command_server(&node.config).placed())),
        Request::Token { seconds } => {
            caller.check_owns_node("make tokens")?;
            make_token(node, seconds)
        }
        Request::Switch { switch, on } => {
            caller.check_owns_node("change the settings of the node")?;
            let reply = node.settings.change(|settings| *settings.of(switch) = on)?;
            if switch == Switch::NoMfs {
                file_server::set_peer_access(&node.config, !on)?;
            }
            Ok(reply)
        }
        Request::Settings => Ok(Reply::Settings(node.settings.get())),
        Request::SetSpeed { speed } => {
            caller.check_owns_node("set the node's speed")?;
            if speed.is_some_and(|speed| !(1..=10_000_000).contains(&speed)) {
                return Err(Refusal::new(
                    RefusalKind::BadRequest,
                    "a speed must be 1 to 10000000; 10000 is a standard CPU",
                ));
            }
            node.settings.change(|settings| settings.speed = speed)
        }
        Request::SetDecay(decay) => {
            caller.check_owns_node("set the node's decay")?;
            let per_mille = 1..=1000;
            if decay.interval == 0 || !per_mille.contains(&decay.slow) || !per_mille.contains(&decay.fast) {
                let message = "a decay needs an interval of at least 1 second and two numbers from 1 to 1000";
                return Err(Refusal::new(RefusalKind::BadRequest, message));
            }
            node.settings.change(|settings| settings.decay = decay)
        }
        Request::Evacuate { what, seconds } => {
            caller.check_owns_node("evacuate the node")?;
            evacuation::evacuate(node, what, seconds)
        }
        Request::Rejoin => {
            caller.check_owns_node("reopen the node")?;
            node.settings.change(|settings| {
                (settings.stay, settings.local_stay, settings.block, settings.quiet) = Default::default();
            })
        }
        Request::Prepare { node: to, migration, accepted_keys, uid, gid, group } => {
            caller.check_owns_node("prepare a migration")?;
            migrate::prepare_destination(
                node,
                GuestPreparation { to, migration, accepted_keys, uid, gid, group },
            )
        }
        Request::Locate { node: on, shim } => {
            caller.check_owns_node("locate shims")?;
            Ok(migrate::locate_shim(node, on, shim))
        }
        Request::IsGuestAwaited { node: on, shim, pid, epoch } => {
            caller.check_owns_node("locate shims")?;
            Ok(migrate::ask_if_awaited(node, on, shim, pid, epoch))
        }
    }
}

fn set_map(node: &Arc<Node>, text: &str) -> Result<Reply, Refusal> {
    let bad = |e: MapError| Refusal::new(RefusalKind::BadRequest, e.to_string());
    let map = Map::parse(text).and_then(|map| map.check_contains(node.me())).map_err(bad)?;
    if map.nodes().is_empty() {
        return Err(bad(MapError::NodeMissing(node.me())));
    }
    node.change_map(|old| Ok(map.with_keys_of(old).with_version(old.version().saturating_add(1))))?;
    client::send_map(node, node.other_nodes());
    Ok(Reply::Done)
}

fn remove_node(node: &Arc<Node>, removed: NodeId) -> Result<Reply, Refusal> {
    node.founding_authority("removes nodes", &format!("tern remove {removed}"))?;
    if removed == node.me() {
        let message = format!("node {removed} founded the cluster, and cannot be removed from it");
        return Err(Refusal::new(RefusalKind::BadRequest, message));
    }
    node.change_map(|map| {
        map.without(removed).map_err(|problem| Refusal::new(RefusalKind::NotFound, problem))
    })?;
    client::send_map(node, node.other_nodes());
    Ok(Reply::Done)
}

fn make_token(node: &Node, seconds: u32) -> Result<Reply, Refusal> {
    let authority = node.founding_authority("admits new ones", "tern token")?;
    if !(60..=604_800).contains(&seconds) {
        return Err(Refusal::new(RefusalKind::BadRequest, "a token is valid for 60 to 604800 seconds"));
    }
    let token = node.tokens.create(node.me(), authority.fingerprint(), seconds, 1);
    let failed = |e| Refusal::new(RefusalKind::Internal, format!("cannot store the token: {e}"));
    token.map(|token| Reply::Token(token.to_string())).map_err(failed)
}
