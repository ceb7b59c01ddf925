//! `tern token`: makes a token for the next node that joins.

use crate::tool::Invocation;
use crate::{Failure, client, help, output};
use clap::{Args, Command};
use tern_control::{Reply, Request};

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How long it is valid: a number with s, m, h or d, from 1m to 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    valid: u32,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("token"))
        .about("Make a token for the next node that joins")
        .long_about("Make a token for the next node that joins. It is valid for one join; anyone who has it can join.")
        .after_help(help::after_help("  tern token\n  tern token --valid 2d", ""))
}

/// `tern token …`.
///
/// # Errors
/// If ternd does not answer, or the caller may not admit nodes.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    match client::request(&Request::Token { seconds: options.valid })? {
        Reply::Token(token) => output::print(&format!("{token}\n")),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// Parses a time such as `90s` or `2d` into seconds.
fn parse_duration(text: &str) -> Result<u32, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match &text[digits.len()..] {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err("expected a number with s, m, h or d, such as 90s or 2d".into()),
    };
    let number: Option<u32> = digits.parse().ok();
    let seconds = number.and_then(|number| number.checked_mul(unit));
    seconds.filter(|s| (60..=604_800).contains(s)).ok_or_else(|| "a token is valid from 1m to 7d".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_and_limits() {
        assert_eq!(
            ["60s", "90m", "1h", "7d"].map(|t| parse_duration(t).unwrap()),
            [60, 5_400, 3_600, 604_800]
        );
        for wrong in ["", "1", "h", "59s", "8d", "99999999d", "1w", "-1h", "1é"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
    }
}
