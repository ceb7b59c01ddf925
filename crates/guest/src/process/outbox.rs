//! Messages for home.

use tern_ids::HomePid;
use tern_migrate::message::Message;

/// Messages that a guest, or a part of it, has for home, in order. The guest does not see the link:
/// the shim sends them when the guest has done its part, or drops them if there is no link. The
/// requests of pending calls are sent again on the next link.
#[derive(Debug, Default)]
pub(crate) struct Outbox(Vec<(HomePid, Message)>);

impl Outbox {
    /// Adds a message about a process or one of its threads.
    pub(crate) fn send(&mut self, tag: HomePid, message: Message) {
        self.0.push((tag, message));
    }

    /// The messages, in order.
    pub(crate) fn into_messages(self) -> impl Iterator<Item = (HomePid, Message)> {
        self.0.into_iter()
    }
}
