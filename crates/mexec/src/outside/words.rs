//! What a client outside and the gatekeeper say to each other, in frames of [`tern_wire::frame`] within TLS.
//!
//! ```text
//!  client                                    gatekeeper
//!         ◀─ HELLO    {"tern": 1, "nonce": HEX}
//!  PROOF {"tern": 1, "client": NAME, "proof": HEX} ─▶         HMAC-SHA256, see tern_wire::secret
//!         ◀─ ADMITTED {}                                      or REFUSED {"message": TEXT}, here and at any time later: the end
//!  ORDER {"argv": […], …} ─▶
//!         ◀─ STARTED  {}
//!         ◀═ streams, credit, beats ═▶                        as words::kind, the stream in the frame's tag
//!  SIGNAL NAME ─▶                                             INT, TERM …: numbers are not the same everywhere
//!         ◀─ ENDED    {"code": N} or {"signal": NAME, "number": N}
//! ```
//! Text of the system, such as an argument, is any bytes but zero: in JSON each byte is one character, U+0001 to U+00FF.

use crate::away::job::Dialect;
use crate::words::{Said, Signal};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

/// The version of all this.
pub(super) const VERSION: u16 = 1;

/// The longest frame of somebody who has not proved who he is.
pub(super) const MOST_OF_STRANGER: usize = 1024;

/// The kinds of frames that only these two have; the others are in [`crate::words::kind`].
pub(super) mod kind {
    pub(in super::super) const HELLO: u8 = 32;
    pub(in super::super) const PROOF: u8 = 33;
    pub(in super::super) const ADMITTED: u8 = 34;
    pub(in super::super) const REFUSED: u8 = 35;
    pub(in super::super) const ORDER: u8 = 36;
    pub(in super::super) const STARTED: u8 = 37;
    pub(in super::super) const ENDED: u8 = 38;
}

/// What a gatekeeper says first.
#[derive(Debug, Serialize)]
pub(super) struct Hello {
    pub(super) tern: u16,
    pub(super) nonce: String,
}

/// What a client answers.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Proof {
    pub(super) tern: u16,
    pub(super) client: String,
    pub(super) proof: String,
}

/// What a client wants. There is no word in it for who it is to be.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Order {
    /// The command and its arguments; no shell reads them.
    pub(super) argv: Vec<Text>,
    #[serde(default)]
    pub(super) environment: BTreeMap<String, Text>,
    /// Where it begins, seen from the user's home; there if absent.
    #[serde(default)]
    pub(super) directory: Option<Text>,
    /// Something may come from standard input.
    #[serde(default)]
    pub(super) input: bool,
    /// Standard output and error are one file at the client.
    #[serde(default)]
    pub(super) joined: bool,
}

impl Order {
    pub(super) fn read(bytes: &[u8]) -> Result<Self> {
        let order: Self = serde_json::from_slice(bytes).context("the order cannot be read")?;
        if order.argv.first().is_none_or(|command| command.0.is_empty()) {
            bail!("no command was given");
        }
        Ok(order)
    }

    /// The command for people, shortened, with nothing in it that commands a terminal.
    pub(super) fn shown(&self) -> String {
        let mut text = String::new();
        for word in &self.argv {
            if !text.is_empty() {
                text.push(' ');
            }
            text.extend(
                String::from_utf8_lossy(&word.0).chars().map(|c| if c.is_control() { '?' } else { c }),
            );
            if text.chars().count() > 200 {
                return text.chars().take(200).chain("…".chars()).collect();
            }
        }
        text
    }
}

/// Text of the system.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Text(pub(super) Vec<u8>);

impl TryFrom<String> for Text {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let byte = |c: char| u8::try_from(c).ok().filter(|byte| *byte != 0);
        text.chars()
            .map(byte)
            .collect::<Option<_>>()
            .map(Self)
            .ok_or("a character that is no byte of 1 to 255")
    }
}

/// What jobs may have, which this process changed for itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Descriptors: soft and hard.
    pub(super) files: (u64, u64),
}

/// Signals that a client may send, with those that reach the whole process group, as from a terminal.
const SIGNALS: [(&str, i32, bool); 12] = [
    ("HUP", libc::SIGHUP, true),
    ("INT", libc::SIGINT, true),
    ("QUIT", libc::SIGQUIT, true),
    ("TSTP", libc::SIGTSTP, true),
    ("STOP", libc::SIGSTOP, true),
    ("CONT", libc::SIGCONT, true),
    ("KILL", libc::SIGKILL, true),
    ("TERM", libc::SIGTERM, false),
    ("USR1", libc::SIGUSR1, false),
    ("USR2", libc::SIGUSR2, false),
    ("ALRM", libc::SIGALRM, false),
    ("WINCH", libc::SIGWINCH, false),
];

