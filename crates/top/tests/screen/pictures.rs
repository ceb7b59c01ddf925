//! Snapshots of the screen: several sizes, numbers of nodes and views, with and without colour, in
//! Unicode and in ASCII.

use crate::sample::{cluster, migration, model, node, press, processes, row};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::style::Color;
use std::time::Duration;
use tern_control::{ClusterReport, NodeFlags, NodeLoad, NodeState, PlacedRow, Reply};
use tern_ids::{HomePid, NodeId};
use tern_top::appearance::Appearance;
use tern_top::event::{Query, UiEvent};
use tern_top::model::Model;
use tern_top::model::list::ProcessList;
use tern_top::once::buffer_lines;
use tern_top::update::update;
use tern_top::{SortOrder, TopError, view};

fn drawn(model: &Model) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(model.size.0, model.size.1)).unwrap();
    terminal.draw(|frame| view::draw(model, frame.buffer_mut())).unwrap();
    terminal.backend().buffer().clone()
}

fn screen(model: &Model) -> String {
    buffer_lines(&drawn(model)).join("\n")
}

fn at(size: (u16, u16), report: ClusterReport) -> Model {
    let mut model = model(report);
    model.size = size;
    model
}

/// The cluster of the MOSIX tutorial (docs/benchmarks.md), 15 s after thirteen encoders were
/// started on node 1.
fn tutorial() -> ClusterReport {
    let mut nodes = vec![node(1, 700.0), node(2, 600.0)];
    (nodes[0].speed, nodes[1].speed) = (9_000, 6_500);
    (nodes[0].away, nodes[1].guests) = (6, 6);
    let mut report = cluster(nodes);
    report.migrations = vec![migration(36, 1, 2, 2_300), migration(35, 1, 2, 4_100)];
    report
}

/// Eight nodes: one is suspected, one is dead, and one has never been in contact.
fn eight() -> ClusterReport {
    let loads = [120.0, 45.0, 0.0, 250.0, 98.0, 3.0, 0.0, 0.0];
    let mut nodes: Vec<NodeLoad> = (1..).zip(loads).map(|(number, load)| node(number, load)).collect();
    nodes[1].flags = NodeFlags { block: true, stay: true, ..NodeFlags::default() };
    nodes[3].cpus = 4.0;
    nodes[3].mem_total = 32_000_000_000;
    nodes[3].mem_free = 20_000_000_000;
    nodes[4].state = NodeState::Suspect;
    nodes[5].utilisability = 40;
    nodes[6].state = NodeState::Dead;
    nodes[6].age_ms = 65_000;
    nodes[7].state = NodeState::NeverSeen;
    let mut report = cluster(nodes);
    report.migrations = (0..9).map(|i| migration(31 + i, 1, 4, 400 + 5_000 * i as u64)).collect();
    report
}

fn thousand() -> ClusterReport {
    let load = |number: u16| f32::from(number.wrapping_mul(7919) % 300);
    let mut nodes: Vec<NodeLoad> = (1..=1000).map(|number| node(number, load(number))).collect();
    for node in nodes.iter_mut().skip(9).step_by(10) {
        node.state = NodeState::Dead;
    }
    cluster(nodes)
}

#[test]
fn tutorial_cluster() {
    insta::assert_snapshot!(screen(&at((80, 24), tutorial())));
}

#[test]
fn eight_nodes() {
    for size in [(80, 24), (40, 10), (200, 60)] {
        let name = format!("eight_nodes_{}x{}", size.0, size.1);
        insta::assert_snapshot!(name, screen(&at(size, eight())));
    }
}

#[test]
fn eight_nodes_with_the_dead_and_totals() {
    for size in [(80, 24), (40, 10), (200, 60)] {
        let mut model = at(size, eight());
        press(&mut model, "dt");
        model.selected = Some(NodeId(7));
        let name = format!("eight_nodes_with_the_dead_and_totals_{}x{}", size.0, size.1);
        insta::assert_snapshot!(name, screen(&model));
    }
}

