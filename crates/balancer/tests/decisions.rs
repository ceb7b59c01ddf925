//! Single decisions, with numbers that can be checked by hand.

use std::collections::{BTreeMap, BTreeSet};
use tern_balancer::{
    Cluster, DecisionState, Hint, LinkCost, MoveReason, NodeSnapshot, Obstacle, OfferReply, PendingChanges,
    PlacementRequest, Policy, ProcessSnapshot, StayReason, Traffic, decide, explain, place, reply_to_offer,
};
use tern_ids::{HomePid, NodeId};

const GB: u64 = 1 << 30;

fn node(id: u16, runnable: f64) -> NodeSnapshot {
    let mut node = NodeSnapshot {
        id: NodeId(id),
        speed: 10_000,
        cpus: 1.0,
        load: 0.0,
        mem_free: 3 * GB,
        mem_total: 4 * GB,
        swap_free: GB,
        swap_total: GB,
        mem_pressure: 0.0,
        takes_guests: true,
        age_ms: 0,
        alive: true,
        link: LinkCost::default(),
    };
    node.load = node.load_of(runnable);
    node
}

fn busy(pid: i32, at: u16, cpu_s: f64) -> ProcessSnapshot {
    ProcessSnapshot::new(HomePid(pid), NodeId(at), 100.0, cpu_s)
}

fn moves(nodes: Vec<NodeSnapshot>, processes: &[ProcessSnapshot]) -> Vec<(i32, u16, MoveReason)> {
    let cluster = Cluster::new(NodeId(1), nodes);
    let mut state = DecisionState::default();
    let moves = decide(&cluster, processes, &mut state, &Policy::default(), 100_000, 1);
    moves.iter().map(|next| (next.pid.0, next.to.0, next.reason)).collect()
}

fn stay(
    nodes: Vec<NodeSnapshot>,
    process: ProcessSnapshot,
) -> (Option<StayReason>, Vec<(u16, Option<Obstacle>)>) {
    let cluster = Cluster::new(NodeId(1), nodes);
    let mut state = DecisionState::default();
    let decided =
        decide(&cluster, std::slice::from_ref(&process), &mut state, &Policy::default(), 100_000, 1);
    assert!(decided.is_empty(), "{decided:?}");
    let why = explain(&cluster, &process, &state, &Policy::default(), 100_000);
    assert!(why.last.is_some());
    (why.ineligible, why.candidates.iter().map(|candidate| (candidate.node.0, candidate.obstacle)).collect())
}

#[test]
fn thirteen_equal_jobs_spread_as_in_the_tutorial() {
    let mut nodes = vec![node(1, 13.0), node(2, 0.0)];
    (nodes[0].speed, nodes[1].speed) = (9_000, 6_500);
    for node in &mut nodes {
        node.load = node.load_of(if node.id.0 == 1 { 13.0 } else { 0.0 });
    }
    let policy = Policy { max_moves_per_pair: 20, max_moves: 20, ..Policy::default() };
    let processes: Vec<ProcessSnapshot> = (0..13).map(|pid| busy(pid, 1, 3.0)).collect();
    let cluster = Cluster::new(NodeId(1), nodes);
    let moves = decide(&cluster, &processes, &mut DecisionState::default(), &policy, 0, 1);
    // Eight and five are balanced: 9000/8 = 1125 each on the first node, whereas each of six on the
    // second would have 6500/6 = 1083.
    assert_eq!(moves.len(), 5, "{moves:?}");
}

