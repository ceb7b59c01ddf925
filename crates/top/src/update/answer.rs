//! What the daemon says.

use crate::ask::Trouble;
use crate::event::Question;
use crate::model::Model;
use crate::view::figures;
use tern_control::{MigrationReport, Reply};

/// Takes the answer to a question, or the reason why there is none.
pub(super) fn take(model: &mut Model, question: Question, reply: Result<Reply, Trouble>) {
    match question {
        Question::Cluster => cluster(model, reply),
        Question::Placed => {
            model.placed.clear();
            // A ternd that knows of none has none.
            if let Ok(Reply::Placed(rows)) = reply {
                for row in rows.iter().filter(|row| row.from.is_none()) {
                    *model.placed.entry(row.r#where).or_default() += 1;
                }
            }
        }
        Question::Processes(of) => {
            let now = model.now;
            let Some(list) = model.list.as_mut().filter(|list| list.of == of) else {
                // The list has been left meanwhile.
                return;
            };
            list.asked = None;
            match reply {
                Ok(Reply::Processes(rows)) => list.take(rows, now),
                Ok(_) => model.complain(&other_kind()),
                Err(trouble) => model.complain(&trouble),
            }
        }
        Question::Move { .. } => {
            match reply {
                Ok(Reply::Migrated(report)) => {
                    let text = moved(model, &report);
                    model.say(text);
                }
                Ok(_) => model.complain(&other_kind()),
                Err(trouble) => model.complain(&trouble),
            }
            // Where it is now shall be seen at once.
            if let Some(list) = &mut model.list {
                list.last_asked = None;
            }
            model.cluster.last_asked = None;
        }
    }
}

fn cluster(model: &mut Model, reply: Result<Reply, Trouble>) {
    let known = &mut model.cluster;
    known.asked = None;
    match reply {
        Ok(Reply::Cluster(mut report)) => {
            report.nodes.sort_by_key(|node| node.node);
            known.report = Some(report);
            known.heard = model.now;
            known.trouble = None;
        }
        Ok(_) => known.trouble = Some(other_kind()),
        Err(trouble) => known.trouble = Some(trouble),
    }
}

fn other_kind() -> Trouble {
    Trouble::new(70, "ternd has answered another question")
        .hint("tern status, to compare the versions of ternd and of this tool")
}

fn moved(model: &Model, report: &MigrationReport) -> String {
    format!(
        "{} {}: {} {} {}, {}, frozen {}",
        report.pid,
        report.command,
        report.from,
        model.appearance.sign("→", "->"),
        report.to,
        figures::bytes(report.bytes),
        figures::milliseconds(report.freeze_ms),
    )
}
