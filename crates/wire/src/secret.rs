//! A shared secret. A peer proves that it knows the secret, without revealing it.
//!
//! The proof is an HMAC-SHA256 over its purpose, the certificate that the prover has received, and
//! a nonce of the verifier. So it cannot be replayed, nor be used by a man in the middle with
//! another certificate.

use ring::hmac::{HMAC_SHA256, Key, sign, verify};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use tern_ids::Fingerprint;

/// The purpose of the proofs. Other uses of such secrets must use another text.
const PURPOSE: &[u8; 16] = b"tern outside 1\r\n";

/// A random number that is used once.
pub type Nonce = [u8; 32];

/// The system's random generator failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system's random generator failed")]
pub struct NoRandomness;

/// Generates a nonce for one proof.
///
/// # Errors
/// If the system's random generator fails.
pub fn nonce() -> Result<Nonce, NoRandomness> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_unspecified| NoRandomness)?;
    Ok(bytes)
}

/// A secret. `{:?}` does not print it.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Generates a secret.
    ///
    /// # Errors
    /// If the system's random generator fails.
    pub fn generate() -> Result<Self, NoRandomness> {
        nonce().map(Self)
    }

    /// An existing secret.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The secret's bytes, for a file that only its owner can read.
    #[must_use]
    pub fn reveal(&self) -> &[u8; 32] {
        &self.0
    }

    /// The proof for a peer with this certificate that sent this nonce.
    #[must_use]
    pub fn prove(&self, peer_certificate: Fingerprint, nonce: &Nonce) -> [u8; 32] {
        let tag = sign(&Key::new(HMAC_SHA256, &self.0), &message(peer_certificate, nonce));
        let mut proof = [0; 32];
        proof.copy_from_slice(tag.as_ref());
        proof
    }

    /// Whether this is the valid proof of a peer to which this side has shown its own certificate.
    /// Takes constant time.
    #[must_use]
    pub fn verify(&self, own_certificate: Fingerprint, nonce: &Nonce, proof: &[u8]) -> bool {
        verify(&Key::new(HMAC_SHA256, &self.0), &message(own_certificate, nonce), proof).is_ok()
    }
}

fn message(certificate: Fingerprint, nonce: &Nonce) -> Vec<u8> {
    [&PURPOSE[..], &certificate.0, nonce].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proof_needs_the_secret_and_is_valid_once() {
        let (secret, other) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        let (here, elsewhere) = (Fingerprint([1; 32]), Fingerprint([2; 32]));
        let (now, later) = (nonce().unwrap(), nonce().unwrap());
        let proof = secret.prove(here, &now);
        assert!(secret.verify(here, &now, &proof));
        assert!(!secret.verify(here, &later, &proof), "seen before");
        assert!(!secret.verify(elsewhere, &now, &proof), "made for who sits between");
        assert!(!other.verify(here, &now, &proof));
        assert!(!secret.verify(here, &now, &proof[..31]) && !secret.verify(here, &now, b""));
        assert_eq!(format!("{secret:?}"), "Secret");
    }

    #[test]
    fn proof_matches_reference_value() {
        // Python: hmac.new(bytes(range(32)), b"tern outside 1\r\n" + b"\x01" * 32 + b"\x02" * 32,
        // "sha256").hexdigest()
        let secret = Secret::from_bytes(std::array::from_fn(|at| at as u8));
        let proof = secret.prove(Fingerprint([1; 32]), &[2; 32]);
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "e8122b66ccc00105425cd6f743c6e3bba5b059e9e8ff7f0e79e3975917e254ea");
    }
}
