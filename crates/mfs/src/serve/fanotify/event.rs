//! Parser of fanotify's events (fanotify(7)): `nix` omits the record that identifies the file.

use super::handle::Handle;
use nix::sys::fanotify::MaskFlags;

/// Size of `struct fanotify_event_metadata`.
const METADATA: usize = 24;

/// Size of a FID record before the handle's bytes: the record's header, the file system ID and the
/// handle's header.
const HEAD: usize = 4 + 8 + 8;

/// Type of the record that identifies the file.
const FID: u8 = libc::FAN_EVENT_INFO_TYPE_FID;

/// An event.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// Kinds of change.
    pub(super) mask: MaskFlags,
    /// The process that made the change, as numbered in our pid namespace; 0 if it has no number
    /// there.
    pub(super) process: i32,
    /// The changed file; if an entry of a directory has changed, the directory.
    pub(super) handle: Option<Handle>,
}

/// All events of one read, up to the first malformed one.
pub(super) fn events(mut bytes: &[u8]) -> impl Iterator<Item = Event> {
    std::iter::from_fn(move || {
        let length = number(bytes, 0, u32::from_le_bytes)? as usize;
        let event = bytes.get(..length).filter(|event| event.len() >= METADATA)?;
        bytes = bytes.get(length..)?;
        let first = number(event, 6, u16::from_le_bytes)?.into();
        Some(Event {
            mask: MaskFlags::from_bits_retain(number(event, 8, u64::from_le_bytes)?),
            process: number(event, 20, i32::from_le_bytes)?,
            handle: event.get(first..).and_then(handle),
        })
    })
}

/// The handle in an event's records.
fn handle(mut records: &[u8]) -> Option<Handle> {
    loop {
        let kind = *records.first()?;
        let length: usize = number(records, 2, u16::from_le_bytes)?.into();
        let record = records.get(..length).filter(|record| record.len() >= 4)?;
        if kind == FID {
            let bytes = number(record, 12, u32::from_le_bytes)? as usize;
            return Some(Handle {
                volume: number(record, 4, u64::from_le_bytes)?,
                kind: number(record, 16, i32::from_le_bytes)?,
                bytes: record.get(HEAD..)?.get(..bytes)?.to_vec(),
            });
        }
        records = records.get(length..)?;
    }
}

/// Reads an integer at this offset.
fn number<const N: usize, T>(bytes: &[u8], at: usize, read: impl Fn([u8; N]) -> T) -> Option<T> {
    Some(read(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event with one record of this type.
    fn event(kind: u8, process: i32, bytes: &[u8]) -> Vec<u8> {
        let record = u16::try_from(HEAD + bytes.len()).unwrap();
        let mut all = Vec::new();
        all.extend((u32::from(record) + 24).to_le_bytes());
        all.extend([3, 0, 24, 0]);
        all.extend(2_u64.to_le_bytes());
        all.extend((-1_i32).to_le_bytes());
        all.extend(process.to_le_bytes());
        all.extend([kind, 0]);
        all.extend(record.to_le_bytes());
        all.extend(7_u64.to_le_bytes());
        all.extend(u32::try_from(bytes.len()).unwrap().to_le_bytes());
        all.extend(1_i32.to_le_bytes());
        all.extend(bytes);
        all
    }

    #[test]
    fn events_report_process_and_file() {
        let bytes = [event(FID, 5, b"abcdefgh"), event(9, 6, b""), event(FID, 7, b"ijkl")].concat();
        let all: Vec<_> = events(&bytes).collect();
        assert_eq!(all.iter().map(|event| event.process).collect::<Vec<_>>(), [5, 6, 7]);
        assert!(all.iter().all(|event| event.mask == MaskFlags::FAN_MODIFY));
        assert_eq!(all[0].handle, Some(Handle { volume: 7, kind: 1, bytes: b"abcdefgh".to_vec() }));
        assert_eq!(all[1].handle, None);
    }

    #[test]
    fn truncated_events_are_not_read() {
        let whole = event(FID, 5, b"abcdefgh");
        for length in 0..whole.len() {
            assert_eq!(events(&whole[..length]).count(), 0);
        }
        let mut wrong = whole;
        wrong[0] = 0;
        assert_eq!(events(&wrong).count(), 0, "nor for ever the same");
    }
}
