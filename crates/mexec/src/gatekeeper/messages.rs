//! Messages between an outside client and the gatekeeper, in frames of [`tern_wire::frame`] within
//! TLS.
//!
//! ```text
//!  client                                    gatekeeper
//!         ◀─ HELLO    {"tern": 1, "nonce": HEX}
//!  PROOF {"tern": 1, "client": NAME, "proof": HEX} ─▶  HMAC-SHA256, see tern_wire::secret
//!         ◀─ ADMITTED {}                 or, here or later, REFUSED {"message": TEXT}: the end
//!  JOB_REQUEST {"argv": […], …} ─▶
//!         ◀─ STARTED  {}
//!         ◀═ streams, credit, heartbeats ═▶  as messages::kind, with the stream in the tag
//!  SIGNAL NAME ─▶                        INT, TERM …: numbers differ between systems
//!         ◀─ ENDED    {"code": N} or {"signal": NAME, "number": N}
//! ```
//! Arguments, values of variables, and paths are any bytes but zero. In JSON each byte is one
//! character, U+0001 to U+00FF.

use crate::away::job::PeerProtocol;
use crate::messages::{ExecReply, Signal};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

/// The version of this protocol.
pub(super) const VERSION: u16 = 1;

/// The maximum length of a frame before authentication.
pub(super) const MAX_UNAUTHENTICATED_FRAME: usize = 1024;

/// The kinds of frames of this protocol. Further kinds are shared with [`crate::messages::kind`].
pub(super) mod kind {
    pub(in super::super) const HELLO: u8 = 32;
    pub(in super::super) const PROOF: u8 = 33;
    pub(in super::super) const ADMITTED: u8 = 34;
    pub(in super::super) const REFUSED: u8 = 35;
    pub(in super::super) const JOB_REQUEST: u8 = 36;
    pub(in super::super) const STARTED: u8 = 37;
    pub(in super::super) const ENDED: u8 = 38;
}

/// The gatekeeper's first message.
#[derive(Debug, Serialize)]
pub(super) struct Hello {
    /// The version of this protocol.
    #[serde(rename = "tern")]
    pub(super) version: u16,
    pub(super) nonce: String,
}

/// The client's reply.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Proof {
    /// The version of this protocol.
    #[serde(rename = "tern")]
    pub(super) version: u16,
    pub(super) client: String,
    pub(super) proof: String,
}

/// A client's job request. It has no field for the user, which is determined by the key.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ClientJobRequest {
    /// The command and its arguments, which no shell interprets.
    pub(super) argv: Vec<ByteString>,
    #[serde(default)]
    pub(super) environment: BTreeMap<String, ByteString>,
    /// The working directory, relative to the user's home, which is the default.
    #[serde(default)]
    pub(super) directory: Option<ByteString>,
    /// Whether standard input is forwarded.
    #[serde(default)]
    pub(super) input: bool,
    /// Whether standard output and error are the same file at the client.
    #[serde(default)]
    pub(super) joined: bool,
}

impl ClientJobRequest {
    pub(super) fn read(bytes: &[u8]) -> Result<Self> {
        let request: Self = serde_json::from_slice(bytes).context("the job request cannot be read")?;
        if request.argv.first().is_none_or(|command| command.0.is_empty()) {
            bail!("no command was given");
        }
        Ok(request)
    }

    /// The command line for display, shortened, and without control characters.
    pub(super) fn summary(&self) -> String {
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

/// An argument, the value of a variable, or a path: any bytes but zero.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct ByteString(pub(super) Vec<u8>);

impl TryFrom<String> for ByteString {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let byte = |c: char| u8::try_from(c).ok().filter(|byte| *byte != 0);
        text.chars()
            .map(byte)
            .collect::<Option<_>>()
            .map(Self)
            .ok_or("a character outside of U+0001 to U+00FF")
    }
}

/// Resource limits that jobs get, and that this process has changed for itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobLimits {
    /// Open files: soft and hard.
    pub(super) open_files: (u64, u64),
}

/// Signals that a client may send, and whether they go to the whole process group, as from a
/// terminal.
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

