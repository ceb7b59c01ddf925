use super::*;
use tern_migrate::message::{FileWord, InHand};

/// Our own memory, in the place of a guest's range.
#[repr(align(4096))]
struct Range([u8; Reserve::LEN as usize]);

struct Trial {
    range: Box<Range>,
    hot: Hot,
    files: Files,
    memory: Memory,
}

fn in_hand(fd: i32, offset: u64, writes: bool) -> (i32, FileWord) {
    (
        fd,
        FileWord::InHand(InHand {
            id: (1, fd.unsigned_abs().into()),
            offset,
            reads: !writes,
            writes,
            local: true,
        }),
    )
}

impl Trial {
    fn of(words: &[(i32, FileWord)]) -> Self {
        let range = Box::new(Range([0; Reserve::LEN as usize]));
        let mut files = Files::default();
        files.hear(
            words,
            None,
            true,
            &crate::near::Beside::new(tern_ids::NodeId(2), "/nowhere".as_ref(), &[]),
        );
        let shape =
            Shape { start: 0x1000, bytes: [0; 5], call: 0x1005, asks: None, nr: libc::SYS_lseek as u32 };
        let asks =
            Shape { start: 0x2000, call: 0x200b, asks: Some((1, 2)), nr: libc::SYS_read as u32, ..shape };
        let mut trial = Self {
            range,
            hot: Hot { allowed: true, ..Hot::default() },
            files,
            memory: Memory::open(std::process::id() as i32).unwrap(),
        };
        let table = trial.reserve().start + stub::TABLE;
        for (n, (shape, hop)) in [(shape, 0x3000), (asks, 0x4000)].into_iter().enumerate() {
            let record = table + (stub::RECORDS + n * stub::RECORD) as u64;
            trial.hot.sites.push(Site::new(shape, hop, record, table).unwrap());
        }
        trial
    }

    fn reserve(&self) -> Reserve {
        Reserve { start: self.range.0.as_ptr() as u64 }
    }

    fn lend(&mut self, fd: i32) {
        let reserve = self.reserve();
        self.hot.lend((fd, None), &mut self.files, &self.memory, reserve).unwrap();
    }

    fn take_back(&mut self) {
        let reserve = self.reserve();
        self.hot.take_back(&mut self.files, &self.memory, reserve).unwrap();
    }

    /// As the stub does.
    fn store(&self, at: usize, word: u64) {
        self.memory.write(self.reserve().start + stub::TABLE + at as u64, &word.to_le_bytes()).unwrap();
    }

    fn kinds(&self) -> [u8; 2] {
        let mut kinds = [9; 2];
        self.memory.read(self.reserve().start + stub::TABLE, &mut kinds).unwrap();
        kinds
    }

    fn offset(&mut self, fd: i32) -> u64 {
        self.files.get(fd).unwrap().known.offset
    }
}

#[test]
fn what_is_lent_comes_back() {
    let mut trial = Trial::of(&[in_hand(3, 10, false), in_hand(4, 20, true)]);
    trial.lend(3);
    trial.lend(4);
    assert_eq!(trial.kinds(), [stub::READ, stub::WRITTEN]);
    assert!(!trial.files.are_clean(), "who looks at it now would look in vain");
    trial.store(stub::SLOTS + 8, 77);
    trial.memory.write(room(trial.reserve(), 1), b"abc").unwrap();
    trial.store(stub::SLOTS + stub::SLOT + 8, 23);
    trial.take_back();
    assert_eq!((trial.kinds(), trial.offset(3), trial.offset(4)), ([0, 0], 77, 23));
    let (calls, _) = trial.files.send_all(1);
    assert_eq!(calls.len(), 1);
    assert!(format!("{calls:?}").contains(&format!("{:?}", tern_syscall::ByteBuf::from(b"abc".to_vec()))));
    trial.take_back();
    assert_eq!(trial.offset(4), 23, "once");
}

#[test]
fn a_third_file_takes_the_place_of_another() {
    let mut trial = Trial::of(&[in_hand(3, 0, false), in_hand(4, 0, true), in_hand(5, 0, true)]);
    for fd in [3, 4, 5] {
        trial.take_back();
        trial.lend(fd);
    }
    let lent: Vec<i32> = trial.hot.slots.iter().map(|slot| slot.fd).collect();
    assert!(lent.contains(&5) && lent.len() == 2);
    let writes: u64 = trial.hot.slots.iter().filter(|s| s.writes).map(|s| s.end - s.start).sum();
    assert!(writes <= 256 << 10, "no more than may be behind");
}

