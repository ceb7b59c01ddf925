use super::sites::CodePattern;
use super::*;
use tern_migrate::message::{FileDelegation, FileNotice};

/// Memory of the test itself, in the place of a guest's reserved range.
#[repr(align(4096))]
struct Range([u8; Reserve::LEN as usize]);

struct TestFastpath {
    range: Box<Range>,
    fastpath: Fastpath,
    files: FileCache,
    memory: Memory,
}

fn delegated(fd: i32, offset: u64, writes: bool) -> (i32, FileNotice) {
    (
        fd,
        FileNotice::Delegated(FileDelegation {
            id: (1, fd.unsigned_abs().into()),
            offset,
            can_read: !writes,
            can_write: writes,
            is_home_local: true,
        }),
    )
}

impl TestFastpath {
    fn of(notices: &[(i32, FileNotice)]) -> Self {
        let range = Box::new(Range([0; Reserve::LEN as usize]));
        let mut files = FileCache::default();
        files.receive_notices(
            notices,
            None,
            true,
            &crate::files::local::LocalNode::new(tern_ids::NodeId(2), "/nowhere".as_ref(), &[]),
        );
        let pattern = CodePattern {
            start: 0x1000,
            code: vec![0xb8, 8, 0, 0, 0],
            thread_flag: None,
            nr: Some(libc::SYS_lseek as u32),
        };
        let thread_flag = CodePattern {
            start: 0x2000,
            code: vec![0x80, 0x3d, 0, 0, 0, 0, 0, 0x74, 0, 0x31, 0xc0],
            thread_flag: Some((1, 2)),
            nr: Some(libc::SYS_read as u32),
        };
        let mut test = Self {
            range,
            fastpath: Fastpath { is_allowed: true, ..Fastpath::default() },
            files,
            memory: Memory::open(std::process::id() as i32).unwrap(),
        };
        let table = test.reserve().start + code::TABLE;
        for (n, (pattern, trampoline)) in [(pattern, 0x3000), (thread_flag, 0x4000)].into_iter().enumerate() {
            let record = (n, pattern.nr.unwrap());
            test.fastpath.sites.push(PatchedSite::new(pattern, trampoline, record, table).unwrap());
        }
        test
    }

    fn reserve(&self) -> Reserve {
        Reserve { start: self.range.0.as_ptr() as u64 }
    }

    fn publish(&mut self, fd: i32) {
        self.publish_with(fd, NativeDescriptors::default());
    }

    fn publish_with(&mut self, fd: i32, connections: NativeDescriptors) {
        let reserve = self.reserve();
        let place = (&self.memory, reserve);
        self.fastpath.publish((fd, None), &mut self.files, connections, place).unwrap();
    }

    /// The first descriptors on which the code makes calls that transfer data, a bit each.
    fn native_files(&self) -> u64 {
        let read = |at: usize| self.memory.word(self.reserve().start + code::TABLE + at as u64).unwrap();
        if read(0).to_le_bytes()[code::NATIVE] == 1 { read(code::DESCRIPTOR_SETS) } else { 0 }
    }

    fn reclaim(&mut self) {
        let reserve = self.reserve();
        self.fastpath.reclaim(&mut self.files, &self.memory, reserve).unwrap();
    }

    /// Writes a word to the table, as the fast path does.
    fn store(&self, at: usize, word: u64) {
        self.memory.write(self.reserve().start + code::TABLE + at as u64, &word.to_le_bytes()).unwrap();
    }

    fn kinds(&self) -> [u8; 2] {
        let mut kinds = [9; 2];
        self.memory.read(self.reserve().start + code::TABLE, &mut kinds).unwrap();
        kinds
    }

    fn offset(&mut self, fd: i32) -> u64 {
        self.files.get(fd).unwrap().delegation.offset
    }
}

#[test]
fn published_files_are_reclaimed() {
    let mut test = TestFastpath::of(&[delegated(3, 10, false), delegated(4, 20, true)]);
    test.publish(3);
    test.publish(4);
    assert_eq!(test.kinds(), [code::READ, code::WRITE]);
    assert!(!test.files.is_clean(), "the cache does not have the current offset");
    test.store(code::SLOTS + 8, 77);
    test.memory.write(buffer(test.reserve(), 1), b"abc").unwrap();
    test.store(code::SLOTS + code::SLOT + 8, 23);
    test.reclaim();
    assert_eq!((test.kinds(), test.offset(3), test.offset(4)), ([0, 0], 77, 23));
    let (calls, _) = test.files.prelude_for_internal_call(1);
    assert_eq!(calls.len(), 1);
    assert!(format!("{calls:?}").contains(&format!("{:?}", tern_syscall::ByteBuf::from(b"abc".to_vec()))));
    test.reclaim();
    assert_eq!(test.offset(4), 23, "once");
}

