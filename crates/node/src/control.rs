//! The control socket: requests of tools and shims of this node.

use crate::beside::Beside;
use crate::map::{Map, MapError};
use crate::message::PeerReply;
use crate::moving::{self, Preparation};
use crate::permission::Caller;
use crate::slots::{Slot, Slots};
use crate::state::{Node, kernel};
use crate::{
    balancing, cluster, costs, credentials, evacuation, mfs, out, owner, peers, processes, single, why,
};
use anyhow::{Context, Result};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tern_control::{NodeRow, Refusal, RefusalKind, Reply, Request, StatusReport, Switch, stream};
use tern_ids::NodeId;

/// Conversations at once, in all and of one user.
const MOST: (usize, usize) = (1024, 256);

/// How long a caller may take to say what it wants, or to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a node may take to show that it is up.
const PING: Duration = Duration::from_secs(1);

/// Makes the socket that everybody may use; one that is left over is replaced. The caller holds the lock of
/// the run directory, so that it is nobody's.
pub(crate) fn bind(node: &Node) -> Result<UnixListener> {
    let path = node.config.run_dir.join("control");
    let _left_over = fs::remove_file(&path);
    let listener =
        UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
    fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Serves for ever.
pub(crate) fn run(listener: &UnixListener, node: &Arc<Node>) -> ! {
    let slots = Slots::new(MOST.0, MOST.1);
    loop {
        match listener.accept() {
            Ok((socket, _)) => enter(node, &slots, socket),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a request");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn enter(node: &Arc<Node>, slots: &Arc<Slots<u32>>, socket: UnixStream) {
    let caller = match credentials::of_peer(&socket) {
        Ok(caller) => caller,
        Err(error) => return tracing::warn!(%error, "a caller without credentials"),
    };
    let Some(slot) = slots.take(caller.uid) else {
        return tracing::warn!(uid = caller.uid, "too many requests at once; one was dropped");
    };
    let node = node.clone();
    let serve = move || {
        let slot: Slot<u32> = slot;
        if let Err(error) = converse(&node, caller, socket) {
            tracing::debug!(uid = caller.uid, %error, "a request failed");
        }
        drop(slot);
    };
    if let Err(error) = thread::Builder::new().name("control".into()).spawn(serve) {
        tracing::warn!(%error, "no thread for a request");
    }
}

fn converse(node: &Arc<Node>, caller: Caller, mut socket: UnixStream) -> Result<()> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let request = match stream::read::<Request>(&mut socket) {
        Ok(request) => request,
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
            let said = "this ternd does not know such a request; is it of another version than the tool?";
            let refusal = Refusal::new(RefusalKind::BadRequest, said);
            return Ok(stream::write(&mut socket, &Reply::Refused(refusal))?);
        }
        Err(e) => return Err(e.into()),
    };
    let reply = answer(node, caller, request).unwrap_or_else(Reply::Refused);
    Ok(stream::write(&mut socket, &reply)?)
}

fn answer(node: &Arc<Node>, caller: Caller, request: Request) -> Result<Reply, Refusal> {
    match request {
        Request::Migrate { pid, to } => moving::migrate(node, caller, pid, to),
        Request::Continue { pid } => moving::let_go_on(node, caller, pid),
        Request::Out { pid, from } => out::out(node, caller, pid, from),
        Request::Tune { node: peer } => {
            caller.must_own_node("measure the links")?;
            costs::measure(node, peer).map(Reply::Tuned)
        }
        Request::KeepCosts(measured) => {
            caller.must_own_node("measure the links")?;
            costs::keep(node, measured).map(|()| Reply::Done)
        }
        Request::Links => Ok(Reply::Links(costs::rows(node))),
        Request::Best { advice } => match balancing::best(node, &advice) {
            Some(best) => Ok(Reply::Best(best)),
            None => Err(Refusal::new(RefusalKind::Unavailable, "no node can take it")
                .hint("mon, which shows the load and memory of all nodes")),
        },
        Request::AtExec { candidates, lock, advice } => {
            moving::at_exec(node, caller, &candidates, lock, advice)
        }
        Request::AtBest { lock, advice } => moving::at_best(node, caller, lock, advice),
        Request::Register { lock, never, advice } => {
            moving::register(node, caller, lock, never, advice).map(|()| Reply::Done)
        }
        Request::Processes => Ok(Reply::Processes(processes::all(node))),
        Request::ProcessesOf { node: on } => processes::of(node, on).map(Reply::Processes),
        Request::Process { pid } => single::row(node, caller, pid).map(|row| Reply::Process(row.into())),
        Request::Place { pid, of } => Ok(Reply::Place(single::place(node, pid, of))),
        Request::Choose { pid, of, node: to } => single::choose(node, caller, pid, of, to),
        Request::FileTraffic(told) => {
            caller.must_own_node("say what others do on files")?;
            node.balancing.traffic.hear(&told);
            Ok(Reply::Done)
        }
        Request::SetLock { pid, lock } => single::set_lock(node, caller, pid, lock),
        Request::Advise { pid, advice } => single::advise(node, caller, pid, advice),
        Request::For { uid, gid, request } => answer(node, caller.speaks_for(uid, gid)?, *request),
        Request::Why { pid } => why::report(node, pid),
        Request::Cluster => Ok(Reply::Cluster(cluster::report(node))),
        Request::Status => Ok(Reply::Status(status(node))),
        Request::GetMap => Ok(Reply::Map(node.map().text().into())),
        Request::SetMap { text } => {
            caller.must_own_node("change the map")?;
            set_map(node, &text)
        }
        Request::MapOff => {
            caller.must_own_node("take the node out of the cluster")?;
            let (away, guests) = processes::counts(node);
            if away + guests > 0 {
                let said = format!("{away} processes are away and {guests} guests are here");
                return Err(Refusal::new(RefusalKind::Unavailable, said).hint("mps shows them"));
            }
            node.forget_map().map(|()| Reply::Done)
        }
        Request::Mexec => {
            let failed = |e: anyhow::Error| Refusal::new(RefusalKind::Internal, format!("{e:#}"));
            Beside::exec(&node.config).ensure().map(|()| Reply::Done).map_err(failed)
        }
        Request::Homes { home } => {
            caller.must_own_node("start what guests map files from")?;
            let failed = |e: anyhow::Error| Refusal::new(RefusalKind::Internal, format!("{e:#}"));
            Beside::homes(&node.config, home).ensure().map(|()| Reply::Done).map_err(failed)
        }
        Request::Spares => owner::spares(node).map(|()| Reply::Done),
        Request::Placed => Ok(Reply::Placed(Beside::exec(&node.config).placed())),
        Request::Token { seconds } => {
            caller.must_own_node("make tokens")?;
            token(node, seconds)
        }
        Request::Switch { switch, on } => {
            caller.must_own_node("steer the node")?;
            let reply = node.settings.change(|settings| *settings.of(switch) = on)?;
            if switch == Switch::NoMfs {
                mfs::let_in(&node.config, !on)?;
            }
            Ok(reply)
        }
        Request::Settings => Ok(Reply::Settings(node.settings.now())),
        Request::SetSpeed { speed } => {
            caller.must_own_node("set the node's speed")?;
            if speed.is_some_and(|speed| !(1..=10_000_000).contains(&speed)) {
                return Err(Refusal::new(
                    RefusalKind::BadRequest,
                    "a speed is 1 to 10000000, 10000 for a standard CPU",
                ));
            }
            node.settings.change(|settings| settings.speed = speed)
        }
        Request::SetDecay(decay) => {
            caller.must_own_node("set the node's decay")?;
            let parts = 1..=1000;
            if decay.interval == 0 || !parts.contains(&decay.slow) || !parts.contains(&decay.fast) {
                let said = "a decay is an interval of at least 1 second, and two numbers of 1 to 1000";
                return Err(Refusal::new(RefusalKind::BadRequest, said));
            }
            node.settings.change(|settings| settings.decay = decay)
        }
        Request::Evacuate { what, seconds } => {
            caller.must_own_node("evacuate the node")?;
            evacuation::evacuate(node, what, seconds)
        }
        Request::Rejoin => {
            caller.must_own_node("open the node")?;
            node.settings.change(|settings| {
                (settings.stay, settings.local_stay, settings.block, settings.quiet) = Default::default();
            })
        }
        Request::Prepare { node: to, migration, accept, uid, gid, company } => {
            caller.must_own_node("prepare a node")?;
            moving::prepare(node, Preparation { to, migration, accept, uid, gid, company })
        }
        Request::Locate { node: on, shim } => {
            caller.must_own_node("ask for shims")?;
            Ok(moving::locate(node, on, shim))
        }
        Request::Awaited { node: on, shim, pid, epoch } => {
            caller.must_own_node("ask for shims")?;
            Ok(moving::awaited(node, on, shim, pid, epoch))
        }
    }
}

fn set_map(node: &Arc<Node>, text: &str) -> Result<Reply, Refusal> {
    let bad = |e: MapError| Refusal::new(RefusalKind::BadRequest, e.to_string());
    let map = Map::parse(text).and_then(|map| map.with(node.me())).map_err(bad)?;
    if map.nodes().is_empty() {
        return Err(bad(MapError::WithoutMe(node.me())));
    }
    node.change_map(|old| Ok(map.at_version(old.version().saturating_add(1))))?;
    peers::spread(node, node.others());
    Ok(Reply::Done)
}

fn token(node: &Node, seconds: u32) -> Result<Reply, Refusal> {
    let Some(authority) = &node.authority else {
        let founder =
            node.config.file.founder.map_or_else(|| "the founding node".into(), |id| format!("node {id}"));
        let said = "only the node that founded the cluster admits new ones";
        return Err(Refusal::new(RefusalKind::Unavailable, said).hint(format!("tern token, on {founder}")));
    };
    if !(60..=604_800).contains(&seconds) {
        return Err(Refusal::new(RefusalKind::BadRequest, "a token is valid for 60 to 604800 seconds"));
    }
    let token = node.tokens.make(node.me(), authority.fingerprint(), seconds, 1);
    let failed = |e| Refusal::new(RefusalKind::Internal, format!("cannot keep the token: {e}"));
    token.map(|token| Reply::Token(token.to_string())).map_err(failed)
}

fn status(node: &Arc<Node>) -> StatusReport {
    let (away, guests) = processes::counts(node);
    let mut nodes: Vec<_> = peers::ping_all(node, PING).into_iter().map(|answer| row(node, answer)).collect();
    let open = if node.takes_guests().is_ok() { "" } else { ", takes no guests" };
    nodes.push(NodeRow {
        node: node.me(),
        host: node.map().host(node.me()).unwrap_or_default(),
        up: true,
        rtt_ms: None,
        note: format!("this node, linux {}{open}", kernel()),
    });
    nodes.sort_by_key(|row| row.node);
    StatusReport {
        node: node.me(),
        version: env!("CARGO_PKG_VERSION").into(),
        cluster: node.identity.cluster().into(),
        nodes,
        away,
        guests,
    }
}

fn row(node: &Node, (peer, answer): (NodeId, Result<peers::Answer, Refusal>)) -> NodeRow {
    let host = node.map().host(peer).unwrap_or_default();
    let answer = match answer {
        Ok(answer) => answer,
        Err(refusal) => return NodeRow { node: peer, host, up: false, rtt_ms: None, note: refusal.message },
    };
    let mut note = format!("ternd {}", plain(&answer.hello.version));
    if let PeerReply::Pong { kernel, guests, open } = &answer.reply {
        note += &format!(", linux {}, {guests} guests", plain(kernel));
        if !open {
            note += ", takes no guests";
        }
    }
    let off = answer.clock_ahead.unsigned_abs();
    if u128::from(off) > peers::MOST_CLOCK_OFFSET.as_nanos() + answer.round_trip.as_nanos() / 2 {
        note += &format!(", clock off by {} ms: no destination", off / 1_000_000);
    }
    NodeRow { node: peer, host, up: true, rtt_ms: Some(answer.round_trip.as_secs_f64() * 1e3), note }
}

/// What another node says, fit for a terminal.
fn plain(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii_graphic()).take(64).collect()
}
