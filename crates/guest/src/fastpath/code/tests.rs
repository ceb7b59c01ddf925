use super::super::places::{Stage, bytes, call, clock_sums, entry, selects, stage, time_stamp_counter};
use super::*;

#[test]
fn code_fits_and_has_a_syscall_for_each_record() {
    assert!(CODE + (bytes().len() as u64) < tern_tracee::PAGE / 2, "{} bytes", bytes().len());
    let calls: Vec<u64> =
        (0..bytes().len() as u64 - 1).filter(|at| bytes()[*at as usize..][..2] == [0x0f, 0x05]).collect();
    assert_eq!(calls, (0..MAX_RECORDS).map(call).collect::<Vec<_>>());
    assert_eq!(CODE % (MAX_RECORDS as u64 * CALL), 0, "the filter's mask");
    assert!(record(MAX_RECORDS) <= DESCRIPTOR_SETS);
    assert!((record(MAX_RECORDS) + WAITS) as u64 + WAIT_MASK + 16 <= tern_tracee::PAGE);
}

#[test]
fn every_offset_has_a_stage() {
    use libc::{SYS_clock_gettime, SYS_lseek, SYS_pread64, SYS_pwrite64, SYS_read, SYS_write};
    use libc::{SYS_epoll_wait, SYS_poll, SYS_pselect6, SYS_select, SYS_sendto};
    let files = [SYS_pread64, SYS_lseek, SYS_write, SYS_pwrite64, SYS_read, SYS_clock_gettime];
    let sockets = [SYS_epoll_wait, SYS_poll, SYS_pselect6, SYS_select, SYS_sendto];
    for nr in files.into_iter().chain(sockets) {
        assert!(entry(nr as u32).is_none_or(|entry| stage(entry) == Some(Stage::Checks)));
    }
    assert_eq!(entry(libc::SYS_close as u32), None);
    assert_eq!((stage(8), stage(15)), (Some(Stage::Calls(1)), Some(Stage::Returned(1))));
    assert_eq!(stage(clock_sums()), Some(Stage::Claims));
    let len = bytes().len() as u64;
    assert!((0..len).all(|at| stage(at).is_some()));
    assert_eq!((stage(len - 1), stage(len)), (Some(Stage::Checks), None));
}

/// The code with its table, in memory of the test itself.
struct RunningCode {
    start: u64,
    /// The site makes calls of several numbers, the first of which is another one.
    searches: bool,
}

impl RunningCode {
    /// With the sets of descriptors in the table filled by `fill`, or not published.
    fn new(fill: Option<&dyn Fn(&mut crate::fastpath::NativeDescriptors)>) -> Self {
        const LEN: usize = 3 * 4096;
        let prot = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, which stays until the test ends.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), LEN, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let this = Self { start: start.addr() as u64, searches: false };
        this.write(CODE, bytes());
        if let Some(fill) = fill {
            let mut native = crate::fastpath::NativeDescriptors::default();
            fill(&mut native);
            this.write(TABLE + NATIVE as u64, &[1]);
            this.write(TABLE + DESCRIPTOR_SETS as u64, native.bytes());
        }
        this
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let to = std::ptr::with_exposed_provenance_mut::<u8>((self.start + at) as usize);
        // SAFETY: the mapping is the test's own, and is long enough.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// The result of a call; none if the code leaves it to the program's own `syscall`. All
    /// registers but rax, rcx and r11 must be preserved.
    fn call(&self, nr: i64, args: [u64; 6]) -> Option<i64> {
        let mut entry = self.start + CODE + entry(nr as u32).unwrap();
        let mut at = TABLE + record(1) as u64;
        self.write(at + 8, &(self.start + CODE + call(1)).to_le_bytes());
        self.write(at + 40, &nr.to_le_bytes());
        self.write(at + 56, &entry.to_le_bytes());
        if self.searches {
            let next = self.start + at;
            (entry, at) = (self.start + CODE + selects(), TABLE + record(2) as u64);
            self.write(at + 40, &(nr + 1).to_le_bytes());
            self.write(at + NEXT as u64, &next.to_le_bytes());
        }
        let (ret, fell_back): (i64, u64);
        let [mut a, mut b, mut c, mut d, mut e, mut f] = args;
        // SAFETY: the code makes at most this call, and then jumps to one of the labels. Their
        // addresses are in the record. It uses no stack.
        unsafe {
            std::arch::asm!(
                "lea r11, [rip + 3f]",
                "mov [rcx + 24], r11",
                "mov [r13 + 24], r11",
                "lea r11, [rip + 2f]",
                "mov [r13 + 32], r11",
                "jmp r12",
                "2: xor r12d, r12d",
                "jmp 4f",
                "3: mov r12d, 1",
                "4:",
                inout("rax") nr => ret,
                inout("r12") entry => fell_back,
                inout("rdi") a, inout("rsi") b, inout("rdx") c,
                inout("r10") d, inout("r8") e, inout("r9") f,
                inout("rcx") self.start + at => _, out("r11") _,
                in("r13") self.start + TABLE + record(1) as u64,
            );
        }
        assert_eq!([a, b, c, d, e, f], args, "call {nr} has changed registers");
        (fell_back == 0).then_some(ret)
    }
}

