//! What can be known of a recipe's command line before it runs.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Commands that are over before they could be sent anywhere.
const TRIVIAL: [&str; 22] = [
    ":", "[", "cd", "chmod", "cmp", "echo", "exit", "export", "false", "fi", "if", "ln", "mkdir", "mv",
    "printf", "rm", "rmdir", "set", "test", "then", "touch", "true",
];

/// What a command does, as far as its line shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// It compiles.
    Compile,
    /// It links, or makes a library.
    Link,
    /// Whatever else.
    #[default]
    Other,
}

/// Linkers, and what makes libraries.
const LINKERS: [&str; 7] = ["ar", "ld", "gold", "lld", "mold", "ranlib", "collect2"];

/// Compilers, which write only what they are told to, and may be run twice.
const COMPILERS: [&str; 10] =
    ["cc", "c++", "gcc", "g++", "clang", "clang++", "as", "rustc", "gfortran", "ccache"];

/// The commands of a line: the first words of what `;`, `|`, `&` and parentheses divide, after assignments.
fn commands(script: &str) -> Vec<&str> {
    let parts = script.split([';', '|', '&', '(', ')', '`', '\n', '{', '}']);
    let first = parts.filter_map(|part| part.split_whitespace().find(|word| !is_assignment(word)));
    first.map(|word| word.trim_start_matches(['@', '-', '+', '\'', '"', '!'])).collect()
}

fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map(|(name, _)| name);
    name.is_some_and(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
}

fn base(command: &str) -> &str {
    command.rsplit('/').next().unwrap_or(command)
}

/// Whether it is a recursive make, which needs the jobserver and runs recipes itself: make has left it the jobserver's descriptors,
/// or, where that is a named pipe, it names make.
pub(super) fn is_recursive(script: &str) -> bool {
    let flags = std::env::var("MAKEFLAGS").unwrap_or_default();
    has_jobserver(&flags) || names_make(script)
}

fn names_make(script: &str) -> bool {
    let is_make = |word: &str| {
        let word = word.trim_matches(['\'', '"', '(', ')', '`', ';']);
        matches!(base(word), "make" | "gmake" | "mpmake" | "ninja")
    };
    script.split_whitespace().any(is_make)
}

/// Whether the descriptors that `--jobserver-auth=3,4` names are a pipe: make closes them for whoever is not to have them.
fn has_jobserver(flags: &str) -> bool {
    let named = |name: &str| flags.split_whitespace().filter_map(|word| word.strip_prefix(name)).next_back();
    let Some((reader, _)) =
        named("--jobserver-auth=").or_else(|| named("--jobserver-fds=")).and_then(|f| f.split_once(','))
    else {
        return false;
    };
    let link = fs::read_link(format!("/proc/self/fd/{reader}"));
    link.is_ok_and(|what| what.to_string_lossy().starts_with("pipe:"))
}

/// Whether all of it takes no time.
pub(super) fn is_trivial(script: &str) -> bool {
    let trivial: HashSet<&str> = TRIVIAL.into_iter().collect();
    commands(script).iter().all(|command| trivial.contains(base(command)))
}

/// Whether this is a compiler, whatever its version and the machine that it compiles for.
fn is_compiler(name: &str) -> bool {
    let plain = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    COMPILERS.iter().any(|compiler| plain == *compiler || plain.ends_with(&format!("-{compiler}")))
}

/// What a command line does: what the first of its commands does that is not over at once.
pub(super) fn kind(script: &str) -> Kind {
    let found = commands(script).into_iter().map(base).find(|name| !TRIVIAL.contains(name));
    // `mexec gcc …`, `ccache gcc …`: a compiler in any case.
    match found {
        Some(name)
            if LINKERS.contains(&name) || name.rsplit('-').next().is_some_and(|n| LINKERS.contains(&n)) =>
        {
            Kind::Link
        }
        Some(name) if is_compiler(name) || ["distcc", "mexec"].contains(&name) && script.contains(" -c ") => {
            let stops_early = |word: &str| {
                ["-c", "-S", "-E", "-fsyntax-only"].contains(&word) || word.starts_with("--emit")
            };
            let is_rust = name == "rustc";
            if is_rust || script.split_whitespace().any(stops_early) { Kind::Compile } else { Kind::Link }
        }
        _ => Kind::Other,
    }
}

