//! Feeds the client arbitrary replies of a hostile server, for the fuzz target `replies` and its
//! tests (`crates/mfs/fuzz`). Values passed on to the kernel are checked by the kernel.

use crate::client::cache::invalidator::Invalidator;
use crate::client::cache::validity::{FileVersion, ValidityStamp};
use crate::client::connection::peer::{MountContext, Peer};
use crate::client::fuse::attributes::{file_attr, file_type};
use crate::client::fuse::inode::{Inode, InodeTable};
use crate::message::{Attributes, FileReply, Found, ROOT};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;
use tern_ids::NodeId;
use tern_wire::{Authority, Identity};

/// A client's state for one node, before any reply.
#[derive(Debug)]
pub struct Client {
    peer: Arc<Peer>,
}

impl Client {
    /// A client that never connects.
    ///
    /// # Errors
    /// If no identity can be created.
    pub fn new() -> anyhow::Result<Self> {
        let node = NodeId(2);
        let identity = Identity::issued_by_authority(&Authority::create("hostile")?, NodeId(1))?;
        let context = MountContext {
            identity,
            map: "/dev/null".into(),
            session: [0; 16],
            timeout: Duration::ZERO,
            purpose: crate::message::Purpose::Container,
            invalidator: Invalidator::default(),
        };
        Ok(Self { peer: Arc::new(Peer::new(node, Arc::new(context))) })
    }

    /// Processes all replies in these bytes, each preceded by its length. Returns their number.
    #[must_use]
    pub fn receive(&self, bytes: &[u8]) -> usize {
        let inodes = InodeTable::default();
        let mut last: Option<Arc<Inode>> = None;
        let mut name = OsString::from("name");
        let mut received = 0;
        for frame in crate::hostile::frames(bytes) {
            let Ok((reply, _data)) = postcard::take_from_bytes::<FileReply>(frame) else { break };
            received += 1;
            match reply {
                FileReply::Found(found, _) | FileReply::Created(found, ..) => {
                    let dir = last.as_ref().map(|dir| (dir, &*name));
                    let inode = inodes.add_lookup(self.peer.node(), &self.peer, &found, dir);
                    self.process(&inode, &found.attributes);
                    last = Some(inode);
                }
                FileReply::Attributes(attributes) | FileReply::FileOpened(_, attributes) => {
                    let found = Found { object: ROOT, attributes };
                    let inode = inodes.add_lookup(self.peer.node(), &self.peer, &found, None);
                    self.process(&inode, &attributes);
                    inodes.forget(inode.number, 1);
                }
                FileReply::Renamed { moved, exchanged, .. } => {
                    let Some(dir) = &last else { continue };
                    for file in [moved, exchanged] {
                        inodes.rename(file, (dir, "old".as_ref()), (dir, &name));
                    }
                }
                FileReply::Entries { entries, .. } => {
                    for entry in entries {
                        let _unknown = file_type(entry.kind);
                        if let Some(dir) = &last {
                            dir.entry_number(entry.inode);
                        }
                        name = entry.name.into();
                    }
                }
                FileReply::Recalled(leases) => {
                    for lease in leases {
                        for inode in inodes.of_file(self.peer.node(), &lease.file) {
                            inode.pages.forget_version();
                            inode.renewable_cache.recall();
                        }
                    }
                }
                _ => {}
            }
        }
        received
    }

    fn process(&self, inode: &Inode, attributes: &Attributes) {
        let attr = file_attr(inode, attributes);
        assert_eq!(attr.ino.0, inode.number);
        let _another = attr.mtime.checked_add(inode.pages.next_mtime_offset());
        let _generation = inode.generation();
        let stamp = ValidityStamp::now(&self.peer);
        inode.renewable_cache.set_name(&self.peer, attributes, &stamp, "name".as_ref(), None);
        inode.pages.note_open();
        inode.pages.set_version(FileVersion::if_settled(attributes));
        let _is_current = inode.pages.has_only(FileVersion::if_settled(attributes));
        inode.pages.note_close();
    }
}
