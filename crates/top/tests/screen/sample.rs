//! Sample nodes and processes for the tests.

use ratatui::crossterm::event::{KeyCode, KeyEvent};
use std::time::Duration;
use tern_control::{
    ClusterReport, MigrationReport, NodeFlags, NodeLoad, NodeState, ProcessRow, RecentMigration, Reply, Usage,
};
use tern_ids::{HomePid, MigrationId, NodeId};
use tern_top::ViewSettings;
use tern_top::appearance::Appearance;
use tern_top::event::{Effect, Query, UiEvent};
use tern_top::model::Model;
use tern_top::update::update;
use tern_top::users::UserNames;

/// A node with this load (100 is one standard CPU kept busy).
pub(crate) fn node(number: u16, load: f32) -> NodeLoad {
    NodeLoad {
        node: NodeId(number),
        host: format!("host{number}"),
        state: NodeState::Alive,
        age_ms: 250,
        load,
        speed: 10_000,
        cpus: 1.0,
        mem_total: 8_000_000_000,
        mem_free: 6_000_000_000,
        mem_raw_free: 2_000_000_000,
        swap_total: 0,
        swap_free: 0,
        utilisability: 100,
        guests: 0,
        away: 0,
        flags: NodeFlags::default(),
    }
}

/// A cluster of these nodes, reported by the first.
pub(crate) fn cluster(nodes: Vec<NodeLoad>) -> ClusterReport {
    let me = nodes.first().map_or(NodeId(1), |node| node.node);
    ClusterReport { me, nodes, migrations: Vec::new() }
}

/// A process: `where` is set for a process of this node, `from` for a guest.
pub(crate) fn row(pid: i32, r#where: Option<u16>, from: Option<u16>, cpu_seconds: f64) -> ProcessRow {
    ProcessRow {
        pid: HomePid(pid),
        uid: 1000,
        r#where: r#where.map(NodeId),
        from: from.map(NodeId),
        state: "running".into(),
        cpu_seconds,
        migrations: 1,
        reason: String::new(),
        command: format!("flac -8 track{pid}.wav"),
        usage: Usage { memory: 6_400_000, ..Usage::default() },
        started: None,
    }
}

/// A migration that ended `ago_ms` ago.
pub(crate) fn migration(pid: i32, from: u16, to: u16, ago_ms: u64) -> RecentMigration {
    RecentMigration { ago_ms, report: report(pid, from, to) }
}

/// ternd's report of a migration.
pub(crate) fn report(pid: i32, from: u16, to: u16) -> MigrationReport {
    MigrationReport {
        pid: HomePid(pid),
        command: "flac".into(),
        migration: MigrationId([7; 16]),
        from: NodeId(from),
        to: NodeId(to),
        bytes: 12_300_000,
        freeze_ms: 18.4,
        total_ms: 210.0,
    }
}

/// The model of a terminal with colours and Unicode, after this report has arrived.
pub(crate) fn model(report: ClusterReport) -> Model {
    let appearance = Appearance { colour: true, unicode: true };
    let mut model =
        Model::new(appearance, ViewSettings::default(), UserNames::parse("ann:x:1000:1000::/:/bin/sh"));
    update(&mut model, UiEvent::Time(Duration::from_secs(1)));
    update(&mut model, UiEvent::Reply(Query::Cluster, Ok(Reply::Cluster(report))));
    model
}

/// Delivers the processes of a node twice, one second apart; those with an even pid have used the
/// CPU in between.
pub(crate) fn processes(model: &mut Model, of: Option<NodeId>, rows: Vec<ProcessRow>) {
    let mut answer = |rows| update(model, UiEvent::Reply(Query::Processes(of), Ok(Reply::Processes(rows))));
    let later = rows.iter().cloned().map(|mut row| {
        row.cpu_seconds += f64::from(1 - row.pid.0 % 2);
        row
    });
    let later = later.collect();
    answer(rows);
    model.now += Duration::from_secs(1);
    // The cluster's report must be as new as the list, so that no age is drawn.
    model.cluster.received_at = model.now;
    update(model, UiEvent::Reply(Query::Processes(of), Ok(Reply::Processes(later))));
}

/// Presses these keys in turn. Returns the effects.
pub(crate) fn press(model: &mut Model, keys: &str) -> Vec<Effect> {
    let mut effects = Vec::new();
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\x1b' => KeyCode::Esc,
            '\x08' => KeyCode::Backspace,
            '→' => KeyCode::Right,
            '←' => KeyCode::Left,
            '↑' => KeyCode::Up,
            '↓' => KeyCode::Down,
            '⇞' => KeyCode::PageUp,
            '⇟' => KeyCode::PageDown,
            '⇱' => KeyCode::Home,
            '⇲' => KeyCode::End,
            letter => KeyCode::Char(letter),
        };
        effects.extend(update(model, UiEvent::Key(KeyEvent::from(code))));
    }
    effects
}