#[test]
fn young_idle_locked_and_unmovable_processes_stay() {
    let nodes = || vec![node(1, 2.0), node(2, 0.0)];
    assert_eq!(moves(nodes(), &[busy(7, 1, 3.0)]), [(7, 2, MoveReason::Faster)]);
    assert!(matches!(stay(nodes(), busy(7, 1, 0.3)).0, Some(StayReason::TooYoung { .. })));
    assert_eq!(
        stay(nodes(), ProcessSnapshot { locked: true, ..busy(7, 1, 9.0) }).0,
        Some(StayReason::Locked)
    );
    assert_eq!(
        stay(nodes(), ProcessSnapshot { movable: false, ..busy(7, 1, 9.0) }).0,
        Some(StayReason::NotMovable)
    );
    assert_eq!(stay(nodes(), ProcessSnapshot { demand: 0.1, ..busy(7, 1, 9.0) }).0, Some(StayReason::Idle));
    let just_came = ProcessSnapshot { resident_s: 0.5, ..busy(7, 1, 9.0) };
    assert!(matches!(stay(nodes(), just_came).0, Some(StayReason::TooRecent { .. })));
    // The more it waits for a CPU, the sooner it may move.
    let crowded = vec![node(1, 8.0), node(2, 0.0)];
    let waiting = ProcessSnapshot { resident_s: 2.4, ..busy(7, 1, 0.3) };
    assert_eq!(moves(crowded, &[waiting]), [(7, 2, MoveReason::Faster)]);
}

#[test]
fn each_obstacle_is_reported() {
    let obstacle = |change: fn(&mut NodeSnapshot), process: ProcessSnapshot| {
        let mut nodes = vec![node(1, 2.0), node(2, 0.0)];
        change(&mut nodes[1]);
        stay(nodes, process).1.into_iter().find(|(node, _)| *node == 2).and_then(|(_, obstacle)| obstacle)
    };
    let job = || busy(7, 1, 9.0);
    assert_eq!(obstacle(|node| node.alive = false, job()), Some(Obstacle::Dead));
    assert_eq!(obstacle(|node| node.age_ms = 6_000, job()), Some(Obstacle::Stale));
    assert_eq!(obstacle(|node| node.takes_guests = false, job()), Some(Obstacle::NoGuests));
    assert_eq!(obstacle(|node| node.load = 100.0, job()), Some(Obstacle::NotFaster));
    assert_eq!(
        obstacle(|_| {}, ProcessSnapshot { forbidden: BTreeSet::from([NodeId(2)]), ..job() }),
        Some(Obstacle::Forbidden)
    );
    assert_eq!(
        obstacle(|_| {}, ProcessSnapshot { allowed: Some(BTreeSet::from([NodeId(3)])), ..job() }),
        Some(Obstacle::Forbidden)
    );
    assert_eq!(obstacle(|_| {}, ProcessSnapshot { hint: Hint::Io, ..job() }), Some(Obstacle::FilesAtHome));
    assert_eq!(obstacle(|_| {}, ProcessSnapshot { claim: 3 * GB, ..job() }), Some(Obstacle::NoMemory));
    assert_eq!(obstacle(|node| node.mem_pressure = 50.0, job()), Some(Obstacle::NoMemory));
    // 2 GB over a megabit link, to gain what is left of nine seconds.
    let slow = |node: &mut NodeSnapshot| node.link.bytes_per_s = 125_000;
    assert_eq!(obstacle(slow, ProcessSnapshot { rss: 2 * GB, ..job() }), Some(Obstacle::NotWorthwhile));
}

#[test]
fn process_with_many_calls_stays_home_and_returns_home() {
    // Each second of work has 5,000 calls of 250 µs: away it would take 2.25 s, at home beside
    // another process 2 s.
    let talker = |at| ProcessSnapshot { calls_per_s: 2_500.0, ..busy(7, at, 9.0) };
    assert_eq!(moves(vec![node(1, 2.0), node(2, 0.0)], &[talker(1)]), []);
    // The calls of a cpujob are ignored.
    let hinted = ProcessSnapshot { hint: Hint::Cpu, ..talker(1) };
    assert_eq!(moves(vec![node(1, 2.0), node(2, 0.0)], &[hinted]), [(7, 2, MoveReason::Faster)]);
    // Alone and away it runs 44% of the time, and waits for calls in the rest.
    let away = ProcessSnapshot { demand: 44.0, calls_per_s: 2_200.0, ..busy(7, 2, 9.0) };
    assert_eq!(moves(vec![node(1, 0.0), node(2, 0.44)], &[away]), [(7, 1, MoveReason::HomeCalls)]);
    // A process observed to run all the time, with as many calls, does not wait for them, whatever
    // the estimated cost of the link: beside another process at home it would be no faster.
    let runs = ProcessSnapshot { calls_per_s: 2_200.0, ..busy(7, 2, 9.0) };
    assert_eq!(moves(vec![node(1, 1.0), node(2, 2.0)], &[runs]), []);
    let files = ProcessSnapshot { hint: Hint::Io, resident_s: 2.0, ..busy(7, 2, 0.1) };
    assert_eq!(moves(vec![node(1, 0.0), node(2, 1.0)], &[files]), [(7, 1, MoveReason::HomeCalls)]);
}

