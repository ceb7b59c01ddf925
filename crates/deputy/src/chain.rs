//! What comes before a guest's call: writes to files in hand, offsets of theirs, and their ends, that are to be made before anybody can
//! hear of anything that the guest does later (`direct.rs`).

use crate::family::Family;
use crate::perform::{forks_or_ends, lends_memory, refused};
use crate::settle::made;
use crate::thread::{Current, Thread};
use std::collections::VecDeque;
use tern_ids::HomePid;
use tern_migrate::message::{CallRequest, CallResult, Message};
use tern_syscall::{Call, Outcome};
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
    fn may_begin(call: &Call) -> bool {
        [libc::SYS_pwrite64, libc::SYS_lseek, libc::SYS_close].contains(&i64::from(call.nr))
    }
}

/// Whether this call may be an errand: then it is made at once, and its result is awaited before its process departs.
pub(crate) fn may_be_errand(nr: u32) -> bool {
    [libc::SYS_pread64, libc::SYS_lseek].contains(&i64::from(nr))
}

/// So much comes before one call at most: what a guest may have in hand, and more.
const MOST: usize = 256;

impl Family {
    /// Has the deputy make a call, and first what comes before it, or that `alone`; true if what it makes now has ended
    /// already.
    pub(crate) fn post(
        &mut self,
        tid: HomePid,
        mut request: CallRequest,
        alone: bool,
    ) -> std::result::Result<bool, i32> {
        if request.before.len() > MOST || !request.before.iter().all(Chain::may_begin) {
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
    pub(crate) fn post_next(
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
        let transfers = Chain::may_begin(&request.call) || may_be_errand(request.call.nr);
        let current = Current::new(request, layout, lends, chain);
        if member.job_stopped && transfers {
            return self.make_though_stopped(tid, current);
        }
        member.threads.get_mut(&tid).ok_or(libc::ESRCH)?.post(current)
    }

    /// What came before a thread's own call has been made, or a part of it: goes on. True if its own call has ended.
    pub(crate) fn go_through_chain(&mut self, tid: HomePid) -> bool {
        loop {
            let Some(thread) = self.of_thread(tid).and_then(|member| member.threads.get_mut(&tid)) else {
                return false;
            };
            let Some(current) = thread.current.take_if(|current| current.chain.goes_on()) else {
                return true;
            };
            let Some(mailbox) = &mut thread.mailbox else { return false };
            let outcome = mailbox.collect(&current);
            if !self.go_on_in_chain(tid, current, &outcome) {
                return false;
            }
        }
    }

    /// A call has ended that came before a guest's own, which is next; true if that has ended as well. Unless a signal has come
    /// first, or an offset is none: then the guest makes what has not been made again, or is told.
    fn go_on_in_chain(&mut self, tid: HomePid, mut current: Current, outcome: &Outcome) -> bool {
        let number = current.request.number;
        let nr = i64::from(current.request.call.nr);
        let Some(member) = self.of_thread(tid) else { return false };
        let called_off = restart::is(outcome.ret);
        if !called_off {
            member.direct.came_first(&current.request.call, outcome.ret);
            current.chain.done.push(outcome.ret);
        }
        let Some(thread) = member.threads.get_mut(&tid) else { return false };
        // As before any call: what the guest has not heard of comes first.
        let waits = called_off || !thread.unheard.is_empty();
        let failed = nr == libc::SYS_lseek && outcome.ret < 0 && !called_off;
        let next = if waits || failed { None } else { current.chain.rest.pop_front() };
        let Some(next) = next else {
            let ret = if failed { outcome.ret } else { restart::NOINTR };
            let result = made(&current, Outcome { ret, outs: Vec::new() });
            thread.last = Some(result.clone());
            thread.follow_mask();
            self.tell(tid, &Message::Result(Box::new(result)));
            return false;
        };
        let chain = std::mem::take(&mut current.chain);
        let (done, last) = (chain.done.clone(), chain.rest.is_empty());
        let request = CallRequest { call: next, ..current.request };
        match self.post_next(tid, request, chain) {
            Ok(true) => return true,
            Ok(false) => {
                // Its own call may wait for ever.
                if last {
                    self.tell(tid, &Message::Before(number, done));
                }
                self.see_it_end(tid);
            }
            Err(errno) => {
                let result = CallResult { before: done, ..refused(number, errno) };
                if let Some(thread) = self.of_thread(tid).and_then(|member| member.threads.get_mut(&tid)) {
                    thread.last = Some(result.clone());
                }
                self.tell(tid, &Message::Result(Box::new(result)));
            }
        }
        false
    }

    /// Has a deputy that job control has stopped make a call on a file in hand, which waits for nobody. It stays stopped.
    fn make_though_stopped(&mut self, tid: HomePid, current: Current) -> std::result::Result<bool, i32> {
        let made = self.with_deputy(tid, |member, stopped| {
            let (mut injection, _) = member.injection(stopped)?;
            let thread = member.thread(tid)?;
            let laid = thread.mailbox.as_mut().map(|mailbox| mailbox.lay(&current.layout));
            if let Some(Ok(args)) = laid {
                let ret = injection.call(i64::from(current.layout.nr()), args)?;
                let thread = member.thread(tid)?;
                thread.mailbox.iter_mut().for_each(|mailbox| mailbox.made(ret));
                thread.current = Some(current);
            }
            let stopped = injection.finish()?;
            member.go_on(stopped).map(|()| true)
        });
        made.map_err(|_gone| libc::ESRCH)
    }
}

impl Thread {
    /// Has the deputy make a call, for which there is room; true if it has ended already.
    fn post(&mut self, current: Current) -> std::result::Result<bool, i32> {
        let mailbox = self.mailbox.as_mut().ok_or(libc::ESRCH)?;
        mailbox.post(&current.layout)?;
        let waits = forks_or_ends(current.request.call.nr);
        self.current = Some(current);
        // A fork's event must be seen to before it can end.
        if !waits && mailbox.soon() {
            return Ok(true);
        }
        mailbox.ring_later();
        Ok(false)
    }
}
