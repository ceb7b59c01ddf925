//! How a tool fails: a sentence, a way out, an exit code.

use std::io::Write;
use tern_control::{Refusal, RefusalKind};

/// What a tool ends with when it did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What it exits with.
    pub code: u8,
    /// One sentence, lower case, no full stop; empty if everything has been said already.
    pub message: String,
    /// What to try.
    pub hint: Option<String>,
}

impl Failure {
    /// A failure with the exit code of a kind of refusal.
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { code: kind.exit_code(), message: message.into(), hint: None }
    }

    /// A wrong command line (exit code 2); the hint names the tool's help.
    pub fn usage(tool: &str, message: impl Into<String>) -> Self {
        Self::new(RefusalKind::BadRequest, message).hint(format!("{tool} --help"))
    }

    /// Only an exit code; what there was to say is on standard output already.
    pub fn silent(code: u8) -> Self {
        Self { code, message: String::new(), hint: None }
    }

    /// The same with a way out.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Says it on standard error. Nothing can be done if that fails.
    pub fn report(&self, tool: &str) {
        if self.message.is_empty() {
            return;
        }
        // One write, so that two tools on one terminal do not mix their lines.
        let text = match &self.hint {
            Some(hint) => format!("{tool}: {}\n  try: {hint}\n", self.message),
            None => format!("{tool}: {}\n", self.message),
        };
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self { code: refusal.kind.exit_code(), message: refusal.message, hint: refusal.hint }
    }
}

impl From<anyhow::Error> for Failure {
    /// The whole chain of causes in one sentence; a refusal or failure inside it keeps its code and hint.
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
    fn a_refusal_keeps_its_code_and_hint_through_anyhow() {
        let refusal = Refusal::new(RefusalKind::NotFound, "no process 7").hint("mps");
        let failure = Failure::from(anyhow::Error::new(refusal).context("while moving"));
        assert_eq!((failure.code, failure.hint.as_deref()), (1, Some("mps")));
        assert_eq!(Failure::from(anyhow::anyhow!("b").context("a")).message, "a: b");
    }
}
