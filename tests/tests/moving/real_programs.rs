//! Real programs, migrated at random times at least ten times each: the same output as at home, and
//! most of the work done away. `TERN_REAL=flac-encode,gcc` selects programs; `TERN_SEED=N` repeats
//! a run's choices.

use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tern_tests::cluster::Cluster;
use tern_tests::moves::random_moves::{Moves, move_randomly};
use tern_tests::programs::generated_input::generated_files;
use tern_tests::programs::{build_directory, wanted};
use tern_tests::runs::running::{ANNOUNCE, Running};
use tern_tests::runs::verdict::Verdict;

/// Number of moves for each program.
const MIN_MOVES: u32 = 10;
/// A program is run again until it has been moved `MIN_MOVES` times, and has used enough of its CPU
/// time away; at most this many times. Which of its processes are moved is left to chance.
const MAX_ROUNDS: u32 = 8;
/// Minimum fraction of the CPU time that must be used away.
const MIN_AWAY_SHARE: f64 = 0.3;
const RUN_TIMEOUT: Duration = Duration::from_secs(120);

/// Name, and a script of `sh`. `$IN` is the input folder and the working directory is empty. All
/// files left there and the standard output are compared. Scripts of one process use `exec`.
type Task = (&'static str, &'static str);

const TASKS: [Task; 9] = [
    ("flac-encode", "exec flac -8 -e --silent -o song.flac $IN/song.wav"),
    ("gzip", "exec gzip -7 -n -c $IN/text >text.gz"),
    ("xz", "exec xz -T1 -1 -c $IN/text >text.xz"),
    (
        "gawk",
        "exec gawk '{ for (i = 3; i <= NF; i++) n[$i]++; s += $1 * $2 % 7 } END { for (w in n) print n[w], w | \"sort\"; close(\"sort\"); printf \"%d\\n\", s }' $IN/text $IN/text $IN/text $IN/text $IN/text $IN/text",
    ),
    ("sort", "exec sort --parallel=1 -S 4M -T . -k3,3 -k1,1n -o sorted $IN/text $IN/text $IN/text"),
    ("bash", "exec bash $IN/script"),
    ("gcc", "exec gcc -O2 -c -o source.o $IN/source.c"),
    ("python3", "exec /usr/bin/python3 -S $IN/compute.py"),
    ("sqlite3", "exec sqlite3 data.db <$IN/load.sql"),
];

/// Programs that resemble the former, for long runs.
const MORE_TASKS: [Task; 6] = [
    (
        "flac-decode",
        "for i in 1 2 3 4 5 6 7 8 9; do flac -d --silent -o $i.wav $IN/song.flac; done; cksum *.wav; rm *.wav",
    ),
    ("zstd", "exec zstd --single-thread --no-asyncio -12 -q -c $IN/text >text.zst"),
    (
        "mawk",
        "exec mawk 'BEGIN { for (i = 1; i < 30000000; i++) { s = (s * 31 + i) % 1000003; t += s / i } printf \"%d %.6f\\n\", s, t }'",
    ),
    (
        "sha256sum",
        "set -- $IN/song.wav $IN/text; set -- $@ $@ $@ $@; exec sha256sum $@ $@ $@ $@ $@ $@ $@ $@ $@ $@ $@ $@",
    ),
    ("perl", "exec perl $IN/compute.pl"),
    ("sqlite3-memory", "exec sqlite3 :memory: <$IN/load.sql"),
];

const SCRIPT: &str = r#"
set -o pipefail
total=0
for round in 1 2 3 4 5 6; do
    words=$(cut -d' ' -f3 "$IN/text" | sort | uniq -c | sort -rn | head -40 | tee "round-$round" | wc -l)
    lines=$(grep -c "ta" <(tr a-m A-M <"$IN/text" | tr A-M a-m))
    for ((i = 0; i < 20000; i++)); do (( total = (total * 31 + i + lines) % 1000003 )); done
    (cd / && exit "$round") || echo "sub-shell said $?"
    echo "round $round: $words words, $lines lines, $total" | sed 's/round/Round/'
done
trap 'echo trapped' USR1; kill -USR1 $$
echo "end of $(basename "$0") with ${#PIPESTATUS[@]}"
"#;

const PYTHON: &str = r"
import hashlib, json, math, re, zlib
table, digest = {}, hashlib.sha256()
for n in range(1, 160000):
    table[n * 7919 % 65537] = math.sqrt(n) * math.sin(n)
    if n % 1000 == 0:
        digest.update(repr(sorted(table.items())[:50]).encode())
