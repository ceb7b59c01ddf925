//! How a tool reports failure: a sentence, a hint, and an exit code.

use std::io::Write;
use tern_control::{Refusal, RefusalKind};

/// Why a tool did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) code: u8,
    /// The kind of refusal; `None` if the exit code belongs to no kind.
    pub(crate) kind: Option<RefusalKind>,
    /// One sentence, lower case, without a full stop; empty if the output already says everything.
    pub(crate) message: String,
    /// A suggestion for the user.
    pub(crate) hint: Option<String>,
}

impl Failure {
    /// A failure with the exit code of `kind`.
    pub(crate) fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { code: kind.exit_code(), kind: Some(kind), message: message.into(), hint: None }
    }

    /// A wrong command line (exit code 2); the hint names the tool's `--help`.
    pub(crate) fn usage(tool: &str, message: impl Into<String>) -> Self {
        Self::new(RefusalKind::BadRequest, message).hint(format!("{tool} --help"))
    }

    /// A failure with an exit code that belongs to no kind.
    pub(crate) fn with_code(code: u8, message: impl Into<String>) -> Self {
        Self { code, kind: None, message: message.into(), hint: None }
    }

    /// A failure that only sets the exit code; the explanation has already been printed.
    pub(crate) fn silent(code: u8) -> Self {
        Self::with_code(code, String::new())
    }

    /// Adds a hint.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prints the failure on standard error. A write error is ignored.
    pub(crate) fn report(&self, tool: &str) {
        if self.message.is_empty() {
            return;
        }
        // A single write, so that lines of two tools on one terminal do not mix.
        let text = match &self.hint {
            Some(hint) => format!("{tool}: {}\n  try: {hint}\n", self.message),
            None => format!("{tool}: {}\n", self.message),
        };
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self { hint: refusal.hint, ..Self::new(refusal.kind, refusal.message) }
    }
}

impl From<anyhow::Error> for Failure {
    /// The refusal in the chain of causes, without its context. If there is none, all causes joined
    /// in one sentence.
    fn from(error: anyhow::Error) -> Self {
        if let Some(refusal) = error.downcast_ref::<Refusal>() {
            return refusal.clone().into();
        }
        Self::new(RefusalKind::Internal, format!("{error:#}"))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(RefusalKind::Internal, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_keeps_code_and_hint_through_anyhow() {
        let refusal = Refusal::new(RefusalKind::NotFound, "no process 7").hint("mps");
        let failure = Failure::from(anyhow::Error::new(refusal).context("while moving"));
        assert_eq!((failure.code, failure.hint.as_deref()), (1, Some("mps")));
        assert_eq!(Failure::from(anyhow::anyhow!("b").context("a")).message, "a: b");
    }
}
