//! Build tools with mexec before their commands, as docs/guide/builds.md describes, compared with
//! the same builds without mexec.

use anyhow::Result;
use serde_json::Value;
use std::collections::HashSet;
use std::process::Stdio;
use tern_tests::cluster::Cluster;
use tern_tests::runs::outcome::result_of;

/// A project with a file that does not compile, and a compiler that takes a while for each file.
/// Before the build, mexec has recorded this compiler as a short command, as after many version
/// queries. `$CC` is the compiler, with or without mexec before it. (Incremental compilation is off
/// since rustc would name its objects differently each time.)
const PROJECT: &str = r#"
unset MAKELEVEL MAKEFLAGS MFLAGS CARGO_MAKEFLAGS RUSTC_WRAPPER CARGO_TARGET_DIR
export CARGO_INCREMENTAL=0
mkdir -p /tmp/p && cd /tmp/p
cat > cc <<'END'
#!/bin/sh
case " $* " in *" -c "*) i=${SPIN-80000}; while [ $i -gt 0 ]; do i=$((i - 1)); done ;; esac
exec gcc "$@"
END
chmod +x cc
for i in 1 2 3 4 5 6 7 8; do echo "int f$i(int x) { return x * $i; }" > f$i.c; done
echo 'int main(void) { return 0; }' > f9.c
echo 'int broken(' > bad.c
CC=${P:+$P }/tmp/p/cc
mkdir -p short && ln -sf /bin/true short/cc && ln -sf /bin/true short/rustc
[ -z "$SHORT" ] || for i in $(seq 12); do mexec -n 1 short/cc; mexec -n 1 short/rustc; done
export TERN_PLACED=/tmp/p/notes
"#;

/// A build tool: how it builds everything, how it builds the broken file, and where its objects
/// are.
struct Tool {
    name: &'static str,
    all: &'static str,
    broken: &'static str,
    objects: &'static str,
}

const TOOLS: [Tool; 8] = [
    Tool {
        name: "make",
        all: r#"printf 'p: f1.o f2.o f3.o f4.o f5.o f6.o f7.o f8.o f9.o\n\t$(CC) -o $@ $^\n' > Makefile; make -j8 CC="$CC""#,
        broken: r#"make CC="$CC" bad.o"#,
        objects: "*.o p",
    },
    Tool {
        name: "ninja",
        all: r#"printf 'rule cc\n  command = %s -c -o $out $in\n' "$CC" > build.ninja
            for i in f1 f2 f3 f4 f5 f6 f7 f8 f9 bad; do echo "build $i.o: cc $i.c" >> build.ninja; done
            echo 'default f1.o f2.o f3.o f4.o f5.o f6.o f7.o f8.o f9.o' >> build.ninja; ninja -j8"#,
        broken: "ninja bad.o",
        objects: "*.o",
    },
    Tool {
        name: "cmake",
        all: r#"printf 'cmake_minimum_required(VERSION 3.13)\nproject(p C)\nadd_executable(p %s)\nadd_library(bad OBJECT EXCLUDE_FROM_ALL bad.c)\n' "$(echo f*.c)" > CMakeLists.txt
            cmake -B b -DCMAKE_C_COMPILER=/tmp/p/cc ${P:+"-DCMAKE_C_COMPILER_LAUNCHER=mexec;-r"} > log || cat log; cmake --build b -j8"#,
        broken: "cmake --build b --target bad",
        objects: "b/CMakeFiles/p.dir/*.o b/p",
    },
    Tool {
        name: "meson",
        all: r#"printf "project('p', 'c')\nexecutable('p'$(printf ", '%s'" f*.c))\nstatic_library('bad', 'bad.c', build_by_default: false)\n" > meson.build
            CC="$CC" meson setup b > log || cat log; ninja -C b -j8"#,
        broken: "ninja -C b libbad.a",
        objects: "b/p.p/*.o b/p",
    },
    Tool {
        name: "xargs",
        all: "ls f*.c | xargs -P8 -n1 $CC -c",
        broken: "echo bad.c | xargs -P8 -n1 $CC -c",
        objects: "*.o",
    },
    Tool {
        name: "parallel",
        all: "parallel -j8 $CC -c {} ::: f*.c",
        broken: "parallel -j8 $CC -c {} ::: bad.c",
        objects: "*.o",
    },
    Tool {
        name: "sh",
        all: "for f in f*.c; do $CC -c $f & all=\"$all $!\"; done; for one in $all; do wait $one || exit; done",
        broken: "$CC -c bad.c & wait $!",
        objects: "*.o",
    },
    Tool {
        name: "cargo",
        all: r#"mkdir c && cd c
            member() { mkdir -p $1/src; printf '[package]\nname = "%s"\nversion = "0.1.0"\nedition = "2021"\n' $1 > $1/Cargo.toml; }
            for i in 1 2 3 4 5 6; do member a$i; echo "pub fn f() -> String { format!(\"{}\", $i) }" > a$i/src/lib.rs; done
            member bad; echo 'pub fn f( {}' > bad/src/lib.rs
            member top; printf '[dependencies]\na1 = { path = "../a1" }\n' >> top/Cargo.toml
            echo 'fn main() { std::fs::write(std::env::var("OUT_DIR").unwrap() + "/x.rs", "7").unwrap(); }' > top/build.rs
            echo 'fn main() { println!("{} {}", a1::f(), include!(concat!(env!("OUT_DIR"), "/x.rs"))); }' > top/src/main.rs
            printf '[workspace]\nresolver = "2"\nmembers = ["a1", "a2", "a3", "a4", "a5", "a6", "bad", "top"]\n' > Cargo.toml
            RUSTC_WRAPPER=$W cargo build -j8 --offline --workspace --exclude bad 2> log; code=$?; grep -A3 warning log; target/debug/top; (exit $code)"#,
        broken: "RUSTC_WRAPPER=$W cargo build --offline -q -p bad",
        objects: "c/target/debug/deps/*.rlib c/target/debug/top",
    },
];

