//! What runs for clients outside: for the lists, for the limits, and for the end of those whose key is not good any more.

use super::clients::{Client, now};
use crate::lock;
use anyhow::{Result, bail};
use std::collections::HashMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Mutex;
use tern_control::OutsideJob;

/// The most of all clients.
const MOST: usize = 1024;

/// The most of one whose key says nothing of it.
const MOST_OF_ONE: u32 = 256;

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Jobs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: u64,
    jobs: HashMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    shown: OutsideJob,
    line: TcpStream,
    /// Why it is to end.
    why: Option<String>,
}

/// One of them, until this is dropped.
#[derive(Debug)]
pub(super) struct Running<'a>(&'a Jobs, u64);

impl Jobs {
    /// One more of this client's.
    ///
    /// # Errors
    /// If there are as many as there may be.
    pub(super) fn enter(
        &self,
        name: &str,
        client: &Client,
        from: SocketAddr,
        line: &TcpStream,
    ) -> Result<Running<'_>> {
        let line = line.try_clone()?;
        let mut state = lock(&self.0);
        let of_client = state.jobs.values().filter(|entry| entry.shown.client == name).count();
        let most = client.jobs.unwrap_or(MOST_OF_ONE);
        if of_client >= most as usize {
            bail!("{most} jobs of this key run already");
        }
        if state.jobs.len() >= MOST {
            bail!("the gatekeeper has {MOST} jobs already");
        }
        state.last += 1;
        let job = state.last;
        let (client, user) = (name.to_owned(), client.user.clone());
        let from = from.ip().to_string();
        let shown = OutsideJob { job, client, user, command: String::new(), since: now(), from };
        state.jobs.insert(job, Entry { shown, line, why: None });
        Ok(Running(self, job))
    }

    /// Those that run, the oldest first.
    pub(super) fn all(&self) -> Vec<OutsideJob> {
        let mut jobs: Vec<_> = lock(&self.0).jobs.values().map(|entry| entry.shown.clone()).collect();
        jobs.sort_by_key(|job| job.job);
        jobs
    }

    /// Ends those of clients for whom there is a reason; how many.
    pub(super) fn end_if(&self, reason: impl Fn(&str) -> Option<String>) -> usize {
        let mut reasons: HashMap<String, Option<String>> = HashMap::new();
        for job in self.all() {
            reasons.entry(job.client).or_insert_with_key(|name| reason(name));
        }
        let mut ended = 0;
        for entry in lock(&self.0).jobs.values_mut() {
            if entry.why.is_none()
                && let Some(Some(why)) = reasons.get(&entry.shown.client)
            {
                entry.why = Some(why.clone());
                ended += 1;
                // Whoever attends to it hears that as the client's end; what is said to him still goes.
                let _gone = entry.line.shutdown(Shutdown::Read);
            }
        }
        ended
    }
}

impl Running<'_> {
    /// Its number.
    pub(super) fn number(&self) -> u64 {
        self.1
    }

    /// It is this command.
    pub(super) fn is(&self, command: &str) {
        if let Some(entry) = lock(&self.0.0).jobs.get_mut(&self.1) {
            entry.shown.command = command.to_owned();
        }
    }

    /// Why it was ended, if it was.
    pub(super) fn why(&self) -> Option<String> {
        lock(&self.0.0).jobs.get(&self.1).and_then(|entry| entry.why.clone())
    }
}

impl Drop for Running<'_> {
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
    fn so_many_run_and_end_when_they_are_to() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut line, from) = listener.accept().unwrap();
        let jobs = Jobs::default();
        let client = Client { jobs: Some(2), ..Client::of("anna") };
        let enter = |name| jobs.enter(name, &client, from, &line);
        let (first, second) = (enter("a").unwrap(), enter("a").unwrap());
        assert!(enter("a").unwrap_err().to_string().contains("2 jobs of this key"));
        first.is("make");
        assert_eq!(jobs.all().iter().map(|job| &*job.command).collect::<Vec<_>>(), ["make", ""]);
        assert_eq!(jobs.end_if(|name| (name == "b").then(String::new)), 0);
        assert_eq!(jobs.end_if(|_| Some("revoked".into())), 2);
        assert_eq!(jobs.end_if(|_| Some("again".into())), 0, "once");
        assert_eq!((first.why(), second.why()), (Some("revoked".into()), Some("revoked".into())));
        drop((first, second));
        assert!(jobs.all().is_empty());
        assert_eq!(line.read(&mut [0]).unwrap(), 0, "its end is heard");
        drop(other);
    }
}
