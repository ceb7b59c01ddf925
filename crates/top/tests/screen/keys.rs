//! What keys do.

use crate::sample::{cluster, model, node, press, processes, report, row};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::time::Duration;
use tern_control::{ClusterReport, Destination, NodeState, Reply};
use tern_ids::{HomePid, NodeId};
use tern_top::Trouble;
use tern_top::event::{Effect, Event, Question};
use tern_top::layout::Layout;
use tern_top::model::{Display, Model};
use tern_top::update::{until_due, update};

fn nodes(count: u16) -> ClusterReport {
    cluster((1..=count).map(|number| node(number, 50.0)).collect())
}

/// The first and the last node on the page.
fn page(model: &Model) -> (u16, u16) {
    let (_, page) = Layout::of(model).page(model);
    (page.first().unwrap().node.0, page.last().unwrap().node.0)
}

fn message(model: &Model) -> &str {
    model.message.as_ref().map_or("", |message| &message.text)
}

#[test]
fn arrows_choose_and_turn_pages() {
    let mut model = model(nodes(100));
    press(&mut model, "V");
    model.size = (27, 24);
    assert_eq!(page(&model), (1, 20));
    press(&mut model, "→→→");
    assert_eq!((model.chosen, page(&model)), (Some(NodeId(3)), (1, 20)));
    press(&mut model, "⇟");
    assert_eq!((model.chosen, page(&model)), (Some(NodeId(23)), (21, 40)));
    press(&mut model, "←←←");
    assert_eq!((model.chosen, page(&model)), (Some(NodeId(20)), (20, 39)));
    press(&mut model, "⇲");
    assert_eq!((model.chosen, page(&model)), (Some(NodeId(100)), (81, 100)));
    press(&mut model, "⇟→");
    assert_eq!((model.chosen, page(&model)), (Some(NodeId(100)), (81, 100)));
    press(&mut model, "⇞");
    assert_eq!((model.chosen, page(&model)), (Some(NodeId(80)), (61, 80)));
    press(&mut model, "⇱⇞←");
    assert_eq!((model.chosen, page(&model)), (Some(NodeId(1)), (1, 20)));
    // A larger terminal shows what it has room for.
    model.settings.first = Some(NodeId(90));
    model.size = (57, 24);
    assert_eq!(page(&model), (51, 100));
}

#[test]
fn the_dead_are_shown_when_they_are_wanted() {
    let mut report = nodes(4);
    report.nodes[1].state = NodeState::Dead;
    report.nodes[2].state = NodeState::NeverHeard;
    let mut model = model(report);
    let shown = |model: &Model| model.shown().iter().map(|node| node.node.0).collect::<Vec<_>>();
    assert_eq!(shown(&model), [1, 4]);
    press(&mut model, "→→");
    assert_eq!(model.chosen, Some(NodeId(4)));
    press(&mut model, "d←");
    assert_eq!((shown(&model), model.chosen), (vec![1, 2, 3, 4], Some(NodeId(3))));
    // The chosen one is shown no more; the arrows go on from where it was.
    press(&mut model, "d→");
    assert_eq!(model.chosen, Some(NodeId(4)));
}

#[test]
fn a_number_is_followed_as_soon_as_it_can_be_no_other() {
    let mut model = model(nodes(12));
    let asked = press(&mut model, "5");
    assert_eq!(asked, [Effect::Ask(Question::Processes(Some(NodeId(5))))]);
    press(&mut model, "q");
    assert!(model.list.is_none());
    assert_eq!(press(&mut model, "1"), []);
    assert_eq!(press(&mut model, "2"), [Effect::Ask(Question::Processes(Some(NodeId(12))))]);
    // Our own are asked for without a detour.
    press(&mut model, "q");
    assert_eq!(press(&mut model, "1\n"), [Effect::Ask(Question::Processes(None))]);
    press(&mut model, "q");
    assert_eq!(press(&mut model, "13\n"), []);
    assert_eq!(message(&model), "no node 13 in the cluster");
    press(&mut model, "1\x08\x08");
    assert!(model.prompt.is_none());
}

#[test]
fn questions_are_asked_at_their_pace_and_not_before_the_last_is_answered() {
    let mut model = model(nodes(2));
    let at = |model: &mut Model, ms| update(model, Event::Time(Duration::from_millis(ms)));
    assert_eq!(at(&mut model, 1_900), []);
    assert_eq!(until_due(&model), Duration::from_millis(100));
    assert_eq!(at(&mut model, 2_000), [Effect::Ask(Question::Cluster)]);
    assert_eq!(at(&mut model, 9_000), []);
    assert_eq!(until_due(&model), Duration::MAX);
    update(&mut model, Event::Answer(Question::Cluster, Err(Trouble::new(5, "ternd is not running"))));
    assert_eq!(model.nodes().len(), 2, "the last picture stays");
    press(&mut model, "--");
    assert_eq!(model.pace, Duration::from_secs(5));
    assert_eq!(at(&mut model, 9_500), [Effect::Ask(Question::Cluster)]);
    press(&mut model, "++++++");
    assert_eq!(model.pace, Duration::from_millis(500));
}

