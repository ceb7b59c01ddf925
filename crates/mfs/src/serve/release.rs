//! What a session holds no more: its client says so, or has given up waiting for the answer that would have told it.
//!
//! Both may be said more than once, and when the server has begun anew since: numbers are never used again, so what is not
//! held is nobody's.

use super::leases::Leases;
use super::perform::writes;
use super::session::Session;
use crate::lock;
use crate::message::{Answer, Release};

/// Lets go of it.
pub(crate) fn release(session: &Session, leases: &Leases, what: Release) {
    match what {
        Release::File(opened) => {
            if let Some(file) = session.close(opened)
                && writes(file.flags)
            {
                leases.closes(session, &file);
            }
        }
        Release::Owner(key, owner) => {
            // It may be the last of a file that was removed: not under the lock.
            let gone = lock(&session.owners).remove(&(key, owner));
            drop(gone);
        }
    }
}

/// Lets go of what an answer has brought, which nobody hears any more.
pub(crate) fn unheard(session: &Session, leases: &Leases, answer: &Answer) {
    if let Answer::Found(found, _) | Answer::Created(found, ..) = answer {
        session.forget(found.object, 1);
    }
    if let Answer::Opened(opened, _) | Answer::Created(_, opened, _) = answer {
        release(session, leases, Release::File(*opened));
    }
}