words = re.findall(r'[a-z]+', 'ta ne ro mi ' * 90000)
primes = [p for p in range(2, 30000) if all(p % d for d in range(2, int(p ** 0.5) + 1))]
with open('result.json', 'w') as out:
    json.dump({'words': len(words), 'primes': len(primes), 'crc': zlib.crc32(repr(primes).encode())}, out)
print(digest.hexdigest())
";

const PERL: &str = r#"
use strict; use warnings;
my (%count, $sum, @list); $sum = 0;
open(my $in, '<', "$ENV{IN}/text") or die;
while (<$in>) { for my $w (split) { $count{$w}++ } $sum = ($sum * 33 + length) % 1000003 }
push @list, "$_=$count{$_}" for sort { $count{$b} <=> $count{$a} || $a cmp $b } keys %count;
open(my $out, '>', "counts") or die; print $out join("\n", @list), "\n"; close $out;
my $text = join ' ', @list[0 .. 200]; my $hits = 0;
for my $i (1 .. 300) { $hits++ while $text =~ /(\w)(\w+)\1/g }
print "$sum $hits ", scalar(@list), "\n";
"#;

/// The result of one run: its output, its status, and every file of its folder.
#[derive(Debug, PartialEq, Eq)]
struct RunResult {
    out: Vec<u8>,
    err: Vec<u8>,
    status: i32,
    files: BTreeMap<String, Vec<u8>>,
}

fn files(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for file in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let file = file?;
        files.insert(file.file_name().to_string_lossy().into_owned(), fs::read(file.path())?);
    }
    Ok(files)
}

