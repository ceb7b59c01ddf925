//! Follows the map, for the programs of a node that have links with other nodes: they accept and keep
//! links with its members only.

use crate::cluster::map::Map;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::Duration;
use tern_wire::Identity;

/// How often to read the map if nothing reports its changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often to read it otherwise: a report is lost if the directory itself was replaced.
const SLOW_POLL_INTERVAL: Duration = Duration::from_secs(60);

/// Sets the members of the identity to those of this map, now and after each change of its file.
///
/// # Errors
/// If the map cannot be read, or no thread can be started. Then there are no members.
pub fn follow_map(path: &Path, identity: &Identity) -> io::Result<()> {
    let (path, members) = (path.to_owned(), identity.members().clone());
    // Watched before it is read, so that no change is missed.
    let changes = path.parent().and_then(|directory| watch(directory).ok());
    let mut known = Map::read(&path)?;
    members.set(known.keys());
    let follow = move || {
        loop {
            wait_for_change(changes.as_ref());
            // A missing map is an empty one. One that cannot be read changes nothing.
            match Map::read(&path) {
                Ok(map) if map != known => {
                    members.set(map.keys());
                    known = map;
                }
                _ => {}
            }
        }
    };
    thread::Builder::new().name("map".into()).spawn(follow).map(drop)
}

fn watch(directory: &Path) -> rustix::io::Result<OwnedFd> {
    let changes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let events = WatchFlags::MOVED_TO | WatchFlags::CLOSE_WRITE | WatchFlags::DELETE | WatchFlags::MOVED_FROM;
    inotify::add_watch(&changes, directory, events | WatchFlags::ONLYDIR)?;
    Ok(changes)
}

/// Returns when the directory has changed, or after a while.
fn wait_for_change(changes: Option<&OwnedFd>) {
    let Some(changes) = changes else { return thread::sleep(POLL_INTERVAL) };
    let timeout = Timespec { tv_sec: SLOW_POLL_INTERVAL.as_secs().cast_signed(), tv_nsec: 0 };
    let _woken = poll(&mut [PollFd::new(changes, PollFlags::IN)], Some(&timeout));
    // All events mean the same.
    let mut events = [0; 4096];
    while rustix::io::read(changes, &mut events).is_ok_and(|count| count > 0) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::scratch::Scratch;
    use crate::os::text_file;
    use std::time::Instant;
    use tern_ids::NodeId;
    use tern_wire::Authority;

    #[test]
    fn members_are_those_of_the_file() {
        let dir = Scratch::new("follow");
        let path = dir.0.join("map");
        let one = Identity::issued_by_authority(&Authority::create("a").unwrap(), NodeId(1)).unwrap();
        follow_map(&path, &one).unwrap();
        let until = |is_member| {
            let end = Instant::now() + Duration::from_secs(20);
            while one.members().contains(NodeId(1)) != is_member {
                assert!(Instant::now() < end, "timed out");
                thread::sleep(Duration::from_millis(1));
            }
        };
        let map = Map::parse("1 a 1\n").unwrap();
        text_file::replace(&path, map.clone().with_key(NodeId(1), one.key()).text(), 0o644).unwrap();
        until(true);
        text_file::replace(&path, map.text(), 0o644).unwrap();
        until(false);
        std::fs::write(&path, map.with_key(NodeId(1), one.key()).text()).unwrap();
        until(true);
        std::fs::remove_file(&path).unwrap();
        until(false);
    }
}
