//! Acceptance tests of the balancer, in simulated clusters with the daemon's own gossip and
//! balancer.

use tern_sim::{
    FileUse, Hardware, Information, Job, Mix, NodeEvent, Objective, PlacementPolicy, Policy, RunResult,
    Scenario, SimSettings, compare, run,
};

fn settings(objective: Objective) -> SimSettings {
    SimSettings {
        placing: PlacementPolicy::Balanced,
        information: Information::Gossip,
        policy: Policy { objective, ..Policy::default() },
        seed: 1,
    }
}

fn balanced(scenario: &Scenario) -> RunResult {
    run(scenario, &settings(Objective::Greedy))
}

/// Jobs on one node that only compute, all arriving at the start.
fn computing(home: usize, count: usize, work_s: f64) -> Vec<Job> {
    let job = Job {
        home,
        arrives_ms: 0,
        work_s,
        memory: 8e6,
        growth: 0.0,
        max_memory: 0.0,
        dirty: 1e6,
        sleep: 0.0,
        calls: 20.0,
        bytes: 20e3,
        files: None,
        alternation_ms: 0,
    };
    vec![job; count]
}

fn scenario(nodes: usize, jobs: Vec<Job>, seconds: u64) -> Scenario {
    Scenario {
        nodes: vec![Hardware::default(); nodes],
        absent: Vec::new(),
        jobs,
        events: Vec::new(),
        until_ms: seconds * 1000,
        settled_ms: 20_000,
    }
}

#[test]
fn tutorial_ends_within_three_percent_of_the_ideal() {
    let scenario = Mix::named("tutorial").unwrap().scenario(2, 1, 1);
    for objective in [Objective::Greedy, Objective::Opportunity] {
        let comparison = compare(&scenario, &settings(objective));
        let ideal = 671.0 * 900.0 / 1_550.0;
        assert!((comparison.earliest_end_s - ideal).abs() < 0.1, "{}", comparison.earliest_end_s);
        let makespan = comparison.balanced.makespan_s.unwrap();
        assert!(makespan <= ideal * 1.03, "{objective:?}: {makespan} of {ideal}");
        // If all jobs stay at home, they take as long as in the tutorial that the mix is named
        // after.
        assert!((669.0..672.0).contains(&comparison.home.unwrap().makespan_s.unwrap()));
    }
}

#[test]
fn login_server_is_balanced_within_twenty_seconds_of_each_change() {
    let mut scenario = Mix::named("login").unwrap().scenario(5, 1, 1);
    let outcome = balanced(&scenario);
    // Even in windows during the changes, no job ever takes more than 1.5 times as long as with its
    // fair share.
    assert!(outcome.fairness.worst <= 1.5, "{:?}", outcome.fairness);
    assert_eq!((outcome.lost, outcome.unfinished), (0, 100));
    // Twenty seconds after a change and later, shares are almost fair.
    for (settled_ms, until_ms) in [(140_000, 210_000), (230_000, 300_000)] {
        (scenario.settled_ms, scenario.until_ms) = (settled_ms, until_ms);
        let outcome = balanced(&scenario);
        assert!(outcome.fairness.worst <= 1.25, "{settled_ms}: {:?}", outcome.fairness);
    }
}

#[test]
fn equal_jobs_on_equal_nodes_move_at_most_once() {
    for jobs in [5, 13, 40] {
        let outcome = balanced(&scenario(5, computing(0, jobs, 1_000.0), 120));
        assert!(outcome.most_moves <= 1, "{jobs} jobs: {outcome:?}");
        assert_eq!(outcome.back_within_10s, 0);
        assert!(outcome.fairness.worst <= 1.3, "{jobs} jobs: {:?}", outcome.fairness);
    }
}

#[test]
fn no_node_swaps_while_the_cluster_has_memory() {
    for nodes in [5, 20] {
        let scenario = Mix::named("memory").unwrap().scenario(nodes, 5, 1);
        let outcome = balanced(&scenario);
        assert_eq!((outcome.out_of_memory, outcome.most_swap), (0, 0.0), "{nodes} nodes");
        assert!(outcome.reasons["memory"] > 0);
        // Without the balancer, jobs are killed for lack of memory.
        let home =
            run(&scenario, &SimSettings { placing: PlacementPolicy::Home, ..settings(Objective::Greedy) });
        assert!(home.out_of_memory > 0 && home.most_swap > 0.0);
    }
}

#[test]
fn failed_node_loses_only_the_jobs_that_ran_there() {
    let mut scenario = scenario(8, computing(0, 24, 60.0), 600);
    scenario.events = vec![(40_000, NodeEvent::Fails(7))];
    let outcome = balanced(&scenario);
    // A fair eighth of the jobs was there, give or take one.
    assert!((2..=4).contains(&outcome.lost), "{outcome:?}");
    assert_eq!(outcome.finished + outcome.lost, 24);
    let deaths = outcome.deaths_known.unwrap();
    assert!(deaths.most_s <= 10.0, "{deaths:?}");
}