#[test]
fn calls_are_made_on_published_descriptors_only() {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let fd = theirs.as_raw_fd();
    let mut buffer = [0u8; 8];
    let args = [fd as u64, buffer.as_mut_ptr().addr() as u64, 8, libc::MSG_DONTWAIT as u64, 0, 0];
    ours.write_all(b"abc").unwrap();
    let code = RunningCode::new(Some(&|native| native.add_file(fd)));
    assert_eq!(code.call(libc::SYS_recvfrom, args), Some(3));
    assert_eq!(code.call(libc::SYS_recvfrom, args), Some(-i64::from(libc::EAGAIN)));
    for other in [fd as u64 + 1, (1 << 40) | (fd as u64 + 1), 5000, u64::MAX] {
        assert_eq!(code.call(libc::SYS_recvfrom, [other, args[1], 8, args[3], 0, 0]), None);
    }
    assert_eq!(RunningCode::new(None).call(libc::SYS_recvfrom, args), None);
    assert_eq!(code.call(libc::SYS_epoll_wait, [fd as u64, args[1], 1, 0, 0, 0]), None);
}

#[test]
fn number_of_a_call_is_searched() {
    use std::os::fd::AsRawFd;
    let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let fd = theirs.as_raw_fd();
    let code = RunningCode { searches: true, ..RunningCode::new(Some(&|native| native.add_file(fd))) };
    let args = [fd as u64, 0, 0, libc::MSG_DONTWAIT as u64, 0, 0];
    assert_eq!(code.call(libc::SYS_recvfrom, args), Some(-i64::from(libc::EAGAIN)));
    assert_eq!(code.call(libc::SYS_recvfrom, [u64::MAX, 0, 0, args[3], 0, 0]), None);
}

#[test]
fn waits_are_made_if_all_descriptors_are_published() {
    use std::os::fd::AsRawFd;
    if entry(libc::SYS_poll as u32).is_none() {
        // This machine's programs may not read their fs base, so no wait is made here.
        return;
    }
    let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let fd = theirs.as_raw_fd();
    let code = RunningCode::new(Some(&|native| native.add_polled_connection(fd)));
    let unconnected = RunningCode::new(Some(&|native| native.add_polled(fd)));
    let polled = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    let one = [std::ptr::from_ref(&polled).addr() as u64, 1, 0, 0, 0, 0];
    assert_eq!(
        (code.call(libc::SYS_poll, one), unconnected.call(libc::SYS_poll, one)),
        (Some(1), None),
        "home makes a wait without connections"
    );
    let written = 1u64 << fd;
    let select_one = [fd as u64 + 1, 0, std::ptr::from_ref(&written).addr() as u64, 0, 0, 0];
    assert_eq!(
        (code.call(libc::SYS_select, select_one), unconnected.call(libc::SYS_select, select_one)),
        (Some(1), None)
    );
    let poll = |fds: &[i32]| {
        let entry = |fd: &i32| libc::pollfd { fd: *fd, events: libc::POLLOUT, revents: 0 };
        let entries: Vec<libc::pollfd> = fds.iter().map(entry).collect();
        code.call(libc::SYS_poll, [entries.as_ptr().addr() as u64, fds.len() as u64, 50, 0, 0, 0])
    };
    assert_eq!((poll(&[fd]), poll(&[fd, fd])), (Some(1), Some(2)));
    assert_eq!((poll(&[fd, fd + 1]), poll(&[-1, fd]), poll(&[])), (None, None, None));
    assert_eq!((poll(&[fd; 64]), poll(&[fd; 65])), (Some(64), None));
    let fs_base = {
        let own: u64;
        // SAFETY: only reads a register.
        unsafe { std::arch::asm!("rdfsbase {}", out(reg) own) };
        own
    };
    let own = tern_tracee::Memory::open(std::process::id() as i32).unwrap();
    let waits = code.start + TABLE + (record(1) + WAITS) as u64 + wait_entry(fs_base);
    let (began, of_thread) = (own.word(waits).unwrap(), own.word(waits + 8).unwrap());
    let now = time_stamp_counter();
    assert!(began != 0 && began <= now && of_thread == fs_base, "{began} {now}");

    let select = |count: i32, sets: [u64; 3]| {
        let at = |set: &u64| if *set == 0 { 0 } else { std::ptr::from_ref(set).addr() as u64 };
        let limit = libc::timeval { tv_sec: 0, tv_usec: 1000 };
        let [read, write, except] = &sets;
        let limit = std::ptr::from_ref(&limit).addr() as u64;
        code.call(libc::SYS_select, [count as u64, at(read), at(write), at(except), limit, 0])
    };
    let bit = 1 << fd;
    assert_eq!(select(fd + 1, [bit, bit, 0]), Some(1));
    assert_eq!(select(fd + 1, [0, 0, bit]), Some(0));
    // Bits beyond the count do not count.
    assert_eq!(select(fd + 1, [0, bit | bit << 1, 0]), Some(1));
    for set in 0..3 {
        let mut sets = [bit; 3];
        sets[set] |= bit >> 1;
        assert_eq!(select(fd + 1, sets), None, "set {set}");
    }
    assert_eq!((select(0, [0; 3]), select(65, [0, bit, 0]), select(-1, [0, bit, 0])), (None, None, None));
    let mask = [0u64, 8];
    let masked = |mask: u64| code.call(libc::SYS_pselect6, [1, 0, 0, 0, mask, mask]);
    assert_eq!(masked(mask.as_ptr().addr() as u64), None);
}
