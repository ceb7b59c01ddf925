//! Generated input for the real programs, the same on every machine.

use crate::programs::build_directory;
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Changes when the generated content changes, so that no test uses the output of an older version.
const INPUT_VERSION: &str = "material-4";
const SAMPLES_PER_SECOND: u32 = 44_100;

/// A deterministic sequence (Knuth's MMIX constants).
#[derive(Debug, Clone)]
pub struct Sequence(pub u64);

impl Sequence {
    /// The next number, of 48 bits.
    pub fn advance(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.advance() % limit.max(1)
    }
}

/// The folder with the generated files; generates them if it does not exist.
///
/// # Errors
/// If it cannot be written.
pub fn generated_files() -> Result<PathBuf> {
    let folder = build_directory()?.join(INPUT_VERSION);
    let lock = File::create(build_directory()?.join("material.lock"))?;
    lock.lock()?;
    if !folder.exists() {
        let half = build_directory()?.join("material.half");
        let _ = fs::remove_dir_all(&half);
        fs::create_dir_all(&half)?;
        song(&half.join("song.wav"), 75).context("cannot make the song")?;
        text(&half.join("text"), 260_000)?;
        source(&half.join("source.c"), 350)?;
        statements(&half.join("load.sql"), 300_000)?;
        fs::rename(&half, &folder)?;
    }
    Ok(folder)
}

/// Two sliding voices and noise: 16 bits, stereo.
fn song(at: &Path, seconds: u32) -> Result<()> {
    let count = seconds * SAMPLES_PER_SECOND;
    let mut out = BufWriter::new(File::create(at)?);
    out.write_all(b"RIFF")?;
    out.write_all(&(36 + count * 4).to_le_bytes())?;
    out.write_all(b"WAVEfmt \x10\0\0\0\x01\0\x02\0")?;
    out.write_all(&SAMPLES_PER_SECOND.to_le_bytes())?;
    out.write_all(&(SAMPLES_PER_SECOND * 4).to_le_bytes())?;
    out.write_all(b"\x04\0\x10\0data")?;
    out.write_all(&(count * 4).to_le_bytes())?;
    let mut noise = Sequence(5);
    let (mut low, mut high) = (0i64, 0i64);
    for sample in 0..i64::from(count) {
        // Triangle waves in integers only: floating point libraries differ in the last bit.
        let triangle =
            |at: i64, period: i64, loud: i64| ((at % period) * 2 - period).abs() * 2 * loud / period - loud;
        low += 3 + (sample / 30_000) % 5;
        high += 11 + (sample / 7_000) % 13;
        let hiss = noise.below(400) as i64 - 200;
        let left = triangle(low, 800, 9000) + triangle(high, 700, 3000) + hiss;
        let right = triangle(low, 1000, 8000) - triangle(high, 900, 4000) + hiss / 2;
        out.write_all(&(left as i16).to_le_bytes())?;
        out.write_all(&(right as i16).to_le_bytes())?;
    }
    Ok(out.flush()?)
}

/// Lines of numbers and words of varying frequency.
fn text(at: &Path, lines: u32) -> Result<()> {
    let mut out = BufWriter::new(File::create(at)?);
    let mut random = Sequence(9);
    for line in 0..lines {
        write!(out, "{} {}", random.below(1_000_000), line % 997)?;
        for _ in 0..8 {
            let rank = random.below(2000).min(random.below(2000));
            write!(out, " {}", word(rank))?;
        }
        writeln!(out)?;
    }
    Ok(out.flush()?)
}

fn word(rank: u64) -> String {
    let mut numbers = Sequence(rank * 77 + 1);
    let syllables = ["ta", "ne", "ro", "mi", "ku", "sel", "bor", "an", "ith", "ue"];
    (0..=rank % 4).map(|_| syllables[numbers.below(10) as usize]).collect()
}

/// C with loops, structures and switches, which keeps an optimising compiler busy.
fn source(at: &Path, functions: u32) -> Result<()> {
    let mut text = String::from("struct pair { unsigned a, b; };\n");
    let mut random = Sequence(21);
    for number in 0..functions {
        let _ = writeln!(
            text,
            "unsigned f{number}(struct pair *p, unsigned n) {{\n  unsigned s = {};\n  for (unsigned i = 0; i < n; i++) {{",
            random.below(1000)
        );
        let _ = writeln!(text, "    switch ((p[i].a ^ i) % 5) {{");
        for case in 0..4 {
            let (a, b) = (random.below(31) + 1, random.below(900));
            let _ = writeln!(text, "    case {case}: s = s * {b} + (p[i].b >> {a}); p[i].a += s; break;");
        }
        let callee = random.below(u64::from(number) + 1).min(u64::from(number.saturating_sub(1)));
        let call = if number > 0 { format!("f{callee}(p, n / 2)") } else { "s".to_owned() };
        let _ = writeln!(text, "    default: s += {call}; p[i].b ^= s;\n    }}\n  }}\n  return s;\n}}");
    }
    Ok(fs::write(at, text)?)
}

/// SQL: two tables, an index, and queries.
fn statements(at: &Path, rows: u32) -> Result<()> {
    let mut out = BufWriter::new(File::create(at)?);
    writeln!(out, "CREATE TABLE one(id INTEGER PRIMARY KEY, name TEXT, number INTEGER);\nBEGIN;")?;
    let mut random = Sequence(33);
    for row in 0..rows {
        let name = word(random.below(3000));
        writeln!(
            out,
            "INSERT INTO one VALUES({row}, '{name}-{}', {});",
            random.below(50),
            random.below(9999)
        )?;
    }
    writeln!(
        out,
        "COMMIT;\nCREATE INDEX by_name ON one(name);\n\
         CREATE TABLE two AS SELECT name, count(*) AS many, sum(number) AS total FROM one GROUP BY name;\n\
         SELECT count(*), sum(total) FROM two;\n\
         SELECT a.name, b.many FROM one a JOIN two b ON a.name = b.name ORDER BY a.number, a.id LIMIT 20;\n\
         SELECT sum(x * y % 1000) FROM (SELECT number AS x FROM one LIMIT 1500), (SELECT many AS y FROM two LIMIT 1500);"
    )?;
    Ok(out.flush()?)
}
