//! Both halves must agree on every call that a guest can make, also if parts of its memory are
//! inaccessible.

use super::*;
use crate::call::{Call, Outcome};
use crate::memory::Fault;
use crate::scatter::scatter;
use proptest::prelude::*;

/// Memory that begins at `BASE`, partly read-only. All other addresses fault.
struct Fake {
    bytes: Vec<u8>,
    read_only: std::ops::Range<u64>,
}

const BASE: u64 = 0x10_0000;

impl Fake {
    fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, read_only: 0..0 }
    }

    fn range(&self, addr: u64, len: usize) -> Result<std::ops::Range<usize>, Fault> {
        let start = usize::try_from(addr.checked_sub(BASE).ok_or(Fault)?).map_err(|_e| Fault)?;
        let end = start.checked_add(len).filter(|&end| end <= self.bytes.len()).ok_or(Fault)?;
        Ok(start..end)
    }
}

impl UserMemory for Fake {
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> Result<(), Fault> {
        let range = self.range(addr, buf.len())?;
        buf.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> Result<(), Fault> {
        if self.writable(addr, data.len() as u64) < data.len() as u64 {
            return Err(Fault);
        }
        let range = self.range(addr, data.len())?;
        self.bytes[range].copy_from_slice(data);
        Ok(())
    }

    fn writable(&mut self, addr: u64, len: u64) -> u64 {
        let is_mapped = addr >= BASE && addr <= BASE + self.bytes.len() as u64;
        if !is_mapped || self.read_only.contains(&addr) {
            return 0;
        }
        let end = BASE + self.bytes.len() as u64;
        let end = if addr < self.read_only.start { end.min(self.read_only.start) } else { end };
        len.min(end - addr)
    }
}

/// Words that are often pointers to the memory, or small numbers.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0..0x4000u64).prop_map(|at| BASE + at),
        4 => 0..200u64,
        1 => Just(0),
        1 => any::<u64>(),
        1 => any::<u32>().prop_map(u64::from),
        1 => Just(u64::MAX),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn home_accepts_every_gathered_call(
        words in proptest::collection::vec(word(), 0x4000 / 8),
        args in proptest::array::uniform6(word()),
        read_only in 0..0x4000u64,
        done in prop_oneof![Just(0), 0..100u64],
        ret in -520..300i64,
    ) {
        let mut mem = Fake::new(words.iter().flat_map(|word| word.to_le_bytes()).collect());
        mem.read_only = BASE + read_only..BASE + read_only + 0x400;
        for row in table::rows() {
            let Ok(gathered) = gather_after(row.nr, &args, done, &mut mem) else { continue };
            let layout = gathered.call.lay_out();
            prop_assert!(layout.is_ok(), "{}: {layout:?}", row.name);
            let Ok(layout) = layout else { continue };
            // Home's outputs match the guest's output buffers one by one, with the same lengths.
            let lens: Vec<u64> =
                gathered.output_buffers.iter().map(|l| l.spans.iter().map(|(_, len)| len).sum()).collect();
            prop_assert_eq!(layout.out_lens(), lens, "{}", row.name);
            if layout.size() < 1 << 20 {
                let mut mailbox = vec![0; layout.size()];
                layout.fill(0, &mut mailbox).expect("the mailbox is large enough");
                let outcome = layout.collect(ret, &mailbox);
                let _ = scatter(&gathered.output_buffers, &outcome, &mut mem);
            }
        }
    }
}

fn args(given: &[u64]) -> [u64; 6] {
    let mut args = [0; 6];
    args[..given.len()].copy_from_slice(given);
    args
}

fn data(call: &Call, arg: usize) -> &[u8] {
    match &call.args[arg] {
        Arg::Bytes(bytes) => bytes,
        Arg::Segments(segments) => &segments.bytes,
        Arg::Messages(messages) => &messages[0].segments.bytes,
        other => panic!("{other:?}"),
    }
}

fn nr(nr: i64) -> u32 {
    nr as u32
}