/// Names of signals that commands die of besides those.
const DEATHS: [(&str, i32); 10] = [
    ("ABRT", libc::SIGABRT),
    ("BUS", libc::SIGBUS),
    ("FPE", libc::SIGFPE),
    ("ILL", libc::SIGILL),
    ("PIPE", libc::SIGPIPE),
    ("SEGV", libc::SIGSEGV),
    ("SYS", libc::SIGSYS),
    ("TRAP", libc::SIGTRAP),
    ("XCPU", libc::SIGXCPU),
    ("XFSZ", libc::SIGXFSZ),
];

/// How a client speaks of a job.
#[derive(Debug, Default)]
pub(crate) struct FromOutside {
    /// It has said that it stops, and will say nothing until it goes on.
    stops: Cell<bool>,
}

impl Dialect for FromOutside {
    fn started(&self) -> Result<(u8, Vec<u8>)> {
        Ok((kind::STARTED, b"{}".to_vec()))
    }

    fn signal(&self, said: &[u8]) -> Result<Signal> {
        let known = SIGNALS.iter().find(|(name, ..)| name.as_bytes() == said);
        let (_, number, group) = known.context("a signal that has no name here")?;
        match *number {
            libc::SIGSTOP | libc::SIGTSTP => self.stops.set(true),
            libc::SIGCONT => self.stops.set(false),
            _ => {}
        }
        Ok(Signal { number: *number, group: *group })
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(30)
    }

    fn is_silent(&self) -> bool {
        self.stops.get()
    }
}

/// The end of a command for its client.
pub(super) fn ended(status: i32) -> Vec<u8> {
    let end = if libc::WIFEXITED(status) {
        serde_json::json!({ "code": libc::WEXITSTATUS(status) })
    } else {
        let number = libc::WTERMSIG(status);
        serde_json::json!({ "signal": name(number), "number": number })
    };
    end.to_string().into_bytes()
}

fn name(number: i32) -> String {
    let known = SIGNALS.iter().map(|(name, number, _)| (*name, *number)).chain(DEATHS);
    known
        .into_iter()
        .find(|(_, of)| *of == number)
        .map_or_else(|| number.to_string(), |(name, _)| name.into())
}

/// A refusal for a client.
pub(super) fn refused(message: &str) -> Vec<u8> {
    serde_json::json!({ "message": message }).to_string().into_bytes()
}

/// How a job has ended, for the log.
pub(super) fn shown(said: &Result<Said>) -> String {
    match said {
        Ok(Said::Ended(end)) if libc::WIFEXITED(end.status) => {
            format!("code {}", libc::WEXITSTATUS(end.status))
        }
        Ok(Said::Ended(end)) => format!("signal {}", name(libc::WTERMSIG(end.status))),
        Ok(other) => format!("{other:?}"),
        Err(error) => format!("{error:#}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_bytes() {
        let order =
            Order::read("{\"argv\": [\"a b\", \"\\n\\\"'$;\", \"\u{ff}\u{fe}\", \"\"]}".as_bytes()).unwrap();
        let words: Vec<&[u8]> = order.argv.iter().map(|word| &word.0[..]).collect();
        assert_eq!(words, [&b"a b"[..], b"\n\"'$;", b"\xff\xfe", b""]);
        assert_eq!(order.shown().chars().take(7).collect::<String>(), "a b ?\"'");
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        for wrong in [
            r#"{}"#,
            r#"{"argv": []}"#,
            r#"{"argv": [""]}"#,
            r#"{"argv": "true"}"#,
            r#"{"argv": ["true"], "uid": 0}"#,
            r#"{"argv": ["true"], "user": "root"}"#,
            r#"{"argv": ["a\u0000b"]}"#,
            r#"{"argv": ["\u20ac"]}"#,
            r#"{"argv": ["true"], "argv": ["false"]}"#,
            r#"{"argv": ["true"], "environment": {"A": 1}}"#,
            "true",
            "",
        ] {
            assert!(Order::read(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn signals_have_names_and_ends_too() {
        let dialect = FromOutside::default();
        assert_eq!(dialect.signal(b"USR1").unwrap(), Signal { number: libc::SIGUSR1, group: false });
        assert!(
            dialect.signal(b"9").is_err() && dialect.signal(b"").is_err() && dialect.signal(b"SEGV").is_err()
        );
        dialect.signal(b"TSTP").unwrap();
        assert!(dialect.is_silent());
        dialect.signal(b"CONT").unwrap();
        assert!(!dialect.is_silent());
        assert_eq!(ended(7 << 8), br#"{"code":7}"#);
        let died: serde_json::Value = serde_json::from_slice(&ended(11)).unwrap();
        assert_eq!(died, serde_json::json!({"signal": "SEGV", "number": 11}));
    }
}
