//! The processes that a user means by a job's number, or by none: those that mosrun has started for him, with their
//! descendants, wherever they run.

use crate::{Failure, client};
use tern_control::{ProcessRow, RefusalKind, Reply, Request};

/// What this node has and knows: its own processes, and guests.
///
/// # Errors
/// If ternd does not answer.
pub fn rows() -> Result<Vec<ProcessRow>, Failure> {
    match client::ask(&Request::Processes)? {
        Reply::Processes(rows) => Ok(rows),
        other => Err(client::unexpected(&other)),
    }
}

/// Whether a process was started with `mosrun -J` of this number, or descends from one that was.
#[must_use]
pub fn is_of(row: &ProcessRow, job: u32) -> bool {
    row.started.is_some_and(|started| started.job == Some(job))
}

/// Of these, the caller's processes of the job, or of any; everybody's if the caller is root. What nomig has started is
/// of no job.
#[must_use]
pub fn members(rows: Vec<ProcessRow>, job: Option<u32>, caller: u32) -> Vec<ProcessRow> {
    let wanted = |row: &ProcessRow| {
        let movable = row.started.is_some_and(|started| !started.never)
            // Moved by hand: nobody has started it, and it is away, or was.
            || (row.started.is_none() && row.from.is_none());
        movable && job.is_none_or(|job| is_of(row, job)) && (caller == 0 || row.uid == caller)
    };
    rows.into_iter().filter(wanted).collect()
}

/// The same of what there is now, for whoever calls; an error if there is none.
///
/// # Errors
/// If ternd does not answer, or nothing of this job runs.
pub fn now(job: u32) -> Result<Vec<ProcessRow>, Failure> {
    let members = members(rows()?, Some(job), rustix::process::geteuid().as_raw());
    if members.is_empty() { Err(nothing(Some(job))) } else { Ok(members) }
}

/// There is nothing to do anything to.
pub fn nothing(job: Option<u32>) -> Failure {
    let what = job.map_or_else(|| "with mosrun".into(), |job| format!("as job {job}"));
    Failure::new(RefusalKind::NotFound, format!("no process runs here that you have started {what}"))
        .hint("mps -a, which shows what was started with mosrun")
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
    fn a_job_is_the_caller_s_own_and_root_s_is_everybody_s() {
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
