//! Creation of a lab: reserves its name, and starts its switch, nodes and link emulator.

use crate::error::{LabError, Result, WithContext};
use crate::lab::boot::{self, read_line_after};
use crate::lab::options::{self, LabOptions};
use crate::lab::state::{self, LabState, NodeState};
use crate::lab::watchdog::Watchdog;
use crate::lab::{Lab, cluster, require_root};
use crate::network::cuts;
use crate::network::iproute2::{self, Program};
use crate::network::link_spec::Topology;
use crate::node::root_fs;
use crate::process::cgroup::Hierarchies;
use crate::process::{Process, namespaces};
use crate::roles;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

impl Lab {
    /// Creates a lab.
    ///
    /// # Errors
    /// Any of [`LabError`]; the failed lab is removed.
    pub fn up(options: &LabOptions) -> Result<Self> {
        require_root()?;
        options.check()?;
        iproute2::check_programs()?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let speeds = options::scale_speeds(&options.speeds, options.nodes, cpus)?;
        if speeds.scaled {
            let list: Vec<_> = speeds.per_node.iter().map(|s| format!("{s:.3}")).collect();
            let _ = writeln!(
                std::io::stderr(),
                "tern lab: the speeds add up to more than 3/4 of this machine's {cpus} CPUs, so they are {}",
                list.join(",")
            );
        }
        let helper = find_helper(options)?;
        let hierarchies = Hierarchies::find()?;
        let watchdog = Watchdog::reserve(&helper, &options.name)?;
        let state = LabState {
            name: options.name.clone(),
            link: options.link,
            seed: options.seed,
            daemon: options.daemon,
            shared: options.shared.clone(),
            helper: helper.clone(),
            netem: false,
            switch: None,
            emulator: None,
            nodes: speeds.per_node.iter().map(|&speed| NodeState { speed, init: None }).collect(),
            cuts: BTreeSet::new(),
        };
        // From here on, dropping `lab` takes everything down.
        let mut lab = Self {
            name: options.name.clone(),
            layout: state.layout(),
            nodes: options.nodes,
            owned: true,
            watchdog: Some(watchdog),
            children: Vec::new(),
            helper,
        };
        lab.build(state, &hierarchies, options)?;
        if options.daemon {
            cluster::start(&lab)?;
        }
        Ok(lab)
    }

    fn build(&mut self, mut state: LabState, hierarchies: &Hierarchies, options: &LabOptions) -> Result<()> {
        let _lock = state::lock(&self.name, Duration::ZERO)?;
        let layers = root_fs::layers_directory(&self.name);
        fs::create_dir(&layers).with_context(|| format!("make {}", layers.display()))?;
        hierarchies.switch_group(&self.name).create(None)?;
        for (number, node) in (1..).zip(&state.nodes) {
            let group = hierarchies.node_group(&self.name, number);
            group.create(options.cpu_quotas.then_some(node.speed))?;
            if let Some(bytes) = options.memory {
                group.limit_memory(bytes)?;
            }
        }
        let switch = self.start_process(roles::command(&self.helper, "switch", &self.name))?;
        state.switch = Some(switch);
        let link = state.link;
        // netem cannot do a hub's shared rate, nor losses that follow a seed.
        state.netem = link.needs_emulator()
            && link.topology != Topology::Hub
            && state.seed.is_none()
            && kernel_has_netem(switch);
        let emulated = state.uses_emulator();
        iproute2::run_batch(switch, Program::Ip, &state.layout().switch_lines(emulated))?;
        state.save()?;
        let all: Vec<u16> = (1..=state.node_count()).collect();
        boot::start_nodes(&mut state, &all)?;
        for &node in &all {
            cuts::connect_node(&state, node)?;
        }
        if emulated {
            let mut command = roles::command(&self.helper, "emulator", &self.name);
            namespaces::set_network(&mut command, iproute2::open_network_namespace(switch)?);
            state.emulator = Some(self.start_process(command)?);
            state.save()?;
            for &node in &all {
                boot::wait_for_emulator(&state, node)?;
            }
        }
        Ok(())
    }

    /// Starts a helper process that runs as long as the lab.
    fn start_process(&mut self, mut command: Command) -> Result<Process> {
        let (child, mut output) = boot::start_process(&mut command)?;
        let pid = child.id() as i32;
        self.children.push(child);
        read_line_after(&mut output, "ready")?;
        Process::find(pid).with_context(|| "find a process of the lab".to_owned())
    }
}

/// Finds the binary to start as init and the other helpers.
fn find_helper(options: &LabOptions) -> Result<PathBuf> {
    if let Some(helper) = options.helper.clone().or_else(|| env::var_os("TERN_LAB_HELPER").map(PathBuf::from))
    {
        return helper.canonicalize().with_context(|| format!("find {}", helper.display()));
    }
    let here = env::current_exe().with_context(|| "find this program's own file".to_owned())?;
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

fn kernel_has_netem(switch: Process) -> bool {
    let line = "qdisc add dev lo root netem delay 1ms".to_owned();
    let found = iproute2::run_batch(switch, Program::Tc, &[line]).is_ok();
    if found {
        // A failed removal is harmless.
        let _ = iproute2::run_batch(switch, Program::Tc, &["qdisc del dev lo root".to_owned()]);
    }
    found
}
