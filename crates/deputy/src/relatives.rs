//! What children have used away, told to parents that are away.
//!
//! Home's kernel adds the CPU time of a child, and of those that the child has waited for, to its parent's
//! (`RUSAGE_CHILDREN`, `times`) when the parent waits for it; not if the parent discards its children (SIGCHLD ignored, or
//! SA_NOCLDWAIT). The same is done here with what they have used away, of which that kernel knows nothing.
//!
//! The end of a deputy is seen here, by its tracer, before its parent can wait for it; and what its guest has used is
//! told before the guest asks for its exit, or says that it was killed. (One that is killed at home has told it within
//! the last second.) It is kept with its parent until the call that reaps it has been made: nothing else does, while the
//! parent is away. Whether a wait has reaped, its result does not always say (WNOWAIT, or nowhere to write to): what has
//! ended and is no zombie any more has been.

use crate::family::Family;
use crate::ledger::Spent;
use crate::member::Member;
use tern_ids::HomePid;
use tern_migrate::{CpuTime, usage};
use tern_syscall::{Arg, ByteBuf, Call, Outcome};
use tern_tracee::procfs;

/// A child that has ended, and has not been waited for.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) pid: HomePid,
    pub(crate) used: CpuTime,
}

impl Member {
    /// All that is known of what it has used away.
    pub(crate) fn spent(&self) -> Spent {
        Spent { own: self.used, children: self.inherited, threads: self.shares.clone() }
    }

    /// Takes over what is known of that from before it came into our hand.
    pub(crate) fn recall(&mut self, spent: Spent) {
        (self.used, self.inherited, self.shares) = (spent.own, spent.children, spent.threads);
    }

    /// Whether its children vanish when they end, without counting.
    fn discards_children(&self) -> bool {
        let action = self.actions.get(libc::SIGCHLD as usize - 1).copied().unwrap_or_default();
        action[0] == tern_image::process::IGNORE || action[1] & libc::SA_NOCLDWAIT as u64 != 0
    }

    /// Counts a child, or any, that has ended and has been waited for. What the only one had used, if it was one.
    fn count_reaped(&mut self, child: Option<i32>) -> Option<CpuTime> {
        let mut reaped = Vec::new();
        let is_meant = |number: &i32| child.is_none_or(|child| child == *number);
        self.ended.retain(|number, ended| {
            let waits =
                !is_meant(number) || procfs::status(ended.pid.0).is_ok_and(|status| status.state == b'Z');
            if !waits {
                reaped.push(ended.used);
            }
            waits
        });
        self.inherited = reaped.iter().fold(self.inherited, |sum, used| sum.and(*used));
        if let [only] = reaped[..] { Some(only) } else { None }
    }
}

impl Family {
    /// A process of ours has ended: what it has used waits with its parent.
    pub(crate) fn bequeath(&mut self, member: &Member) {
        let used = member.spent().sum();
        if used == CpuTime::default() {
            return;
        }
        match self.members.get_mut(&member.parent) {
            Some(parent) if parent.discards_children() => {}
            Some(parent) => drop(parent.ended.insert(member.own_pid, Ended { pid: member.pid, used })),
            // Another family may hold its parent; if it runs at home by itself nobody would ever ask.
            None if procfs::status(member.parent.0).is_ok_and(|parent| parent.tracer != 0) => {
                self.ledger.put(member.pid, member.started, &member.spent());
            }
            None => {}
        }
    }

    /// Adds to what home's kernel has answered what children have used away, if it is a call that tells of them.
    pub(crate) fn add_children(&mut self, pid: HomePid, call: &Call, outcome: &mut Outcome) {
        let Some(member) = self.members.get_mut(&pid).filter(|_| outcome.ret >= 0) else { return };
        match i64::from(call.nr) {
            libc::SYS_wait4 | libc::SYS_waitid => self.waited(pid, call, outcome),
            libc::SYS_times => {
                if let Some(out) = outcome.outs.first_mut() {
                    usage::add_ticks(out, 16, member.inherited);
                }
            }
            libc::SYS_getrusage if matches!(call.args[0], Arg::Value(of) if of as i32 == libc::RUSAGE_CHILDREN) => {
                if let Some(out) = outcome.outs.first_mut() {
                    usage::add_to(out, member.inherited);
                }
            }
            _ => {}
        }
    }

    /// It has waited for a child: for its end, or with another result, which tells of the child's time as well.
    fn waited(&mut self, pid: HomePid, call: &Call, outcome: &mut Outcome) {
        let child = child(call, outcome);
        let used = child.and_then(|child| self.used_by_child(pid, child));
        let Some(member) = self.members.get_mut(&pid) else { return };
        // A waitid that does not want to know of whom it tells.
        let untold = i64::from(call.nr) == libc::SYS_waitid && !matches!(call.args[2], Arg::Bytes(_));
        if child.is_none() && !untold {
            return;
        }
        let reaped = member.count_reaped(child);
        let used = used.or(reaped.filter(|_| untold));
        if let (Some(used), Some(out)) = (used, usage_of(call, outcome)) {
            usage::add_to(out, used);
        }
    }