#[test]
fn process_moves_to_the_node_of_its_files_and_stays() {
    let on = |node| {
        let traffic = Traffic { calls_per_s: 1_000.0, bytes_per_s: 29e6 };
        BTreeMap::from([(NodeId(node), traffic)])
    };
    let idle = || vec![node(1, 0.5), node(2, 0.0), node(3, 0.0)];
    // At home it computes half of the time, and waits for the files in the other half.
    let at_home = ProcessSnapshot { demand: 50.0, files: on(3), ..busy(7, 1, 9.0) };
    assert_eq!(moves(idle(), std::slice::from_ref(&at_home)), [(7, 3, MoveReason::Files)]);
    // It runs where its files are: it would wait for them on any other node, and twice as long on a
    // third one.
    let there = ProcessSnapshot { demand: 100.0, files: on(3), ..busy(7, 3, 30.0) };
    let nodes = vec![node(1, 0.0), node(2, 0.0), node(3, 1.0)];
    let (stay, obstacles) = stay(nodes, there.clone());
    assert_eq!(stay, None);
    assert!(
        obstacles.contains(&(1, Some(Obstacle::NotFaster)))
            && obstacles.contains(&(2, Some(Obstacle::NotFaster))),
        "{obstacles:?}"
    );
    // With three more processes there, home is better all the same.
    assert_eq!(moves(vec![node(1, 0.0), node(3, 4.0)], &[there]), [(7, 1, MoveReason::Faster)]);
    // A process observed to compute all the time does not wait for files, whatever the estimated
    // cost of the link.
    let runs = ProcessSnapshot { demand: 100.0, ..at_home.clone() };
    assert_eq!(moves(idle(), &[runs]), []);
    // A node that is not in the view does not attract a process, nor do files attract a cpujob.
    assert_eq!(moves(idle(), &[ProcessSnapshot { files: on(9), ..at_home.clone() }]), []);
    assert_eq!(moves(idle(), &[ProcessSnapshot { hint: Hint::Cpu, ..at_home.clone() }]), []);
    // A process with as much traffic to home as to its files has nothing to gain.
    let both = ProcessSnapshot { calls_per_s: 1_000.0, bytes_per_s: 29e6, ..at_home };
    assert_eq!(moves(idle(), &[both]), []);
}

#[test]
fn home_is_preferred_to_an_equal_node_if_it_has_an_idle_cpu() {
    let away = || busy(7, 2, 30.0);
    assert_eq!(moves(vec![node(1, 0.0), node(2, 1.0)], &[away()]), [(7, 1, MoveReason::Home)]);
    assert_eq!(moves(vec![node(1, 1.0), node(2, 2.0)], &[away()]), []);
    // Sending a gigabyte for no gain costs too much.
    assert_eq!(moves(vec![node(1, 0.0), node(2, 1.0)], &[ProcessSnapshot { rss: GB, ..away() }]), []);
}

