use super::*;

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

/// Target, fallback, lock, and the program with its argv.
fn parse_launch(line: &str) -> (LaunchTarget, bool, Lock, String) {
    let words = words(line);
    match parse(&words) {
        Ok(CommandLine::Launch(launch)) => {
            let argv = launch.arguments.iter().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ");
            let program = launch.program.to_string_lossy();
            (launch.target, launch.fallback, launch.lock, format!("{program}: {argv}"))
        }
        other => panic!("{line}: {other:?}"),
    }
}

fn error(line: &str) -> String {
    parse(&words(line)).expect_err(line)
}

fn on(numbers: &[u16]) -> LaunchTarget {
    LaunchTarget::Nodes(numbers.iter().copied().map(NodeId).collect())
}

#[test]
fn named_node_implies_lock() {
    assert_eq!(parse_launch("flac -8 a"), (LaunchTarget::Here, false, Lock::Keep, "flac: flac -8 a".into()));
    assert_eq!(parse_launch("-3 flac"), (on(&[3]), false, Lock::Locked, "flac: flac".into()));
    assert_eq!(parse_launch("-h -l x"), (LaunchTarget::HereLocked, false, Lock::Unlocked, "x: x".into()));
    assert_eq!(parse_launch("-65535 -F -k x"), (on(&[65_535]), true, Lock::Keep, "x: x".into()));
    assert_eq!(parse_launch("-c x"), (LaunchTarget::Here, false, Lock::Keep, "x: x".into()));
    assert_eq!(parse_launch("-c -2 x"), (on(&[2]), false, Lock::Locked, "x: x".into()));
    assert_eq!(parse_launch("-t 5 -d926 x"), (LaunchTarget::Here, false, Lock::Keep, "x: x".into()));
    assert_eq!(parse_launch("-b x"), (LaunchTarget::Best, false, Lock::Keep, "x: x".into()));
}

#[test]
fn options_end_at_the_program() {
    assert_eq!(parse_launch("-2 -- -3 -F").3, "-3: -3 -F");
    assert_eq!(parse_launch("sh -h --help").3, "sh: sh -h --help");
    assert_eq!(parse_launch("- x").3, "-: - x");
}

#[test]
fn z_sets_argv0() {
    assert_eq!(parse_launch("-lz /usr/sbin/tcpd in.rshd -v").3, "/usr/sbin/tcpd: in.rshd -v");
    assert_eq!(parse_launch("-z tcpd").3, "tcpd: tcpd");
}

#[test]
fn lists_are_complete_and_shuffled() {
    let sorted = |line| match parse_launch(line).0 {
        LaunchTarget::Nodes(mut nodes) => {
            nodes.sort_unstable();
            nodes.into_iter().map(|n| n.0).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(sorted("-j1-3,5 x"), [1, 2, 3, 5]);
    assert_eq!(sorted("-j 2,1-2 x"), [1, 2]);
    assert_eq!(sorted("-j1-65535,1-65535 x").len(), 65_535);
    // 20 nodes have 2.4e18 orders, so five ascending ones in a row are no accident.
    let ascending = on(&(1..=20).collect::<Vec<_>>());
    assert!((0..5).any(|_| parse_launch("-j1-20 x").0 != ascending));
}

#[test]
fn invalid_arguments_are_named() {
    assert_eq!(error(""), "no program was given");
    assert_eq!(error("-2"), "no program was given");
    assert_eq!(error("-q x"), "unknown option '-q'");
    assert_eq!(error("--fast x"), "unknown option '--fast'");
    assert_eq!(error("-d1001 x"), "-d needs a number from 0 to 1000");
    assert_eq!(error("-mx y"), "'x' after -m is not a number");
    for line in ["-h -2 x", "-2 -3 x", "-b -j1 x", "-j1 -b x"] {
        assert_eq!(error(line), CONFLICTING_TARGETS, "{line}");
    }
    for line in ["-0 x", "-65536 x", "-3x y", "-j1,,2 x", "-j1- x", "-j+1 x"] {
        assert!(error(line).contains("is not a node"), "{line}");
    }
    assert_eq!(error("-j3-1 x"), "the range '3-1' is descending");
    assert_eq!(error("-j"), "-j needs a value");
    assert_eq!(error("-t x y"), "'x' after -t is not a number");
}

#[test]
fn help_after_the_program_belongs_to_it() {
    assert_eq!(parse(&words("-2 --help")), Ok(CommandLine::Help));
    assert_eq!(parse(&words("--version")), Ok(CommandLine::Version));
}

#[test]
fn hints_are_parsed() {
    let words = words("-cm 64 -J7 -f --only 1-2 --not 3 x");
    // -c and -m cannot be combined, because -m takes a value.
    assert!(parse(&words).is_err());
    let words = self::words("-c -m 64 -J7 -f --only 1-2 --not 3 x");
    let Ok(CommandLine::Launch(launch)) = parse(&words) else { panic!() };
    let advice = Advice {
        workload: Some(Workload::Cpu),
        decay: Some(DecayClass::Fast),
        memory: Some(64 << 20),
        job: Some(7),
        only: Some(vec![NodeId(1), NodeId(2)]),
        not: vec![NodeId(3)],
    };
    assert_eq!(launch.advice, advice);
}
