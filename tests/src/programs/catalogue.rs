//! The catalogue of tiny test programs. The first line of each source states what the program
//! proves.

/// One invocation of a program.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its source is `programs/NAME.c`.
    pub name: &'static str,
    /// Its arguments.
    pub args: &'static [&'static str],
    /// How it uses a node, which decides how its location is verified.
    pub kind: Kind,
    /// Its standard input.
    pub input: Input,
}

/// How a program uses a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Computes all the time: the test verifies that CPU time is used where it runs.
    Computes,
    /// Makes system calls, waits and forks.
    Calls,
    /// Calls execve all the time. Each execve runs at home, so its location at one moment says
    /// little.
    Execs,
    /// Not migratable: the request is refused with this word in the reason, and the program is
    /// unharmed.
    Refused(&'static str),
}

/// Standard input of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Nothing.
    None,
    /// Lines through a pipe, one after each answer.
    Pipe,
    /// Lines typed on a terminal, which is also its output.
    Terminal,
    /// As `Terminal`, but ended by Ctrl-C.
    Interrupted,
}

const fn entry(name: &'static str, kind: Kind) -> Entry {
    Entry { name, args: &[], kind, input: Input::None }
}

const fn ending(args: &'static [&'static str]) -> Entry {
    Entry { name: "ending", args, kind: Kind::Calls, input: Input::None }
}

const fn staying(args: &'static [&'static str], word: &'static str) -> Entry {
    Entry { name: "staying", args, kind: Kind::Refused(word), input: Input::None }
}

