//! Keys and certificates as PEM files: written all or nothing, keys readable by their owner only.

use crate::identity::IdentityError;
use crate::limits::MOST_PEM;
use pem::{EncodeConfig, LineEnding, Pem, encode_config};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes `text` under a temporary name and renames it, so that a reader finds the old file or the new one.
pub(crate) fn write(path: &Path, text: &str, mode: u32) -> Result<(), IdentityError> {
    place(path, text, mode, |fresh| fs::rename(fresh, path))
}

/// The same where there is no such file yet; who finds one leaves it.
pub(crate) fn write_first(path: &Path, text: &str, mode: u32) -> Result<(), IdentityError> {
    place(path, text, mode, |fresh| match fs::hard_link(fresh, path) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(e),
        _ => fs::remove_file(fresh),
    })
}

fn place(
    path: &Path,
    text: &str,
    mode: u32,
    put: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<(), IdentityError> {
    let failed = |source| IdentityError::Write { path: path.to_owned(), source };
    let fresh = path.with_extension(format!("new-{}", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&fresh)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        .and_then(|()| put(&fresh));
    written.map_err(|e| {
        let _nothing_to_remove = fs::remove_file(&fresh);
        failed(e)
    })
}

/// Reads a PEM file of a sensible size.
pub(crate) fn read(path: &Path) -> Result<String, IdentityError> {
    let failed = |source| IdentityError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MOST_PEM).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// Writes one certificate.
pub(crate) fn write_certificate(path: &Path, certificate: &CertificateDer<'_>) -> Result<(), IdentityError> {
    let unix = EncodeConfig::new().set_line_ending(LineEnding::LF);
    write(path, &encode_config(&Pem::new("CERTIFICATE", certificate.to_vec()), unix), 0o644)
}

/// Reads one certificate.
pub(crate) fn read_certificate(path: &Path) -> Result<CertificateDer<'static>, IdentityError> {
    CertificateDer::from_pem_slice(read(path)?.as_bytes())
        .map_err(|_pem| IdentityError::Malformed { path: path.to_owned() })
}
