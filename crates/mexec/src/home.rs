//! The half that finds a node for each command of this one, and stands between it and its caller.
//!
//! ```text
//!  mexec ──Order──▶ caller: one thread each
//!                     ├▶ gate     so many of a user's at a time are looked for a node for
//!                     ├▶ choice   which node, by what is known of all
//!                     ├▶ waiting  until a node has room;  line: whose turn it is to have this one
//!                     ├▶ classes  how long such commands took
//!                     ├▶ links    to that node's away half
//!                     └▶ relay    streams, signals and the end
//! ```

mod caller;
mod choice;
mod classes;
mod gate;
mod honest;
mod line;
mod links;
pub(crate) mod relay;
mod running;
mod view;
mod waiting;

use crate::board::Board;
use crate::lock;
use crate::pieces::{self, Piece};
use crate::words::{Ask, Order, Said, TOLD, Wait, Where, Who, Why, kind};
use anyhow::{Context, Result, bail};
use caller::Caller;
use choice::{Known, Wish};
use classes::Classes;
use gate::Gate;
use line::Line;
use links::Links;
use running::{Counted, Running};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_node::Config;
use tern_wire::{Identity, Link};
use view::View;
use waiting::Waited;

/// How long a caller may take to say what he wants, and a node to say whether it runs it: its first command has a room made for it.
const SOON: Duration = Duration::from_secs(20);

/// Enough of each user that each node always knows of somebody who waits for room there.
const LOOKED_FOR: u32 = 8;

/// The most commands of one user at a time: less than there are in all, so that nobody keeps others out.
const MOST: u32 = 2048;

/// How long a node that refused a command, or was lost with it, is not asked for that again. It may wait for hours for room elsewhere.
const AGAIN: Duration = Duration::from_secs(10);

/// The home half of a node.
#[derive(Debug)]
pub(crate) struct Home {
    me: NodeId,
    config: Config,
    view: View,
    links: Links,
    classes: Classes,
    running: Running,
    /// One at a time chooses: when home has room for one, it is one who sees that.
    choosing: Mutex<()>,
    line: Line,
    gate: Gate,
    callers: Gate,
    board: Arc<Board>,
}

/// How a command's time on a node has ended.
pub(crate) enum Outcome {
    /// All has been said to the caller.
    Over,
    /// There is no room.
    Full,
    /// It was not run there: the node refuses, or cannot be reached.
    Not(Refusal),
    /// The node is gone, and nothing of it has been passed on: it may be run again if it is repeatable.
    Lost,
    /// The node is gone, and something of it has been passed on.
    Cut,
}

/// The nodes that a command is not to be sent to for now.
#[derive(Debug, Default)]
struct Lost(HashMap<NodeId, Instant>);

impl Lost {
    fn insert(&mut self, node: NodeId) {
        self.0.insert(node, Instant::now());
    }

    fn contains(&self, node: NodeId) -> bool {
        self.0.get(&node).is_some_and(|since| since.elapsed() < AGAIN)
    }
}

impl Home {
    /// That of this node.
    pub(crate) fn new(config: Config, identity: Identity, board: Arc<Board>) -> Self {
        let me = identity.node();
        Self {
            me,
            view: View::new(&config),
            links: Links::new(&config, identity),
            // As many as other nodes run at once.
            classes: Classes::new(1 + std::thread::available_parallelism().map_or(1, usize::from)),
            running: Running::new(me),
            choosing: Mutex::default(),
            line: Line::default(),
            gate: Gate::new(LOOKED_FOR),
            callers: Gate::new(MOST),
            board,
            config,
        }
    }

    /// Serves one caller, from his order to its command's end.
    pub(crate) fn serve(&self, mut socket: UnixStream) -> Result<()> {
        let who = tern_node::caller(&socket)?;
        socket.set_read_timeout(Some(SOON))?;
        let Piece { kind: kind::ORDER, stream, bytes } = pieces::hear(&mut socket)? else {
            bail!("no order")
        };
        let mut order: Order = pieces::read(&bytes)?;
        let (pid, who) = (who.0, Who { uid: who.1, gid: who.2, groups: who.3 });
        let Some(_counted) = self.callers.enter((who.uid, None), Duration::ZERO) else {
            let said = format!("{MOST} commands of this user are placed from this node already");
            let refused = Said::Refused(Refusal::new(RefusalKind::Unavailable, said));
            return Ok(pieces::say(&mut socket, kind::SAID, &refused)?);
        };
        if who.uid != 0 {
            honest::hold(&mut order.task, pid)?;
        }
        let entry = self.board.add(&order.task, who.uid, None);
        let mut caller = Caller { socket, pid, who, told: stream == TOLD, entry, entered: None, turn: None };
        match self.place(&order, &mut caller) {
            Ok(()) => Ok(()),
            Err(error) => {
                let refusal = error.downcast::<Refusal>();
                let refusal =
                    refusal.unwrap_or_else(|e| Refusal::new(RefusalKind::Internal, format!("{e:#}")));
                caller.say(&Said::Refused(refusal))
            }
        }
    }

