//! The tiny programs and what the harness must know of each. What a program proves, its own first lines say.

/// One way to call one program.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its source is `programs/NAME.c`.
    pub name: &'static str,
    /// What it is called with.
    pub args: &'static [&'static str],
    /// How it uses a node, which decides what a journey can prove.
    pub kind: Kind,
    /// What it is made to talk to.
    pub input: Input,
}

/// How a program uses a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It computes all the time: where it runs, CPU time is used, and the test looks for it.
    Computes,
    /// It calls, waits and forks.
    Calls,
    /// It replaces itself all the time, and each execve comes home: where it is at a moment says little.
    Execs,
    /// Not moved yet: refused with this word in the reason, and unharmed.
    Refused(&'static str),
}

/// Standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Nothing.
    None,
    /// Lines through a pipe, one after each answer.
    Pipe,
    /// Lines typed on a terminal, which is also its output.
    Terminal,
    /// The same, ended by Ctrl-C.
    Interrupted,
}

const fn entry(name: &'static str, kind: Kind) -> Entry {
    Entry { name, args: &[], kind, input: Input::None }
}

const fn ending(args: &'static [&'static str]) -> Entry {
    Entry { name: "ending", args, kind: Kind::Calls, input: Input::None }
}

/// All of them.
pub const ENTRIES: &[Entry] = &[
    entry("arith", Kind::Computes),
    entry("avx", Kind::Computes),
    entry("registers", Kind::Computes),
    entry("heap", Kind::Computes),
    entry("recursion", Kind::Computes),
    entry("vm", Kind::Computes),
    entry("brk", Kind::Calls),
    entry("jumps", Kind::Computes),
    entry("tls", Kind::Calls),
    entry("clocks", Kind::Calls),
    entry("cputime", Kind::Computes),
    entry("random", Kind::Calls),
    entry("dlopen", Kind::Calls),
    entry("locale", Kind::Calls),
    entry("file", Kind::Calls),
    entry("filemap", Kind::Calls),
    entry("directory", Kind::Calls),
    entry("append", Kind::Calls),
    entry("locks", Kind::Calls),
    entry("descriptors", Kind::Calls),
    Entry {
        name: "surroundings",
        args: &["two words", "", "*", "--flag=ä"],
        kind: Kind::Calls,
        input: Input::None,
    },
    entry("credentials", Kind::Calls),
    entry("procself", Kind::Calls),
    entry("pipe", Kind::Calls),
    entry("pipe_blocked", Kind::Calls),
    entry("pipe_big", Kind::Calls),
    entry("socketpair", Kind::Calls),
    entry("polling", Kind::Calls),
    entry("sleep", Kind::Calls),
    Entry { name: "lines", args: &[], kind: Kind::Calls, input: Input::Pipe },
    Entry { name: "lines", args: &[], kind: Kind::Calls, input: Input::Terminal },
    Entry { name: "lines", args: &[], kind: Kind::Calls, input: Input::Interrupted },
    entry("alarms", Kind::Calls),
    entry("restart", Kind::Calls),
    entry("sigchld", Kind::Calls),
    entry("altstack", Kind::Calls),
    entry("sigmask", Kind::Calls),
    entry("sigself", Kind::Calls),
    entry("sigsegv", Kind::Calls),
    entry("forktree", Kind::Calls),
    entry("cores", Kind::Calls),
    entry("execchain", Kind::Execs),
    entry("spawn", Kind::Calls),
    ending(&["exit", "0"]),
    ending(&["exit", "200"]),
    ending(&["abort"]),
    ending(&["kill"]),
    ending(&["term"]),
    ending(&["segv"]),
    ending(&["fpe"]),
    ending(&["pipe"]),
    ending(&["orphan"]),
    entry("threads", Kind::Refused("thread")),
    entry("shared", Kind::Refused("shared")),
];

/// Those that can be moved.
pub fn movable() -> impl Iterator<Item = &'static Entry> {
    ENTRIES.iter().filter(|e| !matches!(e.kind, Kind::Refused(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_source_is_in_the_catalogue_and_says_what_it_proves() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
        let mut sources = BTreeSet::new();
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|e| e == "c") {
                let text = std::fs::read_to_string(&path).unwrap();
                let says = text.starts_with("/* Proves: ") && text.contains("#include \"program.h\"");
                assert!(says, "{} does not begin with what it proves", path.display());
                sources.insert(path.file_stem().unwrap().to_str().unwrap().to_owned());
            }
        }
        let listed: BTreeSet<String> = ENTRIES.iter().map(|e| e.name.to_owned()).collect();
        assert_eq!(listed, sources);
    }
}
