//! Adds the CPU time that children have used away to the results of waits and rusage calls.
//!
//! When a parent waits for a child, home's kernel adds the CPU time of the child, and of the
//! children that it has waited for, to the parent's (`RUSAGE_CHILDREN`, `times`); not if the parent
//! discards its children (SIGCHLD ignored, or SA_NOCLDWAIT). This module does the same with the CPU
//! time used away, which home's kernel does not know.
//!
//! The shim, as tracer, sees the exit of a deputy before the parent can wait for it. The guest
//! reports its CPU time before it requests its exit or reports that it was killed. (If the deputy
//! is killed at home, the last report is at most a second old.) The time is kept with the parent
//! until the call that reaps the child has been made; while the parent is away nothing else reaps.
//! Whether a wait has reaped does not always follow from its result (WNOWAIT, or no buffer given),
//! so a child that has ended and is no zombie any more counts as reaped.

use crate::process::Process;
use crate::shim::Shim;
use crate::time::usage::EndedChild;
use tern_ids::HomePid;
use tern_migrate::{CpuTime, usage};
use tern_syscall::{Arg, ByteBuf, Call, Outcome};
use tern_tracee::procfs;

impl Process {
    /// Whether its children are reaped automatically, without being counted.
    fn discards_children(&self) -> bool {
        let action = self.actions.get(libc::SIGCHLD as usize - 1).copied().unwrap_or_default();
        action[0] == tern_image::process::SIG_IGN || action[1] & libc::SA_NOCLDWAIT as u64 != 0
    }
}

impl Shim {
    /// A process has ended: keeps its CPU time with its parent.
    pub(crate) fn keep_usage_for_parent(&mut self, process: &Process) {
        let used = process.usage.saved().sum();
        if used == CpuTime::default() {
            return;
        }
        match self.processes.get_mut(&process.parent) {
            Some(parent) if parent.discards_children() => {}
            Some(parent) => {
                let ended = EndedChild { pid: process.pid, used };
                parent.usage.child_ended(process.own_pid, ended);
            }
            // Another shim may hold its parent. If the parent runs untraced at home, nothing would
            // ask for the saved time.
            None if procfs::status(process.parent.0).is_ok_and(|parent| parent.tracer != 0) => {
                self.usage_store.save(process.pid, process.started, process.usage.saved());
            }
            None => {}
        }
    }

    /// Adds the CPU time that children have used away to the result of a call that reports it.
    pub(crate) fn add_children_usage(&mut self, pid: HomePid, call: &Call, outcome: &mut Outcome) {
        let Some(process) = self.processes.get_mut(&pid).filter(|_| outcome.ret >= 0) else { return };
        match i64::from(call.nr) {
            libc::SYS_wait4 | libc::SYS_waitid => self.add_waited_child(pid, call, outcome),
            libc::SYS_times => {
                if let Some(out) = outcome.outs.first_mut() {
                    usage::add_tms(out, 16, process.usage.children());
                }
            }
            libc::SYS_getrusage if matches!(call.args[0], Arg::Value(of) if of as i32 == libc::RUSAGE_CHILDREN) => {
                if let Some(out) = outcome.outs.first_mut() {
                    usage::add_rusage(out, process.usage.children());
                }
            }
            _ => {}
        }
    }

    /// Handles a wait for a child. A wait that does not reap (WNOWAIT) reports the child's time too.
    fn add_waited_child(&mut self, pid: HomePid, call: &Call, outcome: &mut Outcome) {
        let child = waited_child(call, outcome);
        let used = child.and_then(|child| self.usage_of_child(pid, child));
        let Some(process) = self.processes.get_mut(&pid) else { return };
        // A waitid without a siginfo buffer does not report which child it is about.
        let child_unknown = i64::from(call.nr) == libc::SYS_waitid && !matches!(call.args[2], Arg::Bytes(_));
        if child.is_none() && !child_unknown {
            return;
        }
        let reaped = process.usage.add_reaped(child);
        let used = used.or(reaped.filter(|_| child_unknown));
        if let (Some(used), Some(out)) = (used, rusage_out(call, outcome)) {
            usage::add_rusage(out, used);
        }
    }

    /// The CPU time used away by a child, which its parent knows by this pid.
    fn usage_of_child(&mut self, pid: HomePid, child: i32) -> Option<CpuTime> {
        let process = self.processes.get(&pid)?;
        if let Some(used) = process.usage.of_ended_child(child) {
            return Some(used);
        }
        let mut living = self.processes.values();
        if let Some(living) = living.find(|other| other.parent == pid && other.own_pid == child) {
            return Some(living.usage.saved().sum());
        }
        // A child that was detached, or belongs to another shim, is known by the pid in this
        // namespace. Once that child has been waited for, its entry is removed.
        let child = HomePid(child);
        let saved_usage = self.usage_store.peek(child).filter(|_| process.own_pid == process.pid.0)?;
        if procfs::status(child.0).is_err() {
            self.usage_store.remove(child);
            let process = self.processes.get_mut(&pid)?;
            process.usage.child_reaped(saved_usage.sum());
        }
        Some(saved_usage.sum())
    }
}

