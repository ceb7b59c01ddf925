use super::*;

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

/// Place, fallback, lock, and the program's words joined.
fn start(line: &str) -> (Place, bool, Lock, String) {
    let words = words(line);
    match read(&words) {
        Ok(Words::Start(start)) => {
            let argv = start.arguments.iter().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ");
            let program = start.program.to_string_lossy();
            (start.place, start.fallback, start.lock, format!("{program}: {argv}"))
        }
        other => panic!("{line}: {other:?}"),
    }
}

fn error(line: &str) -> String {
    read(&words(line)).expect_err(line)
}

fn on(numbers: &[u16]) -> Place {
    Place::Nodes(numbers.iter().copied().map(NodeId).collect())
}

#[test]
fn a_named_place_locks() {
    assert_eq!(start("flac -8 a"), (Place::Here, false, Lock::Keep, "flac: flac -8 a".into()));
    assert_eq!(start("-3 flac"), (on(&[3]), false, Lock::Locked, "flac: flac".into()));
    assert_eq!(start("-h -l x"), (Place::Home, false, Lock::Unlocked, "x: x".into()));
    assert_eq!(start("-65535 -F -k x"), (on(&[65_535]), true, Lock::Keep, "x: x".into()));
    assert_eq!(start("-c x"), (Place::Here, false, Lock::Keep, "x: x".into()));
    assert_eq!(start("-c -2 x"), (on(&[2]), false, Lock::Locked, "x: x".into()));
    assert_eq!(start("-t 5 -d926 x"), (Place::Here, false, Lock::Keep, "x: x".into()));
    assert_eq!(start("-b x"), (Place::Best, false, Lock::Keep, "x: x".into()));
}

#[test]
fn options_end_at_the_program() {
    assert_eq!(start("-2 -- -3 -F").3, "-3: -3 -F");
    assert_eq!(start("sh -h --help").3, "sh: sh -h --help");
    assert_eq!(start("- x").3, "-: - x");
}

#[test]
fn z_passes_argv0() {
    assert_eq!(start("-lz /usr/sbin/tcpd in.rshd -v").3, "/usr/sbin/tcpd: in.rshd -v");
    assert_eq!(start("-z tcpd").3, "tcpd: tcpd");
}

#[test]
fn lists_are_taken_whole_and_in_random_order() {
    let sorted = |line| match start(line).0 {
        Place::Nodes(mut nodes) => {
            nodes.sort_unstable();
            nodes.into_iter().map(|n| n.0).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(sorted("-j1-3,5 x"), [1, 2, 3, 5]);
    assert_eq!(sorted("-j 2,1-2 x"), [1, 2]);
    assert_eq!(sorted("-j1-65535,1-65535 x").len(), 65_535);
    // 20 nodes have 2.4e18 orders; to see the rising one five times is no accident.
    let rising = on(&(1..=20).collect::<Vec<_>>());
    assert!((0..5).any(|_| start("-j1-20 x").0 != rising));
}

#[test]
fn mistakes_are_named() {
    assert_eq!(error(""), "no program was given");
    assert_eq!(error("-2"), "no program was given");
    assert_eq!(error("-q x"), "unknown option '-q'");
    assert_eq!(error("--fast x"), "unknown option '--fast'");
    assert_eq!(error("-d1001 x"), "-d is 0 to 1000");
    assert_eq!(error("-mx y"), "'x' after -m is not a number");
    for line in ["-h -2 x", "-2 -3 x", "-b -j1 x", "-j1 -b x"] {
        assert_eq!(error(line), TWO_PLACES, "{line}");
    }
    for line in ["-0 x", "-65536 x", "-3x y", "-j1,,2 x", "-j1- x", "-j+1 x"] {
        assert!(error(line).contains("is not a node"), "{line}");
    }
    assert_eq!(error("-j3-1 x"), "the range '3-1' runs backwards");
    assert_eq!(error("-j"), "-j needs a value");
    assert_eq!(error("-t x y"), "'x' after -t is not a number");
}

#[test]
fn help_is_only_ours_before_the_program() {
    assert_eq!(read(&words("-2 --help")), Ok(Words::Help));
    assert_eq!(read(&words("--version")), Ok(Words::Version));
}

#[test]
fn advice_is_kept() {
    let words = words("-cm 64 -J7 -f --only 1-2 --not 3 x");
    // -c and -m do not stand together: -m takes a value, and only letters without one can.
    assert!(read(&words).is_err());
    let words = self::words("-c -m 64 -J7 -f --only 1-2 --not 3 x");
    let Ok(Words::Start(start)) = read(&words) else { panic!() };
    let advice = Advice {
        habit: Some(Habit::Cpu),
        forget: Some(Forget::Fast),
        memory: Some(64 << 20),
        job: Some(7),
        only: Some(vec![NodeId(1), NodeId(2)]),
        not: vec![NodeId(3)],
    };
    assert_eq!(start.advice, advice);
}