#[test]
fn the_rest_of_a_write_is_gathered() {
    let mut mem = Fake::new((0..100).collect());
    let write = args(&[1, BASE + 10, 50]);
    let whole = gather(nr(libc::SYS_write), &write, &mut mem).expect("a write");
    assert_eq!(data(&whole.call, 1), (10..60).collect::<Vec<u8>>());
    let rest = gather_after(nr(libc::SYS_write), &write, 20, &mut mem).expect("a write");
    assert_eq!(data(&rest.call, 1), (30..60).collect::<Vec<u8>>());
    assert_eq!(rest.call.args[2], Arg::Value(30));
}

#[test]
fn the_rest_of_segments_is_gathered() {
    let mut mem = Fake::new((0..200).collect());
    let iov = [BASE + 100, 8, BASE + 150, 4, BASE + 120, 10];
    let iov: Vec<u8> = iov.iter().flat_map(|word| u64::to_le_bytes(*word)).collect();
    mem.write(BASE, &iov).expect("memory");
    let write = args(&[1, BASE, 3]);
    let rest = gather_after(nr(libc::SYS_writev), &write, 9, &mut mem).expect("a write");
    let Arg::Segments(segments) = &rest.call.args[1] else { panic!("{:?}", rest.call) };
    assert_eq!(segments.lens, [3, 10]);
    assert_eq!(segments.bytes[..], [151, 152, 153, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129]);
    let rest = gather_after(nr(libc::SYS_readv), &write, 9, &mut mem).expect("a read");
    assert_eq!(rest.output_buffers[0].spans, [(BASE + 151, 3), (BASE + 120, 10)]);
    // An explicit offset is advanced too; the file's current offset advances by itself.
    let at = |offset: i64| args(&[1, BASE, 3, offset as u64]);
    let rest = gather_after(nr(libc::SYS_pwritev2), &at(40), 9, &mut mem).expect("a write");
    assert_eq!(rest.call.args[3], Arg::Value(49));
    let rest = gather_after(nr(libc::SYS_pwritev2), &at(-1), 9, &mut mem).expect("a write");
    assert_eq!(rest.call.args[3], Arg::Value(u64::MAX));
}

#[test]
fn control_data_is_sent_once() {
    let mut mem = Fake::new(vec![1; 400]);
    let header = [0, 0, BASE + 100, 1, BASE + 200, 24, 0, BASE + 300, 50];
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    mem.write(BASE, &words(&header[..7])).expect("memory");
    mem.write(BASE + 100, &words(&header[7..])).expect("memory");
    let send = args(&[1, BASE, 0]);
    for (done, expected) in [(0, 24), (10, 0)] {
        let gathered = gather_after(nr(libc::SYS_sendmsg), &send, done, &mut mem).expect("a message");
        let Arg::Messages(messages) = &gathered.call.args[1] else { panic!("{:?}", gathered.call) };
        let control = match &messages[0].control {
            crate::call::MessageBuffer::Bytes(bytes) => bytes.len(),
            _ => 0,
        };
        assert_eq!((control, messages[0].segments.bytes.len()), (expected, 50 - done as usize));
    }
}

#[test]
fn long_read_is_cut_and_reported() {
    let mut mem = Fake::new(vec![0; 64]);
    let read = args(&[0, BASE, limits::MAX_DATA + 5]);
    // Memory at all addresses, since the call needs more than `mem` has.
    struct Endless;
    impl UserMemory for Endless {
        fn read(&mut self, _: u64, buf: &mut [u8]) -> Result<(), Fault> {
            buf.fill(0);
            Ok(())
        }
        fn write(&mut self, _: u64, _: &[u8]) -> Result<(), Fault> {
            Ok(())
        }
    }
    let gathered = gather(nr(libc::SYS_read), &read, &mut Endless).expect("a read");
    assert!(gathered.is_cut);
    assert_eq!(gathered.call.args[2], Arg::Value(limits::MAX_DATA));
    assert_eq!(gathered.output_buffers[0].spans, [(BASE, limits::MAX_DATA)]);
    let read = args(&[0, BASE, limits::MAX_DATA]);
    assert!(!gather(nr(libc::SYS_read), &read, &mut Endless).expect("a read").is_cut);
    let small = gather(nr(libc::SYS_read), &args(&[0, BASE, 64]), &mut mem).expect("a read");
    assert!(!small.is_cut);
    assert!(postcard::to_stdvec(&small.call).expect("plain data").len() < 16, "no room travels");
}

