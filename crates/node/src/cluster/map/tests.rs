use super::*;

fn problem(text: &str) -> String {
    Map::parse(text).unwrap_err().to_string()
}

#[test]
fn openmosix_map_is_parsed() {
    let map =
        Map::parse("# all of us\n1 10.0.0.254 4 # rack\n\n9 alpha:7102 1\n2 192.168.1.2 ALIAS\n").unwrap();
    assert_eq!(map.nodes(), [1, 2, 3, 4, 9].map(NodeId));
    assert_eq!(map.address(NodeId(3)).unwrap(), "10.0.1.0:7101");
    assert_eq!(map.address(NodeId(9)).unwrap(), "alpha:7102");
    assert_eq!(map.address(NodeId(5)).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(map.host(NodeId(4)).unwrap(), "10.0.1.1");
    assert_eq!((map.lowest_free_number(), map.version()), (Some(NodeId(5)), 0));
    for (word, node) in [("10.0.0.255", 2), ("192.168.1.2", 2), ("alpha", 9), ("alpha:7102", 9)] {
        assert_eq!(map.find(word), Some(NodeId(node)), "{word}");
    }
    for word in ["10.0.1.2", "10.0.0.253", "alpha:7103", "beta", ""] {
        assert_eq!(map.find(word), None, "{word}");
    }
}

#[test]
fn ipv6_addresses_are_parsed() {
    let map = Map::parse("1 fd00::ffff 2\n7 [fd00::9]:99 1\n").unwrap();
    assert_eq!(map.address(NodeId(2)).unwrap(), "[fd00::1:0]:7101");
    assert_eq!(map.address(NodeId(7)).unwrap(), "[fd00::9]:99");
}

#[test]
fn span_of_a_host_name_is_resolved() {
    let map = Map::parse("1 localhost:5 3\n").unwrap();
    assert_eq!(map.host(NodeId(2)).unwrap(), "localhost+1");
    let address = map.address(NodeId(2)).unwrap();
    assert!(address == "127.0.0.2:5" || address == "[::2]:5", "{address}");
}

#[test]
fn invalid_lines_are_reported_with_number() {
    for (line, expected) in [
        ("0 a 1", "'0' is not a node number: nodes are 1 to 65535"),
        ("65536 a 1", "'65536' is not a node number: nodes are 1 to 65535"),
        ("x a 1", "'x' is not a node number: nodes are 1 to 65535"),
        ("-1 a 1", "'-1' is not a node number: nodes are 1 to 65535"),
        ("2 a", "expected three words: ID HOST COUNT"),
        ("2", "expected three words: ID HOST COUNT"),
        ("2 a 1 1", "expected three words: ID HOST COUNT"),
        ("2 a 0", "'0' is neither a count of nodes nor ALIAS"),
        ("2 a alias", "'alias' is neither a count of nodes nor ALIAS"),
        ("2 a 99999999999", "'99999999999' is neither a count of nodes nor ALIAS"),
        ("65535 10.0.0.1 2", "2 nodes from 65535 on go beyond node 65535"),
        ("2 255.255.255.255 2", "2 addresses from 255.255.255.255 on go beyond the last one"),
        ("2 10.0.0 1", "'10.0.0' is not a host name or address"),
        ("2 10.0.0.256 1", "'10.0.0.256' is not a host name or address"),
        ("2 a/b 1", "'a/b' is not a host name or address"),
        ("2 ä 1", "'ä' is not a host name or address"),
        ("2 a: 1", "'a:' has no valid port"),
        ("2 a:0 1", "'a:0' has no valid port"),
        ("2 a:65536 1", "'a:65536' has no valid port"),
        ("1 b 1", "node 1 is in line 1 already"),
        ("2 first 1", "first is in line 1 already"),
        ("2 first ALIAS", "an alias for node 2, which is not in the map"),
    ] {
        assert_eq!(problem(&format!("1 first 1\n{line}\n")), format!("line 2: {expected}"), "{line}");
    }
}

#[test]
fn overlapping_ranges_are_refused() {
    assert_eq!(problem("5 a 10\n1 b 5\n"), "line 2: node 5 is in line 1 already");
    assert_eq!(problem("5 a 10\n14 b 1\n"), "line 2: node 14 is in line 1 already");
    assert_eq!(problem("1 10.0.0.5 5\n9 10.0.0.1 5\n"), "line 2: 10.0.0.5 is in line 1 already");
    assert_eq!(problem("1 10.0.0.1 5\n9 10.0.0.4 5\n"), "line 2: 10.0.0.4 is in line 1 already");
    assert!(Map::parse("1 10.0.0.1:1 1\n2 10.0.0.1:2 1\n").is_ok(), "two daemons on one machine");
    assert_eq!(problem("1 a 1\n2 b 1\n2 a ALIAS\n"), "line 3: a is node 1 already");
}

#[test]
fn too_long_map_is_refused() {
    let lines = |count: u32| (1..=count).map(|id| format!("{id} h{id} 1\n")).collect::<String>();
    assert!(Map::parse(&lines(256)).is_ok());
    assert_eq!(Map::parse(&lines(257)), Err(MapError::TooManyLines));
    assert!(Map::parse(&"# comment\n".repeat(1000)).is_ok(), "comments do not count");
    assert_eq!(Map::parse(&"#\n".repeat(MAX_TEXT_LEN)), Err(MapError::TooLong));
}

#[test]
fn map_without_this_node_is_refused_unless_empty() {
    let map = Map::parse("1 a 2\n").unwrap();
    assert_eq!(map.clone().check_contains(NodeId(3)), Err(MapError::NodeMissing(NodeId(3))));
    assert!(map.check_contains(NodeId(2)).is_ok() && Map::default().check_contains(NodeId(2)).is_ok());
}

#[test]
fn version_is_stored_in_the_text() {
    let first = Map::parse("# ours\n1 a 1\n").unwrap();
    let second = first.with_node(NodeId(2), "10.0.0.2:99", Some("beta")).unwrap();
    assert_eq!(second.text(), "# version 1\n# ours\n1 a 1\n2\t10.0.0.2:99\t1\n2\tbeta\tALIAS\n");
    assert_eq!(Map::parse(second.text()).unwrap().version(), 1);
    assert!(second.replaces(&first) && !first.replaces(&second) && !second.replaces(&second));
    let same = first.with_node(NodeId(2), "10.0.0.3:99", None).unwrap();
    assert!(same.replaces(&second) != second.replaces(&same), "one of two is kept everywhere");
    assert!(second.with_node(NodeId(2), "c", None).is_err());
}
