//! Requests to the server of this node's files, which
//! [`HelperProgram`](crate::programs::HelperProgram) starts.

use crate::config::Config;
use crate::shim::{REPLY_TIMEOUT, request_at};
use std::io;
use tern_control::{Refusal, RefusalKind, ShimRequest};

/// Sets whether other nodes may reach this node's files. A server that starts later reads the
/// setting.
///
/// # Errors
/// If the server does not reply; it then keeps the previous value.
pub(crate) fn set_peer_access(config: &Config, open: bool) -> Result<(), Refusal> {
    match request_at(&config.mfs_socket(), &ShimRequest::ServeFiles { open }, Some(REPLY_TIMEOUT)) {
        Ok(_done) => Ok(()),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(()),
        Err(e) => {
            let message = format!("the server of this node's files does not answer: {e}");
            Err(Refusal::new(RefusalKind::Internal, message).hint("kill it; open files are reopened"))
        }
    }
}
