//! Starts nodes, in a new lab or after they were killed, and the lab's other processes.

use crate::error::{LabError, Result, WithContext};
use crate::lab::state::LabState;
use crate::network::emulator;
use crate::network::iproute2::{self, Program};
use crate::process::{Process, namespaces, signals};
use crate::roles;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Time for the link emulator to open its sockets on a node's ports.
const EMULATOR_START_TIMEOUT: Duration = Duration::from_secs(5);

/// Boots these nodes in parallel. Their ports are left down.
pub(super) fn start_nodes(state: &mut LabState, numbers: &[u16]) -> Result<()> {
    let (layout, emulated, switch) = (state.layout(), state.uses_emulator(), state.switch_process()?);
    let mut starting = Vec::new();
    for number in numbers {
        if let Some(signal) = signals::recorded() {
            return Err(LabError::Interrupted(signal.signal));
        }
        let mut command = roles::command(&state.helper, "node", &state.name);
        starting.push(start_process(command.arg(number.to_string()))?);
    }
    for (&number, (child, output)) in numbers.iter().zip(&mut starting) {
        let pid = read_line_after(output, "pid ")?.parse::<i32>().unwrap_or(-1);
        state.node_mut(number)?.init =
            Some(Process::find(pid).with_context(|| format!("find node {number}"))?);
        child.wait().with_context(|| "wait for a process of the lab".to_owned())?;
    }
    let (mut plugs, mut shapes) = (Vec::new(), Vec::new());
    for &number in numbers {
        plugs.extend(layout.veth_lines(number, state.running_init(number)?.pid, emulated));
        shapes.extend(layout.shape_lines(number, state.netem));
    }
    iproute2::run_batch(switch, Program::Ip, &plugs)?;
    iproute2::run_batch(switch, Program::Tc, &shapes)?;
    for (&number, (_, output)) in numbers.iter().zip(&mut starting) {
        let init = state.running_init(number)?;
        iproute2::run_batch(init, Program::Ip, &layout.node_lines(number, emulated))?;
        iproute2::run_batch(init, Program::Tc, &layout.node_shape_lines(number))?;
        read_line_after(output, "ready")?;
    }
    state.save()
}

/// Waits until the link emulator, if the lab has one, serves the ports of this node.
pub(super) fn wait_for_emulator(state: &LabState, node: u16) -> Result<()> {
    let (Some(emulator), switch) = (state.emulator, state.switch_process()?) else { return Ok(()) };
    let layout = state.layout();
    let ports: Vec<_> = layout.ports_of(node).map(|p| p.port.as_str()).collect();
    if emulator::wait_for_ports(switch, emulator, &ports, EMULATOR_START_TIMEOUT)? {
        return Ok(());
    }
    Err(LabError::Failed {
        what: "the link emulator".to_owned(),
        message: format!("it does not serve node {node}"),
    })
}

/// Starts a helper process, which reports its result on standard output.
pub(super) fn start_process(command: &mut Command) -> Result<(Child, BufReader<ChildStdout>)> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).current_dir("/");
    namespaces::set_new_session(command);
    let mut child =
        command.spawn().with_context(|| format!("start {}", command.get_program().to_string_lossy()))?;
    match child.stdout.take() {
        Some(output) => Ok((child, BufReader::new(output))),
        None => Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe))
            .with_context(|| "read from a process of the lab".to_owned()),
    }
}

/// Reads the helper's next line and returns it without this leading word.
pub(super) fn read_line_after(output: &mut BufReader<ChildStdout>, word: &str) -> Result<String> {
    let mut line = String::new();
    output.read_line(&mut line).with_context(|| "read from a process of the lab".to_owned())?;
    let line = line.trim_end();
    if let Some(rest) = line.strip_prefix(word) {
        return Ok(rest.trim().to_owned());
    }
    let message = line.strip_prefix("failed ").unwrap_or("it exited without a message").to_owned();
    Err(LabError::Failed { what: "a process of the lab".to_owned(), message })
}
