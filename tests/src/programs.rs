//! Builds the tiny programs, each in up to three flavours.

pub mod catalogue;
pub mod generated_input;

use crate::programs::catalogue::{ENTRIES, Entry};
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// How a program is linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// With glibc, by the dynamic loader.
    Dynamic,
    /// With glibc, statically.
    Static,
    /// With musl, statically.
    Musl,
}

impl Flavour {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Dynamic, Self::Static, Self::Musl];

    /// Its name, which is also that of its folder.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dynamic => "dynamic",
            Self::Static => "static",
            Self::Musl => "musl",
        }
    }
}

/// The folder for temporary and built files of these tests: `TARGET/tern-tests`.
///
/// # Errors
/// If it cannot be created, or this program is not in a target folder.
pub fn build_directory() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    // TARGET/debug/deps/journeys-0123
    let target = own.ancestors().nth(3).context("this test program is not in a target folder")?;
    let folder = target.join("tern-tests");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// The folder of the built programs; builds those that are not up to date, once for all test
/// programs.
///
/// # Errors
/// If make or a compiler is missing, or a program does not compile.
pub fn built() -> Result<&'static Path> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    match BUILT.get_or_init(|| build().map_err(|e| format!("{e:#}"))) {
        Ok(folder) => Ok(folder),
        Err(why) => bail!("{why}"),
    }
}

fn build() -> Result<PathBuf> {
    let folder = build_directory()?.join("programs");
    fs::create_dir_all(&folder)?;
    // nextest runs test programs in parallel: only one builds.
    let lock = File::create(folder.join(".lock"))?;
    lock.lock()?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
    let end = Command::new("make")
        .args(["--silent", "-j2", "-C"])
        .arg(&source)
        .arg(format!("OUT={}", folder.display()))
        .output()
        .context("cannot run make; install make, gcc and musl-tools")?;
    if !end.status.success() {
        bail!("the test programs do not build:\n{}", String::from_utf8_lossy(&end.stderr));
    }
    Ok(folder)
}

/// The executable of one program, if it exists in this flavour.
///
/// # Errors
/// As `built`.
pub fn executable(entry: &Entry, flavour: Flavour) -> Result<Option<PathBuf>> {
    let path = built()?.join(flavour.name()).join(entry.name);
    Ok(path.exists().then_some(path))
}

/// The executable of the program with this name.
///
/// # Errors
/// As `built`; also if there is no such program, or not in this flavour.
pub fn named(name: &str, flavour: Flavour) -> Result<PathBuf> {
    let entry = ENTRIES.iter().find(|entry| entry.name == name).context("no such program")?;
    executable(entry, flavour)?.context("it is not built")
}

/// Whether `name` is in the comma-separated list of this environment variable; true if the variable
/// is not set.
pub fn wanted(variable: &str, name: &str) -> bool {
    std::env::var(variable).map_or(true, |list| list.split(',').any(|one| one == name))
}