#[test]
fn each_display() {
    for key in ["L", "s", "m", "r", "u"] {
        let mut model = at((80, 16), eight());
        press(&mut model, key);
        insta::assert_snapshot!(
            format!("display_{key}_{}", key.chars().all(char::is_uppercase)),
            screen(&model)
        );
    }
}

#[test]
fn each_width() {
    let mut report = eight();
    report.nodes[5].node = NodeId(1234);
    for key in ["w", "v", "V"] {
        let mut model = at((80, 16), report.clone());
        press(&mut model, key);
        insta::assert_snapshot!(
            format!("width_{key}_{}", key.chars().all(char::is_uppercase)),
            screen(&model)
        );
    }
}

#[test]
fn a_thousand_nodes() {
    for size in [(80, 24), (40, 10), (200, 60)] {
        let name = format!("a_thousand_nodes_{}x{}", size.0, size.1);
        insta::assert_snapshot!(name, screen(&at(size, thousand())));
    }
}

#[test]
fn one_node_and_none() {
    insta::assert_snapshot!("one_node", screen(&at((80, 24), cluster(vec![node(1, 30.0)]))));
    for size in [(80, 24), (40, 10), (200, 60)] {
        let name = format!("no_cluster_{}x{}", size.0, size.1);
        insta::assert_snapshot!(name, screen(&at(size, cluster(Vec::new()))));
    }
}

#[test]
fn ternd_does_not_run() {
    let mut model = at((80, 24), cluster(Vec::new()));
    model.cluster.report = None;
    let text = "ternd is not running on this node (nothing answers at /run/tern/control)";
    let hint = "systemctl start ternd; or tern init, if this node is in no cluster yet";
    model.cluster.error = Some(TopError::new(5, text).hint(hint));
    insta::assert_snapshot!("ternd_does_not_run", screen(&model));
    // A list without any reply is empty, and its area shows the error.
    model.list = Some(ProcessList::new(None, SortOrder::default()));
    model.list_only = true;
    let error = TopError::new(5, text).hint(hint);
    update(&mut model, UiEvent::Reply(Query::Processes(None), Err(error)));
    insta::assert_snapshot!("ternd_does_not_run_list", screen(&model));
    // ternd has stopped: the last picture stays, with its age.
    let mut model = at((80, 24), eight());
    model.cluster.error = Some(TopError::new(5, text).hint(hint));
    model.now += Duration::from_secs(12);
    insta::assert_snapshot!("ternd_has_ended", screen(&model));
    model.cluster.error = None;
    assert!(screen(&model).starts_with("mon  ternd has not answered for 12 s"), "{}", screen(&model));
}

#[test]
fn ascii() {
    for key in ["l", "m"] {
        let mut model = at((80, 24), eight());
        model.appearance = Appearance { colour: false, unicode: false };
        model.cluster.report.as_mut().unwrap().nodes[0].host = "höst\x1b[2J".into();
        press(&mut model, &format!("d{key}"));
        let screen = screen(&model);
        assert!(screen.is_ascii(), "{screen}");
        insta::assert_snapshot!(format!("ascii_{key}"), screen);
    }
}