#[test]
fn faster_and_additional_cpus_attract() {
    let mut fast = node(2, 1.0);
    (fast.speed, fast.load) = (25_000, 40.0);
    // It gets half of a CPU that is 2.5 times as fast.
    assert_eq!(moves(vec![node(1, 1.0), fast], &[busy(7, 1, 9.0)]), [(7, 2, MoveReason::Faster)]);
    let mut many = node(2, 0.0);
    many.cpus = 4.0;
    many.load = many.load_of(3.0);
    assert_eq!(moves(vec![node(1, 2.0), many.clone()], &[busy(7, 1, 9.0)]), [(7, 2, MoveReason::Faster)]);
    many.load = many.load_of(7.0);
    assert_eq!(moves(vec![node(1, 2.0), many], &[busy(7, 1, 9.0)]), []);
}

#[test]
fn process_leaves_before_the_node_is_full_and_goes_where_it_fits() {
    // 1 GB grows by 50 MB/s on a link of 117 MB/s: it needs nine seconds to leave, and the node
    // fills in twelve.
    let mut full = node(1, 1.0);
    full.mem_free = 800 << 20;
    let mut small = node(2, 0.0);
    small.mem_free = 900 << 20;
    let grower = ProcessSnapshot { rss: GB, growth: 50 << 20, ..busy(7, 1, 0.1) };
    let nodes = vec![full.clone(), small, node(3, 3.0)];
    assert_eq!(moves(nodes, std::slice::from_ref(&grower)), [(7, 3, MoveReason::Memory)]);
    // Nothing can be done if the process fits nowhere, and nothing needs to be done while much
    // memory is free.
    assert_eq!(moves(vec![full], std::slice::from_ref(&grower)), []);
    assert_eq!(moves(vec![node(1, 1.0), node(3, 3.0)], &[grower]), []);
}

#[test]
fn memory_of_departing_processes_is_not_available_yet() {
    let mut full = node(1, 1.0);
    full.mem_free = 100 << 20;
    let (leaves, away) = (ProcessSnapshot { rss: GB, ..busy(7, 1, 0.1) }, busy(8, 2, 30.0));
    let nodes = || vec![full.clone(), node(2, 1.0), node(3, 1.0)];
    let (cluster, policy) = (Cluster::new(NodeId(1), nodes()), Policy::default());
    let mut state = DecisionState::default();
    let to = |moves: Vec<tern_balancer::Move>| moves.iter().map(|m| (m.pid.0, m.reason)).collect::<Vec<_>>();
    let both = [leaves.clone(), away.clone()];
    // Home has no room, and is not asked.
    let first = decide(&cluster, &both, &mut state, &policy, 100_000, 1);
    assert_eq!(to(first), [(7, MoveReason::Memory)]);
    assert_eq!(to(decide(&cluster, &both, &mut state, &policy, 101_000, 1)), []);
    // The process has left, which the view does not show yet.
    state.arrived(HomePid(7), 102_000);
    let both = [ProcessSnapshot { at: NodeId(3), ..leaves }, away];
    assert_eq!(to(decide(&cluster, &both, &mut state, &policy, 102_000, 1)), [(8, MoveReason::Home)]);
}

#[test]
fn best_fit_keeps_large_holes() {
    let mut full = node(1, 3.0);
    full.mem_free = 100 << 20;
    let mut hole = node(2, 0.0);
    hole.mem_free = GB;
    let sizes = [300, 400, 2_000].map(|mb| mb << 20);
    let processes: Vec<ProcessSnapshot> =
        (1..).zip(sizes).map(|(pid, rss)| ProcessSnapshot { rss, ..busy(pid, 1, 0.1) }).collect();
    // 100 MB are lacking: the smallest process is enough, and fits into the smaller hole.
    assert_eq!(moves(vec![full, hole, node(3, 0.0)], &processes), [(1, 2, MoveReason::Memory)]);
}

#[test]
fn evicted_guests_leave_at_once_and_go_home_as_last_resort() {
    let guest = |pid| ProcessSnapshot { evicted: true, ..busy(pid, 2, 0.01) };
    assert_eq!(
        moves(
            vec![node(1, 5.0), node(2, 2.0), node(3, 0.0)],
            &[guest(7), ProcessSnapshot { locked: true, ..guest(8) }]
        ),
        [(7, 3, MoveReason::Evicted), (8, 1, MoveReason::Evicted)]
    );
    let mut blocked = node(3, 0.0);
    blocked.takes_guests = false;
    assert_eq!(moves(vec![node(1, 5.0), node(2, 2.0), blocked], &[guest(7)]), [(7, 1, MoveReason::Evicted)]);
}