#[test]
fn leaving_node_loses_no_jobs() {
    let mut scenario = scenario(4, computing(0, 16, 60.0), 600);
    scenario.events = vec![(60_000, NodeEvent::Leaves(3))];
    let outcome = balanced(&scenario);
    assert_eq!((outcome.finished, outcome.lost), (16, 0));
    assert_eq!(outcome.reasons["evicted"], 4, "{outcome:?}");
}

#[test]
fn short_jobs_stay() {
    let scenario = Mix::named("compile").unwrap().scenario(20, 3, 1);
    let outcome = balanced(&scenario);
    assert!(outcome.moves_per_job() < 0.1, "{outcome:?}");
    let home = run(&scenario, &SimSettings { placing: PlacementPolicy::Home, ..settings(Objective::Greedy) });
    assert!(
        outcome.mean_slowdown <= home.mean_slowdown * 1.02,
        "{} {}",
        outcome.mean_slowdown,
        home.mean_slowdown
    );
}

#[test]
fn load_oscillations_do_not_cause_job_oscillations() {
    for seed in [1, 2] {
        let scenario = Mix::named("adversarial").unwrap().scenario(20, 5, seed);
        let outcome = balanced(&scenario);
        assert_eq!(outcome.back_within_10s, 0);
        // Residence doubles with each recent move, so five minutes leave time for at most this
        // many.
        assert!(outcome.most_moves <= 24, "{outcome:?}");
    }
}

#[test]
fn balancer_beats_static_placement_for_unequal_jobs() {
    let scenario = Mix::named("mixed").unwrap().scenario(40, 5, 3);
    let comparison = compare(&scenario, &settings(Objective::Greedy));
    let best_static = comparison.round_robin.mean_slowdown.min(comparison.random.mean_slowdown);
    assert!(comparison.balanced.mean_slowdown < best_static, "{comparison:?}");
    assert!(comparison.balanced.fairness.p99 < comparison.round_robin.fairness.p99);
}

#[test]
fn same_seed_gives_the_same_report() {
    let of =
        |seed| compare(&Mix::named("churn").unwrap().scenario(20, 2, seed), &settings(Objective::Greedy));
    assert_eq!(of(5), of(5));
    assert_ne!(of(5), of(6));
}

/// A job that uses files of the third node, for which it waits `seconds` at home for each second of
/// work.
fn on_files(home: usize, work_s: f64, seconds: f64) -> Job {
    let files = FileUse { on: 2, calls: seconds * 2_000.0, bytes: seconds * 58e6 };
    Job { files: Some(files), ..computing(home, 1, work_s).remove(0) }
}

#[test]
fn job_moves_to_the_node_of_its_files_and_stays() {
    // All CPUs except its own are idle, so that the files make the only difference.
    for waits in [0.1, 0.5, 5.0] {
        let jobs = [vec![on_files(0, 100.0, waits)], computing(1, 1, 100.0)].concat();
        let outcome = balanced(&scenario(4, jobs, 900));
        assert_eq!((outcome.moves, outcome.reasons.get("files")), (1, Some(&1)), "{waits}: {outcome:?}");
        // It had to use a second of CPU time first.
        let most = 102.0 + 3.0 * waits;
        assert!(outcome.makespan_s.unwrap() <= most, "{waits}: {outcome:?}");
    }
    // A short wait for files does not move a job, nor does computing alone.
    let jobs = [vec![on_files(0, 100.0, 0.02)], computing(1, 1, 100.0)].concat();
    assert_eq!(balanced(&scenario(4, jobs, 900)).moves, 0);
}

#[test]
fn files_and_cpus_are_weighed_without_oscillations() {
    // All eight benefit from the one CPU of their files' node; at home each takes 1.5 times as
    // long.
    let jobs: Vec<Job> = (0..8).map(|index| on_files(index % 2, 120.0, 0.5)).collect();
    let outcome = balanced(&scenario(4, jobs, 3_600));
    assert_eq!((outcome.finished, outcome.back_within_10s), (8, 0));
    assert!(outcome.most_moves <= 6, "{outcome:?}");
    // Three CPUs work at a pace of 1.5 or 2, and the files' node at a pace of 1.
    assert!(outcome.makespan_s.unwrap() < 420.0, "{outcome:?}");
    // The files' node is crowded by its own jobs: moving there is not worthwhile.
    let jobs = [vec![on_files(0, 60.0, 0.3)], computing(2, 12, 60.0)].concat();
    let one = scenario(3, jobs, 900);
    let outcome = balanced(&one);
    assert_eq!(outcome.back_within_10s, 0, "{outcome:?}");
}
