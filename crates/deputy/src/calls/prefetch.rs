//! Open-time prefetch: with the result of an open, home sends the file's status and its first
//! bytes, which the program usually asks for next (docs/design/delegation.md).
//!
//! The open is complete by then and its result recorded. Only sending the result is delayed, by one
//! internal call, with which the deputy reads the bytes. If the process comes home meanwhile, or
//! the link breaks, the recorded result is used, without the bytes.

use crate::calls::current::{Compound, CurrentCall, Origin, Prefetch};
use crate::calls::internal::internal_call;
use crate::process::Process;
use crate::shim::Shim;
use std::time::SystemTime;
use tern_ids::HomePid;
use tern_migrate::message::{CallResult, FileNotice, Message};
use tern_migrate::prefetch::{MAX_PREFETCH, PrefetchedContent};
use tern_syscall::{Arg, Call, Outcome};

/// Bytes prefetched from a file that is longer than the guest wants: it is seldom read to its end.
const LONG_FILE_PREFETCH: u64 = 16 << 10;

/// The call that reads the first bytes.
fn read_call(fd: i32, length: u64) -> Call {
    let [zero, fd, length] = [0, u64::from(fd.cast_unsigned()), length].map(Arg::Value);
    let args = [fd, Arg::Output, length, zero.clone(), zero.clone(), zero];
    Call { nr: libc::SYS_pread64 as u32, args }
}

impl Shim {
    /// Has the deputy read the first bytes of the file that this call has opened. Returns whether
    /// it does; the result of the call is then sent when the bytes have been read.
    pub(crate) fn start_prefetch(
        &mut self,
        tid: HomePid,
        current: &CurrentCall,
        result: &CallResult,
    ) -> bool {
        let fd = result.outcome.ret as i32;
        let is_prefetch =
            |(of, notice): &(i32, FileNotice)| *of == fd && matches!(notice, FileNotice::Prefetched(_));
        let wanted = u64::from(current.request.max_prefetch).min(MAX_PREFETCH);
        if wanted == 0 || !result.notices.iter().any(is_prefetch) {
            return false;
        }
        let Some(process) = self.process_of_thread(tid).filter(|process| !process.job_stopped) else {
            return false;
        };
        let length = match process.delegations.length_if_settled(fd, SystemTime::now()) {
            None | Some(0) => return false,
            Some(size) if size <= wanted => size,
            Some(_) => wanted.min(LONG_FILE_PREFETCH),
        };
        let epoch = process.epoch;
        // The deputy may be busy with an internal call that sets a signal mask.
        if process.threads.get(&tid).is_none_or(|thread| thread.current.is_some()) {
            return false;
        }
        let origin = Origin::Prefetch(Box::new(Prefetch { fd, length, result: result.clone(), epoch }));
        match self.post_next(tid, internal_call(read_call(fd, length)), Compound::default(), origin) {
            Ok(true) => self.call_finished(tid),
            Ok(false) => {}
            Err(_) => return false,
        }
        true
    }

    /// The deputy has read the bytes, or could not: sends the result of the open. If the guest has
    /// repeated its request meanwhile, the repeated request is answered instead, from the recorded
    /// result.
    pub(crate) fn finish_prefetch(&mut self, tid: HomePid, prefetch: Prefetch, outcome: &Outcome) {
        let Some(process) = self.process_of_thread(tid) else { return };
        let (epoch, result) = (prefetch.epoch, process.attach_prefetched(prefetch, outcome));
        let repeated = process.threads.get(&tid).and_then(|thread| thread.queued_call.as_ref());
        if epoch == process.epoch && repeated.is_none_or(|next| next.number != result.number) {
            self.send(tid, &Message::Result(Box::new(result)));
        }
    }
}

impl Process {
    fn attach_prefetched(&mut self, prefetch: Prefetch, outcome: &Outcome) -> CallResult {
        let Prefetch { fd, length, mut result, .. } = prefetch;
        self.call_bytes += outcome.data_len();
        let read = u64::try_from(outcome.ret).ok().filter(|read| *read <= length);
        let open_prefetch = result.notices.iter_mut().find_map(|(of, notice)| match notice {
            FileNotice::Prefetched(open_prefetch) if *of == fd => Some(open_prefetch),
            _ => None,
        });
        if let (Some(size), Some(read), Some(bytes), Some(open_prefetch)) =
            (self.delegations.length_if_unchanged(fd), read, outcome.outs.first(), open_prefetch)
        {
            let mut bytes = bytes.clone();
            bytes.resize(read as usize, 0);
            open_prefetch.content = Some(PrefetchedContent { bytes, at_eof: read == size });
        }
        result
    }
}

/// The result as it is recorded, for repeated requests: without prefetched data.
pub(crate) fn without_prefetched_data(result: &CallResult) -> CallResult {
    let mut kept = CallResult { notices: Vec::new(), ..result.clone() };
    kept.notices.extend(
        result.notices.iter().filter(|(_, notice)| !matches!(notice, FileNotice::Prefetched(_))).cloned(),
    );
    kept
}
