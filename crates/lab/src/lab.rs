//! A whole lab: up, faults, down.

use crate::cgroup::Hierarchies;
use crate::error::{LabError, Result, Tried};
use crate::faults::{self, Cable};
use crate::init;
use crate::keeper::Keeper;
use crate::link::Shape;
use crate::netns::{self, Program};
use crate::node::Node;
use crate::options::{self, Name, Options};
use crate::process::Process;
use crate::state::{self, NodeState, State};
use crate::topology::Plan;
use crate::{cluster, root, signals, spaces, wire};
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// How long processes may take to die, and groups to become empty.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a group may stay busy after its last process was killed, before it is asked for others.
const RELUCTANCE: Duration = Duration::from_millis(100);
/// How long the wire may take to find a port.
const WIRE_PATIENCE: Duration = Duration::from_secs(5);

/// A lab that is up. One that was made by [`Lab::up`] goes down when it is dropped, or when this process dies
/// of whatever; see [`Lab::keep`].
#[derive(Debug)]
pub struct Lab {
    name: Name,
    helper: PathBuf,
    plan: Plan,
    nodes: u16,
    owned: bool,
    keeper: Option<Keeper>,
    children: Vec<Child>,
}

impl Lab {
    /// Makes a lab.
    ///
    /// # Errors
    /// Any; nothing is left then.
    pub fn up(options: &Options) -> Result<Self> {
        must_be_root()?;
        options.check()?;
        netns::check_programs()?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let speeds = options::speeds(&options.speeds, options.nodes, cpus)?;
        if speeds.scaled {
            let list: Vec<_> = speeds.each.iter().map(|s| format!("{s:.3}")).collect();
            let _ = writeln!(
                std::io::stderr(),
                "tern lab: the speeds add up to more than 3/4 of this machine's {cpus} CPUs, so they are {}",
                list.join(",")
            );
        }
        let helper = find_helper(options)?;
        let hierarchies = Hierarchies::find()?;
        claim(&options.name, &hierarchies)?;
        let state = State {
            name: options.name.clone(),
            link: options.link,
            seed: options.seed,
            daemon: options.daemon,
            shared: options.shared.clone(),
            helper: helper.clone(),
            netem: false,
            switch: None,
            wire: None,
            nodes: speeds.each.iter().map(|&speed| NodeState { speed, init: None }).collect(),
            cuts: BTreeSet::new(),
        };
        // From here on its end takes everything down again.
        let mut lab = Self {
            name: options.name.clone(),
            plan: state.plan(),
            nodes: options.nodes,
            owned: true,
            keeper: None,
            children: Vec::new(),
            helper,
        };
        lab.keeper = Some(Keeper::start(&lab.helper, &lab.name)?);
        lab.build(state, &hierarchies, options.memory)?;
        if options.daemon {
            cluster::start(&lab)?;
        }
        Ok(lab)
    }

