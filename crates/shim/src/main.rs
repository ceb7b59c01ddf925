//! tern-shim: the program that holds one half of a family. ternd starts it, and it outlives ternd.
//! It is not started by hand.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::time::Duration;
use tern_control::ShimRole;
use tern_control::control_socket::ControlSocket;
use tern_control::shim::ShimStart;
use tern_wire::Ephemeral;

/// Nice value: a shim runs before CPU-bound processes, but not before the system's own services.
const NICE: i32 = -10;

/// Time slice, longer than a call takes. With the default slice a shim on a busy home waits
/// milliseconds for CPU-bound processes, and its guests run at half speed.
const TIME_SLICE: Duration = Duration::from_micros(100);

/// Maximum length of the start message, in bytes.
const MAX_START_MESSAGE: u64 = 1 << 20;

fn main() -> std::process::ExitCode {
    tern_tracee::heap::keep_freed();
    let initialized = initialize();
    let (start, key, control_socket) = match initialized {
        Ok(all) => all,
        Err(error) => {
            reply(&format!("failed {error:#}"));
            return std::process::ExitCode::FAILURE;
        }
    };
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let fingerprint: String = key.fingerprint().0.iter().map(|b| format!("{b:02x}")).collect();
    reply(&format!("ready {fingerprint}"));
    // A process waits while a shim works for it. Without root privileges the nice value is refused,
    // which is harmless.
    let _refused = rustix::process::setpriority_process(None, NICE);
    let _refused = tern_tracee::time_slice::set(0, Some(TIME_SLICE));
    let done = match start.role {
        ShimRole::Deputy { .. } => tern_deputy::run(start, key, control_socket),
        ShimRole::Guest { .. } => tern_guest::run(start, key, control_socket),
    };
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn initialize() -> anyhow::Result<(ShimStart, Ephemeral, ControlSocket)> {
    let mut text = Vec::new();
    std::io::stdin().take(MAX_START_MESSAGE).read_to_end(&mut text)?;
    let start: ShimStart = serde_json::from_slice(&text)
        .map_err(|error| anyhow::anyhow!("the shim is started by ternd, not by hand ({error})"))?;
    let control_socket = ControlSocket::open_for_shim(&start.run_dir, start.id)?;
    Ok((start, Ephemeral::generate()?, control_socket))
}

/// Answers ternd, which may have exited meanwhile.
fn reply(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