/// All entries.
pub const ENTRIES: &[Entry] = &[
    // The longest program begins first, so that no journey has to wait for it alone at the end: it
    // makes forty waits of a quarter of a second.
    entry("interrupted", Kind::Calls),
    entry("arith", Kind::Computes),
    entry("avx", Kind::Computes),
    entry("registers", Kind::Computes),
    entry("heap", Kind::Computes),
    entry("recursion", Kind::Computes),
    entry("vm", Kind::Computes),
    entry("brk", Kind::Calls),
    entry("vast", Kind::Calls),
    entry("manymaps", Kind::Calls),
    entry("jit", Kind::Computes),
    entry("remap", Kind::Computes),
    entry("advice", Kind::Calls),
    entry("pinned", Kind::Calls),
    entry("placement", Kind::Calls),
    entry("growth", Kind::Computes),
    entry("ownmemory", Kind::Calls),
    Entry { name: "ownmemory", args: &["reach"], kind: Kind::Calls, input: Input::None },
    entry("jumps", Kind::Computes),
    entry("tls", Kind::Calls),
    entry("clocks", Kind::Calls),
    entry("cputime", Kind::Computes),
    entry("rusage", Kind::Calls),
    entry("cputimers", Kind::Calls),
    entry("random", Kind::Calls),
    entry("randomcalls", Kind::Calls),
    entry("dlopen", Kind::Calls),
    entry("locale", Kind::Calls),
    entry("file", Kind::Calls),
    entry("filemap", Kind::Calls),
    entry("mapping", Kind::Calls),
    entry("protection", Kind::Calls),
    entry("lengths", Kind::Calls),
    entry("siblings", Kind::Calls),
    entry("twoways", Kind::Calls),
    entry("written", Kind::Calls),
    entry("mappedaway", Kind::Calls),
    entry("stalling", Kind::Calls),
    entry("delegation", Kind::Calls),
    entry("opens", Kind::Calls),
    entry("fastpath", Kind::Calls),
    entry("filekinds", Kind::Calls),
    entry("directory", Kind::Calls),
    entry("append", Kind::Calls),
    entry("locks", Kind::Calls),
    entry("descriptors", Kind::Calls),
    entry("title", Kind::Calls),
    Entry {
        name: "surroundings",
        args: &["two words", "", "*", "--flag=ä"],
        kind: Kind::Calls,
        input: Input::None,
    },
    entry("credentials", Kind::Calls),
    entry("procself", Kind::Calls),
    entry("procfiles", Kind::Calls),
    entry("rights", Kind::Calls),
    entry("ownstate", Kind::Calls),
    entry("timers", Kind::Calls),
    entry("timelimits", Kind::Calls),
    entry("uninterrupted", Kind::Calls),
    entry("handlerwaits", Kind::Calls),
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
    entry("ownsignals", Kind::Calls),
    entry("sigflood", Kind::Calls),
    entry("fasttimers", Kind::Calls),
    entry("undermask", Kind::Calls),
    entry("sigsegv", Kind::Calls),
    entry("forktree", Kind::Calls),
    entry("cores", Kind::Calls),
    entry("execchain", Kind::Execs),
    entry("spawn", Kind::Calls),
    entry("vforkcalls", Kind::Calls),
    ending(&["exit", "0"]),
    ending(&["exit", "200"]),
    ending(&["abort"]),
    ending(&["kill"]),
    ending(&["term"]),
    ending(&["segv"]),
    ending(&["fpe"]),
    ending(&["pipe"]),
    ending(&["orphan"]),
    entry("threads", Kind::Computes),
    entry("threadbirth", Kind::Calls),
    entry("threadsignals", Kind::Calls),
    entry("sigorder", Kind::Calls),
    entry("threadactions", Kind::Calls),
    entry("threadcalls", Kind::Calls),
    entry("waiting", Kind::Calls),
    entry("threadfork", Kind::Calls),
    entry("threadexec", Kind::Execs),
    entry("forkexec", Kind::Execs),
    entry("forkkill", Kind::Calls),
    entry("threadmany", Kind::Calls),
    entry("threadlast", Kind::Calls),
    entry("threadleader", Kind::Calls),
    entry("barriers", Kind::Calls),
    entry("unmapped", Kind::Calls),
    entry("shared", Kind::Calls),
    entry("outsider", Kind::Refused("shared")),
    staying(&["seccomp"], "seccomp:"),
    staying(&["thread filter"], "seccomp:"),
    staying(&["thread strict"], "seccomp:"),
    staying(&["thread personality"], "different personalities"),
    staying(&["traced"], "traced:"),
    staying(&["shared"], "shared address space:"),
    staying(&["ring"], "special descriptor:"),
    staying(&["perf"], "special descriptor:"),
    staying(&["uffd"], "special descriptor:"),
    staying(&["uffd elsewhere"], "userfaultfd:"),
    staying(&["aio"], "special mapping:"),
    staying(&["secret"], "special mapping:"),
    staying(&["huge"], "huge pages:"),
    staying(&["sealed"], "sealed memory:"),
    staying(&["leased"], "lease:"),
    staying(&["leased shared"], "lease:"),
    staying(&["device"], "device mapping:"),
    staying(&["vdso"], "it has unmapped"),
    entry("epolls", Kind::Calls),
    entry("notices", Kind::Calls),
    entry("passing", Kind::Calls),
    entry("inet", Kind::Calls),
    entry("splicing", Kind::Calls),
    Entry { name: "splicing", args: &["large"], kind: Kind::Calls, input: Input::None },
    entry("manyfiles", Kind::Calls),
    entry("pidfds", Kind::Calls),
    entry("ptys", Kind::Calls),
    entry("prompt", Kind::Calls),
    entry("sigqueues", Kind::Calls),
    entry("clones", Kind::Calls),
    entry("descent", Kind::Calls),
    entry("uncreated", Kind::Calls),
];

/// The entries that can be migrated.
pub fn migratable() -> impl Iterator<Item = &'static Entry> {
    ENTRIES.iter().filter(|e| !matches!(e.kind, Kind::Refused(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_source_is_in_the_catalogue_and_states_what_it_proves() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
        let mut sources = BTreeSet::new();
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|e| e == "c") {
                let text = std::fs::read_to_string(&path).unwrap();
                let says = text.starts_with("/* Proves: ") && text.contains("#include \"program.h\"");
                assert!(says, "{} does not begin with \"Proves:\"", path.display());
                sources.insert(path.file_stem().unwrap().to_str().unwrap().to_owned());
            }
        }
        let listed: BTreeSet<String> = ENTRIES.iter().map(|e| e.name.to_owned()).collect();
        assert_eq!(listed, sources);
    }
}
