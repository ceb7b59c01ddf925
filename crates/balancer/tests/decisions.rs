//! Single decisions, with numbers that one can follow by hand.

use std::collections::{BTreeMap, BTreeSet};
use tern_balancer::{
    Answer, Bar, Cluster, Hint, LinkCost, Node, Placement, Policy, Process, Reason, Settling, State, Stay,
    Traffic, accepts, decide, explain, place,
};
use tern_ids::{HomePid, NodeId};

const GB: u64 = 1 << 30;

fn node(id: u16, runnable: f64) -> Node {
    let mut node = Node {
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

fn busy(pid: i32, at: u16, cpu_s: f64) -> Process {
    Process::new(HomePid(pid), NodeId(at), 100.0, cpu_s)
}

fn moves(nodes: Vec<Node>, processes: &[Process]) -> Vec<(i32, u16, Reason)> {
    let cluster = Cluster::new(NodeId(1), nodes);
    let mut state = State::default();
    let moves = decide(&cluster, processes, &mut state, &Policy::default(), 100_000, 1);
    moves.iter().map(|next| (next.pid.0, next.to.0, next.reason)).collect()
}

fn stay(nodes: Vec<Node>, process: Process) -> (Option<Stay>, Vec<(u16, Option<Bar>)>) {
    let cluster = Cluster::new(NodeId(1), nodes);
    let mut state = State::default();
    let decided =
        decide(&cluster, std::slice::from_ref(&process), &mut state, &Policy::default(), 100_000, 1);
    assert!(decided.is_empty(), "{decided:?}");
    let why = explain(&cluster, &process, &state, &Policy::default(), 100_000);
    assert!(why.last.is_some());
    (why.stay, why.prospects.iter().map(|prospect| (prospect.node.0, prospect.bar)).collect())
}

#[test]
fn thirteen_equal_jobs_spread_as_the_tutorial_wants() {
    let mut nodes = vec![node(1, 13.0), node(2, 0.0)];
    (nodes[0].speed, nodes[1].speed) = (9_000, 6_500);
    for node in &mut nodes {
        node.load = node.load_of(if node.id.0 == 1 { 13.0 } else { 0.0 });
    }
    let policy = Policy { moves_per_pair: 20, moves_at_once: 20, ..Policy::default() };
    let processes: Vec<Process> = (0..13).map(|pid| busy(pid, 1, 3.0)).collect();
    let cluster = Cluster::new(NodeId(1), nodes);
    let moves = decide(&cluster, &processes, &mut State::default(), &policy, 0, 1);
    // Eight and five are in balance: 9000/8 = 1125 each, and one more over there would have 6500/6 = 1083.
    assert_eq!(moves.len(), 5, "{moves:?}");
}

#[test]
fn what_is_young_or_idle_or_locked_or_unmovable_stays() {
    let nodes = || vec![node(1, 2.0), node(2, 0.0)];
    assert_eq!(moves(nodes(), &[busy(7, 1, 3.0)]), [(7, 2, Reason::Faster)]);
    assert!(matches!(stay(nodes(), busy(7, 1, 0.3)).0, Some(Stay::Young { .. })));
    assert_eq!(stay(nodes(), Process { locked: true, ..busy(7, 1, 9.0) }).0, Some(Stay::Locked));
    assert_eq!(stay(nodes(), Process { movable: false, ..busy(7, 1, 9.0) }).0, Some(Stay::NotMovable));
    assert_eq!(stay(nodes(), Process { demand: 0.1, ..busy(7, 1, 9.0) }).0, Some(Stay::Idle));
    let just_came = Process { resident_s: 0.5, ..busy(7, 1, 9.0) };
    assert!(matches!(stay(nodes(), just_came).0, Some(Stay::Resident { .. })));
    // The more it waits, the sooner it may go.
    let crowded = vec![node(1, 8.0), node(2, 0.0)];
    let waiting = Process { resident_s: 2.4, ..busy(7, 1, 0.3) };
    assert_eq!(moves(crowded, &[waiting]), [(7, 2, Reason::Faster)]);
}

#[test]
fn each_bar_has_its_name() {
    let bar = |change: fn(&mut Node), process: Process| {
        let mut nodes = vec![node(1, 2.0), node(2, 0.0)];
        change(&mut nodes[1]);
        stay(nodes, process).1.into_iter().find(|(node, _)| *node == 2).and_then(|(_, bar)| bar)
    };
    let job = || busy(7, 1, 9.0);
    assert_eq!(bar(|node| node.alive = false, job()), Some(Bar::Dead));
    assert_eq!(bar(|node| node.age_ms = 6_000, job()), Some(Bar::OldNews));
    assert_eq!(bar(|node| node.takes_guests = false, job()), Some(Bar::NoGuests));
    assert_eq!(bar(|node| node.load = 100.0, job()), Some(Bar::NotFaster));
    assert_eq!(
        bar(|_| {}, Process { forbidden: BTreeSet::from([NodeId(2)]), ..job() }),
        Some(Bar::Forbidden)
    );
    assert_eq!(
        bar(|_| {}, Process { allowed: Some(BTreeSet::from([NodeId(3)])), ..job() }),
        Some(Bar::Forbidden)
    );
    assert_eq!(bar(|_| {}, Process { hint: Hint::Io, ..job() }), Some(Bar::FilesAtHome));
    assert_eq!(bar(|_| {}, Process { claim: 3 * GB, ..job() }), Some(Bar::NoMemory));
    assert_eq!(bar(|node| node.mem_pressure = 50.0, job()), Some(Bar::NoMemory));
    // 2 GB over a megabit, to win what is left of nine seconds.
    let slow = |node: &mut Node| node.link.bytes_per_s = 125_000;
    assert_eq!(bar(slow, Process { rss: 2 * GB, ..job() }), Some(Bar::NotWorth));
}

#[test]
fn who_talks_much_stays_and_comes_home() {
    // Each second of work has 5,000 calls of 250 µs: away it would take 2.25 s, at home with another one 2 s.
    let talker = |at| Process { calls_per_s: 2_500.0, ..busy(7, at, 9.0) };
    assert_eq!(moves(vec![node(1, 2.0), node(2, 0.0)], &[talker(1)]), []);
    // To somebody who was told to take it for a cpujob that is nothing.
    let told = Process { hint: Hint::Cpu, ..talker(1) };
    assert_eq!(moves(vec![node(1, 2.0), node(2, 0.0)], &[told]), [(7, 2, Reason::Faster)]);
    // Away and alone it runs 44% of the time, and waits for calls in the rest.
    let away = Process { demand: 44.0, calls_per_s: 2_200.0, ..busy(7, 2, 9.0) };
    assert_eq!(moves(vec![node(1, 0.0), node(2, 0.44)], &[away]), [(7, 1, Reason::Talks)]);
    // One that is seen to run all the time, with as many calls, does not wait for them, whatever the link is believed
    // to take: beside another one at home it would be no faster.
    let runs = Process { calls_per_s: 2_200.0, ..busy(7, 2, 9.0) };
    assert_eq!(moves(vec![node(1, 1.0), node(2, 2.0)], &[runs]), []);
    let files = Process { hint: Hint::Io, resident_s: 2.0, ..busy(7, 2, 0.1) };
    assert_eq!(moves(vec![node(1, 0.0), node(2, 1.0)], &[files]), [(7, 1, Reason::Talks)]);
}

#[test]
fn who_works_on_files_of_a_node_goes_there_and_stays() {
    let on = |node| {
        let traffic = Traffic { calls_per_s: 1_000.0, bytes_per_s: 29e6 };
        BTreeMap::from([(NodeId(node), traffic)])
    };
    let idle = || vec![node(1, 0.5), node(2, 0.0), node(3, 0.0)];
    // At home it computes half of the time, and waits for the files in the other half.
    let at_home = Process { demand: 50.0, files: on(3), ..busy(7, 1, 9.0) };
    assert_eq!(moves(idle(), std::slice::from_ref(&at_home)), [(7, 3, Reason::Files)]);
    // Where they are it would wait for them anywhere else, and twice as long on a third node.
    let there = Process { demand: 100.0, files: on(3), ..busy(7, 3, 30.0) };
    let nodes = vec![node(1, 0.0), node(2, 0.0), node(3, 1.0)];
    let (stay, bars) = stay(nodes, there.clone());
    assert_eq!(stay, None);
    assert!(
        bars.contains(&(1, Some(Bar::NotFaster))) && bars.contains(&(2, Some(Bar::NotFaster))),
        "{bars:?}"
    );
    // Three more there, and home is better all the same.
    assert_eq!(moves(vec![node(1, 0.0), node(3, 4.0)], &[there]), [(7, 1, Reason::Faster)]);
    // One that is seen to compute all the time does not wait for them, whatever is believed of the link.
    let runs = Process { demand: 100.0, ..at_home.clone() };
    assert_eq!(moves(idle(), &[runs]), []);
    // Nor does a node draw anybody that is not in sight, or to whose user files are nothing.
    assert_eq!(moves(idle(), &[Process { files: on(9), ..at_home.clone() }]), []);
    assert_eq!(moves(idle(), &[Process { hint: Hint::Cpu, ..at_home.clone() }]), []);
    // Who calls home as much as it works on files has nothing to gain.
    let both = Process { calls_per_s: 1_000.0, bytes_per_s: 29e6, ..at_home };
    assert_eq!(moves(idle(), &[both]), []);
}

#[test]
fn home_is_better_than_an_equal_place_but_only_if_nobody_there_is_put_out() {
    let away = || busy(7, 2, 30.0);
    assert_eq!(moves(vec![node(1, 0.0), node(2, 1.0)], &[away()]), [(7, 1, Reason::Home)]);
    assert_eq!(moves(vec![node(1, 1.0), node(2, 2.0)], &[away()]), []);
    // A gigabyte on the way to gain nothing is too much.
    assert_eq!(moves(vec![node(1, 0.0), node(2, 1.0)], &[Process { rss: GB, ..away() }]), []);
}

#[test]
fn faster_and_more_cpus_count() {
    let mut fast = node(2, 1.0);
    (fast.speed, fast.load) = (25_000, 40.0);
    // Half of a CPU that is 2.5 times as fast.
    assert_eq!(moves(vec![node(1, 1.0), fast], &[busy(7, 1, 9.0)]), [(7, 2, Reason::Faster)]);
    let mut many = node(2, 0.0);
    many.cpus = 4.0;
    many.load = many.load_of(3.0);
    assert_eq!(moves(vec![node(1, 2.0), many.clone()], &[busy(7, 1, 9.0)]), [(7, 2, Reason::Faster)]);
    many.load = many.load_of(7.0);
    assert_eq!(moves(vec![node(1, 2.0), many], &[busy(7, 1, 9.0)]), []);
}

#[test]
fn memory_goes_before_the_node_is_full_and_where_it_fits() {
    // 1 GB grows by 50 MB/s on a link of 117 MB/s: it needs nine seconds to leave, and the node fills in twelve.
    let mut full = node(1, 1.0);
    full.mem_free = 800 << 20;
    let mut small = node(2, 0.0);
    small.mem_free = 900 << 20;
    let grower = Process { rss: GB, growth: 50 << 20, ..busy(7, 1, 0.1) };
    let nodes = vec![full.clone(), small, node(3, 3.0)];
    assert_eq!(moves(nodes, std::slice::from_ref(&grower)), [(7, 3, Reason::Memory)]);
    // There is nothing to be done where it does not fit anywhere, nor any hurry while much is free.
    assert_eq!(moves(vec![full], std::slice::from_ref(&grower)), []);
    assert_eq!(moves(vec![node(1, 1.0), node(3, 3.0)], &[grower]), []);
}

#[test]
fn room_is_what_others_have_left_and_not_what_they_are_to_leave() {
    let mut full = node(1, 1.0);
    full.mem_free = 100 << 20;
    let (leaves, away) = (Process { rss: GB, ..busy(7, 1, 0.1) }, busy(8, 2, 30.0));
    let nodes = || vec![full.clone(), node(2, 1.0), node(3, 1.0)];
    let (cluster, policy) = (Cluster::new(NodeId(1), nodes()), Policy::default());
    let mut state = State::default();
    let to = |moves: Vec<tern_balancer::Move>| moves.iter().map(|m| (m.pid.0, m.reason)).collect::<Vec<_>>();
    let both = [leaves.clone(), away.clone()];
    // Nobody asks home whether it has room.
    let first = decide(&cluster, &both, &mut state, &policy, 100_000, 1);
    assert_eq!(to(first), [(7, Reason::Memory)]);
    assert_eq!(to(decide(&cluster, &both, &mut state, &policy, 101_000, 1)), []);
    // It has left, which the view does not show yet.
    state.arrived(HomePid(7), 102_000);
    let both = [Process { at: NodeId(3), ..leaves }, away];
    assert_eq!(to(decide(&cluster, &both, &mut state, &policy, 102_000, 1)), [(8, Reason::Home)]);
}

#[test]
fn best_fit_leaves_large_holes_alone() {
    let mut full = node(1, 3.0);
    full.mem_free = 100 << 20;
    let mut hole = node(2, 0.0);
    hole.mem_free = GB;
    let sizes = [300, 400, 2_000].map(|mb| mb << 20);
    let processes: Vec<Process> =
        (1..).zip(sizes).map(|(pid, rss)| Process { rss, ..busy(pid, 1, 0.1) }).collect();
    // 100 MB are lacking: the smallest is enough, and fits into the smaller hole.
    assert_eq!(moves(vec![full, hole, node(3, 0.0)], &processes), [(1, 2, Reason::Memory)]);
}

#[test]
fn evicted_guests_go_at_once_home_if_nowhere_else() {
    let guest = |pid| Process { evicted: true, ..busy(pid, 2, 0.01) };
    assert_eq!(
        moves(
            vec![node(1, 5.0), node(2, 2.0), node(3, 0.0)],
            &[guest(7), Process { locked: true, ..guest(8) }]
        ),
        [(7, 3, Reason::Evicted), (8, 1, Reason::Evicted)]
    );
    let mut blocked = node(3, 0.0);
    blocked.takes_guests = false;
    assert_eq!(moves(vec![node(1, 5.0), node(2, 2.0), blocked], &[guest(7)]), [(7, 1, Reason::Evicted)]);
}

#[test]
fn moves_are_charged_until_the_target_has_spoken() {
    let policy = Policy { moves_per_pair: 9, ..Policy::default() };
    let mut state = State::default();
    let mut processes: Vec<Process> = (0..4).map(|pid| busy(pid, 1, 9.0)).collect();
    let view = |here, there, age_ms| {
        let mut other = node(2, there);
        other.age_ms = age_ms;
        Cluster::new(NodeId(1), vec![node(1, here), other])
    };
    let first = decide(&view(4.0, 0.0, 0), &processes, &mut state, &policy, 10_000, 1);
    assert_eq!(first.len(), 2);
    // Nothing has changed in the view, which is older than the decision: nothing more goes.
    assert!(decide(&view(4.0, 0.0, 2_000), &processes, &mut state, &policy, 11_000, 1).is_empty());
    for next in &first {
        state.accepted(next.pid, 11_500);
        state.arrived(next.pid, 12_000);
        processes[usize::try_from(next.pid.0).unwrap()].at = NodeId(2);
    }
    // The old load of the target again, by an entry from before: still charged.
    assert!(decide(&view(2.0, 0.0, 1_500), &processes, &mut state, &policy, 12_500, 1).is_empty());
    // A younger entry says that the others have ended, whatever we think: now it counts.
    let later = decide(&view(2.0, 0.0, 100), &processes, &mut state, &policy, 14_000, 1);
    assert_eq!(later.len(), 1, "{later:?}");
}

#[test]
fn a_refusal_is_believed_at_once_and_a_failure_waits() {
    let policy = Policy::default();
    let processes = [busy(7, 1, 9.0)];
    let cluster = Cluster::new(NodeId(1), vec![node(1, 2.0), node(2, 0.0), node(3, 0.6)]);
    let mut state = State::default();
    let first = decide(&cluster, &processes, &mut state, &policy, 1_000, 1);
    assert_eq!(first[0].to, NodeId(2));
    // Somebody else was there first.
    let Answer::No(refusal) = accepts(&node(2, 1.5), &Settling::default(), &first[0].offer, &policy, 1_000)
    else {
        panic!("it was full");
    };
    assert_eq!(refusal.bar, Bar::Crowded);
    state.refused(HomePid(7), refusal, 1_000);
    let second = decide(&cluster, &processes, &mut state, &policy, 1_000, 1);
    assert_eq!(second[0].to, NodeId(3));
    state.failed(HomePid(7), 2_000);
    let bar = |now_ms| {
        let why = explain(&cluster, &processes[0], &state, &policy, now_ms);
        why.prospects.iter().find(|prospect| prospect.node == NodeId(3)).and_then(|prospect| prospect.bar)
    };
    assert_eq!((bar(2_500), bar(3_100)), (Some(Bar::FailedBefore), None));
}

#[test]
fn a_node_counts_what_it_has_agreed_to() {
    let policy = Policy::default();
    let cluster = Cluster::new(NodeId(1), vec![node(1, 2.0), node(2, 0.0)]);
    let offer = &decide(&cluster, &[busy(7, 1, 9.0)], &mut State::default(), &policy, 0, 1)[0].offer;
    let (own, mut settling) = (node(2, 0.0), Settling::default());
    assert_eq!(accepts(&own, &settling, offer, &policy, 0), Answer::Yes);
    settling.coming(offer, 0);
    assert!(matches!(accepts(&own, &settling, offer, &policy, 0), Answer::No(_)));
    assert!((settling.expected_load(&own, &policy, 60_000) - 100.0).abs() < 1e-6);
    // Once it is here, the sampled load takes over.
    settling.came(offer.home, offer.pid, 60_000);
    let one = node(2, 1.0);
    let load_at = |ms, sampled: &Node| settling.expected_load(sampled, &policy, ms);
    assert!((load_at(60_000, &own) - 100.0).abs() < 1e-6);
    assert!((load_at(75_000, &one) - 100.0).abs() < 1.0);
    // Said again, by whoever sees it later, that changes nothing.
    settling.came(offer.home, offer.pid, 62_000);
    let load_at = |ms, sampled: &Node| settling.expected_load(sampled, &policy, ms);
    assert!((load_at(75_000, &one) - 100.0).abs() < 0.01);
    // However long ago the sample was taken: one of before it came has nothing of it.
    let before = Node { age_ms: 900, ..own.clone() };
    assert!((load_at(60_800, &before) - 100.0).abs() < 1e-6);
    let (fresh, aged) = (node(2, 0.2), Node { age_ms: 900, ..node(2, 0.2) });
    assert!((load_at(60_300, &fresh) - load_at(61_200, &aged)).abs() < 1e-6);
}

#[test]
fn starting_programs_are_spread() {
    let nodes: Vec<Node> = (1..=10).map(|id| node(id, 0.0)).collect();
    let cluster = Cluster::new(NodeId(1), nodes);
    let (mut state, mut counts) = (State::default(), [0; 11]);
    for seed in 0..100 {
        let to = place(&cluster, &Placement::default(), &mut state, &Policy::default(), 1_000, seed).unwrap();
        counts[usize::from(to.0)] += 1;
    }
    assert!(counts[1..].iter().all(|count| *count == 10), "{counts:?}");
    let large = Placement { claim: 5 * GB, ..Placement::default() };
    assert_eq!(place(&cluster, &large, &mut state, &Policy::default(), 1_000, 1), None);
}

#[test]
fn numbers_of_others_cannot_harm() {
    let mut evil = node(2, 0.0);
    (evil.load, evil.cpus, evil.speed) = (f64::NAN, f64::INFINITY, 0);
    let mut worse = node(3, 0.0);
    (worse.load, worse.cpus, worse.mem_free, worse.link.bytes_per_s) = (-1e300, f64::NAN, u64::MAX, 0);
    let odd = Process {
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
        decide(&cluster, &processes, &mut State::default(), &policy, u64::MAX, 1);
    }
}

#[test]
fn who_has_ended_elsewhere_is_counted_out_until_that_node_says_so_itself() {
    let policy = Policy::default();
    let entry = |age_ms| Node { age_ms, ..node(2, 1.0) };
    let with = |threads, age_ms| Cluster::new(NodeId(1), vec![node(1, threads), entry(age_ms)]);
    let view = |age_ms| with(2.0, age_ms);
    let (one, other, away) = (busy(7, 1, 9.0), busy(8, 1, 9.0), busy(9, 2, 9.0));
    let mut state = State::default();
    let all = [one.clone(), other.clone(), away];
    assert_eq!(decide(&view(100), &all, &mut state, &policy, 10_000, 1), []);
    // What node 2 has told is of before that.
    let left = [one, other];
    let moves = decide(&view(200), &left, &mut state.clone(), &policy, 10_100, 1);
    assert_eq!(moves.iter().map(|next| next.to).collect::<Vec<_>>(), [NodeId(2)]);
    // And this of after: somebody else is there.
    assert_eq!(decide(&with(1.0, 200), &left[..1], &mut state, &policy, 10_100, 1), []);
    assert_eq!(decide(&view(0), &left, &mut state, &policy, 10_200, 1), []);
}

#[test]
fn a_load_is_not_below_what_own_processes_want() {
    let policy = Policy::default();
    let mut settling = Settling::default();
    let grows = Process { growth: 5_000_000, ..busy(3, 1, 1.0) };
    let here = [busy(1, 1, 1.0), busy(2, 1, 1.0), grows];
    let threads =
        |settling: &Settling, sampled: f64| settling.expected_load(&node(1, sampled), &policy, 1_000) / 100.0;
    settling.own(here.iter(), &policy);
    // As yet the sample knows little of them; one that grows waits until that knows of it.
    assert!((threads(&settling, 0.3) - 2.0).abs() < 1e-6);
    assert!((threads(&settling, 5.0) - 5.0).abs() < 1e-6);
    settling.own_left(1.0);
    assert!((threads(&settling, 0.3) - 1.0).abs() < 1e-6);
    settling.own_left(9.0);
    assert!((threads(&settling, 0.3) - 0.3).abs() < 1e-6);
    settling.own([Process { demand: f64::NAN, ..busy(1, 1, 1.0) }].iter(), &policy);
    assert!((threads(&settling, 0.3) - 0.3).abs() < 1e-6);
}

#[test]
fn it_is_known_when_the_first_of_a_crowd_is_old_enough() {
    let policy = Policy::default();
    let ripe_s = |threads: u16, cpu_s: f64| {
        let processes: Vec<Process> = (0..threads).map(|pid| busy(pid.into(), 1, cpu_s)).collect();
        let cluster = Cluster::new(NodeId(1), vec![node(1, threads.into()), node(2, 0.0)]);
        let mut state = State::default();
        decide(&cluster, &processes, &mut state, &policy, 1_000, 1);
        state.ripe_s()
    };
    // Of ten each must have used 0.1 s, and has a tenth of a CPU.
    assert!((ripe_s(10, 0.04).unwrap() - 0.6).abs() < 1e-6);
    assert_eq!((ripe_s(10, 0.2), ripe_s(1, 0.04)), (None, None));
}
