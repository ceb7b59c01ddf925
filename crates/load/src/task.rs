//! The texts of `/proc/PID`, as numbers. Bytes, because a command's name need not be UTF-8 and is the program's own
//! to choose.

/// Clock ticks in a second, as `/proc` counts them; Linux has never shown another number.
pub const TICKS: u64 = 100;

/// `/proc/PID/stat`, as far as it is of use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// The name, at most 15 bytes from the kernel.
    pub command: String,
    /// `R`, `S`, `D`, `Z` …
    pub state: char,
    /// Parent.
    pub parent: i32,
    /// Process group.
    pub group: i32,
    /// Session.
    pub session: i32,
    /// It has a controlling terminal.
    pub terminal: bool,
    /// A thread of the kernel's own.
    pub of_kernel: bool,
    /// User and system time, in ticks.
    pub ticks: u64,
    /// Threads.
    pub threads: u32,
    /// When it was started, in ticks since boot; with the pid it names one process for good.
    pub start: u64,
    /// Pages in memory.
    pub resident_pages: u64,
}

/// The kernel's flag for its own threads (PF_KTHREAD).
const OF_KERNEL: u64 = 0x0020_0000;

impl Stat {
    /// Nothing if the text is cut off or is something else.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        // The name in parentheses may hold anything, parentheses too.
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
            of_kernel: number(6)? & OF_KERNEL != 0,
            ticks: number(11)?.saturating_add(number(12)?),
            threads: number(17)?.try_into().ok()?,
            start: number(19)?,
            resident_pages: number(21)?,
        })
    }
}

/// `schedstat` of a thread: all that its scheduler has counted since it was born.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Turns {
    /// Time on a CPU, in nanoseconds.
    pub run: u64,
    /// Time runnable but not on a CPU, in nanoseconds; that of waiting for a quota, too. It is added when the wait
    /// ends.
    pub wait: u64,
    /// How often it was given a CPU.
    pub turns: u64,
}

impl Turns {
    /// Nothing if it is something else; all zero where the kernel does not count.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut numbers = std::str::from_utf8(text).ok()?.split_whitespace().map(str::parse);
        let mut next = || numbers.next()?.ok();
        Some(Self { run: next()?, wait: next()?, turns: next()? })
    }

    /// What it would have used with a CPU of its own, in nanoseconds.
    #[must_use]
    pub fn wanted(&self) -> u64 {
        self.run.saturating_add(self.wait)
    }

    /// What came since. A number that has fallen began anew: another thread has its id.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        if self.run < before.run || self.wait < before.wait {
            return *self;
        }
        let turns = self.turns.saturating_sub(before.turns);
        Self { run: self.run - before.run, wait: self.wait - before.wait, turns }
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            run: self.run.saturating_add(other.run),
            wait: self.wait.saturating_add(other.wait),
            turns: self.turns.saturating_add(other.turns),
        }
    }
}

/// `/proc/PID/io`: calls that read and write, files and pipes and sockets alike, and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Io {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Calls that read.
    pub reads: u64,
    /// Calls that write.
    pub writes: u64,
}

impl Io {
    /// Nothing if one of them is missing.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let number = |name: &str| keyed(text, name);
        Some(Self {
            read_bytes: number("rchar:")?,
            written_bytes: number("wchar:")?,
            reads: number("syscr:")?,
            writes: number("syscw:")?,
        })
    }

    /// Reads and writes.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.reads.saturating_add(self.writes)
    }

    /// Both ways.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.read_bytes.saturating_add(self.written_bytes)
    }
}

/// Real user of `/proc/PID/status`.
#[must_use]
pub fn real_user(status: &[u8]) -> Option<u32> {
    let text = String::from_utf8_lossy(status);
    keyed(&text, "Uid:")?.try_into().ok()
}

/// The number after a word at the beginning of a line.
pub(crate) fn keyed(text: &str, key: &str) -> Option<u64> {
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
    fn the_kernels_texts_are_read() {
        let stat = Stat::parse(STAT).unwrap();
        assert_eq!((stat.command.as_str(), stat.state, stat.of_kernel), ("cat", 'R', false));
        assert_eq!((stat.parent, stat.group, stat.session), (3674, 3675, 28326));
        assert_eq!((stat.ticks, stat.threads, stat.start, stat.resident_pages), (12, 2, 2553052, 409));
        let kthread =
            b"2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0 18446744073709551615 0";
        assert!(Stat::parse(kthread).unwrap().of_kernel);
        let io = b"rchar: 6976\nwchar: 12\nsyscr: 10\nsyscw: 2\nread_bytes: 0\nwrite_bytes: 0\n";
        let io = Io::parse(io).unwrap();
        assert_eq!((io.calls(), io.bytes()), (12, 6988));
        let turns = Turns::parse(b"56732187 2135641926 28\n").unwrap();
        assert_eq!((turns.wanted(), turns.turns), (2_192_374_113, 28));
        assert_eq!(real_user(b"Name:\tx\nUid:\t1000\t0\t0\t0\n"), Some(1000));
    }

    #[test]
    fn a_wild_name_does_not_confuse() {
        let rest = "S 7 1 1 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 1 0 4711 1 1";
        let stat = Stat::parse(&[b"12 (a) R 99 (b\xff) ", rest.as_bytes()].concat()).unwrap();
        assert_eq!((stat.parent, stat.start, stat.ticks), (7, 4711, 200));
        assert_eq!(stat.command, "a) R 99 (b\u{fffd}");
        assert_eq!(Stat::parse(b"12 )a( S 1"), None);
    }

    #[test]
    fn who_has_taken_a_threads_id_begins_anew() {
        let of = |run, wait, turns| Turns { run, wait, turns };
        assert_eq!(of(10, 5, 2).since(&of(4, 5, 1)), of(6, 0, 1));
        assert_eq!(of(3, 5, 1).since(&of(4, 5, 9)), of(3, 5, 1));
    }

    proptest! {
        #[test]
        fn no_bytes_can_harm(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = (Stat::parse(&bytes), Turns::parse(&bytes), Io::parse(&bytes), real_user(&bytes));
        }

        #[test]
        fn no_change_of_a_real_text_can_harm(at in 0..STAT.len(), byte in any::<u8>(), cut in 0..STAT.len()) {
            let mut text = STAT.to_vec();
            text[at] = byte;
            let _ = (Stat::parse(&text), Stat::parse(&text[..cut]));
        }
    }
}