    /// A lab that somebody made; it stays up whatever happens to this.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn open(name: &Name) -> Result<Self> {
        must_be_root()?;
        let state = State::load(name)?;
        Ok(Self {
            name: name.clone(),
            plan: state.plan(),
            nodes: state.count(),
            helper: state.helper,
            owned: false,
            keeper: None,
            children: Vec::new(),
        })
    }

    fn build(&mut self, mut state: State, hierarchies: &Hierarchies, memory: Option<u64>) -> Result<()> {
        let _lock = state::lock(&self.name, Duration::ZERO)?;
        let layers = root::layers(&self.name);
        fs::create_dir(&layers).tried(|| format!("make {}", layers.display()))?;
        hierarchies.part(&self.name, "switch").make(None)?;
        for (number, node) in (1..).zip(&state.nodes) {
            let group = hierarchies.part(&self.name, &format!("node{number}"));
            group.make(Some(node.speed))?;
            if let Some(bytes) = memory {
                group.limit_memory(bytes)?;
            }
        }
        let switch = self.start(init::command(&self.helper, "switch", &self.name))?;
        state.switch = Some(switch);
        let link = state.link;
        // A hub's shared rate, and losses that follow a seed, are beyond netem.
        state.netem =
            link.needs_wire() && link.shape != Shape::Hub && state.seed.is_none() && has_netem(switch);
        let wired = wired(&state);
        netns::batch(switch, Program::Ip, &state.plan().switch_lines(wired))?;
        state.save()?;
        let all: Vec<u16> = (1..=state.count()).collect();
        start_nodes(&mut state, &all)?;
        for &node in &all {
            faults::connect(&state, node)?;
        }
        if wired {
            let mut command = init::command(&self.helper, "wire", &self.name);
            wire::place(&mut command, switch)?;
            state.wire = Some(self.start(command)?);
            state.save()?;
            for &node in &all {
                wait_for_wire(&state, node)?;
            }
        }
        Ok(())
    }

    /// Starts one of the lab's own processes that stay as long as the lab.
    fn start(&mut self, mut command: Command) -> Result<Process> {
        let (child, mut said) = start(&mut command)?;
        let pid = child.id() as i32;
        self.children.push(child);
        hear(&mut said, "ready")?;
        Process::now(pid).tried(|| "find a process of the lab".to_owned())
    }

    /// Its name.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// One of its nodes, counted from 1. Whether there is one of that number shows when it is used.
    pub fn node(&self, number: u16) -> Node {
        Node {
            lab: self.name.clone(),
            number,
            helper: self.helper.clone(),
            address: self.plan.address(number),
        }
    }

    /// All of its nodes, those that are down as well.
    pub fn nodes(&self) -> impl Iterator<Item = Node> {
        (1..=self.nodes).map(|n| self.node(n))
    }

    /// The speed of a node in CPUs, as it was scaled.
    ///
    /// # Errors
    /// No such node, or the lab is down.
    pub fn speed(&self, node: u16) -> Result<f64> {
        Ok(State::load(&self.name)?.node(node)?.speed)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let lock = state::lock(&self.name, PATIENCE)?;
        if lock.is_none() {
            let message = "another process has been changing it for 10 s".to_owned();
            return Err(LabError::Failed { what: format!("locking lab {}", self.name), message });
        }
        let mut state = State::load(&self.name)?;
        let result = change(&mut state);
        // What was done before a failure is remembered as well.
        state.save()?;
        result
    }

    /// Cuts a cable, silently; nothing happens if it is cut already.
    ///
    /// # Errors
    /// No such node, or the lab is down; or a half of a pair may be cut.
    pub fn cut(&self, cable: Cable) -> Result<()> {
        self.change(|state| {
            cable.check(state)?;
            let mut cuts = state.cuts.clone();
            cuts.insert(cable);
            faults::change(state, cuts)
        })
    }

    /// Heals a cable; of a node: also its cables to single others.
    ///
    /// # Errors
    /// As with [`Lab::cut`].
    pub fn heal(&self, cable: Cable) -> Result<()> {
        self.change(|state| {
            cable.check(state)?;
            let mut cuts = state.cuts.clone();
            cuts.retain(|&cut| match cable {
                Cable::Node(node) => !cut.touches(node),
                Cable::Pair(..) | Cable::OneWay(..) => cut != cable,
            });
            faults::change(state, cuts)
        })
    }

    /// Heals all that is cut.
    ///
    /// # Errors
    /// The lab is down.
    pub fn heal_all(&self) -> Result<()> {
        self.change(|state| faults::change(state, BTreeSet::new()))
    }

    /// Kills a node as a power cut does: first its links, so that the others hear no last word of it, then
    /// every process. Its writable layer stays. Nothing happens if it is down already.
    ///
    /// # Errors
    /// No such node; or some of its processes do not die.
    pub fn kill(&self, node: u16) -> Result<()> {
        self.change(|state| kill(state, node))
    }

    /// Boots a node again with its writable layer as it is, killing it first if it is up. What is cut stays
    /// cut. If the lab is a Tern cluster, its ternd is started.
    ///
    /// # Errors
    /// No such node, or it does not start; it is down then.
    pub fn restart(&self, node: u16) -> Result<()> {
        let daemon = self.change(|state| {
            kill(state, node)?;
            let booted = start_nodes(state, &[node])
                .and_then(|()| faults::connect(state, node))
                .and_then(|()| wait_for_wire(state, node));
            if booted.is_err() {
                kill(state, node)?;
            }
            booted.map(|()| state.daemon)
        })?;
        if daemon { cluster::start_daemon(&self.node(node)) } else { Ok(()) }
    }

    /// Kills ternd (SIGKILL) on a node, nothing else, and starts it anew.
    ///
    /// # Errors
    /// No ternd runs there, or it does not start.
    pub fn restart_daemon(&self, node: u16) -> Result<()> {
        State::load(&self.name)?.init(node)?;
        cluster::restart_daemon(&self.node(node))
    }

    /// Leaves the lab up when this process ends; `tern lab down` or [`down`] ends it.
    pub fn keep(mut self) {
        self.owned = false;
        if let Some(mut keeper) = self.keeper.take() {
            keeper.dismiss();
        }
    }

    /// Takes it down, and says whether that worked.
    ///
    /// # Errors
    /// Some of its processes do not die.
    pub fn down(mut self) -> Result<()> {
        self.owned = false;
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let result = down(&self.name);
        for child in &mut self.children {
            // Otherwise it would be a zombie of ours; after a failure it may still run.
            let _ = if result.is_ok() { child.wait().map(Some) } else { child.try_wait() };
        }
        if let Some(mut keeper) = self.keeper.take() {
            keeper.dismiss();
        }
        result
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.owned
            && let Err(error) = self.end()
        {
            let _ = writeln!(std::io::stderr(), "tern lab: {error}");
        }
    }
}

