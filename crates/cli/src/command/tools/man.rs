//! `tern man DIR`: writes manual pages, generated from the same descriptions as the help.

use crate::tool::Invocation;
use crate::{Failure, help};
use clap::{Args, Command};
use std::path::{Path, PathBuf};
use tern_control::RefusalKind;

/// The command-line options.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The directory; it is created if it does not exist
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Describes the command line.
pub(crate) fn describe() -> Command {
    Options::augment_args(help::command("man"))
        .about("Write manual pages")
        .long_about(
            "Write the manual pages of all tools to a directory: tern.1, mosrun.1, tern-init.1 and so on.",
        )
        .after_help(help::after_help("  tern man /usr/local/share/man/man1", ""))
}

/// `tern man …`.
///
/// # Errors
/// If a page cannot be written; the pages before it have been written.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(options) = help::parse::<Options>(describe(), invocation)? else {
        return Ok(());
    };
    write(&options.dir)
        .map_err(|error| Failure::new(RefusalKind::BadRequest, format!("{}: {error}", options.dir.display())))
}

fn write(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for (name, command) in help::pages() {
        let words = name.replacen('-', " ", 1);
        let page = clap_mangen::Man::new(command.bin_name(words).display_name(name.clone()));
        let mut text = Vec::new();
        page.title(name.to_uppercase()).render(&mut text)?;
        std::fs::write(dir.join(format!("{name}.1")), text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tool_has_a_page_with_its_examples() {
        let dir = std::env::temp_dir().join(format!("tern-man-{}", std::process::id()));
        write(&dir).unwrap();
        let pages: Vec<_> = help::pages()
            .into_iter()
            .map(|(name, _)| (name.clone(), std::fs::read_to_string(dir.join(name + ".1")).unwrap()))
            .collect();
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(pages.len(), crate::tool::TOOLS.len() + 1);
        for (name, page) in pages {
            assert!(page.contains("Exit status:"), "{name}");
        }
    }
}