#[test]
fn unwritable_outputs_are_found_before_consuming_calls() {
    let mut mem = Fake::new(vec![0; 64]);
    mem.read_only = BASE + 32..BASE + 64;
    let read =
        |mem: &mut Fake, at| gather(nr(libc::SYS_read), &args(&[0, BASE + at, 16]), mem).expect("a read");
    assert_eq!(read(&mut mem, 0).call.args[1], Arg::Output);
    assert_eq!(read(&mut mem, 40).call.args[1], Arg::BadPointer);
    // The kernel writes what comes, up to the fault.
    let part = read(&mut mem, 20);
    assert_eq!((&part.call.args[1], &part.call.args[2]), (&Arg::Output, &Arg::Value(12)));
    assert_eq!(part.output_buffers[0].spans, [(BASE + 20, 12)]);
    // fstat consumes nothing, so outputs are not probed; the fault is found when they are written.
    let stat = gather(nr(libc::SYS_fstat), &args(&[0, BASE]), &mut mem).expect("a call");
    let outcome = Outcome { ret: 0, outs: vec![ByteBuf::from(vec![7; 144])] };
    assert_eq!(scatter(&stat.output_buffers, &outcome, &mut mem), Err(Fault));
}

/// The kernel fills the segments before the bad one, and returns their length.
#[test]
fn segments_end_before_memory_that_is_bad() {
    for call in [libc::SYS_readv, libc::SYS_preadv, libc::SYS_preadv2] {
        let mut mem = Fake::new(vec![0; 64]);
        let iov: Vec<u8> = [BASE + 40, 5, 8, 5].iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        mem.write(BASE, &iov).expect("memory");
        let read = gather(nr(call), &args(&[0, BASE, 2, 0, 0, 0]), &mut mem).expect("a read");
        assert_eq!(read.output_buffers[0].spans, [(BASE + 40, 5)], "call {call}");
        let iov = [BASE + 40, 5, BASE + 60, 5, BASE + 40, 5];
        let iov: Vec<u8> = iov.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        mem.write(BASE, &iov).expect("memory");
        let read = gather(nr(call), &args(&[0, BASE, 3, 0, 0, 0]), &mut mem).expect("a read");
        assert_eq!(read.output_buffers[0].spans, [(BASE + 40, 5), (BASE + 60, 4)], "call {call}");
    }
}

/// Home's kernel finds inaccessible memory at the same byte of the data, and decides what that means.
#[test]
fn inaccessible_data_is_inaccessible_at_home() {
    let mut mem = Fake::new(b"0123456789abcdef".repeat(256));
    let iov: Vec<u8> = [BASE + 96, 3, BASE + 4091, 50, BASE + 96, 7]
        .iter()
        .flat_map(|word: &u64| word.to_le_bytes())
        .collect();
    mem.write(BASE, &iov).expect("memory");
    let sent = gather(nr(libc::SYS_writev), &args(&[1, BASE, 3]), &mut mem).expect("a write");
    let Arg::Segments(segments) = &sent.call.args[1] else { panic!("{:?}", sent.call) };
    assert_eq!((segments.bytes.as_slice(), segments.inaccessible), (b"012bcdef".as_slice(), 52));
    let layout = sent.call.lay_out().expect("a valid call");
    let mut mailbox = vec![0; layout.size()];
    layout.fill(0, &mut mailbox).expect("it fits");
    let [_, at, count, ..] = layout.args(0);
    let word = |at: u64| u64::from_le_bytes(mailbox[at as usize..][..8].try_into().expect("8 bytes"));
    let entries: Vec<_> = (0..count).map(|i| (word(at + i * 16), word(at + i * 16 + 8))).collect();
    assert_eq!(entries.iter().map(|entry| entry.1).collect::<Vec<_>>(), [3, 5, 52]);
    assert_eq!((entries[1].0, entries[2].0), (entries[0].0 + 3, 2048));
}