/// Names of further signals that may kill a command.
const FATAL_SIGNALS: [(&str, i32); 10] = [
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

/// The peer protocol of an outside client.
#[derive(Debug, Default)]
pub(crate) struct ClientPeer {
    /// It has announced that it is being stopped. It sends nothing until it continues.
    is_stopped: Cell<bool>,
}

impl PeerProtocol for ClientPeer {
    fn encode_started(&self) -> Result<(u8, Vec<u8>)> {
        Ok((kind::STARTED, b"{}".to_vec()))
    }

    fn decode_signal(&self, payload: &[u8]) -> Result<Signal> {
        let known = SIGNALS.iter().find(|(name, ..)| name.as_bytes() == payload);
        let (_, number, group) = known.context("unknown signal name")?;
        match *number {
            libc::SIGSTOP | libc::SIGTSTP => self.is_stopped.set(true),
            libc::SIGCONT => self.is_stopped.set(false),
            _ => {}
        }
        Ok(Signal { number: *number, group: *group })
    }

    fn silence_timeout(&self) -> Duration {
        Duration::from_secs(30)
    }

    fn is_paused(&self) -> bool {
        self.is_stopped.get()
    }
}

/// Encodes the exit of a command for its client.
pub(super) fn encode_exit(status: i32) -> Vec<u8> {
    let end = if libc::WIFEXITED(status) {
        serde_json::json!({ "code": libc::WEXITSTATUS(status) })
    } else {
        let number = libc::WTERMSIG(status);
        serde_json::json!({ "signal": signal_name(number), "number": number })
    };
    end.to_string().into_bytes()
}

fn signal_name(number: i32) -> String {
    let known = SIGNALS.iter().map(|(name, number, _)| (*name, *number)).chain(FATAL_SIGNALS);
    known
        .into_iter()
        .find(|(_, of)| *of == number)
        .map_or_else(|| number.to_string(), |(name, _)| name.into())
}

/// Encodes a refusal for a client.
pub(super) fn encode_refusal(message: &str) -> Vec<u8> {
    serde_json::json!({ "message": message }).to_string().into_bytes()
}

/// Describes how a job has ended, for the log.
pub(super) fn describe_end(reply: &Result<ExecReply>) -> String {
    match reply {
        Ok(ExecReply::Exited(report)) if libc::WIFEXITED(report.status) => {
            format!("code {}", libc::WEXITSTATUS(report.status))
        }
        Ok(ExecReply::Exited(report)) => format!("signal {}", signal_name(libc::WTERMSIG(report.status))),
        Ok(other) => format!("{other:?}"),
        Err(error) => format!("{error:#}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_byte_strings() {
        let request = ClientJobRequest::read(
            "{\"argv\": [\"a b\", \"\\n\\\"'$;\", \"\u{ff}\u{fe}\", \"\"]}".as_bytes(),
        )
        .unwrap();
        let words: Vec<&[u8]> = request.argv.iter().map(|word| &word.0[..]).collect();
        assert_eq!(words, [&b"a b"[..], b"\n\"'$;", b"\xff\xfe", b""]);
        assert_eq!(request.summary().chars().take(7).collect::<String>(), "a b ?\"'");
    }

    #[test]
    fn invalid_requests_are_refused() {
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
            assert!(ClientJobRequest::read(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn signals_and_exits_are_encoded_by_name() {
        let peer = ClientPeer::default();
        assert_eq!(peer.decode_signal(b"USR1").unwrap(), Signal { number: libc::SIGUSR1, group: false });
        assert!(
            peer.decode_signal(b"9").is_err()
                && peer.decode_signal(b"").is_err()
                && peer.decode_signal(b"SEGV").is_err()
        );
        peer.decode_signal(b"TSTP").unwrap();
        assert!(peer.is_paused());
        peer.decode_signal(b"CONT").unwrap();
        assert!(!peer.is_paused());
        assert_eq!(encode_exit(7 << 8), br#"{"code":7}"#);
        let died: serde_json::Value = serde_json::from_slice(&encode_exit(11)).unwrap();
        assert_eq!(died, serde_json::json!({"signal": "SEGV", "number": 11}));
    }
}
