//! The gatekeeper's control socket, for the tools of the node's owner and for ternd.

use super::Gatekeeper;
use anyhow::{Context, Result};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;
use tern_control::{GatekeeperReply, GatekeeperRequest, gatekeeper, stream};

/// Time limit for a connected tool to send its request.
const CALLER_TIMEOUT: Duration = Duration::from_secs(1);

/// Creates the socket, accessible to the owner of the node only.
pub(super) fn bind(run_dir: &Path) -> Result<UnixListener> {
    let path = gatekeeper::socket_path(run_dir);
    let _left_over = std::fs::remove_file(&path);
    // It is bound under a temporary name, until its permissions are set.
    let temporary = path.with_extension("new");
    let _left_over = std::fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).context("cannot listen for tools")?;
    std::fs::set_permissions(&temporary, Permissions::from_mode(0o600))?;
    std::fs::rename(&temporary, &path)?;
    Ok(listener)
}

/// Serves requests for ever.
pub(super) fn serve(gatekeeper: &Gatekeeper, listener: &UnixListener) {
    loop {
        match listener.accept() {
            // ternd connects without a request to see whether the gatekeeper runs.
            Ok((mut caller, _)) => drop(reply(gatekeeper, &mut caller)),
            Err(error) => {
                tracing::warn!(%error, "a tool cannot be served");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn reply(gatekeeper: &Gatekeeper, caller: &mut UnixStream) -> Result<()> {
    caller.set_read_timeout(Some(CALLER_TIMEOUT))?;
    caller.set_write_timeout(Some(CALLER_TIMEOUT))?;
    let reply = match stream::read(caller)? {
        GatekeeperRequest::Jobs => GatekeeperReply::Jobs(gatekeeper.jobs.all()),
        GatekeeperRequest::CheckKeys => GatekeeperReply::Ended(gatekeeper.end_invalid_jobs()),
        GatekeeperRequest::Address => GatekeeperReply::Address(gatekeeper.address.to_string()),
        GatekeeperRequest::End => {
            tracing::info!("the gatekeeper ends, as requested");
            stream::write(caller, &GatekeeperReply::Done)?;
            // The container notices this, and ends with all its jobs.
            std::process::exit(0);
        }
    };
    Ok(stream::write(caller, &reply)?)
}
