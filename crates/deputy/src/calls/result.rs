//! Results of calls.

use crate::calls::current::CurrentCall;
use tern_migrate::message::CallResult;
use tern_syscall::Outcome;

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
