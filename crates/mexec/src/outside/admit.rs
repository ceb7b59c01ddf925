//! Who is at the other end: nothing but this is heard before it is known.

use super::clients::Clients;
use super::words::{Hello, Proof, VERSION, kind, refused};
use anyhow::{Context, Result, bail};
use data_encoding::HEXLOWER;
use std::time::Instant;
use tern_ids::Fingerprint;
use tern_wire::{Link, Nonce, nonce};

/// What is said to whoever does not prove that he has a key of ours: never which part of it was wrong.
const NOT_KNOWN: &str = "this key is not known to the gatekeeper";

/// The name of a client who has proved that he has its secret. Whether the key is still good, and for what, comes after that.
///
/// # Errors
/// If he has not; he is told so.
pub(super) fn admit(
    link: &mut Link,
    clients: &Clients,
    shown: Fingerprint,
    deadline: Instant,
) -> Result<String> {
    let nonce = nonce()?;
    let hello = serde_json::to_vec(&Hello { tern: VERSION, nonce: HEXLOWER.encode(&nonce) })?;
    link.send(kind::HELLO, 0, &[&hello], deadline)?;
    let frame = link.recv(deadline)?;
    if frame.kind != kind::PROOF {
        bail!("a frame of kind {} where a proof was to come", frame.kind);
    }
    let proof: Proof = serde_json::from_slice(&frame.payload).context("its proof cannot be read")?;
    let problem = if proof.tern != VERSION {
        format!("the gatekeeper speaks version {VERSION}, the client {}", proof.tern)
    } else if is_proved(clients, &proof, shown, &nonce) {
        return Ok(proof.client);
    } else {
        NOT_KNOWN.into()
    };
    let _gone = link.send(kind::REFUSED, 0, &[&refused(&problem)], deadline);
    // A name is what anybody may have written.
    bail!("{problem} (client {:?})", proof.client.chars().take(64).collect::<String>())
}

fn is_proved(clients: &Clients, proof: &Proof, shown: Fingerprint, nonce: &Nonce) -> bool {
    let Ok(said) = HEXLOWER.decode(proof.proof.as_bytes()) else { return false };
    // A name that nobody has takes as long as one with another secret.
    let (secret, known) = clients.secret(&proof.client);
    secret.is_proved(shown, nonce, &said) && known
}