    /// What a child has used that its parent knows by this number.
    fn used_by_child(&mut self, pid: HomePid, child: i32) -> Option<CpuTime> {
        let member = self.members.get(&pid)?;
        if let Some(ended) = member.ended.get(&child) {
            return Some(ended.used);
        }
        let mut living = self.members.values();
        if let Some(living) = living.find(|other| other.parent == pid && other.own_pid == child) {
            return Some(living.spent().sum());
        }
        // One that was let go, or is another family's: known by the number that we see. If it has been waited for, its
        // entry is at its end.
        let child = HomePid(child);
        let spent = self.ledger.look(child).filter(|_| member.own_pid == member.pid.0)?;
        if procfs::status(child.0).is_err() {
            self.ledger.strike(child);
            let member = self.members.get_mut(&pid)?;
            member.inherited = member.inherited.and(spent.sum());
        }
        Some(spent.sum())
    }
}

/// The child that a wait tells of, as its caller numbers it.
fn child(call: &Call, outcome: &Outcome) -> Option<i32> {
    if i64::from(call.nr) == libc::SYS_wait4 {
        return i32::try_from(outcome.ret).ok().filter(|child| *child > 0);
    }
    match &call.args[2] {
        Arg::Bytes(before) => {
            // si_pid. What has come back as it was is not among what has come back.
            let after = outcome.outs.first().filter(|after| !after.is_empty()).unwrap_or(before);
            let number = after.get(16..20)?.try_into().ok()?;
            Some(i32::from_le_bytes(number)).filter(|child| *child > 0)
        }
        _ => None,
    }
}

/// The struct rusage that a wait has written.
fn usage_of<'a>(call: &Call, outcome: &'a mut Outcome) -> Option<&'a mut ByteBuf> {
    let (status, usage) = if i64::from(call.nr) == libc::SYS_wait4 { (1, 3) } else { (2, 4) };
    let wanted = |arg: &Arg| matches!(arg, Arg::Room | Arg::Bytes(_));
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
    fn a_wait_says_whom_it_tells_of() {
        let value = Arg::Value;
        let wait4 = call(libc::SYS_wait4, [value(u64::MAX), value(0), value(0), Arg::Room]);
        assert_eq!(child(&wait4, &outcome(4711, &[])), Some(4711));
        assert_eq!(child(&wait4, &outcome(0, &[])), None);
        let mut info = [0; 28];
        info[16..20].copy_from_slice(&4711u32.to_le_bytes());
        let told = |by: libc::idtype_t, info: Arg| {
            call(libc::SYS_waitid, [value(by.into()), value(12), info, value(4)])
        };
        let blank = Arg::Bytes(ByteBuf::from(vec![0; 28]));
        assert_eq!(child(&told(libc::P_ALL, blank.clone()), &outcome(0, &[&info])), Some(4711));
        assert_eq!(child(&told(libc::P_ALL, blank), &outcome(0, &[])), None, "nobody");
        let same = Arg::Bytes(ByteBuf::from(info.to_vec()));
        assert_eq!(child(&told(libc::P_ALL, same), &outcome(0, &[])), Some(4711), "once more the same");
        assert_eq!(child(&told(libc::P_PID, value(0)), &outcome(0, &[])), None, "it need not have ended");
    }

    #[test]
    fn the_usage_is_found_behind_what_else_was_asked_for() {
        let value = Arg::Value;
        let (status, usage) = (&[1u8; 4][..], &[2u8; 144][..]);
        let both = call(libc::SYS_wait4, [value(0), Arg::Room, value(0), Arg::Room]);
        assert_eq!(usage_of(&both, &mut outcome(1, &[status, usage])).unwrap().as_slice(), usage);
        let one = call(libc::SYS_wait4, [value(0), value(0), value(0), Arg::Room]);
        assert_eq!(usage_of(&one, &mut outcome(1, &[usage])).unwrap().as_slice(), usage);
        let none = call(libc::SYS_wait4, [value(0), Arg::Room, value(0), value(0)]);
        assert!(usage_of(&none, &mut outcome(1, &[status])).is_none());
        let waitid = call(libc::SYS_waitid, [value(0), value(0), value(0), value(4)]);
        assert_eq!(usage_of(&waitid, &mut outcome(0, &[])).unwrap().as_slice(), [0; 144], "as it was");
    }
}
