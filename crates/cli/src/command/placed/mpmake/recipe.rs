//! Classifies a recipe's command line before it runs.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
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
/// makefiles would have chosen for a target, and the shell's options. That is the value of their
/// last assignment to SHELL for this target, or else of the last one for all targets. It is
/// /bin/bash if that value contains a variable, and /bin/sh if there is no assignment, or if its
/// value is not an absolute path.
pub(super) fn makefile_shell(makefiles: Option<&OsStr>, target: &str) -> (PathBuf, Vec<OsString>) {
    let files = makefiles.map(OsStr::to_string_lossy).unwrap_or_default();
    let texts: Vec<String> =
        files.split_whitespace().filter_map(|file| fs::read_to_string(file).ok()).collect();
    let last = |target| texts.iter().filter_map(|text| shell_in(text, target)).next_back();
    let value = last(Some(target)).or_else(|| last(None)).unwrap_or_default();
    let mut words = value.split_whitespace();
    match words.next().filter(|shell| Path::new(shell).is_absolute()) {
        // Only make can expand variables; bash understands the syntax of every likely shell.
        _ if value.contains('$') => ("/bin/bash".into(), Vec::new()),
        Some(shell) => (shell.into(), words.map(OsString::from).collect()),
        None => ("/bin/sh".into(), Vec::new()),
    }
}

/// The value of the last assignment to SHELL for this target, or for all targets.
fn shell_in(makefile: &str, target: Option<&str>) -> Option<String> {
    let value = |line: &str| {
        // A recipe, or an assignment in a branch of `ifeq`, begins with blanks.
        let assignment = match target {
            None => line.trim_start(),
            Some(target) => {
                let (targets, rest) = line.split_once(':').filter(|_| !line.starts_with('\t'))?;
                let is_meant = targets.split_whitespace().any(|pattern| matches_target(pattern, target));
                Some(rest.trim_start_matches(':')).filter(|_| is_meant)?
            }
        };
        let modifiers = ["override", "export", "private"];
        let mut assignment = assignment.trim_start();
        while let Some((_, rest)) = assignment
            .split_once(char::is_whitespace)
            .filter(|(first, _)| target.is_some() && modifiers.contains(first))
        {
            assignment = rest.trim_start();
        }
        let value = assignment.strip_prefix("SHELL")?.trim_start();
        let value = value.trim_start_matches([':', '?']).strip_prefix('=')?;
        Some(value.split('#').next().unwrap_or_default().trim().to_owned())
    };
    makefile.lines().filter_map(value).next_back()
}

/// Whether a target is this one, or one that this pattern with `%` stands for.
fn matches_target(pattern: &str, target: &str) -> bool {
    match pattern.split_once('%') {
        None => pattern == target,
        Some((begin, end)) => target
            .strip_prefix(begin)
            .is_some_and(|rest| !rest.is_empty() && rest.len() > end.len() && rest.ends_with(end)),
    }
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
        assert_eq!(shell_in("CC=gcc\nSHELL = /bin/bash # new\nall:\n", None), Some("/bin/bash".into()));
        assert_eq!(shell_in("SHELL:=$(CONFIG_SHELL)\n", None), Some("$(CONFIG_SHELL)".into()));
        assert_eq!(shell_in("SHELLS = x\nall: ; echo $(SHELL)\n", None), None);
        assert_eq!(makefile_shell(None, "all"), ("/bin/sh".into(), Vec::new()));
    }

    #[test]
    fn shell_of_one_target_is_found() {
        let text =
            "a b: SHELL := /bin/bash -e\n%.o: export SHELL=/bin/dash\nc: SHELLS=x\n\techo d: SHELL=/bin/x\n";
        let of = |target| shell_in(text, Some(target));
        assert_eq!(of("b"), Some("/bin/bash -e".into()));
        assert_eq!(of("dir/x.o"), Some("/bin/dash".into()));
        assert_eq!((of("c"), of("d"), of(".o"), of("")), (None, None, None, None));
        assert_eq!(shell_in(text, None), None);
        let file = std::env::temp_dir().join(format!("tern-makefile-{}", std::process::id()));
        fs::write(&file, format!("SHELL = /bin/zsh\n{text}e: SHELL = $(X) -e\n")).unwrap();
        let shell = |target| makefile_shell(Some(file.as_os_str()), target);
        assert_eq!(shell("a"), ("/bin/bash".into(), vec!["-e".into()]));
        assert_eq!(shell("c"), ("/bin/zsh".into(), Vec::new()));
        assert_eq!(shell("e"), ("/bin/bash".into(), Vec::new()));
        fs::remove_file(file).unwrap();
    }
}
