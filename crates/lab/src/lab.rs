//! The life cycle of a lab: creation, faults, removal.

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

/// Time for processes to die, and for groups to become empty.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a group to become empty after its processes were killed, before it is scanned for new
/// ones.
const RELUCTANCE: Duration = Duration::from_millis(100);
/// Time for the wire to find a port.
const WIRE_START_TIMEOUT: Duration = Duration::from_secs(5);

/// A running lab. One created by [`Lab::up`] is taken down when it is dropped, or when this process
/// dies for any reason; see [`Lab::keep`].
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
    /// Creates a lab.
    ///
    /// # Errors
    /// Any of [`LabError`]; the failed lab is removed.
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
        // From here on, dropping `lab` takes everything down.
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

    /// Opens a lab that already exists. Dropping the value does not take the lab down.
    ///
    /// # Errors
    /// No lab has that name.
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
        // netem cannot do a hub's shared rate, nor losses that follow a seed.
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

    /// Starts a helper process that runs as long as the lab.
    fn start(&mut self, mut command: Command) -> Result<Process> {
        let (child, mut output) = start(&mut command)?;
        let pid = child.id() as i32;
        self.children.push(child);
        read_line_after(&mut output, "ready")?;
        Process::now(pid).tried(|| "find a process of the lab".to_owned())
    }

    /// The lab's name.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// The node with this number, counted from 1. The number is checked only when the node is used.
    pub fn node(&self, number: u16) -> Node {
        Node {
            lab: self.name.clone(),
            number,
            helper: self.helper.clone(),
            address: self.plan.address(number),
        }
    }

    /// All nodes, including those that are down.
    pub fn nodes(&self) -> impl Iterator<Item = Node> {
        (1..=self.nodes).map(|n| self.node(n))
    }

    /// The speed of a node in CPUs, after scaling.
    ///
    /// # Errors
    /// No such node, or the lab is down.
    pub fn speed(&self, node: u16) -> Result<f64> {
        Ok(State::load(&self.name)?.node(node)?.speed)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let lock = state::lock(&self.name, EXIT_TIMEOUT)?;
        if lock.is_none() {
            let message = "another process has held its lock for 10 s".to_owned();
            return Err(LabError::Failed { what: format!("locking lab {}", self.name), message });
        }
        let mut state = State::load(&self.name)?;
        let result = change(&mut state);
        // Saved even after a failure: some changes may have been made.
        state.save()?;
        result
    }

    /// Cuts a cable without notifying either end. Does nothing if it is cut already.
    ///
    /// # Errors
    /// No such node, or the lab is down. A pair may then be cut in one direction only.
    pub fn cut(&self, cable: Cable) -> Result<()> {
        self.change(|state| {
            cable.check(state)?;
            let mut cuts = state.cuts.clone();
            cuts.insert(cable);
            faults::change(state, cuts)
        })
    }

    /// Restores a cable. For a node, this includes its cables to single other nodes.
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

    /// Restores everything that was cut.
    ///
    /// # Errors
    /// The lab is down.
    pub fn heal_all(&self) -> Result<()> {
        self.change(|state| faults::change(state, BTreeSet::new()))
    }

    /// Kills a node as a power failure does: first its links, so that no last packet reaches the
    /// others, then every process. Its writable layer stays. Does nothing if the node is down
    /// already.
    ///
    /// # Errors
    /// No such node, or some of its processes do not die.
    pub fn kill(&self, node: u16) -> Result<()> {
        self.change(|state| kill(state, node))
    }

    /// Boots a node with its existing writable layer, killing it first if it is up. Cut cables stay
    /// cut. If the lab is a Tern cluster, the node's ternd is started.
    ///
    /// # Errors
    /// No such node, or it does not start; the node is then down.
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

    /// Kills ternd (SIGKILL) on a node, nothing else, and starts it again.
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

    /// Takes the lab down and reports failures, unlike dropping it.
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
            // Reaped, as it would otherwise remain a zombie. After a failure it may still be
            // running.
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

