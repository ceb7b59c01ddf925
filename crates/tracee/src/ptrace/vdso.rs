//! Running a thread out of the vDSO. `guest/src/vdso.rs` explains why a thread must leave it.
//!
//! A thread leaves a clock function after some 60 single steps. The function reads the clock's
//! pages, and begins again if the kernel has updated them meanwhile, which happens at each tick. On
//! a busy machine each step waits for a CPU, so that the thread may never get out by single steps.
//! Therefore after [`MAX_STEPS`] the thread runs to breakpoints at the function's return address
//! and at its `syscall` instructions. The first breakpoint on a machine takes 5 to 20 ms to set
//! (perf waits for a grace period of RCU), as long as 200 steps.

use crate::memory::Memory;
use crate::registers::Registers;
use crate::stop::{self, MAX_BREAKPOINTS, Stop, Stopped};
use crate::{Result, inject::SYSCALL, procfs};
use gimli::{
    BaseAddresses, CfaRule, EhFrame, LittleEndian, RegisterRule, UnwindContext, UnwindSection, X86_64,
};
use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection};
use std::ops::Range;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Maximum number of steps before a breakpoint is set.
const MAX_STEPS: u32 = 100;

/// Maximum number of stops on the way out.
const MAX_STOPS: u32 = 20_000;

/// How long a thread may take to its breakpoint. It executes some hundred instructions, but may wait
/// for a CPU.
const BREAKPOINT_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a thread with these registers is inside the vDSO. A thread in a system call that was
/// made from there does not count, since it no longer uses the clock pages.
#[must_use]
pub fn is_inside(vdso: &Range<u64>, registers: &Registers) -> bool {
    vdso.contains(&registers.rip) && registers.call().is_none()
}

/// Whether the next instruction of a thread with these registers is `syscall`. A function of the
/// vDSO that has reached its `syscall` does not read the clock pages any more.
#[must_use]
pub fn is_at_syscall(memory: &Memory, registers: &Registers) -> bool {
    let mut next = [0; SYSCALL.len()];
    memory.read(registers.rip, &mut next).is_ok() && next == SYSCALL
}

/// The ELF image of this process's vDSO, which all processes of the kernel have. A tracee may have
/// changed its own. Empty if this process has none.
fn own_code() -> &'static [u8] {
    static CODE: OnceLock<Vec<u8>> = OnceLock::new();
    CODE.get_or_init(|| {
        let own = std::process::id() as i32;
        let maps = procfs::maps(own).unwrap_or_default();
        let Some(vdso) = maps.iter().find(|m| m.name == b"[vdso]") else { return Vec::new() };
        let mut code = vec![0; (vdso.end - vdso.start) as usize];
        match Memory::open(own).and_then(|memory| memory.read(vdso.start, &mut code)) {
            Ok(()) => code,
            Err(_) => Vec::new(),
        }
    })
}

/// Runs a stopped thread until it is outside the vDSO, or at a `syscall` instruction there. Signals
/// are blocked meanwhile. A signal that was about to be delivered to the thread is dropped, and the
/// caller must raise it again.
///
/// The thread is single-stepped if no breakpoint is reached within a second, or none can be set:
/// without debug registers, without a description of the stack frame, or with more exits than debug
/// registers. It may then still be inside after 20,000 steps.
///
/// # Errors
/// If it is gone.
pub fn run_out(stopped: Stopped, memory: &Memory, vdso: &Range<u64>) -> Result<Stopped> {
    run_out_after(MAX_STEPS, stopped, memory, vdso)
}

/// [`run_out`], with a breakpoint after `max_steps` steps.
fn run_out_after(
    max_steps: u32,
    mut stopped: Stopped,
    memory: &Memory,
    vdso: &Range<u64>,
) -> Result<Stopped> {
    if !is_inside(vdso, &stopped.registers()?) {
        return Ok(stopped);
    }
    let mask = stopped.sigmask()?;
    stopped.set_sigmask(!(1 << (libc::SIGTRAP - 1)))?;
    let mut has_breakpoints = false;
    for stops in 0..MAX_STOPS {
        let registers = stopped.registers()?;
        if !is_inside(vdso, &registers) || is_at_syscall(memory, &registers) {
            break;
        }
        if has_breakpoints || stops == max_steps {
            has_breakpoints =
                match exits(vdso, &registers, memory).map(|exits| stopped.set_breakpoints(&exits)) {
                    Some(Err(error)) if error.is_gone() => return Err(error),
                    set => set.is_some_and(|set| set.is_ok()),
                };
        }
        stopped = run_to_trap(stopped, has_breakpoints)?;
        if has_breakpoints {
            stopped.set_breakpoints(&[])?;
            has_breakpoints = stopped.stop == Stop::Signal(libc::SIGTRAP);
        }
    }
    stopped.set_sigmask(mask)?;
    Ok(stopped)
}

/// Resumes a thread, for one instruction unless it has breakpoints, until it stops with SIGTRAP. A
/// thread that does not reach its breakpoint in time is interrupted.
fn run_to_trap(mut stopped: Stopped, has_breakpoints: bool) -> Result<Stopped> {
    let (tid, until) = (stopped.pid(), Instant::now() + BREAKPOINT_TIMEOUT);
    loop {
        if !has_breakpoints {
            stopped.step(0)?;
            stopped = stop::wait_stop(tid)?;
        } else {
            stopped.resume(0)?;
            let reached = stop::wait_stop_until(tid, until)?;
            if reached.is_none() {
                stop::interrupt(tid)?;
            }
            stopped = reached.map_or_else(|| stop::wait_stop(tid), Ok)?;
        }
        if stopped.stop == Stop::Signal(libc::SIGTRAP) || Instant::now() > until {
            return Ok(stopped);
        }
    }
}

