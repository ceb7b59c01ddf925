//! Multi-threaded programs in the storm, and one whose processes share memory. Python's own tests
//! of both are in `tasks.rs`.

use super::tasks::Task;

// Each has a section of its name in `tests/tasks/threaded.sh`.
pub(crate) const FFMPEG: Task = threaded("ffmpeg", &["ffmpeg"], &[("ffmpeg", "ffmpeg")]);
pub(crate) const REDIS: Task =
    threaded("redis", &["redis"], &[("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")]);
pub(crate) const GO: Task = threaded("go", &["go"], &[("go", "golang-go")]);
pub(crate) const JAVA: Task = threaded("java", &["java"], &[("javac", "default-jdk-headless")]);
pub(crate) const NODE: Task = threaded("node", &["node"], &[("node", "nodejs")]);
/// `tests/programs/parallel.rs`.
pub(crate) const RAYON: Task = threaded("rayon", &["rayon", env!("CARGO_BIN_EXE_tern-parallel")], &[]);
pub(crate) const MULTIPROCESSING: Task =
    threaded("multiprocessing", &["multiprocessing"], &[("python3", "python3")]);

const fn threaded(
    name: &'static str,
    called: &'static [&'static str],
    needs: &'static [(&'static str, &'static str)],
) -> Task {
    Task { name, script: "threaded.sh", quick: called, long: called, needs }
}
