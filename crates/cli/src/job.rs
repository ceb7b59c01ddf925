//! Selects a user's movable processes, wherever they run: those started with mosrun, their
//! descendants, and others that have moved; optionally only those of one job.

use crate::{Failure, client};
use tern_control::{ProcessRow, RefusalKind, Reply, Request};

/// All processes that this node's ternd reports: its own, and guests.
///
/// # Errors
/// If ternd does not answer.
pub(crate) fn processes() -> Result<Vec<ProcessRow>, Failure> {
    match client::request(&Request::Processes)? {
        Reply::Processes(rows) => Ok(rows),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// Whether a process was started with `mosrun -J` of this number, or descends from one that was.
#[must_use]
pub(crate) fn contains(row: &ProcessRow, job: u32) -> bool {
    row.started.is_some_and(|started| started.job == Some(job))
}

/// Selects from `rows` the caller's movable processes, or for root those of all users, optionally
/// only those of a job. Processes started by nomig are never selected.
#[must_use]
pub(crate) fn members(rows: Vec<ProcessRow>, job: Option<u32>, caller: u32) -> Vec<ProcessRow> {
    let is_member = |row: &ProcessRow| {
        let is_movable = row.started.is_some_and(|started| !started.never)
            // Not started with mosrun, but away now or earlier: moved by hand, or by the balancer
            // (`balance_users`).
            || (row.started.is_none() && row.from.is_none());
        is_movable && job.is_none_or(|job| contains(row, job)) && (caller == 0 || row.uid == caller)
    };
    rows.into_iter().filter(is_member).collect()
}

/// The caller's processes of this job that exist now.
///
/// # Errors
/// If ternd does not answer, or no process of this job runs.
pub(crate) fn current_members(job: u32) -> Result<Vec<ProcessRow>, Failure> {
    let members = members(processes()?, Some(job), rustix::process::geteuid().as_raw());
    if members.is_empty() { Err(none_found(Some(job))) } else { Ok(members) }
}

/// The failure that no process matches.
pub(crate) fn none_found(job: Option<u32>) -> Failure {
    let what = job.map_or_else(|| "with mosrun".into(), |job| format!("as job {job}"));
    Failure::new(RefusalKind::NotFound, format!("you have no running process that was started {what}"))
        .hint("mps -a, to list the processes started with mosrun")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_control::{StartedAs, Usage};
    use tern_ids::{HomePid, NodeId};

    fn row(pid: i32, uid: u32, started: Option<StartedAs>) -> ProcessRow {
        ProcessRow {
            pid: HomePid(pid),
            uid,
            r#where: Some(NodeId(1)),
            from: None,
            state: "home".into(),
            cpu_seconds: 0.0,
            migrations: 0,
            reason: String::new(),
            command: String::new(),
            usage: Usage::default(),
            started,
        }
    }

    #[test]
    fn members_are_the_callers_own_and_all_for_root() {
        let of = |job| Some(StartedAs { job, ..StartedAs::default() });
        let nomig = Some(StartedAs { job: Some(7), never: true, locked: true });
        let guest = ProcessRow { from: Some(NodeId(2)), r#where: None, ..row(6, 1000, None) };
        let rows = || {
            vec![
                row(1, 1000, of(Some(7))),
                row(2, 2000, of(Some(7))),
                row(3, 1000, of(Some(8))),
                row(4, 1000, of(None)),
                row(5, 1000, nomig),
                guest.clone(),
                // Moved by hand.
                row(8, 1000, None),
            ]
        };
        let pids =
            |job, caller| -> Vec<i32> { members(rows(), job, caller).iter().map(|row| row.pid.0).collect() };
        assert_eq!(pids(Some(7), 1000), [1]);
        assert_eq!(pids(Some(7), 0), [1, 2]);
        assert_eq!(pids(None, 1000), [1, 3, 4, 8]);
        assert_eq!(pids(Some(9), 0), [0; 0]);
    }
}
