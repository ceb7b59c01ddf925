//! Reporting a guest to home on a new link.

use crate::process::Guest;
use crate::process::outbox::Outbox;
use crate::process::thread::Thread;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_syscall::{Route, SplitCall, route};

impl Guest {
    /// Reports the state of its threads to home, and sends the requests of pending calls again.
    pub(crate) fn announce(&mut self, home: &mut Outbox) {
        let Self { process, threads } = self;
        // Earlier reports of a fatal signal, or of a thread that cannot continue here, may have
        // been lost with the previous link.
        process.stop_reasons.report_again();
        // The reply to a repeated call about a timer depends on the current CPU usage.
        home.send(process.pid, process.usage.report());
        let is_timer_call = |thread: &&mut Thread| {
            let trap = thread.pending.as_ref().map(|pending| pending.trap);
            trap.is_some_and(|trap| route(trap.nr, &trap.args) == Route::Both(SplitCall::CpuTimer))
        };
        for thread in threads.values_mut().filter(is_timer_call) {
            home.send(thread.tid, Message::ThreadUsage(thread.cpu_meter.used()));
        }
        // Home takes the first thread's message as the end of the list, so it is sent last, even
        // if that thread has ended.
        let pid = process.pid;
        let others = threads.values().filter(|t| t.tid != pid && !t.is_exiting);
        let mut announced: Vec<(HomePid, u64)> = others.map(|t| (t.tid, t.sync.signals)).collect();
        announced.push((pid, threads.get(&pid).map_or(0, |first| first.sync.signals)));
        for (tid, signals) in announced {
            home.send(tid, Message::Reattach(process.epoch, signals));
        }
        if let Some(request) = process.connections.readiness_request() {
            home.send(pid, request);
        }
        for thread in threads.values() {
            thread.send_pending(process, home);
            thread.resend_internal_call(home);
        }
    }
}