/// The addresses at which a thread with these registers leaves the function that it executes: the
/// address to which the function returns, and the addresses of its `syscall` instructions. `None`
/// if the vDSO does not describe the function's stack frame, or if there are more addresses than
/// debug registers.
fn exits(vdso: &Range<u64>, registers: &Registers, memory: &Memory) -> Option<Vec<u64>> {
    let (code, at) = (own_code(), registers.rip - vdso.start);
    let image = ElfFile64::<Endianness>::parse(code).ok()?;
    let section = image.section_by_name(".eh_frame")?;
    let bases = BaseAddresses::default().set_eh_frame(section.address());
    let mut frames = EhFrame::new(section.data().ok()?, LittleEndian);
    frames.set_address_size(8);
    let function = frames.fde_for_address(&bases, at, EhFrame::cie_from_offset).ok()?;
    let mut context = UnwindContext::new();
    let row = function.unwind_info_for_address(&frames, &bases, &mut context, at).ok()?;
    let CfaRule::RegisterAndOffset { register, offset } = *row.cfa() else { return None };
    let base = match register {
        X86_64::RSP => registers.rsp,
        X86_64::RBP => registers.rbp,
        _ => return None,
    };
    let frame = base.checked_add_signed(offset)?;
    let Some(RegisterRule::Offset(offset)) = row.register(X86_64::RA) else { return None };
    let caller = memory.word(frame.checked_add_signed(offset)?).ok()?;
    let range = function.initial_address()..function.end_address();
    let body = code.get(range.start as usize..range.end as usize)?;
    let calls = body.windows(SYSCALL.len()).enumerate().filter(|(_, bytes)| *bytes == SYSCALL);
    let mut exits = vec![caller];
    exits.extend(calls.map(|(at, _)| vdso.start + range.start + at as u64));
    (exits.len() <= MAX_BREAKPOINTS).then_some(exits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seize;

    struct Child(i32);

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: it is our child, which nothing else waits for any more.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL);
            }
        }
    }

    /// A process that reads two clocks all the time.
    fn clock_reader() -> Child {
        // SAFETY: the child makes only calls that are allowed after a fork.
        let child = Child(unsafe { libc::fork() });
        if child.0 == 0 {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            loop {
                // SAFETY: the time is a valid place.
                unsafe {
                    libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time);
                    libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time);
                }
            }
        }
        child
    }

    fn stop_reader(child: &Child) -> Stopped {
        stop::interrupt(child.0).unwrap();
        stop::wait_stop(child.0).unwrap()
    }

    fn vdso_of(child: &Child) -> (Range<u64>, Memory) {
        let maps = procfs::maps(child.0).unwrap();
        let vdso = maps.iter().find(|m| m.name == b"[vdso]").unwrap();
        (vdso.start..vdso.end, Memory::open(child.0).unwrap())
    }

    #[test]
    fn return_address_is_found_at_each_instruction() {
        let child = clock_reader();
        seize(child.0, stop::EXIT_KILL).unwrap();
        let (vdso, memory) = vdso_of(&child);
        let mut stopped = stop_reader(&child);
        let (mut expected, mut returns) = (None, 0);
        for _ in 0..20_000 {
            let registers = stopped.registers().unwrap();
            if is_inside(&vdso, &registers) {
                let exits = exits(&vdso, &registers, &memory).expect("a stack frame");
                assert!(exits[1..].iter().all(|at| vdso.contains(at)));
                expected = Some(exits[0]);
            } else if let Some(expected) = expected.take() {
                assert_eq!(registers.rip, expected);
                returns += 1;
            }
            if returns == 10 {
                break;
            }
            stopped.step(0).unwrap();
            stopped = stop::wait_stop(child.0).unwrap();
        }
        assert_eq!(returns, 10);
        stopped.resume(0).unwrap();
    }

    /// Each time the thread leaves the function at an exit, and then runs on without a breakpoint.
    #[test]
    fn thread_runs_out_to_an_exit() {
        let child = clock_reader();
        seize(child.0, stop::EXIT_KILL).unwrap();
        let (vdso, memory) = vdso_of(&child);
        let mut found_inside = 0;
        for turn in 0..20_000 {
            stop::pause(Duration::from_micros(turn % 100));
            let stopped = stop_reader(&child);
            let registers = stopped.registers().unwrap();
            if !is_inside(&vdso, &registers) {
                stopped.resume(0).unwrap();
                continue;
            }
            found_inside += 1;
            let exits = exits(&vdso, &registers, &memory).unwrap();
            let mask = stopped.sigmask().unwrap();
            let max_steps = if found_inside % 2 == 0 { 0 } else { MAX_STEPS };
            let stopped = run_out_after(max_steps, stopped, &memory, &vdso).unwrap();
            let now = stopped.registers().unwrap();
            assert!(!is_inside(&vdso, &now) || exits.contains(&now.rip));
            assert_eq!(stopped.sigmask().unwrap(), mask);
            stopped.resume(0).unwrap();
            if found_inside == 50 {
                break;
            }
        }
        assert_eq!(found_inside, 50);
    }
}
