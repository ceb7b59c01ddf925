//! mpmake's own words, which make is not to see.

use crate::tool::Call;
use crate::{Failure, output};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// What they say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Own {
    /// Where the report goes.
    pub(super) report: Option<PathBuf>,
}

/// Takes them out; what is left is make's.
///
/// # Errors
/// If one lacks its file, or that cannot be written: better now than when all is made.
pub(super) fn read(call: &Call<'_>) -> Result<(Own, Vec<OsString>), Failure> {
    let (mut own, mut left) = (Own::default(), Vec::new());
    let mut words = call.args.iter();
    while let Some(word) = words.next() {
        let file = match word.as_bytes() {
            b"--" => {
                left.push(word.clone());
                left.extend(words.cloned());
                break;
            }
            b"--report" => words.next().cloned(),
            other => match other.strip_prefix(b"--report=") {
                Some(file) => Some(OsString::from_vec(file.to_vec())),
                None => {
                    left.push(word.clone());
                    continue;
                }
            },
        };
        match file.filter(|file| !file.is_empty()) {
            Some(file) => own.report = Some(file.into()),
            None => return Err(Failure::usage(call.tool, "--report needs a file")),
        }
    }
    if let Some(file) = &own.report {
        let tried = std::fs::OpenOptions::new().append(true).create(true).open(file);
        tried.map_err(|error| unwritten(file, &error))?;
    }
    Ok((own, left))
}

/// How many jobs these words of make's say, if they say so; 0 for as many as there are.
pub(super) fn jobs(words: &[OsString]) -> Option<u32> {
    let mut jobs = None;
    for (at, word) in words.iter().enumerate() {
        let word = word.to_string_lossy();
        if word == "--" {
            break;
        }
        let number = match word.strip_prefix("--jobs").or_else(|| word.strip_prefix("-j")) {
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
/// Exit code 74 if its file does not take it.
pub(super) fn write(file: &Path, page: &str) -> Result<(), Failure> {
    std::fs::write(file, page).map_err(|error| unwritten(file, &error))
}

fn unwritten(file: &Path, error: &std::io::Error) -> Failure {
    let message = format!("{} cannot be written: {}", file.display(), output::reason(error));
    Failure { code: 74, message, hint: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn make_gets_all_but_what_is_ours() {
        let file = std::env::temp_dir().join(format!("tern-report-{}.html", std::process::id()));
        let name = file.display();
        let read = |line: &str| {
            let args = words(line);
            read(&Call { tool: "mpmake", args: &args }).map_err(|failure| failure.code)
        };
        let with = |line: &str| Ok((Own { report: Some(file.clone()) }, words(line)));
        assert_eq!(read(&format!("-k --report {name} all")), with("-k all"));
        assert_eq!(read(&format!("--report={name} -- --report")), with("-- --report"));
        assert_eq!(read("-k -- --report=x"), Ok((Own::default(), words("-k -- --report=x"))));
        assert_eq!((read("--report"), read("--report=")), (Err(2), Err(2)));
        assert_eq!(read("--report /nonexistent/x all"), Err(74));
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn jobs_are_found_however_they_are_said() {
        let jobs = |line: &str| jobs(&words(line));
        assert_eq!(
            (jobs("all"), jobs("-j4 all"), jobs("-j 4"), jobs("--jobs=4")),
            (None, Some(4), Some(4), Some(4))
        );
        assert_eq!((jobs("-j all"), jobs("-- -j4"), jobs("-j2 -j3")), (Some(0), None, Some(3)));
    }
}