/// The child that a wait reports, by its pid in the caller's namespace.
fn waited_child(call: &Call, outcome: &Outcome) -> Option<i32> {
    if i64::from(call.nr) == libc::SYS_wait4 {
        return i32::try_from(outcome.ret).ok().filter(|child| *child > 0);
    }
    match &call.args[2] {
        Arg::Bytes(before) => {
            // si_pid. An output that equals the input is not part of the result.
            let after = outcome.outs.first().filter(|after| !after.is_empty()).unwrap_or(before);
            let number = after.get(16..20)?.try_into().ok()?;
            Some(i32::from_le_bytes(number)).filter(|child| *child > 0)
        }
        _ => None,
    }
}

/// The struct rusage that a wait has written.
fn rusage_out<'a>(call: &Call, outcome: &'a mut Outcome) -> Option<&'a mut ByteBuf> {
    let (status, usage) = if i64::from(call.nr) == libc::SYS_wait4 { (1, 3) } else { (2, 4) };
    let wanted = |arg: &Arg| matches!(arg, Arg::Output | Arg::Bytes(_));
    if !wanted(&call.args[usage]) {
        return None;
    }
    let at = usize::from(wanted(&call.args[status]));
    if outcome.outs.len() <= at {
        outcome.outs.resize(at + 1, ByteBuf::new());
    }
    let out = &mut outcome.outs[at];
    if let Arg::Bytes(before) = &call.args[usage]
        && out.is_empty()
    {
        out.clone_from(before);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(nr: i64, args: [Arg; 4]) -> Call {
        let [a, b, c, d] = args;
        let last =
            if nr == libc::SYS_waitid { Arg::Bytes(ByteBuf::from(vec![0; 144])) } else { Arg::Value(0) };
        Call { nr: nr as u32, args: [a, b, c, d, last, Arg::Value(0)] }
    }

    fn outcome(ret: i64, outs: &[&[u8]]) -> Outcome {
        Outcome { ret, outs: outs.iter().map(|out| ByteBuf::from(out.to_vec())).collect() }
    }

    #[test]
    fn waited_child_is_found_in_the_result() {
        let value = Arg::Value;
        let wait4 = call(libc::SYS_wait4, [value(u64::MAX), value(0), value(0), Arg::Output]);
        assert_eq!(waited_child(&wait4, &outcome(4711, &[])), Some(4711));
        assert_eq!(waited_child(&wait4, &outcome(0, &[])), None);
        let mut info = [0; 28];
        info[16..20].copy_from_slice(&4711u32.to_le_bytes());
        let waitid = |by: libc::idtype_t, info: Arg| {
            call(libc::SYS_waitid, [value(by.into()), value(12), info, value(4)])
        };
        let blank = Arg::Bytes(ByteBuf::from(vec![0; 28]));
        assert_eq!(waited_child(&waitid(libc::P_ALL, blank.clone()), &outcome(0, &[&info])), Some(4711));
        assert_eq!(waited_child(&waitid(libc::P_ALL, blank), &outcome(0, &[])), None, "no child");
        let same = Arg::Bytes(ByteBuf::from(info.to_vec()));
        assert_eq!(
            waited_child(&waitid(libc::P_ALL, same), &outcome(0, &[])),
            Some(4711),
            "the same as before"
        );
        assert_eq!(
            waited_child(&waitid(libc::P_PID, value(0)), &outcome(0, &[])),
            None,
            "it need not have ended"
        );
    }

    #[test]
    fn rusage_follows_the_other_outputs() {
        let value = Arg::Value;
        let (status, usage) = (&[1u8; 4][..], &[2u8; 144][..]);
        let both = call(libc::SYS_wait4, [value(0), Arg::Output, value(0), Arg::Output]);
        assert_eq!(rusage_out(&both, &mut outcome(1, &[status, usage])).unwrap().as_slice(), usage);
        let one = call(libc::SYS_wait4, [value(0), value(0), value(0), Arg::Output]);
        assert_eq!(rusage_out(&one, &mut outcome(1, &[usage])).unwrap().as_slice(), usage);
        let none = call(libc::SYS_wait4, [value(0), Arg::Output, value(0), value(0)]);
        assert!(rusage_out(&none, &mut outcome(1, &[status])).is_none());
        let waitid = call(libc::SYS_waitid, [value(0), value(0), value(0), value(4)]);
        assert_eq!(rusage_out(&waitid, &mut outcome(0, &[])).unwrap().as_slice(), [0; 144], "as it was");
    }
}