#[test]
fn moves_are_charged_until_the_target_publishes_a_newer_entry() {
    let policy = Policy { max_moves_per_pair: 9, ..Policy::default() };
    let mut state = DecisionState::default();
    let mut processes: Vec<ProcessSnapshot> = (0..4).map(|pid| busy(pid, 1, 9.0)).collect();
    let view = |here, there, age_ms| {
        let mut other = node(2, there);
        other.age_ms = age_ms;
        Cluster::new(NodeId(1), vec![node(1, here), other])
    };
    let first = decide(&view(4.0, 0.0, 0), &processes, &mut state, &policy, 10_000, 1);
    assert_eq!(first.len(), 2);
    // The view has not changed since, and is older than the decision: no more moves.
    assert!(decide(&view(4.0, 0.0, 2_000), &processes, &mut state, &policy, 11_000, 1).is_empty());
    for next in &first {
        state.accepted(next.pid, 11_500);
        state.arrived(next.pid, 12_000);
        processes[usize::try_from(next.pid.0).unwrap()].at = NodeId(2);
    }
    // An old entry of the target with the old load: still charged.
    assert!(decide(&view(2.0, 0.0, 1_500), &processes, &mut state, &policy, 12_500, 1).is_empty());
    // A younger entry shows that the processes have ended. It counts, and nothing is charged any
    // more.
    let later = decide(&view(2.0, 0.0, 100), &processes, &mut state, &policy, 14_000, 1);
    assert_eq!(later.len(), 1, "{later:?}");
}

#[test]
fn small_difference_does_not_move_a_process_again() {
    let policy = Policy::default();
    let mut state = DecisionState::default();
    let mut process = busy(7, 1, 9.0);
    let view = |loads: [f64; 3]| {
        Cluster::new(NodeId(1), vec![node(1, loads[0]), node(2, loads[1]), node(3, loads[2])])
    };
    let decide = |process: &ProcessSnapshot, state: &mut DecisionState, loads, now_ms| {
        let decided = decide(&view(loads), std::slice::from_ref(process), state, &policy, now_ms, 1);
        decided.first().map(|next| next.to.0)
    };
    assert_eq!(decide(&process, &mut state, [3.0, 0.0, 5.0], 1_000), Some(2));
    state.accepted(HomePid(7), 1_100);
    state.arrived(HomePid(7), 1_200);
    process.at = NodeId(2);
    // On node 3 its pace would be 4 instead of 5.
    let slightly_better = [9.0, 5.0, 3.0];
    assert_eq!(decide(&process, &mut DecisionState::default(), slightly_better, 20_000), Some(3));
    assert_eq!(decide(&process, &mut state, slightly_better, 20_000), None);
    let much_better = [9.0, 3.0, 1.0];
    assert_eq!(decide(&process, &mut state.clone(), much_better, 20_000), Some(3));
    assert_eq!(decide(&process, &mut state, slightly_better, 620_000), Some(3), "the move is forgotten");
}

#[test]
fn refusal_updates_the_view_and_failure_delays_the_retry() {
    let policy = Policy::default();
    let processes = [busy(7, 1, 9.0)];
    let cluster = Cluster::new(NodeId(1), vec![node(1, 2.0), node(2, 0.0), node(3, 0.6)]);
    let mut state = DecisionState::default();
    let first = decide(&cluster, &processes, &mut state, &policy, 1_000, 1);
    assert_eq!(first[0].to, NodeId(2));
    // A process of another home was there first.
    let OfferReply::Refuse(refusal) =
        reply_to_offer(&node(2, 1.5), &PendingChanges::default(), &first[0].offer, &policy, 1_000)
    else {
        panic!("it was full");
    };
    assert_eq!(refusal.obstacle, Obstacle::Overloaded);
    state.refused(HomePid(7), refusal, 1_000);
    let second = decide(&cluster, &processes, &mut state, &policy, 1_000, 1);
    assert_eq!(second[0].to, NodeId(3));
    state.failed(HomePid(7), 2_000);
    let obstacle = |now_ms| {
        let why = explain(&cluster, &processes[0], &state, &policy, now_ms);
        why.candidates
            .iter()
            .find(|candidate| candidate.node == NodeId(3))
            .and_then(|candidate| candidate.obstacle)
    };
    assert_eq!((obstacle(2_500), obstacle(3_100)), (Some(Obstacle::RetryDelay), None));
}

