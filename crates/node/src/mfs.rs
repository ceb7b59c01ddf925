//! What the server of this node's files is told; it is started by [`Beside`](crate::beside::Beside).

use crate::config::Config;
use crate::shims::{ANSWER, ask_at};
use std::io;
use tern_control::{Refusal, RefusalKind, ShimRequest};

/// Tells the server whether others may reach this node's files. One that does not run reads it when it begins.
///
/// # Errors
/// If it does not answer; it goes by what it was told before then.
pub(crate) fn let_in(config: &Config, open: bool) -> Result<(), Refusal> {
    match ask_at(&config.mfs_door(), &ShimRequest::Files { open }, Some(ANSWER)) {
        Ok(_done) => Ok(()),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(()),
        Err(e) => {
            let said = format!("the server of this node's files does not answer: {e}");
            Err(Refusal::new(RefusalKind::Internal, said).hint("kill it: what is open is opened again"))
        }
    }
}
