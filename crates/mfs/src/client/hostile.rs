//! What a hostile server may answer, as the fuzz target `answers` and the tests have it answered: `crates/mfs/fuzz`. What of it
//! goes on to the kernel, that examines itself.

use super::attributes::{file, kind};
use super::belief::{Before, Forgetting, Version};
use super::inode::{Inode, Inodes};
use super::peer::{Common, Peer};
use crate::message::{Answer, Attributes, Found, ROOT};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;
use tern_ids::NodeId;
use tern_wire::{Authority, Identity};

/// A client's memory of one node, before it has heard anything.
#[derive(Debug)]
pub struct Client {
    peer: Arc<Peer>,
}

impl Client {
    /// One that connects to nobody.
    ///
    /// # Errors
    /// If no identity can be made.
    pub fn new() -> anyhow::Result<Self> {
        let node = NodeId(2);
        let identity = Identity::issued_by(&Authority::create("hostile")?, NodeId(1))?;
        let common = Common {
            identity,
            map: "/dev/null".into(),
            session: [0; 16],
            patience: Duration::ZERO,
            purpose: crate::message::Purpose::Room,
            forgetting: Forgetting::default(),
        };
        Ok(Self { peer: Arc::new(Peer::new(node, Arc::new(common))) })
    }

    /// Takes all answers that are in these bytes, each with its length before it; how many there were.
    #[must_use]
    pub fn hear(&self, bytes: &[u8]) -> usize {
        let inodes = Inodes::default();
        let mut last: Option<Arc<Inode>> = None;
        let mut name = OsString::from("name");
        let mut heard = 0;
        for frame in crate::hostile::frames(bytes) {
            let Ok((answer, _data)) = postcard::take_from_bytes::<Answer>(frame) else { break };
            heard += 1;
            match answer {
                Answer::Found(found, _) | Answer::Created(found, ..) => {
                    let dir = last.as_ref().map(|dir| (dir, &*name));
                    let inode = inodes.tell(self.peer.node(), &self.peer, &found, dir);
                    self.told(&inode, &found.attributes);
                    last = Some(inode);
                }
                Answer::Attributes(is) | Answer::Opened(_, is) => {
                    let found = Found { object: ROOT, attributes: is };
                    let inode = inodes.tell(self.peer.node(), &self.peer, &found, None);
                    self.told(&inode, &is);
                    inodes.forget(inode.number, 1);
                }
                Answer::Renamed { moved, back, .. } => {
                    let Some(dir) = &last else { continue };
                    for file in [moved, back] {
                        inodes.rename(file, (dir, "old".as_ref()), (dir, &name));
                    }
                }
                Answer::Entries { entries, .. } => {
                    for entry in entries {
                        let _unknown = kind(entry.kind);
                        if let Some(dir) = &last {
                            dir.number_of_entry(entry.inode);
                        }
                        name = entry.name.into();
                    }
                }
                Answer::Recalled(leases) => {
                    for lease in leases {
                        for inode in inodes.of(self.peer.node(), &lease.of) {
                            inode.content.doubt();
                            inode.lasting.is_void();
                        }
                    }
                }
                _ => {}
            }
        }
        heard
    }

    fn told(&self, inode: &Inode, is: &Attributes) {
        let attributes = file(inode, is);
        assert_eq!(attributes.ino.0, inode.number);
        let _another = attributes.mtime.checked_add(inode.content.nudge());
        let _generation = inode.generation();
        let before = Before::asking(&self.peer);
        inode.lasting.has(&self.peer, is, &before, "name".as_ref(), None);
        inode.content.opened();
        inode.content.becomes(Version::of(is));
        let _kept = inode.content.is_only(Version::of(is));
        inode.content.closed();
    }
}