/// Lengths beyond the memory behind them are cut, wherever they are stated.
#[test]
fn stated_lengths_end_at_the_memory() {
    let mut mem = Fake::new(vec![0; 64]);
    let bytes =
        |mem: &mut Fake, at: usize, value: u64| mem.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    let cut = |mem: &mut Fake, call, words: &[u64]| gather(nr(call), &args(words), mem).expect("a call");
    // The option's value is read, too.
    bytes(&mut mem, 0, 5000);
    let option = cut(&mut mem, libc::SYS_getsockopt, &[3, 1, 3, BASE + 48, BASE, 0]);
    let Arg::Bytes(value) = &option.call.args[3] else { panic!("{:?}", option.call) };
    assert_eq!((value.len(), &option.call.args[4]), (16, &Arg::Bytes(ByteBuf::from(vec![16, 0, 0, 0]))));
    let message = cut(&mut mem, libc::SYS_msgrcv, &[3, BASE + 40, 5000, 0, 0, 0]);
    assert_eq!(message.call.args[2], Arg::Value(16), "without the type");
    let entries = cut(&mut mem, libc::SYS_getdents64, &[3, BASE + 32, 1000]);
    assert_eq!(entries.call.args[2], Arg::Value(32));
    // A message with control data that is longer than the memory.
    for (at, word) in [(0, 0), (8, 0), (16, 0), (24, 0), (32, BASE + 56), (40, 5000), (48, 0)] {
        bytes(&mut mem, at, word);
    }
    let message = cut(&mut mem, libc::SYS_recvmsg, &[3, BASE, 0]);
    let Arg::Messages(messages) = &message.call.args[1] else { panic!("{:?}", message.call) };
    assert_eq!(messages[0].control, crate::MessageBuffer::Output(8));
}

#[test]
fn scatter_writes_only_to_output_buffers() {
    let mut mem = Fake::new(vec![0; 64]);
    let read = gather(nr(libc::SYS_read), &args(&[0, BASE + 16, 8]), &mut mem).expect("a read");
    let outcome = Outcome { ret: 8, outs: vec![ByteBuf::from(vec![7; 40]), ByteBuf::from(vec![9; 40])] };
    assert_eq!(scatter(&read.output_buffers, &outcome, &mut mem), Ok(()));
    assert_eq!(mem.bytes[16..24], [7; 8]);
    assert!(mem.bytes[..16].iter().chain(&mem.bytes[24..]).all(|&b| b == 0));
}

#[test]
fn remaining_time_may_be_in_read_only_memory() {
    let mut mem = Fake::new(vec![0; 64]);
    mem.read_only = BASE..BASE + 64;
    let select = args(&[0, 0, 0, 0, BASE + 16]);
    let gathered = gather(nr(libc::SYS_select), &select, &mut mem).expect("a call");
    let outcome = Outcome { ret: 0, outs: vec![ByteBuf::from(vec![7; 16])] };
    assert_eq!(scatter(&gathered.output_buffers, &outcome, &mut mem), Ok(()));
    assert!(mem.bytes.iter().all(|&b| b == 0));
}

/// Makes a call in which `kernel` plays home's kernel and `ret` is the result. Returns the guest's
/// memory from `BASE + 32` on.
fn after(call: i64, given: &[u64], ret: i64, kernel: impl FnOnce(&[u64; 6], &mut [u8])) -> Vec<u8> {
    let mut mem = Fake::new(vec![1; 96]);
    let gathered = gather(nr(call), &args(given), &mut mem).expect("a call of home");
    let layout = gathered.call.lay_out().expect("well formed");
    let mut mailbox = vec![0x55; layout.size()];
    layout.fill(0, &mut mailbox).expect("large enough");
    kernel(&layout.args(0), &mut mailbox);
    let outcome = layout.collect(ret, &mailbox);
    scatter(&gathered.output_buffers, &outcome, &mut mem).expect("good memory");
    mem.bytes.split_off(32)
}

#[test]
fn remaining_time_is_written_after_interruption() {
    let sleep = [BASE, BASE + 32];
    for (ret, written) in [(0, false), (-4, true), (-516, true), (-22, false), (-514, false)] {
        let memory = after(libc::SYS_nanosleep, &sleep, ret, |args, mailbox| {
            mailbox[args[1] as usize..][..16].fill(3);
        });
        assert_eq!(memory[..16], if written { [3; 16] } else { [1; 16] }, "{ret}");
        assert_eq!(memory[16..], [1; 48]);
    }
}

