//! The effects of keys.

use crate::sample::{cluster, model, node, press, processes, report, row};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::time::Duration;
use tern_control::{ClusterReport, Destination, NodeState, Reply};
use tern_ids::{HomePid, NodeId};
use tern_top::TopError;
use tern_top::event::{Effect, Query, UiEvent};
use tern_top::layout::ScreenLayout;
use tern_top::model::{Display, Model};
use tern_top::update::{time_until_query, update};

fn nodes(count: u16) -> ClusterReport {
    cluster((1..=count).map(|number| node(number, 50.0)).collect())
}

/// The first and the last node on the page.
fn page(model: &Model) -> (u16, u16) {
    let (_, page) = ScreenLayout::new(model).page(model);
    (page.first().unwrap().node.0, page.last().unwrap().node.0)
}

fn message(model: &Model) -> &str {
    model.message.as_ref().map_or("", |message| &message.text)
}

#[test]
fn arrow_keys_select_nodes_and_turn_pages() {
    let mut model = model(nodes(100));
    press(&mut model, "V");
    model.size = (27, 24);
    assert_eq!(page(&model), (1, 20));
    press(&mut model, "→→→");
    assert_eq!((model.selected, page(&model)), (Some(NodeId(3)), (1, 20)));
    press(&mut model, "⇟");
    assert_eq!((model.selected, page(&model)), (Some(NodeId(23)), (21, 40)));
    press(&mut model, "←←←");
    assert_eq!((model.selected, page(&model)), (Some(NodeId(20)), (20, 39)));
    press(&mut model, "⇲");
    assert_eq!((model.selected, page(&model)), (Some(NodeId(100)), (81, 100)));
    press(&mut model, "⇟→");
    assert_eq!((model.selected, page(&model)), (Some(NodeId(100)), (81, 100)));
    press(&mut model, "⇞");
    assert_eq!((model.selected, page(&model)), (Some(NodeId(80)), (61, 80)));
    press(&mut model, "⇱⇞←");
    assert_eq!((model.selected, page(&model)), (Some(NodeId(1)), (1, 20)));
    // A larger terminal shows as many nodes as fit.
    model.settings.first = Some(NodeId(90));
    model.size = (57, 24);
    assert_eq!(page(&model), (51, 100));
}

#[test]
fn d_key_shows_and_hides_dead_nodes() {
    let mut report = nodes(4);
    report.nodes[1].state = NodeState::Dead;
    report.nodes[2].state = NodeState::NeverSeen;
    let mut model = model(report);
    let shown = |model: &Model| model.shown().iter().map(|node| node.node.0).collect::<Vec<_>>();
    assert_eq!(shown(&model), [1, 4]);
    press(&mut model, "→→");
    assert_eq!(model.selected, Some(NodeId(4)));
    press(&mut model, "d←");
    assert_eq!((shown(&model), model.selected), (vec![1, 2, 3, 4], Some(NodeId(3))));
    // The selected node is no longer shown; the arrows continue from its position.
    press(&mut model, "d→");
    assert_eq!(model.selected, Some(NodeId(4)));
}

#[test]
fn typed_node_number_opens_when_unambiguous() {
    let mut model = model(nodes(12));
    let effects = press(&mut model, "5");
    assert_eq!(effects, [Effect::Query(Query::Processes(Some(NodeId(5))))]);
    press(&mut model, "q");
    assert!(model.list.is_none());
    assert_eq!(press(&mut model, "1"), []);
    assert_eq!(press(&mut model, "2"), [Effect::Query(Query::Processes(Some(NodeId(12))))]);
    // This node's own processes are queried without naming the node.
    press(&mut model, "q");
    assert_eq!(press(&mut model, "1\n"), [Effect::Query(Query::Processes(None))]);
    press(&mut model, "q");
    assert_eq!(press(&mut model, "13\n"), []);
    assert_eq!(message(&model), "no node 13 in the cluster; try: tern status, to list the nodes");
    press(&mut model, "1\x08\x08");
    assert!(model.prompt.is_none());
}

#[test]
fn queries_respect_interval_and_wait_for_reply() {
    let mut model = model(nodes(2));
    let at = |model: &mut Model, ms| update(model, UiEvent::Time(Duration::from_millis(ms)));
    assert_eq!(at(&mut model, 1_900), []);
    assert_eq!(time_until_query(&model), Duration::from_millis(100));
    assert_eq!(at(&mut model, 2_000), [Effect::Query(Query::Cluster)]);
    assert_eq!(at(&mut model, 9_000), []);
    assert_eq!(time_until_query(&model), Duration::MAX);
    update(&mut model, UiEvent::Reply(Query::Cluster, Err(TopError::new(5, "ternd is not running"))));
    assert_eq!(model.nodes().len(), 2, "the last picture stays");
    press(&mut model, "--");
    assert_eq!(model.interval, Duration::from_secs(5));
    assert_eq!(at(&mut model, 9_500), [Effect::Query(Query::Cluster)]);
    press(&mut model, "++++++");
    assert_eq!(model.interval, Duration::from_millis(500));
}