#[test]
fn accepted_offers_count_in_the_expected_load() {
    let policy = Policy::default();
    let cluster = Cluster::new(NodeId(1), vec![node(1, 2.0), node(2, 0.0)]);
    let offer = &decide(&cluster, &[busy(7, 1, 9.0)], &mut DecisionState::default(), &policy, 0, 1)[0].offer;
    let (own, mut pending) = (node(2, 0.0), PendingChanges::default());
    assert_eq!(reply_to_offer(&own, &pending, offer, &policy, 0), OfferReply::Accept);
    pending.record_accepted(offer, 0);
    assert!(matches!(reply_to_offer(&own, &pending, offer, &policy, 0), OfferReply::Refuse(_)));
    assert!((pending.expected_load(&own, &policy, 60_000) - 100.0).abs() < 1e-6);
    // Once it is here, the sampled load takes over.
    pending.record_arrived(offer.home, offer.pid, 60_000);
    let one = node(2, 1.0);
    let load_at = |ms, sampled: &NodeSnapshot| pending.expected_load(sampled, &policy, ms);
    assert!((load_at(60_000, &own) - 100.0).abs() < 1e-6);
    assert!((load_at(75_000, &one) - 100.0).abs() < 1.0);
    // A second report of the arrival changes nothing.
    pending.record_arrived(offer.home, offer.pid, 62_000);
    let load_at = |ms, sampled: &NodeSnapshot| pending.expected_load(sampled, &policy, ms);
    assert!((load_at(75_000, &one) - 100.0).abs() < 0.01);
    // The age of the sample does not matter: one taken before the arrival does not include it.
    let before = NodeSnapshot { age_ms: 900, ..own.clone() };
    assert!((load_at(60_800, &before) - 100.0).abs() < 1e-6);
    let (fresh, aged) = (node(2, 0.2), NodeSnapshot { age_ms: 900, ..node(2, 0.2) });
    assert!((load_at(60_300, &fresh) - load_at(61_200, &aged)).abs() < 1e-6);
}

#[test]
fn starting_programs_are_spread() {
    let nodes: Vec<NodeSnapshot> = (1..=10).map(|id| node(id, 0.0)).collect();
    let cluster = Cluster::new(NodeId(1), nodes);
    let (mut state, mut counts) = (DecisionState::default(), [0; 11]);
    for seed in 0..100 {
        let to = place(&cluster, &PlacementRequest::default(), &mut state, &Policy::default(), 1_000, seed)
            .unwrap();
        counts[usize::from(to.0)] += 1;
    }
    assert!(counts[1..].iter().all(|count| *count == 10), "{counts:?}");
    let large = PlacementRequest { claim: 5 * GB, ..PlacementRequest::default() };
    assert_eq!(place(&cluster, &large, &mut state, &Policy::default(), 1_000, 1), None);
}