#[test]
fn colour_is_never_the_only_cue() {
    let mut coloured = at((40, 10), eight());
    press(&mut coloured, "d");
    insta::assert_debug_snapshot!("coloured", drawn(&coloured));
    let mut plain = coloured.clone();
    plain.appearance.colour = false;
    let buffer = drawn(&plain);
    assert!(buffer.content.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    assert_eq!(buffer_lines(&buffer), buffer_lines(&drawn(&coloured)));
}

#[test]
fn processes_of_a_node() {
    let mut rows: Vec<_> = (1..=30).map(|pid| row(pid, Some(2), None, f64::from(pid))).collect();
    rows[28].reason = "it maps a device".into();
    rows[28].state = "home".into();
    rows[28].r#where = Some(NodeId(1));
    rows.push(row(412, None, Some(3), 4_000.0));
    for size in [(80, 24), (40, 10), (200, 60)] {
        let mut model = at(size, tutorial());
        press(&mut model, "\nT");
        processes(&mut model, None, rows.clone());
        press(&mut model, "↓↓");
        insta::assert_snapshot!(format!("processes_{}x{}", size.0, size.1), screen(&model));
    }
    let mut model = at((80, 24), tutorial());
    press(&mut model, "\n");
    processes(&mut model, None, rows);
    press(&mut model, "m2");
    insta::assert_snapshot!("processes_prompt", screen(&model));
}

#[test]
fn help() {
    for size in [(80, 24), (40, 10), (200, 60)] {
        let mut model = at(size, eight());
        press(&mut model, "h");
        insta::assert_snapshot!(format!("help_{}x{}", size.0, size.1), screen(&model));
    }
}

/// Drawing must not panic at any size or with any values in a report.
#[test]
fn any_size_and_any_report_can_be_drawn() {
    let mut odd = eight();
    odd.nodes[0] = NodeLoad { cpus: f32::NAN, mem_free: u64::MAX, ..node(1, f32::NAN) };
    odd.nodes[1].load = f32::NEG_INFINITY;
    odd.nodes[2] =
        NodeLoad { speed: u32::MAX, cpus: f32::MAX, mem_total: u64::MAX, ..node(65_535, f32::INFINITY) };
    odd.nodes[3].swap_free = u64::MAX;
    let list: Vec<_> = (0..99).map(|pid| row(pid, Some(9), None, f64::NAN)).collect();
    for columns in (0..90).chain([65_535 / 90]) {
        for lines in 0..40 {
            let mut model = at((columns, lines), odd.clone());
            for keys in
                ["d", "t", "L", "V", "m", "w", "s", "u", "→", "h", "h", "1", "\x1b", "\n", "↓", "m", "999"]
            {
                press(&mut model, keys);
                if keys == "\n" {
                    processes(&mut model, Some(NodeId(1)), list.clone());
                    processes(&mut model, None, list.clone());
                }
                drawn(&model);
            }
        }
    }
}

#[test]
fn documentation_has_current_pictures() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(here.join("../../docs/guide/watching.md")).unwrap();
    for name in
        ["tutorial_cluster", "eight_nodes_with_the_dead_and_totals_80x24", "processes_80x24", "ascii_m"]
    {
        let path = here.join(format!("tests/screen/snapshots/screen__pictures__{name}.snap"));
        let text = std::fs::read_to_string(path).unwrap();
        let picture = text.splitn(3, "---\n").nth(2).unwrap();
        assert!(page.contains(picture.trim_end()), "docs/guide/watching.md lacks {name} as it is now");
    }
}

#[test]
fn placed_commands_are_counted_where_they_run() {
    let mut model = model(tutorial());
    let placed = |r#where: Option<u16>, from: Option<u16>| PlacedRow {
        pid: HomePid(7),
        uid: 1000,
        r#where: r#where.map(NodeId),
        is_queued: r#where.is_none(),
        from: from.map(NodeId),
        seconds: 1.0,
        command: "gcc".into(),
    };
    let rows =
        vec![placed(Some(2), None), placed(Some(2), None), placed(None, None), placed(Some(1), Some(2))];
    update(&mut model, UiEvent::Reply(Query::Placed, Ok(Reply::Placed(rows))));
    assert!(screen(&model).contains("1 queued, load 7.00"), "{}", screen(&model));
    model.selected = Some(NodeId(2));
    assert!(screen(&model).contains("2 placed, load 6.00"), "{}", screen(&model));
    update(&mut model, UiEvent::Reply(Query::Placed, Err(TopError::new(2, "no such request"))));
    assert!(!screen(&model).contains("placed") && !screen(&model).contains("no such"));
}