#[test]
fn a_guest_may_write_anything_there() {
    let mut trial = Trial::of(&[in_hand(3, 10, false), in_hand(4, 20, true)]);
    for word in [0, 19, u64::MAX, 1 << 40, 21 + ROOM] {
        trial.lend(3);
        trial.lend(4);
        trial.store(stub::SLOTS + 8, word.max(1 << 33));
        trial.store(stub::SLOTS + stub::SLOT + 8, word);
        trial.store(0, word);
        trial.take_back();
        assert_eq!((trial.offset(3), trial.offset(4)), (10, 20));
    }
    // And where a site should be there is none.
    trial.store(stub::FROM, 5);
    let copies = (0..).find(|at| stub::stage(*at) == Some(Stage::Copies)).unwrap();
    let reserve = trial.reserve();
    let mut registers = Registers { rip: reserve.start + stub::CODE + copies, ..Registers::default() };
    assert!(trial.hot.leave(&mut registers, &trial.memory, reserve).is_err());
}

#[test]
fn nobody_stands_in_the_stub() {
    let trial = Trial::of(&[]);
    let (reserve, memory) = (trial.reserve(), &trial.memory);
    for (at, word) in [(stub::KEPT_RDI, 1), (stub::KEPT_RSI, 2), (stub::KEPT_RCX, 3), (stub::KEPT_RAX, 4)] {
        trial.store(at, word);
    }
    for site in &trial.hot.sites {
        trial.store(stub::FROM, site.record);
        for at in 0..stub::code().len() as u64 {
            let mut registers = Registers {
                rip: reserve.start + stub::CODE + at,
                rax: site.record,
                rdi: 101,
                rsi: 102,
                ..Registers::default()
            };
            let stage = trial.hot.leave(&mut registers, memory, reserve).unwrap().unwrap();
            let (shape, pair) = (&site.shape, (registers.rdi, registers.rsi));
            let place = match stage {
                Stage::Enters | Stage::Asks(_) => shape.start,
                Stage::Looks | Stage::Copies | Stage::Slow => shape.call,
                Stage::Done | Stage::Returned => shape.call + 2,
            };
            assert_eq!(registers.rip, place, "{stage:?}");
            assert_eq!(pair, if stage == Stage::Copies { (1, 2) } else { (101, 102) }, "{stage:?}");
        }
    }
    let mut hop = Registers { rip: 0x4001, rax: 9, ..Registers::default() };
    assert!(trial.hot.leave(&mut hop, memory, reserve).unwrap().is_some());
    assert_eq!((hop.rip, hop.rax), (0x2000, 4));
    let mut elsewhere = Registers { rip: 0x5000, ..Registers::default() };
    assert!(trial.hot.leave(&mut elsewhere, memory, reserve).unwrap().is_none());
}

#[test]
fn calls_on_a_file_that_nodes_share_are_named_as_long_as_home_vouches_for_it() {
    let mut trial = Trial::of(&[in_hand(3, 0, false), in_hand(4, 0, true)]);
    let file = std::fs::File::open("/dev/null").unwrap();
    trial.files.open_here(3, crate::near::Near::Open(file.into(), None));
    let own = |trial: &Trial| {
        let mut bits = [0; 8];
        trial.memory.read(trial.reserve().start + stub::TABLE, &mut bits).unwrap();
        u64::from_le_bytes(bits) >> 16
    };
    trial.hot.own.some = true;
    trial.lend(4);
    assert_eq!(own(&trial), 0, "nothing has been said of it");
    trial.take_back();
    trial.files.vouch(3);
    trial.lend(4);
    assert_eq!(own(&trial), 1 << 3);
    assert!(trial.hot.own.until.is_some_and(|until| until <= Instant::now() + SOON));
    trial.take_back();
    trial.files.distrust();
    trial.lend(4);
    assert_eq!(own(&trial), 0, "a signal may have told of a change");
}

#[test]
fn calls_on_a_file_of_this_nodes_own_are_named_until_they_are_taken_back() {
    let mut trial = Trial::of(&[in_hand(3, 0, false), in_hand(4, 0, true)]);
    let file = std::fs::File::open("/dev/null").unwrap();
    let (server, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    trial.files.open_here(3, crate::near::Near::Open(file.into(), Some(server)));
    let own = |trial: &Trial| {
        let mut bits = [0; 8];
        trial.memory.read(trial.reserve().start + stub::TABLE, &mut bits).unwrap();
        u64::from_le_bytes(bits) >> 16
    };
    trial.lend(4);
    assert_eq!(own(&trial), 0, "none has been let through");
    trial.hot.own.some = true;
    trial.take_back();
    trial.lend(4);
    assert_eq!((own(&trial), trial.kinds()), (1 << 3, [stub::WRITTEN, 0]));
    assert!(trial.hot.is_out() && trial.hot.due().is_some());
    let reserve = trial.reserve();
    trial.hot.revoke(&trial.memory, reserve).unwrap();
    assert_eq!((own(&trial), trial.kinds()), (0, [0, 0]));
    assert!(trial.hot.is_out(), "it may be in one");
    trial.files.put_down();
    assert!(trial.files.await_return(), "its offset is nobody's to say");
    trial.take_back();
    trial.files.is_back();
    assert!(!trial.hot.is_out() && !trial.files.await_return());
}