#[test]
fn invalid_numbers_of_other_nodes_are_harmless() {
    let mut evil = node(2, 0.0);
    (evil.load, evil.cpus, evil.speed) = (f64::NAN, f64::INFINITY, 0);
    let mut worse = node(3, 0.0);
    (worse.load, worse.cpus, worse.mem_free, worse.link.bytes_per_s) = (-1e300, f64::NAN, u64::MAX, 0);
    let odd = ProcessSnapshot {
        demand: f64::NAN,
        calls_per_s: f64::INFINITY,
        rss: u64::MAX,
        growth: u64::MAX,
        ..busy(7, 1, f64::NAN)
    };
    let cluster = Cluster::new(NodeId(1), vec![node(1, 9.0), evil, worse.clone(), worse]);
    assert_eq!(cluster.nodes().len(), 3);
    let processes = [odd, busy(8, 1, 9.0), busy(9, 70, 9.0)];
    for objective in [tern_balancer::Objective::Greedy, tern_balancer::Objective::Opportunity] {
        let policy = Policy { objective, ..Policy::default() };
        decide(&cluster, &processes, &mut DecisionState::default(), &policy, u64::MAX, 1);
    }
}

#[test]
fn ended_remote_process_is_subtracted_until_its_node_publishes() {
    let policy = Policy::default();
    let entry = |age_ms| NodeSnapshot { age_ms, ..node(2, 1.0) };
    let with = |threads, age_ms| Cluster::new(NodeId(1), vec![node(1, threads), entry(age_ms)]);
    let view = |age_ms| with(2.0, age_ms);
    let (one, other, away) = (busy(7, 1, 9.0), busy(8, 1, 9.0), busy(9, 2, 9.0));
    let mut state = DecisionState::default();
    let all = [one.clone(), other.clone(), away];
    assert_eq!(decide(&view(100), &all, &mut state, &policy, 10_000, 1), []);
    // The entry of node 2 was made before the end of the process.
    let left = [one, other];
    let moves = decide(&view(200), &left, &mut state.clone(), &policy, 10_100, 1);
    assert_eq!(moves.iter().map(|next| next.to).collect::<Vec<_>>(), [NodeId(2)]);
    // This entry was made afterwards, so another process runs there.
    assert_eq!(decide(&with(1.0, 200), &left[..1], &mut state, &policy, 10_100, 1), []);
    assert_eq!(decide(&view(0), &left, &mut state, &policy, 10_200, 1), []);
}

#[test]
fn expected_load_is_at_least_the_demand_of_local_processes() {
    let policy = Policy::default();
    let mut pending = PendingChanges::default();
    let grows = ProcessSnapshot { growth: 5_000_000, ..busy(3, 1, 1.0) };
    let here = [busy(1, 1, 1.0), busy(2, 1, 1.0), grows];
    let threads = |pending: &PendingChanges, sampled: f64| {
        pending.expected_load(&node(1, sampled), &policy, 1_000) / 100.0
    };
    pending.set_local(here.iter(), &policy);
    // The sample includes little of them yet; a growing process does not count until the sample
    // includes it.
    assert!((threads(&pending, 0.3) - 2.0).abs() < 1e-6);
    assert!((threads(&pending, 5.0) - 5.0).abs() < 1e-6);
    pending.record_local_departed(1.0);
    assert!((threads(&pending, 0.3) - 1.0).abs() < 1e-6);
    pending.record_local_departed(9.0);
    assert!((threads(&pending, 0.3) - 0.3).abs() < 1e-6);
    pending.set_local([ProcessSnapshot { demand: f64::NAN, ..busy(1, 1, 1.0) }].iter(), &policy);
    assert!((threads(&pending, 0.3) - 0.3).abs() < 1e-6);
}

#[test]
fn time_until_the_first_young_process_is_eligible_is_reported() {
    let policy = Policy::default();
    let young_process_s = |threads: u16, cpu_s: f64| {
        let processes: Vec<ProcessSnapshot> = (0..threads).map(|pid| busy(pid.into(), 1, cpu_s)).collect();
        let cluster = Cluster::new(NodeId(1), vec![node(1, threads.into()), node(2, 0.0)]);
        let mut state = DecisionState::default();
        decide(&cluster, &processes, &mut state, &policy, 1_000, 1);
        state.eligible_in_s()
    };
    // Each of ten processes must have used 0.1 s, and gets a tenth of a CPU.
    assert!((young_process_s(10, 0.04).unwrap() - 0.6).abs() < 1e-6);
    assert_eq!((young_process_s(10, 0.2), young_process_s(1, 0.04)), (None, None));
}
