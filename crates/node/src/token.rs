//! Tokens: who has one may make one machine a member of the cluster.
//!
//! A token names the node that admits, the fingerprint of the authority by which the joining machine knows
//! that node, and a secret by which that node knows the joining machine. The node keeps only the secret's
//! hash, beside its authority, so that a token outlives ternd.

use crate::files;
use data_encoding::BASE64URL_NOPAD;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};
use tern_ids::{Fingerprint, NodeId};

const VERSION: u8 = 1;
const LENGTH: usize = 1 + 2 + 8 + 16 + 32;

/// The most tokens that are valid at a time.
const MOST: usize = 1024;

/// A token, as it is passed on.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The node that admits.
    pub node: NodeId,
    /// Seconds since 1970, on that node's clock.
    pub expires: u64,
    /// Known to that node.
    pub secret: [u8; 16],
    /// Of the cluster's authority.
    pub authority: Fingerprint,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token(of node {}, until {})", self.node, self.expires)
    }
}

/// The text is no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("that is not a token; copy it whole, as tern init or tern token printed it")]
pub struct NotAToken;

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut bytes = vec![VERSION];
        bytes.extend(self.node.0.to_be_bytes());
        bytes.extend(self.expires.to_be_bytes());
        bytes.extend(self.secret);
        bytes.extend(self.authority.0);
        f.write_str(&BASE64URL_NOPAD.encode(&bytes))
    }
}

impl std::str::FromStr for Token {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<Self, NotAToken> {
        let bytes = BASE64URL_NOPAD.decode(text.trim().as_bytes()).map_err(|_base64| NotAToken)?;
        let bytes: [u8; LENGTH] = bytes.try_into().map_err(|_length| NotAToken)?;
        let [VERSION, n0, n1, rest @ ..] = bytes else { return Err(NotAToken) };
        let (expires, rest) = rest.split_first_chunk().ok_or(NotAToken)?;
        let (secret, rest) = rest.split_first_chunk().ok_or(NotAToken)?;
        let authority = rest.try_into().map_err(|_length| NotAToken)?;
        Ok(Self {
            node: NodeId(u16::from_be_bytes([n0, n1])),
            expires: u64::from_be_bytes(*expires),
            secret: *secret,
            authority: Fingerprint(authority),
        })
    }
}

/// The tokens that this node made and that were not used up.
#[derive(Debug)]
pub struct Tokens {
    path: PathBuf,
    /// Makes reading and rewriting the file one act.
    turn: Mutex<()>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    hash: String,
    expires: u64,
    uses: u32,
}

/// Why a secret does not admit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefused {
    /// Nobody made it, or it was used up.
    #[error("the token is unknown here, or was used already")]
    Unknown,
    /// Too late.
    #[error("the token has expired")]
    Expired,
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Tokens {
    /// The tokens kept in a directory.
    pub fn new(directory: &Path) -> Self {
        Self { path: directory.join("tokens.json"), turn: Mutex::new(()) }
    }

    /// Makes a token for this many joins within that many seconds.
    ///
    /// # Errors
    /// If the file cannot be written, or too many are valid already.
    pub fn make(&self, node: NodeId, authority: Fingerprint, seconds: u32, uses: u32) -> io::Result<Token> {
        let _turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut entries = self.read()?;
        entries.retain(|entry| entry.expires > now());
        if entries.len() >= MOST {
            return Err(io::Error::other(format!("{MOST} tokens are valid already")));
        }
        let token = Token { node, expires: now() + u64::from(seconds), secret: rand::random(), authority };
        let hash = blake3::hash(&token.secret).to_hex().to_string();
        entries.push(Entry { hash, expires: token.expires, uses });
        self.write(&entries)?;
        Ok(token)
    }

    /// Whether the secret admits now; takes nothing from it.
    ///
    /// # Errors
    /// `Err(Ok(_))` says why not; `Err(Err(_))` that the file is unreadable.
    pub fn check(&self, secret: &[u8; 16]) -> Result<(), Result<TokenRefused, io::Error>> {
        let _turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        find(&self.read().map_err(Err)?, secret).map(|_at| ()).map_err(Ok)
    }

    /// Takes one use of the secret.
    ///
    /// # Errors
    /// As `check`; nothing is taken then.
    pub fn take(&self, secret: &[u8; 16]) -> Result<(), Result<TokenRefused, io::Error>> {
        let _turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut entries = self.read().map_err(Err)?;
        let at = find(&entries, secret).map_err(Ok)?;
        entries[at].uses = entries[at].uses.saturating_sub(1);
        if entries[at].uses == 0 {
            entries.remove(at);
        }
        self.write(&entries).map_err(Err)
    }

    fn read(&self) -> io::Result<Vec<Entry>> {
        match files::read_bounded(&self.path, 1 << 20) {
            Ok(text) => Ok(serde_json::from_str(&text)?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    fn write(&self, entries: &[Entry]) -> io::Result<()> {
        files::replace(&self.path, &serde_json::to_string(entries)?, 0o600)
    }
}

/// Compares hashes, in constant time; what an attacker learns from timing is about a hash that he cannot aim.
fn find(entries: &[Entry], secret: &[u8; 16]) -> Result<usize, TokenRefused> {
    let hash = blake3::hash(secret);
    let same = |entry: &Entry| blake3::Hash::from_hex(&entry.hash).is_ok_and(|known| known == hash);
    let at = entries.iter().position(same).ok_or(TokenRefused::Unknown)?;
    if entries[at].expires <= now() { Err(TokenRefused::Expired) } else { Ok(at) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn tokens_survive_text() {
        let token = Token { node: NodeId(7), expires: 99, secret: [3; 16], authority: Fingerprint([9; 32]) };
        let text = token.to_string();
        assert_eq!(format!(" {text}\n").parse(), Ok(token.clone()));
        assert_eq!(text[1..].parse::<Token>(), Err(NotAToken));
        assert_eq!(format!("{text}AA").parse::<Token>(), Err(NotAToken));
        assert_eq!("".parse::<Token>(), Err(NotAToken));
        assert!(!format!("{token:?}").contains('3'), "secrets stay out of logs");
    }

    #[test]
    fn a_token_admits_as_often_as_it_says_also_after_a_restart() {
        let dir = Scratch::new("tokens");
        let token = Tokens::new(&dir.0).make(NodeId(1), Fingerprint([0; 32]), 60, 2).unwrap();
        let other = Tokens::new(&dir.0).make(NodeId(1), Fingerprint([0; 32]), 60, 1).unwrap();
        let tokens = Tokens::new(&dir.0);
        assert!(tokens.check(&token.secret).is_ok());
        assert!(tokens.take(&token.secret).is_ok() && tokens.take(&token.secret).is_ok());
        assert!(matches!(tokens.take(&token.secret), Err(Ok(TokenRefused::Unknown))));
        assert!(matches!(tokens.take(&[0; 16]), Err(Ok(TokenRefused::Unknown))));
        assert!(tokens.take(&other.secret).is_ok());
    }

    #[test]
    fn an_expired_token_says_so() {
        let dir = Scratch::new("expired");
        let tokens = Tokens::new(&dir.0);
        let token = tokens.make(NodeId(1), Fingerprint([0; 32]), 0, 1).unwrap();
        assert!(matches!(tokens.take(&token.secret), Err(Ok(TokenRefused::Expired))));
    }
}
