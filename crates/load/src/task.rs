//! Parses the files of `/proc/PID`. Input is bytes, because a command's name is chosen by the
//! program and need not be UTF-8.

/// Clock ticks per second in `/proc` (USER_HZ); 100 on all Linux systems.
pub const TICKS_PER_SECOND: u64 = 100;

/// The used fields of `/proc/PID/stat`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcStat {
    /// Its name: at most 15 bytes, or 64 for a kernel thread.
    pub command: String,
    /// State: `R`, `S`, `D`, `Z` …
    pub state: char,
    /// Parent PID.
    pub parent: i32,
    /// Process group.
    pub group: i32,
    /// Session.
    pub session: i32,
    /// Whether it has a controlling terminal.
    pub terminal: bool,
    /// Whether it is a kernel thread.
    pub is_kernel_thread: bool,
    /// User and system time, in ticks.
    pub ticks: u64,
    /// Number of threads.
    pub threads: u32,
    /// Start time, in ticks since boot; unique together with the PID.
    pub start: u64,
    /// Pages resident in memory.
    pub resident_pages: u64,
}

/// The kernel's flag of kernel threads (PF_KTHREAD).
const PF_KTHREAD: u64 = 0x0020_0000;

impl ProcStat {
    /// `None` if the text is truncated or malformed.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        // The name in parentheses may contain anything, including parentheses.
        let open = text.iter().position(|&byte| byte == b'(')?;
        let close = text.iter().rposition(|&byte| byte == b')')?;
        let command = String::from_utf8_lossy(text.get(open + 1..close)?).chars().take(64).collect();
        let fields: Vec<&str> =
            std::str::from_utf8(text.get(close + 1..)?).ok()?.split_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        let id = |at: usize| fields.get(at)?.parse::<i32>().ok();
        Some(Self {
            command,
            state: fields.first()?.chars().next()?,
            parent: id(1)?,
            group: id(2)?,
            session: id(3)?,
            terminal: id(4)? != 0,
            is_kernel_thread: number(6)? & PF_KTHREAD != 0,
            ticks: number(11)?.saturating_add(number(12)?),
            threads: number(17)?.try_into().ok()?,
            start: number(19)?,
            resident_pages: number(21)?,
        })
    }
}

/// `schedstat` of a thread: the scheduler's counters since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SchedStat {
    /// Time on a CPU, in nanoseconds.
    pub run_ns: u64,
    /// Time runnable but not on a CPU, in nanoseconds, including waiting for a quota. It is added
    /// when the wait ends.
    pub wait_ns: u64,
    /// How often it was scheduled on a CPU.
    pub timeslices: u64,
}

impl SchedStat {
    /// `None` if the text is malformed; all zero where the kernel does not count.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut numbers = std::str::from_utf8(text).ok()?.split_whitespace().map(str::parse);
        let mut next = || numbers.next()?.ok();
        Some(Self { run_ns: next()?, wait_ns: next()?, timeslices: next()? })
    }

    /// CPU time that it would have used with a CPU of its own, in nanoseconds.
    #[must_use]
    pub fn demand_ns(&self) -> u64 {
        self.run_ns.saturating_add(self.wait_ns)
    }

    /// Counted since `before`. If a counter has fallen, another thread now has the same ID, and its
    /// counters began at 0.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        if self.run_ns < before.run_ns || self.wait_ns < before.wait_ns {
            return *self;
        }
        let timeslices = self.timeslices.saturating_sub(before.timeslices);
        Self { run_ns: self.run_ns - before.run_ns, wait_ns: self.wait_ns - before.wait_ns, timeslices }
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            run_ns: self.run_ns.saturating_add(other.run_ns),
            wait_ns: self.wait_ns.saturating_add(other.wait_ns),
            timeslices: self.timeslices.saturating_add(other.timeslices),
        }
    }
}

/// `/proc/PID/io`: read and write calls on files, pipes and sockets, and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IoCounters {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Read calls.
    pub reads: u64,
    /// Write calls.
    pub writes: u64,
}

