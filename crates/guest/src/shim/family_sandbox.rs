//! The sandbox that all guests of a family share. It is created for the first guest.

use crate::sandbox::Sandbox;
use crate::time::clocks::HomeClocks;
use tern_tracee::stop;

/// The sandbox, and the values that it is created with.
#[derive(Debug)]
pub(super) struct FamilySandbox {
    /// The uid and gid of the family's user.
    user: (u32, u32),
    clocks: HomeClocks,
    sandbox: Option<Sandbox>,
}

impl FamilySandbox {
    /// For the guests of this user. The sandbox itself is not created yet.
    pub(super) fn new(user: (u32, u32)) -> Self {
        Self { user, clocks: HomeClocks::default(), sandbox: None }
    }

    /// The uid of the family's user.
    pub(super) fn uid(&self) -> u32 {
        self.user.0
    }

    /// Handles a reading of home's clocks. Guests see home's clocks.
    pub(super) fn receive_clocks(&mut self, home: [u64; 2]) {
        self.clocks.receive(home);
    }

    /// The sandbox, if it exists.
    pub(super) fn get(&self) -> Option<&Sandbox> {
        self.sandbox.as_ref()
    }

    /// The sandbox, which is created if it does not exist. All its guests together may use `cpus`
    /// CPUs.
    ///
    /// # Errors
    /// If home has not sent its clocks, or a namespace cannot be created here.
    pub(super) fn get_or_create(&mut self, cpus: Option<f64>) -> anyhow::Result<&Sandbox> {
        if self.sandbox.is_none() {
            let Some(offsets) = self.clocks.offsets() else { anyhow::bail!("home has not sent its clocks") };
            // No guest is here that could be delayed.
            let sandbox = stop::count_as_slept(|| Sandbox::create(self.user.0, self.user.1, offsets))?;
            // The helper has no child yet, so all guests inherit its control group.
            if let Err(error) = stop::count_as_slept(|| tern_cgroup::guests::enter(sandbox.helper(), cpus)) {
                tracing::warn!(%error, "these guests have no control group of their own; see tern doctor");
            }
            self.sandbox = Some(sandbox);
        }
        self.sandbox.as_ref().ok_or_else(|| anyhow::anyhow!("no sandbox"))
    }

    /// Whether this process is the sandbox's helper.
    pub(super) fn is_helper(&self, host: i32) -> bool {
        self.sandbox.as_ref().is_some_and(|sandbox| sandbox.helper() == host)
    }

    /// Ends the sandbox, and with it all guests.
    pub(super) fn end(&mut self) {
        self.sandbox = None;
    }
}
