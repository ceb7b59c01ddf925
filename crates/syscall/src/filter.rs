//! The guest's seccomp filter, generated from the table: it allows calls that may run natively, and
//! notifies the shim of all others.
//!
//! ```text
//! arch is not x86-64          kill
//! number ≥ 0x4000_0000        ENOSYS, as in a kernel without x32
//! binary tree over numbers    allow · notify · test of an argument, or of the caller's address → allow or notify
//! ```
//!
//! The search in the tree examines only the number, so that the kernel can cache the calls that are
//! always allowed.

use crate::route::{ArgTest, Route, Rule};
use crate::table;

/// An instruction of classic BPF: `struct sock_filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SockFilter {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if true.
    pub jt: u8,
    /// Instructions to skip if false.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Offsets in struct seccomp_data.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const CALLER: u32 = 8;
const ARGS: u32 = 16;

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const X32: u32 = 0x4000_0000;

/// Calls on the content of an open file or connection, and calls that wait for some. The filter
/// allows them from Tern's own `syscall` instructions in the guest's fast path: a guest has only
/// descriptors of files that it may read and write directly, of its connections, and of files that
/// report readiness.
const NATIVE_CALLS: [i64; 16] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_pselect6,
];

/// Number of Tern's own `syscall` instructions in the guest's fast path, a power of two.
pub const NATIVE_CALL_SITES: u32 = 16;
/// Their distance, a power of two.
pub const NATIVE_CALL_DISTANCE: u32 = 8;

/// Whether this is clock_gettime, which the filter allows from Tern's own `syscall` instructions for
/// any clock: it reveals only the CPU time that this node's kernel has counted.
fn is_clock_gettime(nr: u32) -> bool {
    i64::from(nr) == libc::SYS_clock_gettime
}

/// The verdict for the numbers from `from` up to the next range.
struct Range {
    from: u32,
    verdict: Verdict,
}

#[derive(Clone, Copy)]
enum Verdict {
    Allow,
    Notify,
    Check(ArgTest),
    /// Allow if called from one of Tern's own `syscall` instructions; otherwise test an argument.
    FromTernOr(ArgTest),
    /// Allow if called from one of Tern's own `syscall` instructions; otherwise notify.
    FromTern,
}