#[test]
fn a_process_of_ours_is_moved_wherever_it_runs() {
    let mut model = model(nodes(3));
    // Node 2 has a guest of ours and one of node 3, and a process of its own.
    press(&mut model, "2");
    let rows = vec![row(31, None, Some(1), 0.0), row(41, None, Some(3), 0.0), row(51, Some(3), None, 0.0)];
    processes(&mut model, Some(NodeId(2)), rows);
    press(&mut model, "N");
    let to = |to| Question::Move { pid: HomePid(31), command: "flac".into(), to };
    assert_eq!(press(&mut model, "m3\n"), [Effect::Ask(to(Destination::Node(NodeId(3))))]);
    assert_eq!(message(&model), "moving 31 flac to 3");
    assert_eq!(press(&mut model, "mhome\n"), [Effect::Ask(to(Destination::Home))]);
    assert_eq!(press(&mut model, "mhost3\n"), [Effect::Ask(to(Destination::Node(NodeId(3))))]);
    assert_eq!(press(&mut model, "m\n"), []);
    assert_eq!(press(&mut model, "mmars\n"), []);
    assert_eq!(message(&model), "no node mars in the cluster");
    for (key, said) in [
        ("↓m", "41 flac is at home on node 3 and can only be moved there"),
        ("↓m", "51 flac is at home on node 2 and can only be moved there"),
        ("k", "51 flac is at home on node 2 and can only be signalled there"),
    ] {
        assert_eq!(press(&mut model, key), []);
        assert_eq!((message(&model), model.prompt.is_some()), (said, false));
    }
    let moved = Event::Answer(to(Destination::Home), Ok(Reply::Migrated(report(31, 2, 1))));
    update(&mut model, moved);
    assert_eq!(message(&model), "31 flac: 2 → 1, 12.3 MB, frozen 18 ms");
    assert_eq!(until_due(&model), Duration::ZERO, "where it is now is asked at once");
    let no = Trouble::new(3, "31 is not yours").hint("sudo");
    update(&mut model, Event::Answer(to(Destination::Home), Err(no)));
    assert_eq!(message(&model), "31 is not yours; try: sudo");
}

#[test]
fn a_process_of_ours_is_signalled() {
    let mut model = model(nodes(3));
    press(&mut model, "\n");
    processes(&mut model, None, vec![row(31, Some(2), None, 0.0), row(41, None, Some(3), 0.0)]);
    press(&mut model, "N");
    let signal = |signal| Effect::Signal { pid: HomePid(31), command: "flac".into(), signal };
    assert_eq!(press(&mut model, "k\n"), [signal(15)]);
    assert_eq!(press(&mut model, "kstop\n"), [signal(19)]);
    assert_eq!(press(&mut model, "k9\x1b\n"), []);
    assert_eq!(press(&mut model, "kfly\n"), []);
    assert_eq!(message(&model), "there is no signal fly; try: a number, or a name such as TERM");
}

#[test]
fn a_late_answer_about_another_node_is_not_shown() {
    let mut model = model(nodes(3));
    press(&mut model, "2q3");
    let late = Event::Answer(
        Question::Processes(Some(NodeId(2))),
        Ok(Reply::Processes(vec![row(1, None, None, 0.0)])),
    );
    update(&mut model, late);
    let list = model.list.as_ref().unwrap();
    assert_eq!((list.of, list.entries.len(), list.asked.is_some()), (Some(NodeId(3)), 0, true));
}

#[test]
fn displays_help_and_the_way_out() {
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
        (vec![Effect::Ask(Question::Processes(None))], vec![Effect::Quit],)
    );
    assert_eq!(press(&mut model, "\x1b"), [Effect::Quit]);
    let control = |letter| Event::Key(KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL));
    // Even while something is typed.
    press(&mut model, "1");
    assert_eq!(update(&mut model, control('c')), [Effect::End(2)]);
    assert_eq!(update(&mut model, control('z')), [Effect::StopAll]);
    assert_eq!(update(&mut model, control('l')), [Effect::Redraw]);
}

#[test]
fn mtop_ends_where_mon_goes_back() {
    let mut model = model(nodes(1));
    press(&mut model, "\n");
    model.only_list = true;
    assert_eq!(press(&mut model, "q"), [Effect::Quit]);
}