/// Takes a lab down: all its processes, control groups, networks, layers and files. A lab that is
/// not up, or only partly up, is no error.
///
/// # Errors
/// The caller is not root, or some processes do not die within 10 s.
pub fn down(name: &Name) -> Result<()> {
    must_be_root()?;
    // A process that holds the lock for longer is stuck, and must not prevent the removal.
    let lock = state::lock(name, EXIT_TIMEOUT);
    if let Ok(hierarchies) = Hierarchies::find() {
        let group = hierarchies.lab(name);
        let end = Instant::now() + EXIT_TIMEOUT;
        loop {
            group.kill(EXIT_TIMEOUT).map_err(|pids| LabError::Undying { lab: name.clone(), pids })?;
            // A process forked just before the kill may join the group before its removal; the next
            // round kills it. Once a group is removed, no process can join it, and a helper that
            // cannot join exits.
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

/// Reserves the name. Remains of a crashed lab of that name are removed first.
fn claim(name: &Name, hierarchies: &Hierarchies) -> Result<()> {
    let taken = || LabError::AlreadyUp(name.clone());
    // Checked before the directory: inside a node of this lab the directory is not visible.
    if hierarchies.lab(name).occupied() {
        return Err(taken());
    }
    if state::claim(name)? {
        return Ok(());
    }
    // Another process may be creating the lab right now.
    if state::lock(name, Duration::ZERO)?.is_none() {
        return Err(taken());
    }
    down(name)?;
    if state::claim(name)? { Ok(()) } else { Err(taken()) }
}

/// Finds the binary to start as init and the other helpers.
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
    // Test binaries are in target/debug/deps, one level below the programs.
    let places = here.ancestors().skip(1).take(2);
    let mut candidates = places.flat_map(|place| names.map(|name| place.join(name)));
    let missing = || LabError::NoHelper { beside: here.display().to_string() };
    candidates.find(|c| c.is_file()).ok_or_else(missing)
}

fn has_netem(switch: Process) -> bool {
    let line = "qdisc add dev lo root netem delay 1ms".to_owned();
    let found = netns::batch(switch, Program::Tc, &[line]).is_ok();
    if found {
        // A failed removal is harmless.
        let _ = netns::batch(switch, Program::Tc, &["qdisc del dev lo root".to_owned()]);
    }
    found
}

fn wired(state: &State) -> bool {
    state.link.needs_wire() && !state.netem
}

/// Starts a helper process, which reports its result on standard output.
fn start(command: &mut Command) -> Result<(Child, BufReader<ChildStdout>)> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).current_dir("/");
    spaces::in_own_session(command);
    let mut child = command.spawn().tried(|| format!("start {}", command.get_program().to_string_lossy()))?;
    match child.stdout.take() {
        Some(output) => Ok((child, BufReader::new(output))),
        None => Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe))
            .tried(|| "read from a process of the lab".to_owned()),
    }
}

/// Reads the helper's next line and returns it without this leading word.
fn read_line_after(output: &mut BufReader<ChildStdout>, word: &str) -> Result<String> {
    let mut line = String::new();
    output.read_line(&mut line).tried(|| "read from a process of the lab".to_owned())?;
    let line = line.trim_end();
    if let Some(rest) = line.strip_prefix(word) {
        return Ok(rest.trim().to_owned());
    }
    let message = line.strip_prefix("failed ").unwrap_or("it exited without a message").to_owned();
    Err(LabError::Failed { what: "a process of the lab".to_owned(), message })
}

/// Boots these nodes in parallel. Their ports are left down.
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
    for (&number, (child, output)) in numbers.iter().zip(&mut births) {
        let pid = read_line_after(output, "pid ")?.parse::<i32>().unwrap_or(-1);
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
    for (&number, (_, output)) in numbers.iter().zip(&mut births) {
        let init = state.init(number)?;
        netns::batch(init, Program::Ip, &plan.node_lines(number, wired))?;
        netns::batch(init, Program::Tc, &plan.node_shape_lines(number))?;
        read_line_after(output, "ready")?;
    }
    state.save()
}

fn wait_for_wire(state: &State, node: u16) -> Result<()> {
    let (Some(wire), switch) = (state.wire, state.switch()?) else { return Ok(()) };
    let plan = state.plan();
    let ports: Vec<_> = plan.ports_of(node).map(|p| p.port.as_str()).collect();
    if wire::wait_for_ports(switch, wire, &ports, WIRE_START_TIMEOUT)? {
        return Ok(());
    }
    Err(LabError::Failed { what: "the wire".to_owned(), message: format!("it does not serve node {node}") })
}

fn kill(state: &mut State, node: u16) -> Result<()> {
    let Some(init) = state.node(node)?.init else { return Ok(()) };
    // If another process killed the node's init, the node's ports are gone already.
    if init.alive() {
        faults::silence(state, node)?;
        init.kill();
    }
    let group = Hierarchies::find()?.part(&state.name, &format!("node{node}"));
    group.kill(EXIT_TIMEOUT).map_err(|pids| LabError::Undying { lab: state.name.clone(), pids })?;
    state.node_mut(node)?.init = None;
    let plan = state.plan();
    for port in plan.ports_of(node) {
        // The kernel removes them with the node's namespace, possibly only after a restart needs
        // their names.
        let _ = netns::batch(state.switch()?, Program::Ip, &[format!("link del {}", port.port)]);
    }
    Ok(())
}
