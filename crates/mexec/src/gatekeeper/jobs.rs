//! The jobs of outside clients: listed on request, limited in number, and ended when their key is
//! not valid any more.

use super::client_keys::{ClientKey, unix_time};
use crate::lock;
use anyhow::{Result, bail};
use std::collections::HashMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Mutex;
use tern_control::GatekeeperJob;

/// The maximum number of jobs of all clients.
const MAX_JOBS: usize = 1024;

/// The maximum number of jobs of a client whose key has no limit of its own.
const DEFAULT_MAX_JOBS_PER_CLIENT: u32 = 256;

/// All running jobs.
#[derive(Debug, Default)]
pub(super) struct Jobs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: u64,
    jobs: HashMap<u64, JobEntry>,
}

#[derive(Debug)]
struct JobEntry {
    job: GatekeeperJob,
    connection: TcpStream,
    /// Why it was ended.
    end_reason: Option<String>,
}

/// A running job, until this is dropped.
#[derive(Debug)]
pub(super) struct RunningJob<'a>(&'a Jobs, u64);

impl Jobs {
    /// Adds a job of this client.
    ///
    /// # Errors
    /// If the maximum number is running.
    pub(super) fn add(
        &self,
        name: &str,
        key: &ClientKey,
        from: SocketAddr,
        connection: &TcpStream,
    ) -> Result<RunningJob<'_>> {
        let connection = connection.try_clone()?;
        let mut state = lock(&self.0);
        let of_client = state.jobs.values().filter(|entry| entry.job.client == name).count();
        let max = key.jobs.unwrap_or(DEFAULT_MAX_JOBS_PER_CLIENT);
        if of_client >= max as usize {
            bail!("{max} jobs of this key run already");
        }
        if state.jobs.len() >= MAX_JOBS {
            bail!("the gatekeeper has {MAX_JOBS} jobs already");
        }
        state.last += 1;
        let number = state.last;
        let (client, user) = (name.to_owned(), key.user.clone());
        let from = from.ip().to_string();
        let since = unix_time();
        let job = GatekeeperJob { job: number, client, user, command: String::new(), since, from };
        state.jobs.insert(number, JobEntry { job, connection, end_reason: None });
        Ok(RunningJob(self, number))
    }

    /// The running jobs, the oldest first.
    pub(super) fn all(&self) -> Vec<GatekeeperJob> {
        let mut jobs: Vec<_> = lock(&self.0).jobs.values().map(|entry| entry.job.clone()).collect();
        jobs.sort_by_key(|job| job.job);
        jobs
    }

    /// Ends the jobs of those clients for which `reason` returns a reason. Returns their number.
    pub(super) fn end_where(&self, reason: impl Fn(&str) -> Option<String>) -> usize {
        let mut reasons: HashMap<String, Option<String>> = HashMap::new();
        for job in self.all() {
            reasons.entry(job.client).or_insert_with_key(|name| reason(name));
        }
        let mut ended = 0;
        for entry in lock(&self.0).jobs.values_mut() {
            if entry.end_reason.is_none()
                && let Some(Some(reason)) = reasons.get(&entry.job.client)
            {
                entry.end_reason = Some(reason.clone());
                ended += 1;
                // Its thread reads this as the end of the connection. It can still send the reason.
                let _gone = entry.connection.shutdown(Shutdown::Read);
            }
        }
        ended
    }
}

impl RunningJob<'_> {
    /// Its number.
    pub(super) fn number(&self) -> u64 {
        self.1
    }

    /// Sets its command line for lists.
    pub(super) fn set_command(&self, command: &str) {
        if let Some(entry) = lock(&self.0.0).jobs.get_mut(&self.1) {
            entry.job.command = command.to_owned();
        }
    }

    /// Why it was ended by the gatekeeper, if it was.
    pub(super) fn end_reason(&self) -> Option<String> {
        lock(&self.0.0).jobs.get(&self.1).and_then(|entry| entry.end_reason.clone())
    }
}

impl Drop for RunningJob<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).jobs.remove(&self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;

    #[test]
    fn jobs_are_limited_and_end_with_their_reason() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut connection, from) = listener.accept().unwrap();
        let jobs = Jobs::default();
        let key = ClientKey { jobs: Some(2), ..ClientKey::of("anna") };
        let add = |name| jobs.add(name, &key, from, &connection);
        let (first, second) = (add("a").unwrap(), add("a").unwrap());
        assert!(add("a").unwrap_err().to_string().contains("2 jobs of this key"));
        first.set_command("make");
        assert_eq!(jobs.all().iter().map(|job| &*job.command).collect::<Vec<_>>(), ["make", ""]);
        assert_eq!(jobs.end_where(|name| (name == "b").then(String::new)), 0);
        assert_eq!(jobs.end_where(|_| Some("revoked".into())), 2);
        assert_eq!(jobs.end_where(|_| Some("again".into())), 0, "once");
        assert_eq!(
            (first.end_reason(), second.end_reason()),
            (Some("revoked".into()), Some("revoked".into()))
        );
        drop((first, second));
        assert!(jobs.all().is_empty());
        assert_eq!(connection.read(&mut [0]).unwrap(), 0, "its thread sees the end");
        drop(other);
    }
}