#[test]
fn own_process_is_migrated_from_any_list() {
    let mut model = model(nodes(3));
    // Node 2 has a guest of this node, one of node 3, and a process of its own that is away.
    press(&mut model, "2");
    let rows = vec![row(31, None, Some(1), 0.0), row(41, None, Some(3), 0.0), row(51, Some(3), None, 0.0)];
    processes(&mut model, Some(NodeId(2)), rows);
    press(&mut model, "N");
    let to = |to| Query::Move { pid: HomePid(31), command: "flac".into(), to };
    assert_eq!(press(&mut model, "m3\n"), [Effect::Query(to(Destination::Node(NodeId(3))))]);
    assert_eq!(message(&model), "moving 31 flac to 3");
    assert_eq!(press(&mut model, "mhome\n"), [Effect::Query(to(Destination::Home))]);
    assert_eq!(press(&mut model, "mhost3\n"), [Effect::Query(to(Destination::Node(NodeId(3))))]);
    assert_eq!(press(&mut model, "m\n"), []);
    assert_eq!(press(&mut model, "mmars\n"), []);
    assert_eq!(message(&model), "no node mars in the cluster; try: tern status, to list the nodes");
    for (key, text) in [
        ("↓m", "41 flac can only be moved on its home, node 3; try: mon on node 3"),
        ("↓m", "51 flac can only be moved on its home, node 2; try: mon on node 2"),
        ("k", "51 flac can only be signalled on its home, node 2; try: mon on node 2"),
    ] {
        assert_eq!(press(&mut model, key), []);
        assert_eq!((message(&model), model.prompt.is_some()), (text, false));
    }
    let moved = UiEvent::Reply(to(Destination::Home), Ok(Reply::Migrated(report(31, 2, 1))));
    update(&mut model, moved);
    assert_eq!(message(&model), "31 flac: 2 → 1, 12.3 MB, frozen 18 ms");
    assert_eq!(time_until_query(&model), Duration::ZERO, "the new location is queried at once");
    let no = TopError::new(3, "31 is not yours").hint("sudo");
    update(&mut model, UiEvent::Reply(to(Destination::Home), Err(no)));
    assert_eq!(message(&model), "31 is not yours; try: sudo");
}

#[test]
fn own_process_is_signalled() {
    let mut model = model(nodes(3));
    press(&mut model, "\n");
    processes(&mut model, None, vec![row(31, Some(2), None, 0.0), row(41, None, Some(3), 0.0)]);
    press(&mut model, "N");
    let signal = |signal| Effect::Signal { pid: HomePid(31), command: "flac".into(), signal };
    assert_eq!(press(&mut model, "k\n"), [signal(15)]);
    assert_eq!(press(&mut model, "kstop\n"), [signal(19)]);
    assert_eq!(press(&mut model, "k9\x1b\n"), []);
    assert_eq!(press(&mut model, "kfly\n"), []);
    assert_eq!(message(&model), "unknown signal fly; try: a number, or a name such as TERM");
}

#[test]
fn late_reply_of_another_node_is_ignored() {
    let mut model = model(nodes(3));
    press(&mut model, "2q3");
    let late = UiEvent::Reply(
        Query::Processes(Some(NodeId(2))),
        Ok(Reply::Processes(vec![row(1, None, None, 0.0)])),
    );
    update(&mut model, late);
    let list = model.list.as_ref().unwrap();
    assert_eq!((list.node, list.entries.len(), list.pending_since.is_some()), (Some(NodeId(3)), 0, true));
}

#[test]
fn keys_select_display_help_and_quit() {
    let mut model = model(nodes(3));
    for (key, display) in [
        ("m", Display::Memory),
        ("r", Display::RawMemory),
        ("s", Display::Speed),
        ("u", Display::Utilisability),
        ("L", Display::LogLoad),
        ("l", Display::Load),
    ] {
        press(&mut model, key);
        assert_eq!(model.settings.display, display);
    }
    model.size = (80, 10);
    press(&mut model, "h↓↓↑");
    assert_eq!(model.help, Some(1));
    assert_eq!(press(&mut model, "q"), [], "any other key leaves the help only");
    assert_eq!(
        (press(&mut model, "\nq"), press(&mut model, "q")),
        (vec![Effect::Query(Query::Processes(None))], vec![Effect::Quit],)
    );
    assert_eq!(press(&mut model, "\x1b"), [Effect::Quit]);
    let control = |letter| UiEvent::Key(KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL));
    // Also while a prompt is shown.
    press(&mut model, "1");
    assert_eq!(update(&mut model, control('c')), [Effect::EndBySignal(2)]);
    assert_eq!(update(&mut model, control('z')), [Effect::StopAll]);
    assert_eq!(update(&mut model, control('l')), [Effect::Redraw]);
}

#[test]
fn q_quits_mtop() {
    let mut model = model(nodes(1));
    press(&mut model, "\n");
    model.list_only = true;
    assert_eq!(press(&mut model, "q"), [Effect::Quit]);
}
