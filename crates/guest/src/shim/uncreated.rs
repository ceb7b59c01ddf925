//! Reports to home about children and threads that could not be created here. They are repeated on a
//! new link until home has removed its half, even if the process that was to create them has ended.

use super::Shim;
use tern_ids::HomePid;
use tern_migrate::message::Message;

impl Shim {
    /// Reports a child or thread that this thread could not create.
    pub(super) fn report_uncreated(&mut self, child: HomePid, creator: HomePid) {
        tracing::info!(%child, %creator, "it could not be created here");
        self.uncreated.insert(child, creator);
        self.send_home(child, &Message::NotCreated);
    }

    /// Repeats the reports on a new link.
    pub(super) fn repeat_uncreated(&mut self) {
        let unconfirmed: Vec<HomePid> = self.uncreated.keys().copied().collect();
        unconfirmed.into_iter().for_each(|child| self.send_home(child, &Message::NotCreated));
    }

    /// Home has removed its half of a child or thread: its creator's call fails.
    pub(super) fn fail_creation(&mut self, child: HomePid) {
        let Some(creator) = self.uncreated.remove(&child) else { return };
        let Some(pid) = self.members.process_of_thread(creator) else { return };
        self.act_on(pid, |guest, _home| Ok(guest.fail_creation(creator, child)?));
    }
}
