//! Calls made on this machine twice, once directly and once through gather, lay_out, a mailbox,
//! collect and scatter: results and memory must be equal.
#![allow(clippy::panic, reason = "everything here is a test, also what is not marked as one")]

mod arena;
mod events;
mod files;
mod ipc;
mod process;
mod sockets;

use arena::Arena;
use std::sync::{Mutex, MutexGuard};
use tern_syscall::{Call, Outcome, gather, scatter};

/// Descriptor numbers are compared, so only one test at a time may open descriptors.
static DESCRIPTORS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    DESCRIPTORS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Makes a system call; returns -errno on failure.
fn native(nr: u32, args: &[u64; 6]) -> i64 {
    let [a, b, c, d, e, f] = *args;
    // SAFETY: the tests pass pointers into their arena or into a mailbox, which are alive and large
    // enough; these calls change no other memory of this process.
    let ret = unsafe { libc::syscall(i64::from(nr), a, b, c, d, e, f) };
    if ret == -1 { -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { ret }
}

/// Makes the same call through the pipeline. The mailbox is filled with garbage first, as after an
/// earlier call.
fn forwarded(nr: i64, args: &[u64; 6], arena: &mut Arena) -> i64 {
    let gathered = match gather(nr as u32, args, arena) {
        Ok(gathered) => gathered,
        Err(tern_syscall::GatherError::Errno(errno)) => return -i64::from(errno),
        Err(other) => panic!("{nr}: {other}"),
    };
    let bytes = postcard::to_stdvec(&gathered.call).expect("a call is plain data");
    let call: Call = postcard::from_bytes(&bytes).expect("what was just written");
    assert_eq!(call, gathered.call);
    let layout = call.lay_out().expect("a gathered call is well formed");
    let mut mailbox = arena::Pages::new(layout.size());
    let base = mailbox.bytes().as_ptr() as u64;
    layout.fill(base, mailbox.bytes()).expect("the mailbox is large enough");
    let ret = native(layout.nr(), &layout.args(base));
    let outcome = layout.collect(ret, mailbox.bytes());
    let bytes = postcard::to_stdvec(&outcome).expect("an outcome is plain data");
    let outcome: Outcome = postcard::from_bytes(&bytes).expect("what was just written");
    match scatter(&gathered.output_buffers, &outcome, arena) {
        Ok(()) => ret,
        Err(tern_syscall::Fault) => -i64::from(libc::EFAULT),
    }
}

/// Makes the call both ways. `set_up` writes the arguments to a fresh arena; `clean_up` undoes the
/// call's effects, given its result. Returns the result and the arena for further checks.
fn same(
    nr: i64,
    set_up: impl FnMut(&mut Arena) -> [u64; 6],
    clean_up: impl FnMut(i64, &mut Arena),
) -> (i64, Arena) {
    compare(nr, set_up, clean_up, |_, _| false)
}

/// Like `same`, for calls that leave padding in memory unchanged. After a forwarded call, padding
/// has the bytes of the mailbox, or zeros.
fn same_but_for_padding(
    nr: i64,
    set_up: impl FnMut(&mut Arena) -> [u64; 6],
    clean_up: impl FnMut(i64, &mut Arena),
) -> (i64, Arena) {
    let is_padding = |got, expected| matches!(got, 0 | arena::STALE) && expected == arena::UNTOUCHED;
    compare(nr, set_up, clean_up, is_padding)
}

fn compare(
    nr: i64,
    mut set_up: impl FnMut(&mut Arena) -> [u64; 6],
    mut clean_up: impl FnMut(i64, &mut Arena),
    forgiven: impl Fn(u8, u8) -> bool,
) -> (i64, Arena) {
    let mut arena = Arena::new();
    let args = set_up(&mut arena);
    let direct = native(nr as u32, &args);
    let expected = arena.snapshot();
    clean_up(direct, &mut arena);

    arena.reset();
    assert_eq!(set_up(&mut arena), args, "the same arena gives the same addresses");
    let ret = forwarded(nr, &args, &mut arena);
    assert_eq!(ret, direct, "result of call {nr}");
    let got = arena.snapshot();
    if let Some(at) = (0..got.len()).find(|&at| got[at] != expected[at] && !forgiven(got[at], expected[at])) {
        let around = at..(at + 32).min(got.len());
        panic!("call {nr}: memory differs at {at}: {:?}, not {:?}", &got[around.clone()], &expected[around]);
    }
    clean_up(ret, &mut arena);
    (ret, arena)
}

/// Like `same`, for a call without lasting effects.
fn same_result(nr: i64, set_up: impl FnMut(&mut Arena) -> [u64; 6]) -> i64 {
    same(nr, set_up, |_, _| {}).0
}

/// Closes the descriptor that a call opened.
fn close(ret: i64) {
    if ret >= 0 {
        assert_eq!(native(libc::SYS_close as u32, &[ret as u64, 0, 0, 0, 0, 0]), 0);
    }
}

/// The numbers as the first arguments, and zeroes for the rest.
fn args(given: &[u64]) -> [u64; 6] {
    let mut args = [0; 6];
    args[..given.len()].copy_from_slice(given);
    args
}
