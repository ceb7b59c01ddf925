//! The tasks of the storm: scripts of `tests/tasks`, and the programs that they need.

/// A task.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    pub(crate) name: &'static str,
    /// A file of `tests/tasks`; its output and files are the same each time.
    pub(crate) script: &'static str,
    /// Its arguments in the default tests, and in the long ones.
    pub(crate) quick: &'static [&'static str],
    pub(crate) long: &'static [&'static str],
    /// Programs, or absolute paths of files, and the Debian packages that contain them.
    pub(crate) needs: &'static [(&'static str, &'static str)],
}

pub(crate) const SHELL: Task = Task {
    name: "shell",
    script: "shell.sh",
    quick: &["1"],
    long: &["6"],
    needs: &[("bash", "bash"), ("/usr/bin/python3", "python3")],
};

/// Threads start and end all the time, so that some start while their process is being migrated.
pub(crate) const BIRTHS: Task = Task {
    name: "births",
    script: "births.sh",
    quick: &[],
    long: &[],
    needs: &[("/usr/bin/python3", "python3")],
};

pub(crate) const COREUTILS: Task = Task {
    name: "coreutils",
    script: "coreutils.sh",
    quick: &["1"],
    long: &["4"],
    needs: &[("sort", "coreutils"), ("find", "findutils"), ("diff", "diffutils"), ("openssl", "openssl")],
};

pub(crate) const BUILD: Task = Task {
    name: "build",
    script: "build.sh",
    quick: &["20", "2"],
    long: &["120", "3"],
    needs: &[("make", "make"), ("gcc", "gcc"), ("ar", "binutils")],
};

pub(crate) const GIT: Task =
    Task { name: "git", script: "git.sh", quick: &["12"], long: &["40"], needs: &[("git", "git")] };

pub(crate) const SQLITE: Task = Task {
    name: "sqlite",
    script: "sqlite.sh",
    quick: &["3000"],
    long: &["40000"],
    needs: &[("sqlite3", "sqlite3")],
};

pub(crate) const OPENSSL: Task = Task {
    name: "openssl",
    script: "openssl.sh",
    quick: &["1"],
    long: &["6"],
    needs: &[("openssl", "openssl")],
};

/// For Debian 12; scripts/setup finds that of other versions.
pub(crate) const TEST_SUITE: (&str, &str) =
    ("/usr/lib/python3.11/test/test_os.py", "libpython3.11-testsuite");

/// Modules of Python's tests.
pub(crate) const PYTHON: Task = Task {
    name: "python",
    script: "python.sh",
    quick: &["test_fcntl"],
    long: MODULES,
    needs: &[("/usr/bin/python3", "python3"), TEST_SUITE],
};

/// Quick modules are run several times in one process (`*N`), slow ones in parts (`NAME PART`), by
/// `python.sh`, which also lists the excluded tests and the reasons. test_fcntl is in `quick`.
/// test_mmap runs without its files of gigabytes, which each move would read.
const MODULES: &[&str] = &[
    "test_os",
    "test_select",
    "test_fork1",
    "test_wait4",
    "test_posix",
    "test_poll",
    "test_selectors",
    "test_subprocess",
    "test_signal",
    "test_time",
    "test_tarfile",
    "test_shutil",
    "test_mailbox",
    "test_threading",
    "test_threadsignals",
    "test_mmap*20 mmap.MmapTests",
    "test_eintr",
    "test_file_eintr",
    "test_faulthandler",
    "test_thread*3",
    "test_queue",
    "test_socket",
    "test_socketserver*8",
    "test_epoll*200",
    "test_pty*30",
    "test_shelve*8",
    "test_asyncio.test_subprocess",
    "test_asyncio.test_unix_events*12",
    "test_asyncio.test_events",
    "test_asyncio.test_sendfile",
    "test_ssl",
    "test_multiprocessing_fork WithThreads",
    "test_multiprocessing_fork WithProcesses",
    "test_multiprocessing_fork Manager",
    "test_multiprocessing_fork .Test",
    "test_multiprocessing_main_handling",
];
