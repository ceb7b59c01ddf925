//! How this crate reaches the cluster: through whoever calls it.

use std::sync::Arc;
use tern_control::{Reply, Request};

/// Asks the node's daemon, and waits for its answer.
pub type Ask = Arc<dyn Fn(&Request) -> Result<Reply, Trouble> + Send + Sync>;

/// Why there is no answer, or nothing was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// One sentence, lower case, no full stop.
    pub message: String,
    /// What to try.
    pub hint: Option<String>,
    /// What a tool exits with that ends for it.
    pub code: u8,
}

impl Trouble {
    /// Trouble without a way out.
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, code }
    }

    /// The same with a way out.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl From<std::io::Error> for Trouble {
    fn from(error: std::io::Error) -> Self {
        Self::new(70, format!("cannot use the terminal: {error}"))
    }
}
