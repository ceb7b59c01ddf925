//! The gatekeeper's own socket, for its owner's tools and for ternd.

use super::Outside;
use anyhow::{Context, Result};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;
use tern_control::{OutsideAsk, OutsideReply, outside, stream};

/// How long somebody may take to ask.
const PATIENCE: Duration = Duration::from_secs(1);

/// Opens it for the owner of the node only.
pub(super) fn open(run_dir: &Path) -> Result<UnixListener> {
    let path = outside::socket(run_dir);
    let _left_over = std::fs::remove_file(&path);
    // It has another name until nobody else can open it.
    let closed = path.with_extension("new");
    let _left_over = std::fs::remove_file(&closed);
    let listener = UnixListener::bind(&closed).context("cannot listen for tools")?;
    std::fs::set_permissions(&closed, Permissions::from_mode(0o600))?;
    std::fs::rename(&closed, &path)?;
    Ok(listener)
}

/// Answers for ever.
pub(super) fn serve(own: &Outside, listener: &UnixListener) {
    loop {
        match listener.accept() {
            // ternd looks whether we are here, and says nothing.
            Ok((mut caller, _)) => drop(answer(own, &mut caller)),
            Err(error) => {
                tracing::warn!(%error, "a tool cannot be answered");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn answer(own: &Outside, caller: &mut UnixStream) -> Result<()> {
    caller.set_read_timeout(Some(PATIENCE))?;
    caller.set_write_timeout(Some(PATIENCE))?;
    let reply = match stream::read(caller)? {
        OutsideAsk::Jobs => OutsideReply::Jobs(own.jobs.all()),
        OutsideAsk::Look => OutsideReply::Ended(own.look()),
        OutsideAsk::Address => OutsideReply::Address(own.address.to_string()),
        OutsideAsk::End => {
            tracing::info!("the gatekeeper ends, as it was asked to");
            stream::write(caller, &OutsideReply::Done)?;
            // The room sees that, and ends with all jobs in it.
            std::process::exit(0);
        }
    };
    Ok(stream::write(caller, &reply)?)
}
