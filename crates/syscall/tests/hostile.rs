//! Calls of a hostile node: none makes home panic, or request more mailbox space than one call may
//! have.

use proptest::collection::vec;
use proptest::prelude::*;
use tern_syscall::{Arg, ByteBuf, Call, MessageBuffer, NUMBERS, Segments, Shape, SocketMessage, limits, row};

fn bytes() -> impl Strategy<Value = ByteBuf> {
    prop_oneof![
        vec(any::<u8>(), 0..200),
        // Numbers at the start, as lengths inside of structs.
        (prop_oneof![0u32..300, any::<u32>()], 0..300usize).prop_map(|(n, len)| {
            let mut bytes = n.to_le_bytes().to_vec();
            bytes.resize(len.max(4), 1);
            bytes
        }),
        // Text with and without its NUL.
        (0..5000usize, any::<bool>()).prop_map(|(len, ended)| {
            let mut bytes = vec![b'x'; len];
            bytes.extend(ended.then_some(0));
            bytes
        }),
        (0..6usize).prop_map(|strings| vec![0; strings]),
    ]
    .prop_map(ByteBuf::from)
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        0..64u64,
        0..10_000u64,
        any::<u64>(),
        any::<u32>().prop_map(u64::from),
        any::<i16>().prop_map(|n| i64::from(n) as u64),
    ]
}

fn segments() -> impl Strategy<Value = Segments> {
    let lens = vec(prop_oneof![0..64u32, any::<u32>()], 0..8);
    (lens, bytes(), prop_oneof![0..64u64, any::<u64>()], any::<bool>()).prop_map(
        |(mut lens, bytes, inaccessible, honest)| {
            if honest {
                lens = vec![bytes.len() as u32 + inaccessible.min(64) as u32];
            }
            Segments { lens, bytes, inaccessible }
        },
    )
}

fn message_buffer() -> impl Strategy<Value = MessageBuffer> {
    prop_oneof![
        Just(MessageBuffer::Null),
        prop_oneof![0..200u32, any::<u32>()].prop_map(MessageBuffer::Output),
        bytes().prop_map(MessageBuffer::Bytes),
    ]
}

fn arg() -> impl Strategy<Value = Arg> {
    prop_oneof![
        3 => number().prop_map(Arg::Value),
        1 => Just(Arg::BadPointer),
        1 => Just(Arg::KernelPointer),
        2 => Just(Arg::Output),
        3 => bytes().prop_map(Arg::Bytes),
        2 => segments().prop_map(Arg::Segments),
        2 => vec((message_buffer(), segments(), message_buffer()), 0..4).prop_map(|messages| {
            let message = |(name, segments, control)| SocketMessage { name, segments, control };
            Arg::Messages(messages.into_iter().map(message).collect())
        }),
        1 => bytes().prop_map(Arg::Strings),
    ]
}

