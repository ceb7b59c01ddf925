//! A secret that two know, and how one proves to the other that he does, without saying it.
//!
//! The proof is HMAC-SHA256 over what it is for, the certificate that the prover has seen, and a number that the other side has just
//! made: so it is of no use again, nor to who sits between them with a certificate of his own.

use ring::hmac::{HMAC_SHA256, Key, sign, verify};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use tern_ids::Fingerprint;

/// What proofs are for. Another use of such secrets has another text.
const PURPOSE: &[u8; 16] = b"tern outside 1\r\n";

/// A number that is used once.
pub type Nonce = [u8; 32];

/// The system gives no random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system has no randomness")]
pub struct NoRandomness;

/// A new number for one proof.
///
/// # Errors
/// If the system has no randomness.
pub fn nonce() -> Result<Nonce, NoRandomness> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_unspecified| NoRandomness)?;
    Ok(bytes)
}

/// A secret; it is not shown by `{:?}`.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn generate() -> Result<Self, NoRandomness> {
        nonce().map(Self)
    }

    /// One that is known.
    #[must_use]
    pub fn of(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// To be written down where only who may know it reads it.
    #[must_use]
    pub fn reveal(&self) -> &[u8; 32] {
        &self.0
    }

    /// The proof of whoever has it.
    #[must_use]
    pub fn prove(&self, seen: Fingerprint, nonce: &Nonce) -> [u8; 32] {
        let tag = sign(&Key::new(HMAC_SHA256, &self.0), &message(seen, nonce));
        let mut proof = [0; 32];
        proof.copy_from_slice(tag.as_ref());
        proof
    }

    /// Whether this is that proof. It takes as long wherever the two differ.
    #[must_use]
    pub fn is_proved(&self, shown: Fingerprint, nonce: &Nonce, proof: &[u8]) -> bool {
        verify(&Key::new(HMAC_SHA256, &self.0), &message(shown, nonce), proof).is_ok()
    }
}

fn message(certificate: Fingerprint, nonce: &Nonce) -> Vec<u8> {
    [&PURPOSE[..], &certificate.0, nonce].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_has_it_proves_it_and_only_once() {
        let (secret, other) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        let (here, elsewhere) = (Fingerprint([1; 32]), Fingerprint([2; 32]));
        let (now, later) = (nonce().unwrap(), nonce().unwrap());
        let proof = secret.prove(here, &now);
        assert!(secret.is_proved(here, &now, &proof));
        assert!(!secret.is_proved(here, &later, &proof), "seen before");
        assert!(!secret.is_proved(elsewhere, &now, &proof), "made for who sits between");
        assert!(!other.is_proved(here, &now, &proof));
        assert!(!secret.is_proved(here, &now, &proof[..31]) && !secret.is_proved(here, &now, b""));
        assert_eq!(format!("{secret:?}"), "Secret");
    }

    #[test]
    fn a_proof_is_what_other_languages_compute() {
        // Python: hmac.new(bytes(range(32)), b"tern outside 1\r\n" + b"\x01" * 32 + b"\x02" * 32, "sha256").hexdigest()
        let secret = Secret::of(std::array::from_fn(|at| at as u8));
        let proof = secret.prove(Fingerprint([1; 32]), &[2; 32]);
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "e8122b66ccc00105425cd6f743c6e3bba5b059e9e8ff7f0e79e3975917e254ea");
    }
}
