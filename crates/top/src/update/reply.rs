//! Applies replies of the daemon to the model.

use crate::event::Query;
use crate::model::Model;
use crate::request::TopError;
use crate::view::format;
use tern_control::{MigrationReport, PlacedRow, Reply};

/// Applies the reply to a query, or its error.
pub(super) fn apply(model: &mut Model, query: Query, reply: Result<Reply, TopError>) {
    match query {
        Query::Cluster => cluster(model, reply),
        Query::Placed => {
            model.placed.clear();
            // If ternd does not support the query, no placed commands are shown.
            if let Ok(Reply::Placed(rows)) = reply {
                let is_counted = |row: &&PlacedRow| row.r#where.is_some() || row.is_queued;
                for row in rows.iter().filter(|row| row.from.is_none()).filter(is_counted) {
                    *model.placed.entry(row.r#where).or_default() += 1;
                }
            }
        }
        Query::Processes(node) => {
            let now = model.now;
            let Some(list) = model.list.as_mut().filter(|list| list.node == node) else {
                // The user has left this list meanwhile.
                return;
            };
            list.pending_since = None;
            match reply {
                Ok(Reply::Processes(rows)) => list.update(rows, now),
                Ok(_) => model.show_error(&unexpected_reply()),
                Err(error) => model.show_error(&error),
            }
        }
        Query::Move { .. } => {
            match reply {
                Ok(Reply::Migrated(report)) => {
                    let text = migration_message(model, &report);
                    model.show_message(text);
                }
                Ok(_) => model.show_error(&unexpected_reply()),
                Err(error) => model.show_error(&error),
            }
            // Query at once, to show where the process is now.
            if let Some(list) = &mut model.list {
                list.last_sent = None;
            }
            model.cluster.last_sent = None;
        }
    }
}

fn cluster(model: &mut Model, reply: Result<Reply, TopError>) {
    let state = &mut model.cluster;
    state.pending_since = None;
    match reply {
        Ok(Reply::Cluster(mut report)) => {
            report.nodes.sort_by_key(|node| node.node);
            state.report = Some(report);
            state.received_at = model.now;
            state.error = None;
        }
        Ok(_) => state.error = Some(unexpected_reply()),
        Err(error) => state.error = Some(error),
    }
}

fn unexpected_reply() -> TopError {
    TopError::new(70, "ternd sent an unexpected reply")
        .hint("tern status, to compare the versions of ternd and of this tool")
}

fn migration_message(model: &Model, report: &MigrationReport) -> String {
    format!(
        "{} {}: {} {} {}, {}, frozen {}",
        report.pid,
        report.command,
        report.from,
        model.appearance.choose("→", "->"),
        report.to,
        format::bytes(report.bytes),
        format::milliseconds(report.freeze_ms),
    )
}
