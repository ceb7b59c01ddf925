//! Both halves fork.
//!
//! Home's half has forked already and says which pid the child got. Here the same is done with a clone made in
//! the guest's place: beside it, not below it (CLONE_PARENT), so that no second SIGCHLD appears and the
//! helper reaps it; and with the arguments in registers, where nobody else can change them between our look
//! and the kernel's.
//!
//! After a vfork the parent stays inside its clone until the child has executed or ended; the main loop sees
//! it come out.

use crate::member::{Member, OpenCall, State};
use crate::sandbox::Sandbox;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_tracee::inject::MOST_STOPS;
use tern_tracee::registers::Registers;
use tern_tracee::stop::{self, Change, Stop};
use tern_tracee::{Error, Result};

/// A parent waiting inside its vfork.
#[derive(Debug)]
pub struct Forking {
    /// Its registers for afterwards.
    pub after: Registers,
    /// Its signal mask.
    pub mask: u64,
}

/// Flags of clone that concern memory and are done here as well.
const OURS: i32 = libc::CLONE_VM
    | libc::CLONE_VFORK
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// What to call clone with, for the call that the program made: flags, stack, two tid addresses, TLS.
fn arguments(nr: u32, args: &[u64; 6]) -> [u64; 6] {
    let vfork = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    let [flags, stack, parent_tid, child_tid, tls] = match i64::from(nr) {
        libc::SYS_clone => [args[0], args[1], args[2], args[3], args[4]],
        libc::SYS_vfork => [vfork, 0, 0, 0, 0],
        _ => [0; 5],
    };
    [flags & OURS as u64 | libc::CLONE_PARENT as u64, stack, parent_tid, child_tid, tls, 0]
}

impl Member {
    /// Makes the guest's half of a fork whose child at home is `child`, with this pid in its own namespace.
    /// The child is returned, stopped, ready to run; the parent runs, or waits for a vfork's end.
    ///
    /// # Errors
    /// If the guest is gone or the kernel will not fork; the parent then got EAGAIN.
    pub fn fork(
        &mut self,
        open: &OpenCall,
        child: HomePid,
        own_pid: i32,
        sandbox: &Sandbox,
    ) -> Result<Member> {
        let args = arguments(open.trap.nr, &open.trap.args);
        let io = |source| Error::Refused { operation: "choose a pid", pid: self.host, source };
        sandbox.next_pid(own_pid).map_err(io)?;
        let stopped = self.halt_in(open.trap.id)?;
        let before = stopped.registers()?;
        let mask = stopped.sigmask()?;
        let mut after = before;
        (after.rax, after.orig_rax) = (own_pid as u64, u64::MAX);
        // As an injected call, but the fork's own events are ours to see.
        stopped.set_sigmask(u64::MAX)?;
        stopped.set_registers(&before.calling(self.reserve.start, libc::SYS_clone as u64, &args))?;
        stopped.to_call()?;
        let host = match self.clone_through(&args, own_pid)? {
            Ok(host) => host,
            Err(failed) => {
                failed
                    .set_registers(&Registers { rax: (-i64::from(libc::EAGAIN)).cast_unsigned(), ..after })?;
                failed.set_sigmask(mask)?;
                failed.resume(0)?;
                return Err(Error::Astray { what: "it could not fork here".into(), pid: self.host });
            }
        };
        let begun = stop::wait_stop(host)?;
        let mut registers = begun.registers()?;
        registers = Registers { fs_base: registers.fs_base, ..before };
        (registers.rax, registers.orig_rax) = (0, u64::MAX);
        if args[1] != 0 {
            registers.rsp = args[1];
        }
        begun.set_registers(&registers)?;
        begun.set_sigmask(mask)?;
        let vfork = args[0] & libc::CLONE_VFORK as u64 != 0;
        if vfork {
            self.state = State::Forking(Box::new(Forking { after, mask }));
        } else {
            for stops in 0.. {
                let stopped = stop::wait_stop(self.host)?;
                if stops > MOST_STOPS {
                    return Err(Error::Astray {
                        what: "it never comes out of its fork".into(),
                        pid: self.host,
                    });
                }
                if stopped.stop == Stop::Call {
                    stopped.set_registers(&after)?;
                    stopped.set_sigmask(mask)?;
                    stopped.resume(0)?;
                    break;
                }
                stopped.to_call()?;
            }
        }
        begun.resume(0)?;
        Ok(Member {
            listener: self.listener.clone(),
            shown: self.shown.clone(),
            image: self.image.clone(),
            home_mask: self.home_mask,
            borrowed: args[0] & libc::CLONE_VM as u64 != 0,
            ..Member::new(child, own_pid, host, self.epoch, self.reserve, State::Running)?
        })
    }

    /// Lets the clone through the filter and waits for its event: the child's pid here, or the parent after a
    /// clone that failed.
    fn clone_through(
        &mut self,
        args: &[u64; 6],
        own_pid: i32,
    ) -> Result<std::result::Result<i32, stop::Stopped>> {
        let Some(listener) = self.listener.clone() else { return Err(Error::Gone { pid: self.host }) };
        let give_up = Instant::now() + Duration::from_secs(10);
        let (mut host, mut begun) = (None, false);
        loop {
            if let Some(call) = listener.receive_new()? {
                if call.pid != self.host {
                    listener.put_aside(call);
                } else if i64::from(call.nr) == libc::SYS_clone && call.args == *args {
                    listener.pass(call.id)?;
                } else {
                    listener.fail(call.id, libc::EPERM)?;
                }
            }
            match stop::wait(self.host, false)? {
                Some((_, Change::Stopped(stopped))) => match stopped.stop {
                    Stop::Fork | Stop::Vfork | Stop::Clone => {
                        host = Some(stopped.message()? as i32);
                        stopped.to_call()?;
                    }
                    Stop::Call if begun => return Ok(Err(stopped)),
                    Stop::Call => {
                        begun = true;
                        stopped.to_call()?;
                    }
                    _ => stopped.to_call()?,
                },
                Some(_) => return Err(Error::Gone { pid: self.host }),
                None => std::thread::yield_now(),
            }
            if let Some(host) = host {
                return Ok(Ok(host));
            }
            if Instant::now() > give_up {
                return Err(Error::Astray {
                    what: format!("no child {own_pid} came of its fork"),
                    pid: self.host,
                });
            }
        }
    }
}
