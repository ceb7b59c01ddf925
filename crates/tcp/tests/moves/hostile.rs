//! Data of a hostile node is refused, or gives a connection; it never makes the program panic.

use crate::router::Net;
use crate::traffic::Stream;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rustix::net::{Shutdown, shutdown};
use std::cell::Cell;
use tern_tcp::{Connection, Invalid, RestoreError, capture, restore};

/// The encoded form of a connection with bytes in all queues.
fn sample(net: &Net) -> Vec<u8> {
    let (client, server) = net.pair();
    net.hold_to_server();
    Stream::default().send_some(&server, 40_000);
    shutdown(&server, Shutdown::Write).unwrap();
    let connection = capture(&server).unwrap();
    drop((client, server));
    postcard::to_stdvec(&connection).unwrap()
}

#[test]
fn changed_bytes_never_panic() {
    let net = Net::new();
    let bytes = sample(&net);
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..5);
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let (decoded, restored) = net.servers[1].run(|| {
        let (decoded, restored) = (Cell::new(0), Cell::new(0));
        TestRunner::new(config)
            .run(&edits, |edits| {
                let mut bytes = bytes.clone();
                let length = bytes.len();
                for (place, value, near_end) in edits {
                    // The header and the settings, not the bytes of the queues.
                    let place = place.index(60.min(length));
                    let place = if near_end { length - 1 - place } else { place };
                    bytes[place] = value;
                }
                if let Ok(connection) = postcard::from_bytes::<Connection>(&bytes) {
                    decoded.set(decoded.get() + 1);
                    restored.set(restored.get() + usize::from(restore(&connection).is_ok()));
                }
                Ok(())
            })
            .unwrap();
        (decoded.get(), restored.get())
    });
    println!("of 300 changed connections {decoded} were decoded and {restored} restored");
    assert!(decoded > 0);
}

#[test]
fn each_field_is_checked() {
    let net = Net::new();
    let valid: Connection = postcard::from_bytes(&sample(&net)).unwrap();
    assert_eq!(valid.validate(), Ok(()));
    let check = |change: &dyn Fn(&mut Connection), expected: Invalid| {
        let mut connection = valid.clone();
        change(&mut connection);
        match net.servers[1].run(|| restore(&connection)) {
            Err(RestoreError::Invalid(invalid)) => assert_eq!(invalid, expected),
            other => panic!("{expected}: {other:?}"),
        }
    };
    check(&|c| c.local.set_port(0), Invalid::Addresses);
    check(&|c| c.peer.set_ip([224, 0, 0, 1].into()), Invalid::Addresses);
    check(&|c| c.peer = "[fd00::1]:5".parse().unwrap(), Invalid::Addresses);
    check(&|c| c.receive.bytes = vec![0; tern_tcp::connection::MAX_QUEUED + 1], Invalid::Queues);
    check(&|c| c.state = tern_tcp::connection::State::FinWait2, Invalid::State);
    check(&|c| (c.send.fin_sent, c.send.unsent) = (true, vec![0]), Invalid::State);
    check(&|c| c.negotiated.mss = 0, Invalid::Negotiated);
    check(&|c| c.negotiated.window_scale.as_mut().unwrap().own = 15, Invalid::Negotiated);
    check(&|c| c.windows.rcv_wnd = u32::MAX, Invalid::Windows);
    check(&|c| c.windows.snd_wnd = c.windows.max_window + 1, Invalid::Windows);
    check(&|c| c.windows.rcv_wup = c.receive.end.wrapping_add(1), Invalid::Windows);
    check(&|c| c.settings.options[0].value = 256, Invalid::Options);
    check(&|c| c.settings.options[0].option = libc::IP_TRANSPARENT, Invalid::Options);
    check(&|c| c.settings.options.push(c.settings.options[0]), Invalid::Options);
    check(&|c| c.settings.congestion = "../x".into(), Invalid::Options);
    check(&|c| c.settings.buffers.receive = u32::MAX, Invalid::Options);
    check(&|c| c.settings.file.signal = 65, Invalid::Options);
}
