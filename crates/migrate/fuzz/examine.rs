//! What is done with a hostile shim's frames: shared by the fuzz target and by tests/hostile.rs.

use tern_migrate::message::{Inbox, MORE, Message};
use tern_syscall::limits::MAILBOX;
use tern_wire::Frame;

/// Where the mailbox of an imagined deputy lies.
const BASE: u64 = 0x7000_0000_0000;
/// Mailboxes up to this size are filled.
const FILLED: usize = 1 << 20;

/// Reads the bytes as frames, each of which begins with kind and flags, tag, and the length of its payload in two
/// bytes; puts messages together from them, and does with each what the shims do before they believe it. Returns the
/// number of messages.
pub(crate) fn examine(mut bytes: &[u8]) -> usize {
    let (mut inbox, mut messages) = (Inbox::default(), 0);
    while let Some(([kind, tag, low, high], after)) = bytes.split_first_chunk::<4>() {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        let (payload, rest) = after.split_at(length);
        bytes = rest;
        let flags = if kind & 0x80 == 0 { 0 } else { MORE };
        let frame = Frame { kind: kind & 3, flags, tag: u64::from(*tag), payload: payload.to_vec() };
        match inbox.take(frame) {
            Err(_) => return messages,
            Ok(None) => {}
            Ok(Some(arrived)) => {
                messages += 1;
                let _pages = arrived.bytes();
                judge(arrived.message);
            }
        }
    }
    messages
}

fn judge(message: Message) {
    match message {
        Message::Space(layout) => drop(layout.check()),
        Message::Image(image, _) => drop(image.check()),
        Message::Call(request) => {
            let Ok(layout) = request.call.lay_out() else { return };
            assert!(layout.size() <= MAILBOX, "a mailbox of {}", layout.size());
            let _registers = layout.args(BASE);
            if layout.size() <= FILLED {
                let mut mailbox = vec![0; layout.size()];
                let _what_does_not_fit = layout.fill(BASE, &mut mailbox);
                // The kernel's answer, and answers that only a deputy gone astray gives.
                for ret in [0, 1, -4, i64::from(i32::MAX), i64::MAX, i64::MIN] {
                    let _outcome = layout.collect(ret, &mailbox);
                }
            }
        }
        _ => {}
    }
}