    /// Finds a node that runs it, and sees it through.
    fn place<'a>(&'a self, order: &Order, caller: &mut Caller<'a>) -> Result<()> {
        let best = matches!(order.r#where, Where::Best);
        // It is one of those until it has ended.
        let short = best.then(|| self.classes.short(caller.who.uid, &order.class)).flatten();
        let wish = match &order.r#where {
            Where::Best => {
                Wish::Any { short: short.is_some(), need: self.classes.need(caller.who.uid, &order.class) }
            }
            Where::Among(nodes) => Wish::Among(nodes.clone()),
        };
        let (mut lost, mut why) = (Lost::default(), None);
        let mut again = None;
        // Who waits for nobody is not to wait for those who do either.
        let small = best && self.classes.small(caller.who.uid, &order.class).is_some();
        if !wish.stays(self.me) && !small {
            caller.enter(&self.gate, wish.only())?;
        }
        let since = Instant::now();
        loop {
            let choosing = lock(&self.choosing);
            let (mut now, later) = match self.candidates(&wish, (&lost, since)) {
                Err(error) => return Err(why.map_or(error, anyhow::Error::from)),
                Ok(candidates) => candidates,
            };
            if !wish.stays(self.me) && !self.is_turn(caller) {
                now.retain(|node| *node != self.me);
            }
            let is_home = now.first() == Some(&self.me);
            let mut counted = is_home.then(|| self.count_here(caller.who.uid));
            drop(choosing);
            let mut outcome = None;
            for node in now {
                if node == self.me {
                    let now = counted.take();
                    let Some(counted) = now
                        .map_or_else(|| self.room_here(&wish, (&lost, since), caller), |now| Ok(Some(now)))?
                    else {
                        continue;
                    };
                    return self.here(order, again.unwrap_or_else(|| wish.why(true)), caller, counted);
                }
                match self.on(node, order, again.unwrap_or_else(|| wish.why(false)), caller)? {
                    Outcome::Full => {}
                    // It is not asked again for now, and neither is it waited for.
                    Outcome::Not(refusal) => {
                        lost.insert(node);
                        why = Some(refusal);
                    }
                    other => {
                        outcome = Some((node, other));
                        break;
                    }
                }
            }
            if outcome.is_none() {
                // What needs next to nothing waits for nobody.
                let small = best.then(|| self.classes.small(caller.who.uid, &order.class)).flatten();
                if small.is_some() && later.contains(&self.me) {
                    return self.here(order, Why::Short, caller, self.count_here(caller.who.uid));
                }
                let later: Vec<_> = later.into_iter().filter(|node| !lost.contains(*node)).collect();
                outcome = match self.wait(&wish, &later, (&mut lost, since), caller)? {
                    Waited::Room(node, link) => {
                        let why = again.unwrap_or(Why::Room);
                        Some((node, self.over(node, *link, order, why, caller)?))
                    }
                    Waited::Change => None,
                    Waited::Nobody => {
                        let none = || {
                            Refusal::new(RefusalKind::Unavailable, "no node can run it").hint("tern status")
                        };
                        return Err(why.take().unwrap_or_else(none).into());
                    }
                };
            }
            match outcome {
                Some((_, Outcome::Over)) => return Ok(()),
                Some((node, Outcome::Lost)) if order.repeatable => {
                    lost.insert(node);
                    again = Some(Why::Again(node));
                    caller.enter(&self.gate, wish.only())?;
                }
                Some((node, Outcome::Lost | Outcome::Cut)) => return caller.say(&Said::Lost(node)),
                Some((node, Outcome::Not(refusal))) => {
                    lost.insert(node);
                    why = Some(refusal);
                }
                Some((_, Outcome::Full)) | None => {}
            }
        }
    }

    /// What is known of this node, and of those that it trusts.
    fn known(&self) -> Result<Vec<Known>> {
        let mut nodes = self.view.nodes(|node| self.running.on(node))?;
        nodes.retain(|node| node.node == self.me || self.config.trusts(node.node));
        Ok(nodes)
    }

    fn known_of(&self, node: NodeId) -> Option<Known> {
        self.known().ok()?.into_iter().find(|known| known.node == node)
    }

    /// The nodes to ask now, and those that may have room later.
    fn candidates(&self, wish: &Wish, (lost, since): (&Lost, Instant)) -> Result<(Vec<NodeId>, Vec<NodeId>)> {
        let mut known = self.known()?;
        known.retain(|known| !lost.contains(known.node));
        let (now, later) = (choice::order(&known, self.me, wish, since.elapsed()), choice::fit(&known, wish));
        if later.is_empty() {
            let said = "none of the nodes asked for is up and trusted";
            return Err(Refusal::new(RefusalKind::Unavailable, said)
                .hint("tern status, which lists them")
                .into());
        }
        Ok((now, later))
    }

    /// Whether it is this caller's turn to have room here.
    fn is_turn(&self, caller: &Caller<'_>) -> bool {
        self.line.is_turn(caller.who.uid, caller.turn.as_ref(), &|uid| self.running.share(uid, None))
    }

    /// Room here for who was elsewhere first, where there was none: meanwhile others may have taken it.
    fn room_here(
        &self,
        wish: &Wish,
        lost: (&Lost, Instant),
        caller: &Caller<'_>,
    ) -> Result<Option<Counted<'_>>> {
        let _choosing = lock(&self.choosing);
        let has_room = self.candidates(wish, lost)?.0.contains(&self.me);
        Ok((has_room && self.is_turn(caller)).then(|| self.count_here(caller.who.uid)))
    }

    fn count_here(&self, uid: u32) -> Counted<'_> {
        self.line.give(uid);
        self.running.count(self.me, uid)
    }

    /// The caller becomes the command; it counts until that ends.
    fn here(&self, order: &Order, why: Why, caller: &mut Caller<'_>, counted: Counted<'_>) -> Result<()> {
        let pid =
            rustix::process::Pid::from_raw(caller.pid).context("the caller is of another pid namespace")?;
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
        caller.chosen(self.me, why)?;
        caller.say(&Said::Here)?;
        let begun = Instant::now();
        while let Err(rustix::io::Errno::INTR) = poll(&mut [PollFd::new(&process, PollFlags::IN)], None) {}
        let wall = begun.elapsed();
        let need = self.known_of(self.me).map_or(wall, |known| known.alone(wall));
        self.classes.took(caller.who.uid, &order.class, wall, need);
        counted.used(need);
        self.line.wake(&|uid| self.running.share(uid, None));
        Ok(())
    }

    /// Runs it on that node, if there is room.
    fn on(&self, node: NodeId, order: &Order, why: Why, caller: &mut Caller<'_>) -> Result<Outcome> {
        caller.waits(Wait::Node(node))?;
        match self.links.to(node) {
            Ok(link) => self.over(node, link, order, why, caller),
            Err(error) => {
                let said = format!("node {node} cannot be asked: {error:#}");
                Ok(Outcome::Not(Refusal::new(RefusalKind::Unavailable, said)))
            }
        }
    }

    fn over(
        &self,
        node: NodeId,
        mut link: Link,
        order: &Order,
        why: Why,
        caller: &mut Caller<'_>,
    ) -> Result<Outcome> {
        let uid = caller.who.uid;
        let counted = self.running.count(node, uid);
        let run = Ask::Run(Box::new(order.task.clone()), caller.who.clone());
        match links::ask(&mut link, &run, Instant::now() + SOON) {
            Ok(Said::Full) => {
                self.links.keep(node, link);
                Ok(Outcome::Full)
            }
            Ok(Said::Refused(refusal)) => Ok(Outcome::Not(refusal)),
            Ok(said @ (Said::Started(_) | Said::NotStarted(..))) => {
                caller.chosen(node, why)?;
                // Who has input for it has to hear at once that it runs; and what was taken of that cannot be had again.
                let held = order.repeatable && !order.task.input;
                let (outcome, ended) = relay::relay(&mut link, &mut caller.socket, said, held)?;
                if let Some(ended) = ended {
                    let used = Duration::from_micros(ended.cpu);
                    let used = self.known_of(node).map_or(used, |known| Known::standard(known.speed, used));
                    counted.used(used);
                    self.classes.took(uid, &order.class, Duration::from_micros(ended.wall), used);
                    self.links.keep(node, link);
                }
                Ok(outcome)
            }
            Ok(said) => bail!("node {node} says {said:?} where a command was to be run"),
            // It may have begun.
            Err(error) => {
                tracing::info!(%node, "lost with a command asked for: {error:#}");
                Ok(Outcome::Lost)
            }
        }
    }
}
