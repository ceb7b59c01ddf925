//! The lab as a program of its own, without the rest of Tern: `tern-lab up` is the same as `tern
//! lab up`.
#![forbid(unsafe_code)]

use clap::Parser;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use tern_lab::command::{self, LabArgs};

fn main() -> ExitCode {
    let called = std::env::args_os().next().unwrap_or_default();
    if Path::new(&called).file_name().is_some_and(|name| name == tern_lab::INIT_NAME) {
        return tern_lab::init_main().into();
    }
    match command::run(LabArgs::parse().command) {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "tern-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
