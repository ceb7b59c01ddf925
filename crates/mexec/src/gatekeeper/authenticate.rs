//! Authentication of a client, before which no other frame is accepted.

use super::client_keys::ClientKeys;
use super::messages::{Hello, Proof, VERSION, encode_refusal, kind};
use anyhow::{Context, Result, bail};
use data_encoding::HEXLOWER;
use std::time::Instant;
use tern_ids::Fingerprint;
use tern_wire::{Link, Nonce, nonce};

/// The reply to every wrong proof. It does not reveal whether the name or the secret was wrong.
const UNKNOWN_KEY: &str = "this key is not known to the gatekeeper";

/// Returns the name of a client that has proved its secret. Whether the key is still valid is
/// checked later.
///
/// # Errors
/// If no valid proof arrives. The client receives a refusal if its proof is of another version or
/// wrong, and no reply to anything else.
pub(super) fn authenticate(
    link: &mut Link,
    keys: &ClientKeys,
    fingerprint: Fingerprint,
    deadline: Instant,
) -> Result<String> {
    let nonce = nonce()?;
    let hello = serde_json::to_vec(&Hello { version: VERSION, nonce: HEXLOWER.encode(&nonce) })?;
    link.send(kind::HELLO, 0, &[&hello], deadline)?;
    let frame = link.recv(deadline)?;
    if frame.kind != kind::PROOF {
        bail!("a frame of kind {} instead of a proof", frame.kind);
    }
    let proof: Proof = serde_json::from_slice(&frame.payload).context("its proof cannot be read")?;
    let problem = if proof.version != VERSION {
        format!("the gatekeeper speaks version {VERSION}, the client {}", proof.version)
    } else if is_proved(keys, &proof, fingerprint, &nonce) {
        return Ok(proof.client);
    } else {
        UNKNOWN_KEY.into()
    };
    let _gone = link.send(kind::REFUSED, 0, &[&encode_refusal(&problem)], deadline);
    // The name is unauthenticated input, so it is escaped and shortened.
    bail!("{problem} (client {:?})", proof.client.chars().take(64).collect::<String>())
}

fn is_proved(keys: &ClientKeys, proof: &Proof, fingerprint: Fingerprint, nonce: &Nonce) -> bool {
    let Ok(mac) = HEXLOWER.decode(proof.proof.as_bytes()) else { return false };
    // An unknown name takes as long as a wrong secret.
    let (secret, is_known) = keys.secret(&proof.client);
    secret.verify(fingerprint, nonce, &mac) && is_known
}
