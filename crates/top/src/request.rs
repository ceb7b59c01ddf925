//! The interface through which this crate reaches the cluster; the caller implements it.

use std::sync::Arc;
use tern_control::{Reply, Request};

/// Sends a request to the node's daemon and waits for the reply.
pub type RequestFn = Arc<dyn Fn(&Request) -> Result<Reply, TopError> + Send + Sync>;

/// Why there is no reply, or why an action failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopError {
    /// One sentence, lower case, without a full stop.
    pub message: String,
    /// A suggestion for the user.
    pub hint: Option<String>,
    /// The exit code of a tool that ends with this error.
    pub code: u8,
}

impl TopError {
    /// An error without a hint.
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, code }
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl From<std::io::Error> for TopError {
    fn from(error: std::io::Error) -> Self {
        Self::new(70, format!("cannot use the terminal: {error}"))
    }
}
