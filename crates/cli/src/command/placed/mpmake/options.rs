//! mpmake's own options, which are not passed to make.

use crate::tool::Invocation;
use crate::{Failure, output};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The options.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    /// The file for the report.
    pub(super) report: Option<PathBuf>,
}

/// Separates mpmake's options from those of make.
///
/// # Errors
/// If an option lacks its file, or the file cannot be written, which is better reported before the
/// build.
pub(super) fn parse(invocation: &Invocation<'_>) -> Result<(Options, Vec<OsString>), Failure> {
    let (mut options, mut make_args) = (Options::default(), Vec::new());
    let mut args = invocation.args.iter();
    while let Some(word) = args.next() {
        let file = match word.as_bytes() {
            b"--" => {
                make_args.push(word.clone());
                make_args.extend(args.cloned());
                break;
            }
            b"--report" => args.next().cloned(),
            other => match other.strip_prefix(b"--report=") {
                Some(file) => Some(OsString::from_vec(file.to_vec())),
                None => {
                    make_args.push(word.clone());
                    continue;
                }
            },
        };
        match file.filter(|file| !file.is_empty()) {
            Some(file) => options.report = Some(file.into()),
            None => return Err(Failure::usage(invocation.tool, "--report needs a file")),
        }
    }
    if let Some(file) = &options.report {
        let result = std::fs::OpenOptions::new().append(true).create(true).open(file);
        result.map_err(|error| write_failure(file, &error))?;
    }
    Ok((options, make_args))
}

/// The number of jobs that make's options request; 0 for -j without a number.
pub(super) fn jobs(words: &[OsString]) -> Option<u32> {
    let mut jobs = None;
    for (at, word) in words.iter().enumerate() {
        let word = word.to_string_lossy();
        if word == "--" {
            break;
        }
        // --jobserver-auth and --jobserver-style are other options.
        let long = word.strip_prefix("--jobs").filter(|rest| rest.is_empty() || rest.starts_with('='));
        let number = match long.or_else(|| word.strip_prefix("-j")) {
            None => continue,
            Some("") => words.get(at + 1).and_then(|next| next.to_str()).and_then(|next| next.parse().ok()),
            Some(number) => number.trim_start_matches('=').parse().ok(),
        };
        jobs = Some(number.unwrap_or(0));
    }
    jobs
}

/// Writes the report.
///
/// # Errors
/// Exit code 74 if the file cannot be written.
pub(super) fn write(file: &Path, page: &str) -> Result<(), Failure> {
    std::fs::write(file, page).map_err(|error| write_failure(file, &error))
}

fn write_failure(file: &Path, error: &std::io::Error) -> Failure {
    let message = format!("{} cannot be written: {}", file.display(), output::error_text(error));
    Failure::with_code(74, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn own_options_are_not_passed_to_make() {
        let file = std::env::temp_dir().join(format!("tern-report-{}.html", std::process::id()));
        let name = file.display();
        let parse_line = |line: &str| {
            let args = words(line);
            parse(&Invocation { tool: "mpmake", args: &args }).map_err(|failure| failure.code)
        };
        let with = |line: &str| Ok((Options { report: Some(file.clone()) }, words(line)));
        assert_eq!(parse_line(&format!("-k --report {name} all")), with("-k all"));
        assert_eq!(parse_line(&format!("--report={name} -- --report")), with("-- --report"));
        assert_eq!(parse_line("-k -- --report=x"), Ok((Options::default(), words("-k -- --report=x"))));
        assert_eq!((parse_line("--report"), parse_line("--report=")), (Err(2), Err(2)));
        assert_eq!(parse_line("--report /nonexistent/x all"), Err(74));
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn jobs_option_is_found_in_all_its_forms() {
        let jobs = |line: &str| jobs(&words(line));
        assert_eq!(
            (jobs("all"), jobs("-j4 all"), jobs("-j 4"), jobs("--jobs=4")),
            (None, Some(4), Some(4), Some(4))
        );
        assert_eq!(jobs("-j4 --jobserver-auth=3,4 --jobserver-style=fifo"), Some(4));
        assert_eq!((jobs("-j all"), jobs("-- -j4"), jobs("-j2 -j3")), (Some(0), None, Some(3)));
    }
}