#[test]
fn third_file_replaces_a_slot() {
    let mut test = TestFastpath::of(&[delegated(3, 0, false), delegated(4, 0, true), delegated(5, 0, true)]);
    for fd in [3, 4, 5] {
        test.reclaim();
        test.publish(fd);
    }
    let published: Vec<i32> = test.fastpath.slots.iter().map(|slot| slot.fd).collect();
    assert!(published.contains(&5) && published.len() == 2);
    let writes: u64 = test.fastpath.slots.iter().filter(|s| s.writes).map(|s| s.end - s.start).sum();
    assert!(writes <= 256 << 10, "at most the limit for pending writes");
}

#[test]
fn invalid_table_contents_are_ignored() {
    let mut test = TestFastpath::of(&[delegated(3, 10, false), delegated(4, 20, true)]);
    for word in [0, 19, u64::MAX, 1 << 40, 21 + FASTPATH_BUFFER_LEN] {
        test.publish(3);
        test.publish(4);
        test.store(code::SLOTS + 8, word.max(1 << 33));
        test.store(code::SLOTS + code::SLOT + 8, word);
        test.store(0, word);
        test.reclaim();
        assert_eq!((test.offset(3), test.offset(4)), (10, 20));
    }
    // And a record that belongs to no site.
    test.store(code::CURRENT_RECORD, 5);
    let copies = (0..).find(|at| places::stage(*at) == Some(Stage::Copies)).unwrap();
    let reserve = test.reserve();
    let mut registers = Registers { rip: reserve.start + code::CODE + copies, ..Registers::default() };
    assert!(test.fastpath.step_out(&mut registers, &test.memory, reserve).is_err());
}

#[test]
fn stopped_thread_leaves_fastpath_at_every_offset() {
    let test = TestFastpath::of(&[]);
    let (reserve, memory) = (test.reserve(), &test.memory);
    test.store(code::SAVED_RDI, 1);
    test.store(code::SAVED_RSI, 2);
    for site in &test.fastpath.sites {
        let record = reserve.start + code::TABLE + code::record(site.records[0].0) as u64;
        test.store(code::CURRENT_RECORD, record);
        for at in 0..places::bytes().len() as u64 {
            let mut registers = Registers {
                rip: reserve.start + code::CODE + at,
                rax: 9,
                rcx: record,
                rdi: 101,
                rsi: 102,
                rdx: 103,
                r11: 104,
                ..Registers::default()
            };
            let stage = match (places::stage(at), test.fastpath.step_out(&mut registers, memory, reserve)) {
                (Some(Stage::Calls(record) | Stage::Returned(record)), Err(_)) => {
                    assert!(record >= test.fastpath.sites.len());
                    continue;
                }
                (_, stage) => stage.unwrap().unwrap(),
            };
            if let Stage::Calls(record) | Stage::Returned(record) = stage
                && record != site.records[0].0
            {
                continue;
            }
            let (pattern, pair) = (&site.pattern, (registers.rdi, registers.rsi));
            let has_result = matches!(stage, Stage::Done | Stage::Returned(_));
            let nr = if stage == Stage::Selects { 9 } else { pattern.nr.unwrap().into() };
            let expected = if has_result { (pattern.call() + 2, 9) } else { (pattern.call(), nr) };
            assert_eq!((registers.rip, registers.rax), expected, "{stage:?}");
            assert_eq!(pair, if stage == Stage::Copies { (1, 2) } else { (101, 102) }, "{stage:?}");
            assert_eq!(registers.rdx, if stage == Stage::Times { 104 } else { 103 }, "{stage:?}");
        }
    }
    let mut trampoline = Registers { rip: 0x4001, rax: 9, ..Registers::default() };
    assert!(test.fastpath.step_out(&mut trampoline, memory, reserve).unwrap().is_some());
    assert_eq!((trampoline.rip, trampoline.rax), (0x2000, 9));
    let mut elsewhere = Registers { rip: 0x5000, ..Registers::default() };
    assert!(test.fastpath.step_out(&mut elsewhere, memory, reserve).unwrap().is_none());
}