/// Whether all of it may be run twice: compilations.
pub(super) fn is_repeatable(script: &str) -> bool {
    let may = |command: &&str| {
        let name = base(command);
        TRIVIAL.contains(&name) && !["mv", "rm"].contains(&name) || is_compiler(name)
    };
    let commands = commands(script);
    // What reads its standard input has something that is not there twice.
    let reads = script.split_whitespace().any(|word| word == "-");
    !commands.is_empty() && !script.contains(">>") && !reads && commands.iter().all(may)
}

/// The shell that these makefiles name, which the one on make's command line has replaced: the last that says so in plain words.
pub(super) fn shell(makefiles: Option<&OsStr>) -> PathBuf {
    let files = makefiles.map(OsStr::to_string_lossy).unwrap_or_default();
    let said = files.split_whitespace().filter_map(|file| fs::read_to_string(file).ok());
    let named = said.filter_map(|text| named_in(&text)).next_back();
    named.filter(|shell| Path::new(shell).is_absolute()).map_or_else(|| "/bin/sh".into(), PathBuf::from)
}

fn named_in(makefile: &str) -> Option<String> {
    let value = |line: &str| {
        let line = line.trim_start().strip_prefix("SHELL")?.trim_start();
        let value = line.trim_start_matches([':', '?']).strip_prefix('=')?.trim();
        // What is put together of variables only make knows; the shells that do what they do are bash's.
        if value.contains('$') {
            Some("/bin/bash".to_owned())
        } else {
            value.split_whitespace().next().map(str::to_owned)
        }
    };
    makefile.lines().filter_map(value).next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_no_time_stays() {
        assert!(is_trivial("echo '  CC x.o'") && is_trivial("mkdir -p a/b && touch a/b/.d; true"));
        assert!(is_trivial("if test -f x; then rm -f x; fi"));
        assert!(!is_trivial("echo '  CC x.o'; gcc -c x.c") && !is_trivial("CC=1 ./configure"));
    }

    #[test]
    fn compilations_may_be_done_twice() {
        assert!(
            is_repeatable("gcc -O2 -c -o x.o x.c")
                && is_repeatable("echo CC; x86_64-linux-gnu-gcc-12 -c x.c")
        );
        assert!(!is_repeatable("gcc -c x.c && mv x.o y.o") && !is_repeatable("./generate > x.c"));
        assert!(!is_repeatable("gcc -x c -c -o x.o -"));
        assert!(!is_repeatable("ar r lib.a x.o") && !is_repeatable("echo x >> log"));
    }

    #[test]
    fn what_a_line_does_is_seen() {
        for (line, what) in [
            ("gcc -O2 -c -o x.o x.c", Kind::Compile),
            ("echo '  CC x.o'; x86_64-linux-gnu-gcc-12 -c x.c", Kind::Compile),
            ("ccache g++ -c x.cc", Kind::Compile),
            ("rustc --crate-type lib x.rs", Kind::Compile),
            ("gcc -o all x.o y.o", Kind::Link),
            ("rm -f lib.a; arm-linux-gnueabi-ar rcs lib.a x.o", Kind::Link),
            ("./generate -c > x.c", Kind::Other),
            ("true", Kind::Other),
        ] {
            assert_eq!(kind(line), what, "{line}");
        }
    }

    #[test]
    fn recursive_makes_are_known() {
        assert!(
            names_make("cd src && make all")
                && names_make("/usr/bin/make -C x")
                && !names_make("cmake --build x")
        );
        assert!(
            !has_jobserver("-j4 --jobserver-auth=997,998")
                && !has_jobserver("")
                && !has_jobserver("--jobserver-auth=fifo:/x")
        );
    }

    #[test]
    fn the_makefile_s_own_shell_is_found() {
        assert_eq!(named_in("CC=gcc\nSHELL = /bin/bash\nall:\n"), Some("/bin/bash".into()));
        assert_eq!(named_in("SHELL:=$(CONFIG_SHELL)\n"), Some("/bin/bash".into()));
        assert_eq!(named_in("SHELLS = x\nall: ; echo $(SHELL)\n"), None);
        assert_eq!(shell(None), Path::new("/bin/sh"));
    }
}
