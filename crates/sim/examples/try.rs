use tern_sim::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let n: usize = a[2].parse().unwrap();
    let m: u64 = a[3].parse().unwrap();
    let mut policy = tern_balancer::Policy::default();
    if a.get(4).is_some_and(|x| x == "opportunity") {
        policy.objective = tern_balancer::Objective::Opportunity;
    }
    let s = Mix::named(&a[1]).unwrap().scenario(n, m, 1);
    let t = std::time::Instant::now();
    let c = compare(
        &s,
        &Settings {
            placing: Placing::Balanced,
            information: if a.get(5).is_some() { Information::Ideal } else { Information::Gossip },
            policy,
            seed: 1,
        },
    );
    println!("end>={:.1} ideal {:.3}", c.earliest_end_s, c.ideal_slowdown);
    println!("{:#?}", c.balanced);
    for (n, o) in [("rr", &c.round_robin), ("rnd", &c.random), ("home", &c.home)] {
        println!(
            "{n}: makespan {:?} slowdown {:.2} p95 {:.2} wait {:.2}/{:.2} fin {} unf {} lost {} oom {} swap {:.0}",
            o.makespan_s,
            o.mean_slowdown,
            o.p95_slowdown,
            o.fairness.worst,
            o.fairness.p99,
            o.finished,
            o.unfinished,
            o.lost,
            o.out_of_memory,
            o.most_swap
        );
    }
    println!("{:?}", t.elapsed());
}