/// The result of a build: its exit status, the checksums of its objects, and the result of building
/// the broken file.
type BuildResult = (Option<i32>, String, (Option<i32>, String, String));

fn build(cluster: &Cluster, tool: &Tool, placed: bool) -> Result<BuildResult> {
    let run = |line: &str, short: &str| {
        let (prefix, spin) = if placed { ("mexec -r", "80000") } else { ("", "0") };
        let mut command = cluster.command(1, "sh");
        command.args(["-c", &format!("{PROJECT}\n{line}")]).stdin(Stdio::null());
        command
            .env("P", prefix)
            .env("W", if placed { "mexec" } else { "" })
            .env("SPIN", spin)
            .env("SHORT", short);
        Ok::<_, std::io::Error>(result_of(&command.output()?))
    };
    let (code, out, err) = run(tool.all, if placed { "yes" } else { "" })?;
    let made = cluster.run(1, &["sh", "-c", &format!("cd /tmp/p; sha256sum {}", tool.objects)])?;
    let made = String::from_utf8_lossy(&made).into_owned();
    let warns = format!("{out}{err}").contains("warning");
    assert!(made.lines().count() >= 7 && !warns, "{}: {made}\n{out}\n{err}", tool.name);
    let cd = if tool.name == "cargo" { "cd c\n" } else { "" };
    let (failed, out, err) = run(&format!("{cd}{}", tool.broken), "")?;
    // Some tools print the command with all its words.
    let plain = |text: &str| text.replace("mexec -r ", "");
    Ok((code, made, (failed, plain(&out), plain(&err))))
}

/// Number of commands that ran, number of those on another node, and the largest number that ran at
/// home at once.
fn ran(cluster: &Cluster) -> Result<(usize, usize, usize)> {
    let notes = cluster.run(1, &["cat", "/tmp/p/notes"])?;
    let (mut all, mut away, mut most) = (0, 0, 0);
    let mut here = HashSet::new();
    for line in String::from_utf8_lossy(&notes).lines() {
        let note: Value = serde_json::from_str(line)?;
        let id = note["id"].as_str().unwrap_or_default().to_owned();
        match note["event"].as_str() {
            Some("begun") => {
                all += 1;
                if note["node"].as_u64().is_some_and(|node| node > 1) {
                    away += 1;
                } else {
                    here.insert(id);
                }
            }
            Some("ended") => drop(here.remove(&id)),
            _ => {}
        }
        most = most.max(here.len());
    }
    Ok((all, away, most))
}

#[test]
fn every_build_tool_has_the_same_results_with_mexec() {
    let cluster = Cluster::with_nodes("tools", 3).unwrap();
    for tool in &TOOLS {
        let is_there = cluster.command(1, "sh").args(["-c", "command -v $0", tool.name]).output().unwrap();
        if !is_there.status.success() {
            eprintln!("build_tools: {} is not installed, so it was not tried", tool.name);
            continue;
        }
        let begun = std::time::Instant::now();
        let afresh = || cluster.run(1, &["rm", "-rf", "/tmp/p"]).unwrap();
        afresh();
        let native = build(&cluster, tool, false).unwrap();
        assert!(native.0 == Some(0) && native.2.0 != Some(0), "{}: {native:?}", tool.name);
        afresh();
        let placed = build(&cluster, tool, true).unwrap();
        assert_eq!(placed, native, "{}", tool.name);
        let (all, away, most) = ran(&cluster).unwrap();
        let seen =
            format!("{}: {away} of {all} commands ran elsewhere, and {most} at once at home", tool.name);
        eprintln!("{seen}, {:?}", begun.elapsed());
        // Home runs one command more than it has CPUs, and as many again that it expects to be
        // short.
        assert!(all >= 8 && away > 0 && most <= 4, "{seen}");
    }
}