#[test]
fn shared_files_are_published_only_while_valid() {
    let mut test = TestFastpath::of(&[delegated(3, 0, false), delegated(4, 0, true)]);
    let file = std::fs::File::open("/dev/null").unwrap();
    test.files.open_here(3, crate::files::local::LocalFile::Open(file.into(), None));
    test.fastpath.native.has_local_files = true;
    test.publish(4);
    assert_eq!(test.native_files(), 0, "it was not validated");
    test.reclaim();
    test.files.validate(3);
    test.publish(4);
    assert_eq!(test.native_files(), 1 << 3);
    assert!(test.fastpath.native.until.is_some_and(|until| until <= Instant::now() + PUBLICATION_TERM));
    test.reclaim();
    test.files.invalidate();
    test.publish(4);
    assert_eq!(test.native_files(), 0, "a signal may have announced a change");
}

#[test]
fn local_files_are_published_until_reclaimed() {
    let mut test = TestFastpath::of(&[delegated(3, 0, false), delegated(4, 0, true)]);
    let file = std::fs::File::open("/dev/null").unwrap();
    let (server, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    test.files.open_here(3, crate::files::local::LocalFile::Open(file.into(), Some(server)));
    test.publish(4);
    assert_eq!(test.native_files(), 0, "no call was let through");
    test.fastpath.native.has_local_files = true;
    test.reclaim();
    test.publish(4);
    assert_eq!((test.native_files(), test.kinds()), (1 << 3, [code::WRITE, 0]));
    assert!(test.fastpath.may_be_in_use() && test.fastpath.due().is_some());
    let reserve = test.reserve();
    test.fastpath.unpublish(&test.memory, reserve).unwrap();
    assert_eq!((test.native_files(), test.kinds()), (0, [0, 0]));
    assert!(test.fastpath.may_be_in_use(), "a call may be in progress");
    test.files.return_delegations();
    assert!(test.files.must_await_native_call(), "the offset is unknown");
    test.reclaim();
    test.files.leave_native_call();
    assert!(!test.fastpath.may_be_in_use() && !test.files.must_await_native_call());
}

#[test]
fn connections_and_files_are_not_published_together() {
    let mut test = TestFastpath::of(&[delegated(3, 0, true)]);
    let mut connections = NativeDescriptors::default();
    connections.add_file(9);
    test.publish_with(3, connections.clone());
    assert_eq!((test.native_files(), test.kinds()), (1 << 9, [0, 0]));
    let has_used =
        |test: &TestFastpath| test.fastpath.has_used_connections(&test.memory, test.reserve()).unwrap();
    assert!(test.fastpath.may_use_connections() && !has_used(&test), "no call was made");
    test.store(code::CALL_MADE, 1);
    assert!(has_used(&test));
    test.reclaim();
    test.fastpath.enter_connection_call();
    test.publish_with(3, connections.clone());
    assert!(has_used(&test), "a call is let through");
    test.reclaim();
    assert!(!test.fastpath.may_use_connections() && !test.fastpath.may_be_in_use());
    assert_eq!(test.native_files(), 0);
    test.publish(3);
    assert_eq!((test.native_files(), test.kinds()[0]), (0, code::WRITE));
}

#[test]
fn beginning_of_a_wait_is_known() {
    let mut test = TestFastpath::of(&[]);
    let mut connections = NativeDescriptors::default();
    connections.add_epoll_set(5);
    let before = Instant::now();
    test.publish_with(3, connections);
    std::thread::sleep(std::time::Duration::from_millis(20));
    let (began, counter) = (Instant::now(), places::time_stamp_counter());
    std::thread::sleep(std::time::Duration::from_millis(20));
    let record = test.fastpath.sites[1].records[0].0;
    let registers = Registers {
        rip: test.reserve().start + code::CODE + places::call(record) + 2,
        fs_base: 0x7f12_3456_7000,
        ..Registers::default()
    };
    let known = |word: u64, fs_base: u64| {
        let entry = code::record(record) + code::WAITS + code::wait_entry(registers.fs_base) as usize;
        test.store(entry, word);
        test.store(entry + 8, fs_base);
        test.fastpath.native_call_began(&registers, &test.memory, test.reserve()).unwrap().unwrap()
    };
    let of_thread = known(counter, registers.fs_base);
    let error = of_thread.max(began) - of_thread.min(began);
    assert!(error < std::time::Duration::from_millis(2), "{error:?}");
    // Whatever the program writes there, the wait began after the publication.
    assert!(known(0, registers.fs_base) >= before && known(u64::MAX, registers.fs_base) <= Instant::now());
    let now = Instant::now();
    assert!(known(counter, registers.fs_base + 1) >= now, "the entry is another thread's");
    let outside = Registers { rip: 0x5000, ..registers };
    assert!(test.fastpath.native_call_began(&outside, &test.memory, test.reserve()).unwrap().is_none());
}
