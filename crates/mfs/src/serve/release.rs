//! Releases resources of a session, either because its client requests that, or because the client
//! has abandoned the request whose reply would have delivered them.
//!
//! A release may arrive more than once, and after a restart of the server. Numbers are never
//! reused, so a number that is not held is ignored.

use super::leases::LeaseTable;
use super::perform::opens_for_writing;
use super::session::Session;
use crate::lock;
use crate::message::{FileReply, Release};

/// Releases a resource.
pub(crate) fn release(session: &Session, leases: &LeaseTable, resource: Release) {
    match resource {
        Release::File(opened) => {
            if let Some(file) = session.close(opened)
                && opens_for_writing(file.flags)
            {
                leases.close_writer(session, file.key);
            }
        }
        Release::LockOwner(key, owner) => {
            // It may hold the last descriptor of a removed file: drop it without the lock.
            let removed = lock(&session.owners).remove(&(key, owner));
            drop(removed);
        }
    }
}

/// Releases the object and the open file in a reply that the client has abandoned.
pub(crate) fn release_undelivered(session: &Session, leases: &LeaseTable, reply: &FileReply) {
    if let FileReply::Found(found, _) | FileReply::Created(found, ..) = reply {
        session.forget(found.object, 1);
    }
    if let FileReply::FileOpened(opened, _) | FileReply::Created(_, opened, _) = reply {
        release(session, leases, Release::File(*opened));
    }
}
