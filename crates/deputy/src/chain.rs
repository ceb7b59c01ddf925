//! What comes before a guest's call: writes to files in hand, and offsets of theirs, that are to be made before anybody can
//! hear of anything that the guest does later (`direct.rs`).

use crate::family::Family;
use crate::perform::{forks_or_ends, lends_memory, refused};
use crate::settle::made;
use crate::thread::{Current, Thread};
use std::collections::VecDeque;
use tern_ids::HomePid;
use tern_migrate::message::{CallRequest, CallResult, Message};
use tern_syscall::{Call, Layout, Outcome};
use tern_tracee::registers::restart;

/// What comes before a guest's call, and what came of it.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// What is still to be made, the guest's call last, if that is to be made at all.
    pub(crate) rest: VecDeque<Call>,
    /// The guest's own call is not made here and now: it is asked for again when the others have been made.
    pub(crate) alone: bool,
    /// What those returned that have been made.
    pub(crate) done: Vec<i64>,
}

impl Chain {
    /// The calls of a request in their order: the first, and the rest.
    pub(crate) fn begin(before: Vec<Call>, call: Call) -> (Call, Self) {
        let mut rest = VecDeque::from(before);
        let Some(first) = rest.pop_front() else { return (call, Self::default()) };
        rest.push_back(call);
        (first, Self { rest, ..Self::default() })
    }

    /// Whether something is to follow the call that has been made.
    pub(crate) fn goes_on(&self) -> bool {
        self.alone || !self.rest.is_empty()
    }

    /// Whether a guest may have this made before its own call.
    pub(crate) fn may_begin(call: &Call) -> bool {
        [libc::SYS_pwrite64, libc::SYS_lseek].contains(&i64::from(call.nr))
    }
}

impl Family {
    /// Has the deputy make a call, and first what comes before it, or that `alone`; true if what it makes now has ended
    /// already.
    pub(crate) fn post(
        &mut self,
        tid: HomePid,
        mut request: CallRequest,
        alone: bool,
    ) -> std::result::Result<bool, i32> {
        if !request.before.iter().all(Chain::may_begin) {
            tracing::warn!(%tid, "a guest asks for something before its call that cannot come first");
            return Err(libc::ENOSYS);
        }
        let (first, mut chain) = Chain::begin(std::mem::take(&mut request.before), request.call);
        if alone {
            (chain.alone, _) = (true, chain.rest.pop_back());
        }
        self.post_next(tid, CallRequest { call: first, ..request }, chain)
    }

    /// Has the deputy make the next call of a chain; true if it has ended already.
    fn post_next(
        &mut self,
        tid: HomePid,
        mut request: CallRequest,
        chain: Chain,
    ) -> std::result::Result<bool, i32> {
        let member = self.of_thread(tid).ok_or(libc::ESRCH)?;
        let lends = lends_memory(&request.call);
        member.adapt(&mut request.call);
        let layout = request.call.clone().lay_out().map_err(|malformed| {
            tracing::warn!(%tid, %malformed, "a guest sent a call that is none");
            libc::ENOSYS
        })?;
        let mailbox = member.threads.get(&tid).and_then(|thread| thread.mailbox.as_ref());
        if mailbox.is_some_and(|mailbox| !mailbox.fits(layout.size())) {
            let room = self.with_deputy(tid, |member, stopped| member.make_room(stopped, layout.size()));
            room.map_err(|_e| libc::ENOMEM)?;
        }
        let member = self.of_thread(tid).ok_or(libc::ESRCH)?;
        member.threads.get_mut(&tid).ok_or(libc::ESRCH)?.post(request, layout, lends, chain)
    }

    /// A call has ended that came before a guest's own, which is next, unless a signal has come first: then the guest makes
    /// all of it again that has not been made.
    pub(crate) fn go_on_in_chain(&mut self, tid: HomePid, mut current: Current, outcome: &Outcome) {
        let number = current.request.number;
        let called_off = restart::is(outcome.ret);
        if !called_off {
            current.chain.done.push(outcome.ret);
        }
        let next = if called_off { None } else { current.chain.rest.pop_front() };
        let Some(next) = next else {
            let again = made(&current, Outcome { ret: restart::NOINTR, outs: Vec::new() });
            if let Some(thread) = self.of_thread(tid).and_then(|member| member.threads.get_mut(&tid)) {
                thread.last = Some(again.clone());
                thread.follow_mask();
            }
            return self.tell(tid, &Message::Result(Box::new(again)));
        };
        let chain = std::mem::take(&mut current.chain);
        let done = chain.done.clone();
        let request = CallRequest { call: next, ..current.request };
        let last = chain.rest.is_empty();
        match self.post_next(tid, request, chain) {
            Ok(true) => self.ended(tid),
            Ok(false) => {
                // Its own call may wait for ever.
                if last {
                    self.tell(tid, &Message::Before(number, done));
                }
                self.see_it_end(tid);
            }
            Err(errno) => {
                let result = CallResult { before: done, ..refused(number, errno) };
                self.tell(tid, &Message::Result(Box::new(result)));
            }
        }
    }
}

impl Thread {
    /// Has the deputy make a call, for which there is room; true if it has ended already.
    fn post(
        &mut self,
        request: CallRequest,
        layout: Layout,
        lends: bool,
        chain: Chain,
    ) -> std::result::Result<bool, i32> {
        let mailbox = self.mailbox.as_mut().ok_or(libc::ESRCH)?;
        mailbox.post(&layout)?;
        let waits = forks_or_ends(request.call.nr);
        self.current = Some(Current::new(request, layout, lends, chain));
        // A fork's event must be seen to before it can end.
        if !waits && mailbox.soon() {
            return Ok(true);
        }
        mailbox.ring_later();
        Ok(false)
    }
}
