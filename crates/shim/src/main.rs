//! tern-shim: the program that holds one half of one family. Its node's daemon starts it, and it outlives the
//! daemon. It is of no use by hand.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::time::Duration;
use tern_control::ShimRole;
use tern_control::door::Door;
use tern_control::shim::ShimStart;
use tern_wire::Ephemeral;

/// Before all that compute; less urgent than what the system itself puts first.
const NICE: i32 = -10;

/// How long its turns are: a call takes less. On a busy home, where those that compute are let to the end of theirs, of
/// milliseconds, a guest got half as much done.
const TURN: Duration = Duration::from_micros(100);

/// The longest order that is read.
const MOST: u64 = 1 << 20;

fn main() -> std::process::ExitCode {
    tern_tracee::heap::keep();
    let begun = begin();
    let (start, key, door) = match begun {
        Ok(all) => all,
        Err(error) => {
            say(&format!("failed {error:#}"));
            return std::process::ExitCode::FAILURE;
        }
    };
    let filter = std::env::var("TERN_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let fingerprint: String = key.fingerprint().0.iter().map(|b| format!("{b:02x}")).collect();
    say(&format!("ready {fingerprint}"));
    // Programs stand still while a shim is at work for them. Only root may; what cannot be is no harm.
    let _refused = rustix::process::setpriority_process(None, NICE);
    let _refused = tern_tracee::turn::set(0, Some(TURN));
    let done = match start.role {
        ShimRole::Deputy { .. } => tern_deputy::run(start, key, door),
        ShimRole::Guest { .. } => tern_guest::run(start, key, door),
    };
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn begin() -> anyhow::Result<(ShimStart, Ephemeral, Door)> {
    let mut order = Vec::new();
    std::io::stdin().take(MOST).read_to_end(&mut order)?;
    let start: ShimStart = serde_json::from_slice(&order)
        .map_err(|error| anyhow::anyhow!("it is started by ternd, not by hand ({error})"))?;
    let door = Door::open(&start.run_dir, start.id)?;
    Ok((start, Ephemeral::generate()?, door))
}

/// Answers whoever started us, who may be gone.
fn say(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}