/// Takes a lab down: all its processes, control groups, networks, layers and files. One that is not up, or
/// only in part, is no error.
///
/// # Errors
/// Not root; or some processes do not die within 10 s.
pub fn down(name: &Name) -> Result<()> {
    must_be_root()?;
    // Who holds it longer than this is stuck, and shall not keep the lab from ending.
    let lock = state::lock(name, PATIENCE);
    if let Ok(hierarchies) = Hierarchies::find() {
        let group = hierarchies.lab(name);
        let end = Instant::now() + PATIENCE;
        loop {
            group.kill(PATIENCE).map_err(|pids| LabError::Undying { lab: name.clone(), pids })?;
            // One that was born just before may become a member between the two: then it is killed as well. As soon
            // as a group is gone, none joins any more, and who cannot join ends.
            match group.remove(RELUCTANCE) {
                Err(_) if Instant::now() < end => {}
                removed => break removed.tried(|| format!("remove the control groups of lab {name}"))?,
            }
        }
    }
    let removed = state::remove(name);
    drop(lock);
    removed
}

fn must_be_root() -> Result<()> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(LabError::NotRoot) }
}

/// Takes the name; what a crash has left under it is removed first.
fn claim(name: &Name, hierarchies: &Hierarchies) -> Result<()> {
    let taken = || LabError::AlreadyUp(name.clone());
    // Asked before the directory: inside a node of this lab, that is not to be seen.
    if hierarchies.lab(name).occupied() {
        return Err(taken());
    }
    if state::claim(name)? {
        return Ok(());
    }
    // Another process may be making it just now.
    if state::lock(name, Duration::ZERO)?.is_none() {
        return Err(taken());
    }
    down(name)?;
    if state::claim(name)? { Ok(()) } else { Err(taken()) }
}

/// The binary to start as init and its kin.
fn find_helper(options: &Options) -> Result<PathBuf> {
    if let Some(helper) = options.helper.clone().or_else(|| env::var_os("TERN_LAB_HELPER").map(PathBuf::from))
    {
        return helper.canonicalize().tried(|| format!("find {}", helper.display()));
    }
    let here = env::current_exe().tried(|| "find this program's own file".to_owned())?;
    let names = ["tern", "tern-lab"];
    if here.file_name().is_some_and(|own| names.iter().any(|n| own == *n)) {
        return Ok(here);
    }
    // Tests are in target/debug/deps, below the programs.
    let places = here.ancestors().skip(1).take(2);
    let mut candidates = places.flat_map(|place| names.map(|name| place.join(name)));
    let missing = || LabError::NoHelper { beside: here.display().to_string() };
    candidates.find(|c| c.is_file()).ok_or_else(missing)
}

fn has_netem(switch: Process) -> bool {
    let line = "qdisc add dev lo root netem delay 1ms".to_owned();
    let found = netns::batch(switch, Program::Tc, &[line]).is_ok();
    if found {
        // It does no harm there either.
        let _ = netns::batch(switch, Program::Tc, &["qdisc del dev lo root".to_owned()]);
    }
    found
}