impl IoCounters {
    /// `None` if a field is missing.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let number = |name: &str| number_after(text, name);
        Some(Self {
            read_bytes: number("rchar:")?,
            written_bytes: number("wchar:")?,
            reads: number("syscr:")?,
            writes: number("syscw:")?,
        })
    }

    /// Read and write calls.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.reads.saturating_add(self.writes)
    }

    /// Bytes read and written.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.read_bytes.saturating_add(self.written_bytes)
    }
}

/// The real user in `/proc/PID/status`.
#[must_use]
pub fn real_user(status: &[u8]) -> Option<u32> {
    let text = String::from_utf8_lossy(status);
    number_after(&text, "Uid:")?.try_into().ok()
}

/// The number after a key at the beginning of a line.
pub(crate) fn number_after(text: &str, key: &str) -> Option<u64> {
    let mut words = text.lines().find_map(|line| line.strip_prefix(key))?.split_whitespace();
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAT: &[u8] =
        b"3686 (cat) R 3674 3675 28326 0 -1 4194304 101 0 0 0 7 5 0 0 20 0 2 0 2553052 3133440 409 \
        18446744073709551615 94127000711168 94127000731049 140727176550432 0 0 0 0 0 0 0 0 0 17 0\n";

    #[test]
    fn kernel_texts_are_parsed() {
        let stat = ProcStat::parse(STAT).unwrap();
        assert_eq!((stat.command.as_str(), stat.state, stat.is_kernel_thread), ("cat", 'R', false));
        assert_eq!((stat.parent, stat.group, stat.session), (3674, 3675, 28326));
        assert_eq!((stat.ticks, stat.threads, stat.start, stat.resident_pages), (12, 2, 2553052, 409));
        let kthread =
            b"2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0 18446744073709551615 0";
        assert!(ProcStat::parse(kthread).unwrap().is_kernel_thread);
        let io = b"rchar: 6976\nwchar: 12\nsyscr: 10\nsyscw: 2\nread_bytes: 0\nwrite_bytes: 0\n";
        let io = IoCounters::parse(io).unwrap();
        assert_eq!((io.calls(), io.bytes()), (12, 6988));
        let counters = SchedStat::parse(b"56732187 2135641926 28\n").unwrap();
        assert_eq!((counters.demand_ns(), counters.timeslices), (2_192_374_113, 28));
        assert_eq!(real_user(b"Name:\tx\nUid:\t1000\t0\t0\t0\n"), Some(1000));
    }

    #[test]
    fn name_with_parentheses_is_parsed() {
        let rest = "S 7 1 1 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 1 0 4711 1 1";
        let stat = ProcStat::parse(&[b"12 (a) R 99 (b\xff) ", rest.as_bytes()].concat()).unwrap();
        assert_eq!((stat.parent, stat.start, stat.ticks), (7, 4711, 200));
        assert_eq!(stat.command, "a) R 99 (b\u{fffd}");
        assert_eq!(ProcStat::parse(b"12 )a( S 1"), None);
    }

    #[test]
    fn counters_of_a_reused_thread_id_restart() {
        let of = |run_ns, wait_ns, timeslices| SchedStat { run_ns, wait_ns, timeslices };
        assert_eq!(of(10, 5, 2).since(&of(4, 5, 1)), of(6, 0, 1));
        assert_eq!(of(3, 5, 1).since(&of(4, 5, 9)), of(3, 5, 1));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_harmless(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = (ProcStat::parse(&bytes), SchedStat::parse(&bytes), IoCounters::parse(&bytes), real_user(&bytes));
        }

        #[test]
        fn corrupted_real_text_is_harmless(at in 0..STAT.len(), byte in any::<u8>(), cut in 0..STAT.len()) {
            let mut text = STAT.to_vec();
            text[at] = byte;
            let _ = (ProcStat::parse(&text), ProcStat::parse(&text[..cut]));
        }
    }
}
