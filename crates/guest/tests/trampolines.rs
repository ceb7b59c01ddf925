//! Runs the trampolines that replace another kernel's vDSO, for this machine's vDSO.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "the generated code is run")]

use tern_guest::vdso::trampoline::{
    DISTANCE, ENTRY_LEN, GETRANDOM, MAX_VDSO_LEN, VdsoTrampolines, functions,
};
use tern_tracee::stop::{self, Stop};
use tern_tracee::{Memory, Registers, procfs};

fn own() -> Vec<u8> {
    let maps = procfs::maps(std::process::id() as i32).unwrap();
    let vdso = maps.iter().find(|m| m.name == b"[vdso]").unwrap();
    let mut code = vec![0; vdso.len() as usize];
    Memory::open(std::process::id() as i32).unwrap().read(vdso.start, &mut code).unwrap();
    code
}

#[test]
fn only_entries_differ() {
    let own = own();
    let trampolines = VdsoTrampolines::for_vdso(&own).unwrap();
    assert!(trampolines.places.len() >= 5, "{:?}", trampolines.places);
    let mut changed: Vec<usize> = (0..own.len()).filter(|at| own[*at] != trampolines.code[*at]).collect();
    changed.retain(|at| {
        !trampolines
            .places
            .iter()
            .any(|(_, _, entry)| (*entry as usize..*entry as usize + ENTRY_LEN).contains(at))
    });
    assert!(changed.is_empty(), "{changed:?}");
    assert!(VdsoTrampolines::for_vdso(&trampolines.code).is_none(), "a vDSO with trampolines is rejected");
}

#[test]
fn invalid_vdso_images_are_rejected() {
    let own = own();
    assert_eq!(VdsoTrampolines::for_vdso(&[]), None);
    assert_eq!(VdsoTrampolines::for_vdso(&own[..own.len() - 1]), None);
    assert_eq!(VdsoTrampolines::for_vdso(&vec![0; 2 * MAX_VDSO_LEN]), None);
    // Any number that is read from it may have any value.
    for at in 0..0x400 {
        for value in [0x00, 0x7f, 0x80, 0xff] {
            let mut bent = own.clone();
            bent[at] = value;
            let _no_panic = VdsoTrampolines::for_vdso(&bent);
        }
    }
}

/// Maps a copy with its trampolines into this process, as into a guest. Returns the copy's address.
fn laid_out(trampolines: &VdsoTrampolines) -> u64 {
    let len = DISTANCE as usize + trampolines.code.len();
    // SAFETY: new memory, never unmapped; what is written lies inside it.
    unsafe {
        let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let at = libc::mmap(std::ptr::null_mut(), len, all, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        let at = at.cast::<u8>();
        at.copy_from(trampolines.page.as_ptr(), trampolines.page.len());
        at.add(DISTANCE as usize).copy_from(trampolines.code.as_ptr(), trampolines.code.len());
        at as u64 + DISTANCE
    }
}

#[test]
fn functions_have_the_same_results() {
    let own = own();
    let trampolines = VdsoTrampolines::for_vdso(&own).unwrap();
    let base = laid_out(&trampolines);
    let find = |name: &[u8]| {
        let (_, at) = functions(&own).unwrap().into_iter().find(|(known, _)| *known == name).unwrap();
        base + at as u64
    };
    let random = functions(&own).unwrap().iter().any(|(name, _)| *name == GETRANDOM);
    // SAFETY: the functions have these signatures.
    unsafe {
        let clock: extern "C" fn(i32, *mut libc::timespec) -> i32 =
            std::mem::transmute(find(b"__vdso_clock_gettime"));
        let (mut by_stub, mut by_call) = (std::mem::zeroed::<libc::timespec>(), std::mem::zeroed());
        assert_eq!(clock(libc::CLOCK_MONOTONIC, &raw mut by_stub), 0);
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut by_call);
        assert!((by_call.tv_sec - by_stub.tv_sec) < 2 && by_stub.tv_sec > 0);
        assert_eq!(clock(-1, &raw mut by_stub), -libc::EINVAL);
        let time: extern "C" fn(*mut i64) -> i64 = std::mem::transmute(find(b"__vdso_time"));
        assert!((time(std::ptr::null_mut()) - libc::time(std::ptr::null_mut())).abs() < 2);
        if random {
            type Random = extern "C" fn(*mut u8, usize, u32, *mut u8, usize) -> isize;
            let get: Random = std::mem::transmute(find(GETRANDOM));
            let mut bytes = [0u8; 16];
            let none = std::ptr::null_mut();
            assert_eq!(get(bytes.as_mut_ptr(), 16, 0, none, 144), 16);
            assert_ne!(bytes, [0; 16]);
            assert_eq!(get(none, 0, 0, none, usize::MAX), -(libc::ENOSYS as isize));
        }
    }
}

/// Execution that lands inside an entry faults there, whatever the registers are.
#[test]
fn jump_into_an_entry_faults() {
    let trampolines = VdsoTrampolines::for_vdso(&own()).unwrap();
    let base = laid_out(&trampolines);
    for (_, _, entry) in &trampolines.places {
        for inside in 1..ENTRY_LEN as u64 {
            let at = base + entry + inside;
            assert_eq!(fault_at(at), at, "{:02x?}", &trampolines.code[*entry as usize..][..ENTRY_LEN]);
        }
    }
}

/// Where a copy of this process faults if it continues at `address`.
fn fault_at(address: u64) -> u64 {
    // SAFETY: the child does nothing but wait to be traced.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        loop {
            // SAFETY: has no arguments.
            unsafe { libc::pause() };
        }
    }
    tern_tracee::seize(pid, stop::EXIT_KILL).unwrap();
    stop::interrupt(pid).unwrap();
    let stopped = stop::wait_stop(pid).unwrap();
    let before = stopped.registers().unwrap();
    stopped.set_registers(&Registers { rip: address, orig_rax: u64::MAX, ..before }).unwrap();
    stopped.resume(0).unwrap();
    let stopped = stop::wait_stop(pid).unwrap();
    assert!(matches!(stopped.stop, Stop::Signal(libc::SIGSEGV | libc::SIGILL)), "{:?}", stopped.stop);
    let found = stopped.registers().unwrap().rip;
    tern_tracee::pidfd::kill(pid);
    let _its_end = stop::wait(pid, true);
    found
}