/// Generates the filter, to be installed with SECCOMP_FILTER_FLAG_NEW_LISTENER and
/// WAIT_KILLABLE_RECV. `ours` is the address after the first of [`NATIVE_CALL_SITES`] `syscall`
/// instructions in the fast path, from which the calls in `NATIVE_CALLS` and clock_gettime are allowed.
/// The first is at a multiple of the length of all of them.
#[must_use]
pub fn filter(ours: u64) -> Vec<SockFilter> {
    let mut program = vec![
        load(ARCH),
        SockFilter { code: IF_EQUAL, jt: 1, jf: 0, k: AUDIT_ARCH_X86_64 },
        verdict(libc::SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
        SockFilter { code: IF_AT_LEAST, jt: 0, jf: 1, k: X32 },
        verdict(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ];
    tree(&ranges(), ours, &mut program);
    program
}

/// The ranges, in order. Adjacent numbers that are all allowed, or all notified, share one range; a
/// number with a test is a range of its own.
fn ranges() -> Vec<Range> {
    let mut ranges = vec![Range { from: 0, verdict: Verdict::Notify }];
    for nr in 0..=table::NUMBERS {
        let verdict = match table::row(nr).map(|row| row.rule) {
            Some(Rule::Always(Route::Here)) => Verdict::Allow,
            Some(Rule::HereIf(test, ..)) if is_clock_gettime(nr) => Verdict::FromTernOr(test),
            Some(Rule::HereIf(test, ..)) => Verdict::Check(test),
            _ if NATIVE_CALLS.contains(&i64::from(nr)) => Verdict::FromTern,
            _ => Verdict::Notify,
        };
        match (ranges.last_mut(), verdict) {
            (Some(Range { verdict: Verdict::Allow, .. }), Verdict::Allow)
            | (Some(Range { verdict: Verdict::Notify, .. }), Verdict::Notify) => {}
            (Some(last), verdict) if last.from == nr => last.verdict = verdict,
            (_, verdict) => ranges.push(Range { from: nr, verdict }),
        }
    }
    ranges
}

/// Generates a binary search for the range that contains the number in the accumulator.
fn tree(ranges: &[Range], ours: u64, program: &mut Vec<SockFilter>) {
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let Some(middle) = high.first() else { return };
    if low.is_empty() {
        return leaf(middle.verdict, ours, program);
    }
    let mut below = Vec::new();
    tree(low, ours, &mut below);
    // A conditional jump reaches 255 instructions, the unconditional one after it any distance.
    match u8::try_from(below.len()) {
        Ok(jt) => program.push(SockFilter { code: IF_AT_LEAST, jt, jf: 0, k: middle.from }),
        Err(_) => {
            program.push(SockFilter { code: IF_AT_LEAST, jt: 0, jf: 1, k: middle.from });
            program.push(SockFilter { code: JUMP, jt: 0, jf: 0, k: below.len() as u32 });
        }
    }
    program.append(&mut below);
    tree(high, ours, program);
}

fn leaf(what: Verdict, ours: u64, program: &mut Vec<SockFilter>) {
    match what {
        Verdict::Allow => program.push(verdict(libc::SECCOMP_RET_ALLOW)),
        Verdict::Notify => program.push(verdict(libc::SECCOMP_RET_USER_NOTIF)),
        Verdict::FromTern => {
            program.extend(allow_from(ours));
            program.push(verdict(libc::SECCOMP_RET_USER_NOTIF));
        }
        Verdict::FromTernOr(test) => {
            program.extend(allow_from(ours));
            leaf(Verdict::Check(test), ours, program);
        }
        Verdict::Check(ArgTest::Masked { arg, mask, value }) => program.extend([
            load(ARGS + 8 * u32::from(arg)),
            SockFilter { code: AND, jt: 0, jf: 0, k: mask },
            SockFilter { code: IF_EQUAL, jt: 1, jf: 0, k: value },
            verdict(libc::SECCOMP_RET_USER_NOTIF),
            verdict(libc::SECCOMP_RET_ALLOW),
        ]),
        Verdict::Check(ArgTest::OneOf { arg, values }) => {
            program.push(load(ARGS + 8 * u32::from(arg)));
            // Each comparison jumps over the ones after it and the notification.
            for (&k, over) in values.iter().zip((1..=values.len() as u8).rev()) {
                program.push(SockFilter { code: IF_EQUAL, jt: over, jf: 0, k });
            }
            program.push(verdict(libc::SECCOMP_RET_USER_NOTIF));
            program.push(verdict(libc::SECCOMP_RET_ALLOW));
        }
        Verdict::Check(ArgTest::DiffersOrNull { arg, mask, value, pointer }) => {
            let pointer = ARGS + 8 * u32::from(pointer);
            program.extend([
                load(ARGS + 8 * u32::from(arg)),
                SockFilter { code: AND, jt: 0, jf: 0, k: mask },
                SockFilter { code: IF_EQUAL, jt: 0, jf: 4, k: value },
                load(pointer),
                SockFilter { code: IF_EQUAL, jt: 0, jf: 3, k: 0 },
                load(pointer + 4),
                SockFilter { code: IF_EQUAL, jt: 0, jf: 1, k: 0 },
                verdict(libc::SECCOMP_RET_ALLOW),
                verdict(libc::SECCOMP_RET_USER_NOTIF),
            ]);
        }
    }
}

fn allow_from(ours: u64) -> [SockFilter; 6] {
    [
        load(CALLER),
        SockFilter { code: AND, jt: 0, jf: 0, k: !((NATIVE_CALL_SITES - 1) * NATIVE_CALL_DISTANCE) },
        SockFilter { code: IF_EQUAL, jt: 0, jf: 3, k: ours as u32 },
        load(CALLER + 4),
        SockFilter { code: IF_EQUAL, jt: 0, jf: 1, k: (ours >> 32) as u32 },
        verdict(libc::SECCOMP_RET_ALLOW),
    ]
}

fn load(offset: u32) -> SockFilter {
    SockFilter { code: LOAD, jt: 0, jf: 0, k: offset }
}

fn verdict(k: u32) -> SockFilter {
    SockFilter { code: RETURN, jt: 0, jf: 0, k }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::route;

    const FIRST: u64 = 0x3100_0000_0102;

    fn run(program: &[SockFilter], arch: u32, nr: u32, args: &[u64; 6]) -> (u32, bool) {
        run_from(program, arch, (nr, 0x40_1000), args)
    }

    /// Runs the program as the kernel would. Returns the verdict, and whether the program read an
    /// argument.
    fn run_from(program: &[SockFilter], arch: u32, (nr, caller): (u32, u64), args: &[u64; 6]) -> (u32, bool) {
        let (mut at, mut a, mut looked) = (0, 0u32, false);
        loop {
            let SockFilter { code, jt, jf, k } = program[at];
            at += 1;
            match code {
                LOAD => {
                    a = match k {
                        NUMBER => nr,
                        ARCH => arch,
                        CALLER => caller as u32,
                        12 => (caller >> 32) as u32,
                        _ => {
                            looked = true;
                            let at = k - ARGS;
                            assert_eq!(at % 4, 0);
                            (args[at as usize / 8] >> (at % 8 * 8)) as u32
                        }
                    }
                }
                AND => a &= k,
                JUMP => at += k as usize,
                IF_EQUAL => at += usize::from(if a == k { jt } else { jf }),
                IF_AT_LEAST => at += usize::from(if a >= k { jt } else { jf }),
                RETURN => return (k, looked),
                _ => panic!("instruction {code:#x}"),
            }
        }
    }

    fn samples() -> Vec<[u64; 6]> {
        let words = [
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            11,
            0x20,
            0x21,
            0x22,
            0x32,
            0x80,
            0x1002,
            0x1005,
            0xffff_ffff,
            u64::MAX,
            0x1_0000_0000,
            0x1_0000_0022,
            0x4_0022,
            0x5401,
            0x5413,
        ];
        let mut samples = Vec::new();
        for first in words {
            for fourth in words {
                samples.push([first, 2, 3, fourth, u64::MAX, 0]);
                samples.push([2, first, 3, fourth, u64::MAX, 0]);
            }
        }
        samples
    }

    #[test]
    fn filter_and_router_agree() {
        let program = filter(FIRST);
        for nr in 0..600 {
            for args in samples() {
                let verdict = run(&program, AUDIT_ARCH_X86_64, nr, &args).0;
                let expected = match route(nr, &args) {
                    Route::Here => libc::SECCOMP_RET_ALLOW,
                    _ => libc::SECCOMP_RET_USER_NOTIF,
                };
                assert_eq!(verdict, expected, "call {nr} with {args:x?}");
            }
        }
    }

    #[test]
    fn only_native_calls_are_allowed_by_address() {
        let program = filter(FIRST);
        for nr in 0..600 {
            let others = [FIRST ^ 1 << 32, FIRST as u32 as u64];
            for caller in (FIRST - 8..FIRST + 200).chain(others) {
                let verdict = run_from(&program, AUDIT_ARCH_X86_64, (nr, caller), &[0; 6]).0;
                let distance = caller.wrapping_sub(FIRST);
                let is_ours = distance % 8 == 0 && distance < 16 * 8;
                let ours = is_ours && (NATIVE_CALLS.contains(&nr.into()) || is_clock_gettime(nr));
                let here = route(nr, &[0; 6]) == Route::Here;
                assert_eq!(verdict == libc::SECCOMP_RET_ALLOW, ours || here, "call {nr} from {caller:#x}");
            }
        }
    }

    #[test]
    fn other_architectures_are_killed_and_x32_fails() {
        let program = filter(FIRST);
        let args = [0; 6];
        let i386 = 0x4000_0003;
        assert_eq!(run(&program, i386, 12, &args).0, libc::SECCOMP_RET_KILL_PROCESS);
        for nr in [X32, X32 + 12, u32::MAX] {
            let nosys = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
            assert_eq!(run(&program, AUDIT_ARCH_X86_64, nr, &args).0, nosys);
            assert_eq!(route(nr, &args), Route::Refuse(libc::ENOSYS));
        }
    }

    #[test]
    fn unconditional_verdicts_read_no_arguments() {
        let program = filter(FIRST);
        for row in table::rows() {
            let looked = run(&program, AUDIT_ARCH_X86_64, row.nr, &[0; 6]).1;
            assert_eq!(looked, matches!(row.rule, Rule::HereIf(..)), "{}", row.name);
        }
    }

    #[test]
    fn program_is_short_and_jumps_stay_inside() {
        let program = filter(FIRST);
        assert!(program.len() < 400, "{} instructions; the kernel takes 4096", program.len());
        for (at, op) in program.iter().enumerate() {
            let reach = match op.code {
                JUMP => op.k as usize,
                IF_EQUAL | IF_AT_LEAST => usize::from(op.jt.max(op.jf)),
                _ => 0,
            };
            assert!(at + 1 + reach < program.len() + usize::from(op.code == RETURN), "instruction {at}");
        }
    }
}
