//! Processes the frames of a hostile shim. Shared by the fuzz target and tests/hostile.rs.

use tern_migrate::message::{FLAG_MORE, Message, Reassembler};
use tern_syscall::limits::MAX_MAILBOX;
use tern_wire::Frame;

/// Address of the mailbox of an imagined deputy.
const BASE: u64 = 0x7000_0000_0000;
/// Maximum size of the mailboxes that are filled.
const FILLED: usize = 1 << 20;

/// Decodes the bytes as frames (kind and flags, tag, and a two-byte payload length each),
/// reassembles messages from them, and applies the shims' checks to each. Returns the number of
/// messages.
pub(crate) fn examine(mut bytes: &[u8]) -> usize {
    let (mut inbox, mut messages) = (Reassembler::default(), 0);
    while let Some(([kind, tag, low, high], after)) = bytes.split_first_chunk::<4>() {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
        let (payload, rest) = after.split_at(length);
        bytes = rest;
        let flags = if kind & 0x80 == 0 { 0 } else { FLAG_MORE };
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
            assert!(layout.size() <= MAX_MAILBOX, "a mailbox of {}", layout.size());
            let _registers = layout.args(BASE);
            if layout.size() <= FILLED {
                let mut mailbox = vec![0; layout.size()];
                let _what_does_not_fit = layout.fill(BASE, &mut mailbox);
                // Results that a kernel returns, and some that only a broken deputy returns.
                for ret in [0, 1, -4, i64::from(i32::MAX), i64::MAX, i64::MIN] {
                    let _outcome = layout.collect(ret, &mailbox);
                }
            }
        }
        _ => {}
    }
}
