//! What is put into the storm: scripts of `tests/tasks`, and what they need.

/// One of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    pub(crate) name: &'static str,
    /// In `tests/tasks`; it says and leaves the same each time.
    pub(crate) script: &'static str,
    /// What it is called with in the default tests, and in the long ones.
    pub(crate) quick: &'static [&'static str],
    pub(crate) long: &'static [&'static str],
    /// Programs, or files by their full name, and the Debian packages that have them.
    pub(crate) needs: &'static [(&'static str, &'static str)],
}

pub(crate) const SHELL: Task = Task {
    name: "shell",
    script: "shell.sh",
    quick: &["1"],
    long: &["6"],
    needs: &[("bash", "bash"), ("/usr/bin/python3", "python3")],
};

/// Threads that begin and end all the time, so that some begin while their process is being sent.
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

/// Debian 12's; scripts/setup finds that of another Python.
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

/// What is quick is run several times in one process (`*N`), what takes minutes in parts (`NAME PART`), as `python.sh` has
/// it; which tests are left out, and why, is there too. Without test_fcntl, which is above. Of test_mmap without the files of gigabytes, which each move reads.
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