fn wired(state: &State) -> bool {
    state.link.needs_wire() && !state.netem
}

/// Starts one of the lab's own processes, which will say on its standard output how it goes.
fn start(command: &mut Command) -> Result<(Child, BufReader<ChildStdout>)> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).current_dir("/");
    spaces::in_own_session(command);
    let mut child = command.spawn().tried(|| format!("start {}", command.get_program().to_string_lossy()))?;
    match child.stdout.take() {
        Some(said) => Ok((child, BufReader::new(said))),
        None => {
            Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe)).tried(|| "hear a process".to_owned())
        }
    }
}

/// The next line that it says, without this word at its beginning.
fn hear(said: &mut BufReader<ChildStdout>, word: &str) -> Result<String> {
    let mut line = String::new();
    said.read_line(&mut line).tried(|| "hear a process of the lab".to_owned())?;
    let line = line.trim_end();
    if let Some(rest) = line.strip_prefix(word) {
        return Ok(rest.trim().to_owned());
    }
    let message = line.strip_prefix("failed ").unwrap_or("it ended without a word").to_owned();
    Err(LabError::Failed { what: "a process of the lab".to_owned(), message })
}

/// Boots these nodes, all at the same time. Their ports are left down.
fn start_nodes(state: &mut State, numbers: &[u16]) -> Result<()> {
    let (plan, wired, switch) = (state.plan(), wired(state), state.switch()?);
    let mut births = Vec::new();
    for number in numbers {
        if let Some(signal) = signals::noted() {
            return Err(LabError::Interrupted(signal.signal));
        }
        let mut command = init::command(&state.helper, "node", &state.name);
        births.push(start(command.arg(number.to_string()))?);
    }
    for (&number, (child, said)) in numbers.iter().zip(&mut births) {
        let pid = hear(said, "pid ")?.parse::<i32>().unwrap_or(-1);
        state.node_mut(number)?.init = Some(Process::now(pid).tried(|| format!("find node {number}"))?);
        child.wait().tried(|| "wait for a process of the lab".to_owned())?;
    }
    let (mut plugs, mut shapes) = (Vec::new(), Vec::new());
    for &number in numbers {
        plugs.extend(plan.plug_lines(number, state.init(number)?.pid, wired));
        shapes.extend(plan.shape_lines(number, state.netem));
    }
    netns::batch(switch, Program::Ip, &plugs)?;
    netns::batch(switch, Program::Tc, &shapes)?;
    for (&number, (_, said)) in numbers.iter().zip(&mut births) {
        let init = state.init(number)?;
        netns::batch(init, Program::Ip, &plan.node_lines(number, wired))?;
        netns::batch(init, Program::Tc, &plan.node_shape_lines(number))?;
        hear(said, "ready")?;
    }
    state.save()
}

fn wait_for_wire(state: &State, node: u16) -> Result<()> {
    let (Some(wire), switch) = (state.wire, state.switch()?) else { return Ok(()) };
    let plan = state.plan();
    let ports: Vec<_> = plan.ports_of(node).map(|p| p.port.as_str()).collect();
    if wire::wait_for_ports(switch, wire, &ports, WIRE_PATIENCE)? {
        return Ok(());
    }
    Err(LabError::Failed { what: "the wire".to_owned(), message: format!("it does not carry node {node}") })
}

fn kill(state: &mut State, node: u16) -> Result<()> {
    let Some(init) = state.node(node)?.init else { return Ok(()) };
    // A node whose init was killed by somebody else has no ports any more.
    if init.alive() {
        faults::silence(state, node)?;
        init.kill();
    }
    let group = Hierarchies::find()?.part(&state.name, &format!("node{node}"));
    group.kill(PATIENCE).map_err(|pids| LabError::Undying { lab: state.name.clone(), pids })?;
    state.node_mut(node)?.init = None;
    let plan = state.plan();
    for port in plan.ports_of(node) {
        // The kernel removes them with the node's namespace, a little later than it might be restarted.
        let _ = netns::batch(state.switch()?, Program::Ip, &[format!("link del {}", port.port)]);
    }
    Ok(())
}
