//! Keys and certificates in PEM files. Files are written atomically; keys are readable by their
//! owner only.

use crate::identity::IdentityError;
use crate::limits::MAX_PEM;
use pem::{EncodeConfig, LineEnding, Pem, encode_config};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes `text` to a temporary file and renames it, so that readers see the old file or the new
/// one.
pub(crate) fn write(path: &Path, text: &str, mode: u32) -> Result<(), IdentityError> {
    install(path, text, mode, |fresh| fs::rename(fresh, path))
}

/// As `write`, but keeps an existing file.
pub(crate) fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), IdentityError> {
    install(path, text, mode, |fresh| match fs::hard_link(fresh, path) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(e),
        _ => fs::remove_file(fresh),
    })
}

fn install(
    path: &Path,
    text: &str,
    mode: u32,
    publish: impl FnOnce(&Path) -> io::Result<()>,
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
        .and_then(|()| publish(&fresh));
    written.map_err(|e| {
        let _nothing_to_remove = fs::remove_file(&fresh);
        failed(e)
    })
}

/// Reads a PEM file, up to the maximum size.
pub(crate) fn read(path: &Path) -> Result<String, IdentityError> {
    let failed = |source| IdentityError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_PEM).read_to_string(&mut text).map_err(failed)?;
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
