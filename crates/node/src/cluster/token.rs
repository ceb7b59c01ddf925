//! Tokens. A token allows one machine to become a member of the cluster.
//!
//! A token contains the number of the node that admits, the fingerprint of the authority by which
//! the joining machine authenticates that node, and a secret by which that node authenticates the
//! machine. The node stores only the hash of the secret, next to its authority, so tokens survive a
//! restart of ternd.

use crate::os::clock::unix_seconds;
use crate::os::text_file;
use data_encoding::BASE64URL_NOPAD;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tern_ids::{Fingerprint, NodeId};

const VERSION: u8 = 1;
const LENGTH: usize = 1 + 2 + 8 + 16 + 32;

/// Maximum number of valid tokens.
const MAX_TOKENS: usize = 1024;

/// A token in the form in which users pass it on.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The node that admits.
    pub node: NodeId,
    /// Seconds since 1970, on that node's clock.
    pub expires: u64,
    /// The secret that is shared with the node.
    pub secret: [u8; 16],
    /// The fingerprint of the cluster's authority.
    pub authority: Fingerprint,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token(of node {}, until {})", self.node, self.expires)
    }
}

/// The text is not a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("that is not a token; copy it whole, as tern init or tern token printed it")]
pub struct InvalidToken;

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
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        let bytes = BASE64URL_NOPAD.decode(text.trim().as_bytes()).map_err(|_base64| InvalidToken)?;
        let bytes: [u8; LENGTH] = bytes.try_into().map_err(|_length| InvalidToken)?;
        let [VERSION, n0, n1, rest @ ..] = bytes else { return Err(InvalidToken) };
        let (expires, rest) = rest.split_first_chunk().ok_or(InvalidToken)?;
        let (secret, rest) = rest.split_first_chunk().ok_or(InvalidToken)?;
        let authority = rest.try_into().map_err(|_length| InvalidToken)?;
        Ok(Self {
            node: NodeId(u16::from_be_bytes([n0, n1])),
            expires: u64::from_be_bytes(*expires),
            secret: *secret,
            authority: Fingerprint(authority),
        })
    }
}

/// The valid tokens that this node has made.
#[derive(Debug)]
pub struct Tokens {
    path: PathBuf,
    /// Serialises changes of the file.
    update: Mutex<()>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredToken {
    hash: String,
    expires: u64,
    uses: u32,
}

/// Why a secret is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TokenRefused {
    /// The node did not create it, or it was used up.
    #[error("the token is unknown here, or was used already")]
    Unknown,
    /// It has expired.
    #[error("the token has expired")]
    Expired,
}

impl Tokens {
    /// The tokens that are stored in this directory.
    pub fn new(directory: &Path) -> Self {
        Self { path: directory.join("tokens.json"), update: Mutex::new(()) }
    }

    /// Makes a token that is valid for this number of joins and seconds.
    ///
    /// # Errors
    /// If the file cannot be written, or there are too many valid tokens.
    pub fn create(&self, node: NodeId, authority: Fingerprint, seconds: u32, uses: u32) -> io::Result<Token> {
        let _guard = self.update.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut entries = self.read()?;
        entries.retain(|entry| entry.expires > unix_seconds());
        if entries.len() >= MAX_TOKENS {
            return Err(io::Error::other(format!("{MAX_TOKENS} tokens are valid already")));
        }
        let token =
            Token { node, expires: unix_seconds() + u64::from(seconds), secret: rand::random(), authority };
        let hash = blake3::hash(&token.secret).to_hex().to_string();
        entries.push(StoredToken { hash, expires: token.expires, uses });
        self.write(&entries)?;
        Ok(token)
    }

    /// Checks that the secret is valid now, without using it.
    ///
    /// # Errors
    /// `Err(Ok(_))` if it is not valid; `Err(Err(_))` if the file is unreadable.
    pub(crate) fn check(&self, secret: &[u8; 16]) -> Result<(), Result<TokenRefused, io::Error>> {
        let _guard = self.update.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        find(&self.read().map_err(Err)?, secret).map(|_at| ()).map_err(Ok)
    }

    /// Uses the secret once.
    ///
    /// # Errors
    /// As `check`; the secret is not used then.
    pub(crate) fn use_once(&self, secret: &[u8; 16]) -> Result<(), Result<TokenRefused, io::Error>> {
        let _guard = self.update.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut entries = self.read().map_err(Err)?;
        let at = find(&entries, secret).map_err(Ok)?;
        entries[at].uses = entries[at].uses.saturating_sub(1);
        if entries[at].uses == 0 {
            entries.remove(at);
        }
        self.write(&entries).map_err(Err)
    }

    /// Makes all tokens invalid.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn forget_all(&self) -> io::Result<()> {
        let _guard = self.update.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.read()?.is_empty() { Ok(()) } else { self.write(&[]) }
    }

    fn read(&self) -> io::Result<Vec<StoredToken>> {
        match text_file::read_bounded(&self.path, 1 << 20) {
            Ok(text) => Ok(serde_json::from_str(&text)?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    fn write(&self, entries: &[StoredToken]) -> io::Result<()> {
        text_file::replace(&self.path, &serde_json::to_string(entries)?, 0o600)
    }
}

/// Finds the entry of a secret. Hashes are compared in constant time, and an attacker cannot choose
/// the hash of a guess.
fn find(entries: &[StoredToken], secret: &[u8; 16]) -> Result<usize, TokenRefused> {
    let hash = blake3::hash(secret);
    let same = |entry: &StoredToken| blake3::Hash::from_hex(&entry.hash).is_ok_and(|known| known == hash);
    let at = entries.iter().position(same).ok_or(TokenRefused::Unknown)?;
    if entries[at].expires <= unix_seconds() { Err(TokenRefused::Expired) } else { Ok(at) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;

    #[test]
    fn token_text_round_trips() {
        let token = Token { node: NodeId(7), expires: 99, secret: [3; 16], authority: Fingerprint([9; 32]) };
        let text = token.to_string();
        assert_eq!(format!(" {text}\n").parse(), Ok(token.clone()));
        assert_eq!(text[1..].parse::<Token>(), Err(InvalidToken));
        assert_eq!(format!("{text}AA").parse::<Token>(), Err(InvalidToken));
        assert_eq!("".parse::<Token>(), Err(InvalidToken));
        assert!(!format!("{token:?}").contains('3'), "secrets stay out of logs");
    }

    #[test]
    fn token_is_valid_for_its_uses_across_a_restart() {
        let dir = Scratch::new("tokens");
        let token = Tokens::new(&dir.0).create(NodeId(1), Fingerprint([0; 32]), 60, 2).unwrap();
        let other = Tokens::new(&dir.0).create(NodeId(1), Fingerprint([0; 32]), 60, 1).unwrap();
        let tokens = Tokens::new(&dir.0);
        assert!(tokens.check(&token.secret).is_ok());
        assert!(tokens.use_once(&token.secret).is_ok() && tokens.use_once(&token.secret).is_ok());
        assert!(matches!(tokens.use_once(&token.secret), Err(Ok(TokenRefused::Unknown))));
        assert!(matches!(tokens.use_once(&[0; 16]), Err(Ok(TokenRefused::Unknown))));
        assert!(tokens.use_once(&other.secret).is_ok());
    }

    #[test]
    fn expired_token_is_refused() {
        let dir = Scratch::new("expired");
        let tokens = Tokens::new(&dir.0);
        let token = tokens.create(NodeId(1), Fingerprint([0; 32]), 0, 1).unwrap();
        assert!(matches!(tokens.use_once(&token.secret), Err(Ok(TokenRefused::Expired))));
    }
}
