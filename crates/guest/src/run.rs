//! Runs a guest shim.

use crate::shim::Shim;
use std::time::Duration;
use tern_control::control_socket::ControlSocket;
use tern_control::shim::ShimStart;
use tern_wire::Ephemeral;

/// Limit for a call that the shim injects into a guest. The slowest such call is the
/// unmapping of a large region.
const INJECTED_CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the shim until its family has left this node.
///
/// # Errors
/// If the shim cannot be set up.
pub fn run(start: ShimStart, key: Ephemeral, control_socket: ControlSocket) -> anyhow::Result<()> {
    tern_tracee::call_timeout::kill_after(INJECTED_CALL_TIMEOUT, Duration::from_secs(1))?;
    let mut shim = Shim::new(start, key, control_socket)?;
    while !shim.is_finished() {
        shim.run_once()?;
    }
    tracing::info!("the family has left");
    shim.end();
    Ok(())
}