/// The difference between two results. For files, only sizes and the first difference are shown.
fn difference(got: &RunResult, wanted: &RunResult) -> Option<String> {
    if got == wanted {
        return None;
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned();
    let mut report = format!("status {} instead of {}", got.status, wanted.status);
    for (name, got, wanted) in [("stdout", &got.out, &wanted.out), ("stderr", &got.err, &wanted.err)] {
        if got != wanted {
            report += &format!("\n{name}: {:?}\ninstead of {:?}", text(got), text(wanted));
        }
    }
    let names: std::collections::BTreeSet<_> = got.files.keys().chain(wanted.files.keys()).collect();
    for name in names {
        let (a, b) = (got.files.get(name), wanted.files.get(name));
        if a != b {
            let at = a.zip(b).map(|(a, b)| a.iter().zip(b).take_while(|(a, b)| a == b).count());
            report += &format!(
                "\nfile {name}: {:?} bytes instead of {:?}, first difference at {at:?}",
                a.map(Vec::len),
                b.map(Vec::len)
            );
        }
    }
    Some(report)
}

/// Creates the input files of the tasks.
fn prepare() -> Result<PathBuf> {
    let folder = generated_files()?;
    for (name, text) in [("script", SCRIPT), ("compute.py", PYTHON), ("compute.pl", PERL)] {
        fs::write(folder.join(name), text)?;
    }
    if !folder.join("song.flac").exists() {
        let end = Command::new("flac")
            .args(["-5", "--silent", "-f", "-o"])
            .args([folder.join("song.flac"), folder.join("song.wav")])
            .status()
            .context("cannot run flac; install it")?;
        ensure!(end.success(), "flac does not encode");
    }
    Ok(folder)
}

/// Runs the task without Tern in an empty folder.
fn native(script: &str, input: &Path) -> Result<RunResult> {
    let folder = build_directory()?.join(format!("native-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let mut command = Command::new("sh");
    command.args(["-c", ANNOUNCE, "sh", "sh", "-c", script]);
    command.env("IN", input).env("LC_ALL", "C").current_dir(&folder);
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let end = running.finish(RUN_TIMEOUT)?;
    ensure!(end.status == 0, "it fails without migration: {}", String::from_utf8_lossy(&end.err));
    let result = RunResult { out: end.out, err: end.err, status: end.status, files: files(&folder)? };
    fs::remove_dir_all(&folder)?;
    Ok(result)
}

/// Runs the task on node 1, migrated until it ends.
fn moved(cluster: &Cluster, script: &str, input: &Path, seed: u64) -> Result<(RunResult, Moves)> {
    let folder = format!("/tmp/tern-real-{seed}");
    cluster.run(1, &["mkdir", "-p", &folder])?;
    // The folder exists on node 1 only, so the script changes into it.
    let script = format!("cd {folder} || exit; {script}");
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh", "mosrun", "-L", "sh", "-c", &script]);
    command.env("IN", input).env("LC_ALL", "C");
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let (pid, stop) = (running.pid, AtomicBool::new(false));
    let (end, moves) = thread::scope(|scope| {
        let mover = scope.spawn(|| move_randomly(cluster, pid, seed, &stop, |_done| ()));
        let end = running.finish(RUN_TIMEOUT);
        stop.store(true, Ordering::Relaxed);
        (end, mover.join())
    });
    let moves = moves.map_err(|_panic| anyhow::anyhow!("the mover panicked"))??;
    let end = end.with_context(|| format!("{moves:?}"))?;
    let files = files(&cluster.lab().node(1).path(&folder)?)?;
    cluster.run(1, &["rm", "-r", &folder])?;
    Ok((RunResult { out: end.out, err: end.err, status: end.status, files }, moves))
}

fn task(cluster: &Cluster, name: &str, script: &str, seed: u64) -> Result<Vec<String>> {
    let input = generated_files()?;
    let wanted = native(script, &input)?;
    let cpu = |node| cluster.cpu_seconds(node);
    let before = [cpu(1)?, cpu(2)?, cpu(3)?];
    let used = || -> Result<[f64; 3]> { Ok([cpu(1)? - before[0], cpu(2)? - before[1], cpu(3)? - before[2]]) };
    let share_away = |used: [f64; 3]| (used[1] + used[2]) / used.iter().sum::<f64>();
    let (mut moves, mut round, mut refused, begun) = (0, 0, Vec::new(), Instant::now());
    while round < MAX_ROUNDS && (moves < MIN_MOVES || share_away(used()?) < MIN_AWAY_SHARE) {
        let (result, done) = moved(cluster, script, &input, seed + u64::from(round))?;
        if let Some(text) = difference(&result, &wanted) {
            bail!("round {round}, seed {seed}, after {} moves: {text}", done.done);
        }
        ensure!(done.broken.is_empty(), "tern failed, though the program did not: {:?}", done.broken);
        moves += done.done;
        refused.extend(done.refused);
        round += 1;
    }
    ensure!(moves >= MIN_MOVES, "moved only {moves} times in {round} rounds; refused: {refused:?}");
    let used = used()?;
    let share = share_away(used);
    ensure!(
        share >= MIN_AWAY_SHARE,
        "only {:.0} % of the CPU time was used away: {used:.2?} s",
        share * 100.0
    );
    let mut notes = vec![format!(
        "{name}: {moves} moves in {round} rounds, {:.0} % away, {:.1} s",
        share * 100.0,
        begun.elapsed().as_secs_f64()
    )];
    notes.extend(refused.into_iter().take(3).map(|why| format!("refused once: {why}")));
    Ok(notes)
}

#[test]
fn real_programs_produce_the_same_bytes() -> Result<()> {
    produce_the_same_bytes("real", &TASKS)
}

#[test]
fn more_real_programs_produce_the_same_bytes() -> Result<()> {
    produce_the_same_bytes("morereal", &MORE_TASKS)
}

fn produce_the_same_bytes(cluster: &str, tasks: &[Task]) -> Result<()> {
    prepare()?;
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let seed = std::env::var("TERN_SEED").map_or(Ok(clock), |text| text.parse())?;
    eprintln!("TERN_SEED={seed}");
    let cluster = Cluster::up(cluster)?;
    let mut verdict = Verdict::default();
    let tasks = tasks.iter().filter(|(name, _)| wanted("TERN_REAL", name));
    // One at a time, since CPU time is measured for the whole node.
    verdict.each(tasks.map(|task| (task.0.to_owned(), *task)), 1, |(name, script)| {
        task(&cluster, name, script, seed).map_err(|e| format!("{e:#}\n{}", cluster.diagnostics(0)))
    });
    verdict.conclude();
    Ok(())
}

#[test]
fn tasks_are_deterministic() {
    let input = prepare().unwrap();
    let mut verdict = Verdict::default();
    let tasks = TASKS.iter().chain(&MORE_TASKS);
    verdict.each(tasks.map(|task| (task.0.to_owned(), *task)), 1, |(name, script)| {
        let begun = Instant::now();
        let first = native(script, &input).map_err(|e| format!("{e:#}"))?;
        let took = begun.elapsed().as_secs_f64();
        let second = native(script, &input).map_err(|e| format!("{e:#}"))?;
        let noise = first.out.len() + first.files.values().map(Vec::len).sum::<usize>();
        match difference(&second, &first) {
            Some(text) => Err(text),
            None if noise == 0 => Err("it leaves nothing to compare".into()),
            None => Ok(vec![format!("{name}: {took:.1} s, {noise} bytes")]),
        }
    });
    verdict.conclude();
}
