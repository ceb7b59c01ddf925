//! Results of calls, and requests for internal calls.

use crate::process::thread::CurrentCall;
use tern_ids::Epoch;
use tern_migrate::message::{CallRequest, CallResult};
use tern_syscall::Outcome;

/// The call number of internal calls, which the program did not make.
pub(crate) const INTERNAL_CALL_NUMBER: u64 = u64::MAX;

/// The request for an internal call. Its result is not sent to the guest.
pub(crate) fn internal_call(call: tern_syscall::Call) -> CallRequest {
    CallRequest {
        epoch: Epoch(0),
        number: INTERNAL_CALL_NUMBER,
        signals: 0,
        restart_code: None,
        prelude: Vec::new(),
        max_prefetch: 0,
        call,
        procfs_view: None,
    }
}

/// The result of a call that was rejected with an errno.
pub(crate) fn rejected(number: u64, errno: i32) -> CallResult {
    let outcome = Outcome { ret: -i64::from(errno), outs: Vec::new() };
    CallResult::new(number, outcome)
}

/// The result of a call, as it is sent to the guest.
pub(crate) fn call_result(current: &CurrentCall, outcome: Outcome) -> CallResult {
    let result = CallResult::new(current.request.number, outcome);
    CallResult { child: current.child, prelude: current.compound.results.clone(), ..result }
}
