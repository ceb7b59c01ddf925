//! Classifies a recipe's command line before it runs.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Commands that end faster than they could be placed.
const TRIVIAL: [&str; 22] = [
    ":", "[", "cd", "chmod", "cmp", "echo", "exit", "export", "false", "fi", "if", "ln", "mkdir", "mv",
    "printf", "rm", "rmdir", "set", "test", "then", "touch", "true",
];

/// The kind of work of a command, judged by its command line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// It compiles.
    Compile,
    /// It links, or builds a library.
    Link,
    /// Anything else.
    #[default]
    Other,
}

/// Linkers and archivers.
const LINKERS: [&str; 7] = ["ar", "ld", "gold", "lld", "mold", "ranlib", "collect2"];

/// Compilers: they write only their output files, so they may run twice.
const COMPILERS: [&str; 10] =
    ["cc", "c++", "gcc", "g++", "clang", "clang++", "as", "rustc", "gfortran", "ccache"];

/// The commands of a line: the first word, after assignments, of each part between `;`, `|`, `&`,
/// parentheses, braces, backquotes and line ends.
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

/// Whether the recipe is a recursive make, which needs the jobserver and runs recipes itself: make
/// has passed it the jobserver's descriptors, or the command line names make or ninja. If the
/// jobserver is a named pipe, make passes it to every recipe, and only the command line counts.
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

/// Whether the descriptors in `--jobserver-auth=3,4` are a pipe. make closes them for recipes that
/// are not recursive.
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

/// Whether all commands of the line are trivial.
pub(super) fn is_trivial(script: &str) -> bool {
    let trivial: HashSet<&str> = TRIVIAL.into_iter().collect();
    commands(script).iter().all(|command| trivial.contains(base(command)))
}

/// Whether this is a compiler of any version and for any target.
fn is_compiler(name: &str) -> bool {
    let plain = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    COMPILERS.iter().any(|compiler| plain == *compiler || plain.ends_with(&format!("-{compiler}")))
}

/// The kind of a command line: that of its first command that is not trivial.
pub(super) fn kind(script: &str) -> Kind {
    let found = commands(script).into_iter().map(base).find(|name| !TRIVIAL.contains(name));
    // `distcc gcc -c …` and `mexec gcc -c …` compile as well; ccache is one of the compilers.
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

/// Whether all commands of the line may run twice: compilations, and trivial commands other than
/// `mv` and `rm`.
pub(super) fn is_repeatable(script: &str) -> bool {
    let is_safe = |command: &&str| {
        let name = base(command);
        TRIVIAL.contains(&name) && !["mv", "rm"].contains(&name) || is_compiler(name)
    };
    let commands = commands(script);
    // A command that reads standard input cannot read the same input twice.
    let reads = script.split_whitespace().any(|word| word == "-");
    !commands.is_empty() && !script.contains(">>") && !reads && commands.iter().all(is_safe)
}

/// mpmake overrides SHELL on make's command line. This function returns the shell that the
/// makefiles would have chosen: the value of their last assignment to SHELL; /bin/bash if that
/// value contains a variable; /bin/sh if there is no assignment, or its value is not an absolute
/// path.
pub(super) fn makefile_shell(makefiles: Option<&OsStr>) -> PathBuf {
    let files = makefiles.map(OsStr::to_string_lossy).unwrap_or_default();
    let texts = files.split_whitespace().filter_map(|file| fs::read_to_string(file).ok());
    let named = texts.filter_map(|text| shell_in(&text)).next_back();
    named.filter(|shell| Path::new(shell).is_absolute()).map_or_else(|| "/bin/sh".into(), PathBuf::from)
}

fn shell_in(makefile: &str) -> Option<String> {
    let value = |line: &str| {
        let line = line.trim_start().strip_prefix("SHELL")?.trim_start();
        let value = line.trim_start_matches([':', '?']).strip_prefix('=')?.trim();
        // Only make can expand variables; bash understands the syntax of every likely shell.
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
    fn trivial_commands_are_recognised() {
        assert!(is_trivial("echo '  CC x.o'") && is_trivial("mkdir -p a/b && touch a/b/.d; true"));
        assert!(is_trivial("if test -f x; then rm -f x; fi"));
        assert!(!is_trivial("echo '  CC x.o'; gcc -c x.c") && !is_trivial("CC=1 ./configure"));
    }

    #[test]
    fn compilations_are_repeatable() {
        assert!(
            is_repeatable("gcc -O2 -c -o x.o x.c")
                && is_repeatable("echo CC; x86_64-linux-gnu-gcc-12 -c x.c")
        );
        assert!(!is_repeatable("gcc -c x.c && mv x.o y.o") && !is_repeatable("./generate > x.c"));
        assert!(!is_repeatable("gcc -x c -c -o x.o -"));
        assert!(!is_repeatable("ar r lib.a x.o") && !is_repeatable("echo x >> log"));
    }

    #[test]
    fn kind_of_a_line_is_recognised() {
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
    fn recursive_makes_are_recognised() {
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
    fn shell_set_by_the_makefile_is_found() {
        assert_eq!(shell_in("CC=gcc\nSHELL = /bin/bash\nall:\n"), Some("/bin/bash".into()));
        assert_eq!(shell_in("SHELL:=$(CONFIG_SHELL)\n"), Some("/bin/bash".into()));
        assert_eq!(shell_in("SHELLS = x\nall: ; echo $(SHELL)\n"), None);
        assert_eq!(makefile_shell(None), Path::new("/bin/sh"));
    }
}