#[test]
fn outputs_have_the_length_of_the_result() {
    let read = [0, BASE + 32, 16];
    for (ret, written) in [(-9, 0), (0, 0), (5, 5), (16, 16), (17, 16), (-512, 0)] {
        let memory =
            after(libc::SYS_read, &read, ret, |args, mailbox| mailbox[args[1] as usize..][..16].fill(3));
        assert_eq!(memory.iter().filter(|&&b| b == 3).count(), written, "{ret}");
    }
    let wait = [1, BASE + 32, 0, 0];
    for (ret, written) in [(0, 1), (-10, 1), (77, 3)] {
        let memory =
            after(libc::SYS_wait4, &wait, ret, |args, mailbox| mailbox[args[1] as usize..][..4].fill(3));
        assert_eq!(memory[..4], [written; 4], "{ret}");
    }
}

#[test]
fn reported_length_is_limited_to_the_buffer() {
    let mut mem = Fake::new(vec![0; 96]);
    mem.write(BASE, &8u32.to_le_bytes()).expect("memory");
    let gathered =
        gather(nr(libc::SYS_getsockname), &args(&[3, BASE + 32, BASE]), &mut mem).expect("a call of home");
    let layout = gathered.call.lay_out().expect("well formed");
    let mut mailbox = vec![3; layout.size()];
    layout.fill(0, &mut mailbox).expect("large enough");
    let length = layout.args(0)[2] as usize;
    mailbox[length..][..4].copy_from_slice(&110u32.to_le_bytes());
    let outcome = layout.collect(0, &mailbox);
    scatter(&gathered.output_buffers, &outcome, &mut mem).expect("good memory");
    assert_eq!(mem.bytes[32..40], [3; 8]);
    assert!(mem.bytes[40..].iter().all(|&b| b == 0));
    assert_eq!(mem.bytes[..4], 110u32.to_le_bytes(), "the true length, as the kernel reports it");
}

#[test]
fn ungathered_calls_have_a_reason() {
    let mut mem = Fake::new(vec![0; 16]);
    let mut why = |call: i64| gather(nr(call), &[0; 6], &mut mem).map(|_| ()).unwrap_err();
    assert_eq!(why(libc::SYS_brk), GatherError::Here);
    assert_eq!(why(libc::SYS_ptrace), GatherError::Homeward(crate::reason::TRACING));
    assert_eq!(why(libc::SYS_io_uring_setup), GatherError::Errno(libc::ENOSYS));
    assert_eq!(why(100_000), GatherError::Errno(libc::ENOSYS));
}

#[test]
fn exec_strings_have_the_kernels_limits() {
    let mut bytes = vec![b'a'; 0x30_0000];
    bytes[0x2f_fff0] = 0;
    let words: Vec<u8> = [BASE + 0x1000, 0].iter().flat_map(|word| u64::to_le_bytes(*word)).collect();
    bytes[..16].copy_from_slice(&words);
    bytes[16] = 0;
    let mut mem = Fake::new(bytes);
    let exec =
        |mem: &mut Fake| gather(nr(libc::SYS_execve), &args(&[BASE + 16, BASE, 0]), mem).map(|g| g.call);
    assert_eq!(exec(&mut mem), Err(GatherError::Errno(libc::E2BIG)), "one string of more than 128 KiB");
    mem.bytes[0x1004] = 0;
    assert_eq!(exec(&mut mem).expect("a short one").args[1], Arg::Strings(ByteBuf::from(b"aaaa\0".to_vec())));
    // Sixty strings of 128 KiB less one: more than 6 MiB in all.
    mem.bytes[0x1004] = b'a';
    mem.bytes[0x1000 + limits::MAX_EXEC_STRING - 1] = 0;
    let mut words: Vec<u8> = (BASE + 0x1000).to_le_bytes().repeat(60);
    words.extend([0; 8]);
    mem.bytes[..words.len()].copy_from_slice(&words);
    assert_eq!(exec(&mut mem), Err(GatherError::Errno(libc::E2BIG)));
}

#[test]
fn struct_size_field_is_always_sent() {
    let mut mem = Fake::new(vec![1, 0, 0, 0, 7, 7, 7, 7]);
    let gathered = gather(nr(libc::SYS_sched_setattr), &args(&[0, BASE, 0]), &mut mem).expect("a call");
    assert_eq!(data(&gathered.call, 1), [1, 0, 0, 0]);
    assert!(gathered.call.lay_out().is_ok(), "home takes what the guest gathers");
}