/// Any call. In half of the cases each argument at least has the kind that its row requires.
fn call() -> impl Strategy<Value = Call> {
    (0..NUMBERS + 10, any::<bool>(), vec(arg(), 6), vec(number(), 6), vec(bytes(), 6)).prop_map(
        |(nr, shaped, any, numbers, bytes)| {
            let mut any = any;
            let values = std::array::from_fn(|i| numbers[i]);
            if let (true, Some(row)) = (shaped, row(nr)) {
                for (i, arg) in any.iter_mut().enumerate() {
                    let kept = match (row.shapes(&values).get(i), &*arg) {
                        (None | Some(Shape::Value | Shape::Fd), _) => None,
                        (Some(_), Arg::BadPointer | Arg::KernelPointer | Arg::Value(0)) => continue,
                        (Some(Shape::Out(..)), _) => Some(Arg::Output),
                        (Some(Shape::Segments(..)), Arg::Segments(_))
                        | (Some(Shape::Messages(..)), Arg::Messages(_)) => continue,
                        (Some(Shape::Strings), _) => Some(Arg::Strings(bytes[i].clone())),
                        (Some(_), _) => Some(Arg::Bytes(bytes[i].clone())),
                    };
                    *arg = kept.unwrap_or(Arg::Value(numbers[i]));
                }
            }
            Call { nr, args: any.try_into().expect("six arguments") }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn no_call_panics_at_home(call in call(), ret in prop_oneof![any::<i64>(), -520..5000i64], rubbish in any::<u8>()) {
        let sent = call.args.iter().map(|arg| match arg {
            Arg::Bytes(bytes) | Arg::Strings(bytes) => bytes.len(),
            _ => 0,
        }).sum::<usize>();
        let _ = (call.mask(), call.values());
        let mut shortened = call.clone();
        shortened.subtract_elapsed(std::time::Duration::from_secs(3));
        let Ok(layout) = call.lay_out() else { return Ok(()) };
        prop_assert!(layout.size() <= limits::MAX_MAILBOX);
        prop_assert!(sent <= limits::MAX_MAILBOX);
        // A mailbox that is too small causes an error, not a panic. Its content is not trusted.
        if layout.size() < 1 << 20 {
            let mut mailbox = vec![rubbish; layout.size()];
            prop_assert!(layout.fill(0x7000, &mut mailbox).is_ok());
            mailbox.fill(rubbish);
            let outcome = layout.collect(ret, &mailbox);
            let written: usize = outcome.outs.iter().map(|out| out.len()).sum();
            prop_assert!(written <= layout.size() * 2);
            let half = mailbox.len() / 2;
            let _ = layout.fill(0x7000, &mut mailbox[..half]);
            let _ = layout.collect(ret, &mailbox[..half]);
        }
        let _ = layout.args(u64::MAX);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in vec(any::<u8>(), 0..100)) {
        if let Ok(call) = postcard::from_bytes::<Call>(&bytes) {
            let _ = call.lay_out().map(|layout| layout.collect(0, &[]));
        }
    }
}

/// Well-formed calls that are too large: every way to ask for a large mailbox.
#[test]
fn all_sizes_are_limited() {
    let values = |args: [u64; 6]| args.map(Arg::Value);
    let read = |len: u64| {
        let mut args = values([0, 0, len, 0, 0, 0]);
        args[1] = Arg::Output;
        Call { nr: libc::SYS_read as u32, args }.lay_out()
    };
    assert!(read(limits::MAX_DATA).is_ok());
    assert!(read(limits::MAX_DATA + 1).is_err());
    assert!(read(u64::MAX).is_err());

    let message = |control: u32, len: u32| SocketMessage {
        name: MessageBuffer::Null,
        segments: Segments { lens: vec![len; 1024], bytes: ByteBuf::new(), inaccessible: 0 },
        control: MessageBuffer::Output(control),
    };
    let receive = |messages: Vec<SocketMessage>| {
        let mut args = values([0, 0, messages.len() as u64, 0, 0, 0]);
        args[1] = Arg::Messages(messages);
        Call { nr: libc::SYS_recvmmsg as u32, args }.lay_out()
    };
    assert!(receive(vec![message(0, 64); 64]).is_ok());
    assert!(receive(vec![message(0, 64); 1025]).is_err());
    assert!(receive(vec![message(1 << 20, 0); 100]).is_err());
    assert!(receive(vec![message(0, 1 << 20); 2]).is_err());
    assert!(receive(vec![message(0, 1); 1024]).is_err());

    let exec = |texts: Vec<u8>| {
        let mut args = values([0; 6]);
        args[0] = Arg::Bytes(ByteBuf::from(b"/bin/sh\0".to_vec()));
        args[1] = Arg::Strings(ByteBuf::from(texts));
        Call { nr: libc::SYS_execve as u32, args }.lay_out()
    };
    assert!(exec(vec![0; 1000]).is_ok());
    assert!(exec(vec![0; limits::MAX_EXEC_TOTAL / 8]).is_err());
    assert!(exec(b"no end".to_vec()).is_err());
}

#[test]
fn only_home_calls_are_laid_out() {
    for nr in 0..NUMBERS + 100 {
        let args = [0; 6];
        let accepted = Call { nr, args: args.map(Arg::Value) }.lay_out().is_ok();
        let home = matches!(
            tern_syscall::route(nr, &args),
            tern_syscall::Route::Home | tern_syscall::Route::Both(_)
        );
        assert_eq!(accepted, home, "{nr}");
    }
}
