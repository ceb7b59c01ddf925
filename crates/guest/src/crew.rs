//! The threads with which a process arrives, besides its first one: made in it, each with its number, by clones that the
//! first one is led through, and given what is theirs before they run.
//!
//! To make them takes far longer than all else that a thread needs. So the sender says their numbers with the address
//! space, while the process runs on at its old place; what has changed until the image comes is made good then.

use crate::births::SHARED;
use crate::clone::{Cloned, Cloner, come_out};
use crate::forward::Failed;
use crate::sandbox::Sandbox;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tern_image::process::MOST_THREADS;
use tern_image::{Reserve, ThreadImage, Unmovable};
use tern_tracee::inject::{Injection, Site};
use tern_tracee::listener::Listener;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result, procfs};

/// How long a first thread may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// A process that threads are made in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// Our range in it.
    pub(crate) reserve: Reserve,
    /// Its memory.
    pub(crate) memory: &'a Memory,
    /// The listening end of its filter.
    pub(crate) listener: &'a Listener,
    /// Where numbers are chosen.
    pub(crate) sandbox: &'a Sandbox,
}

/// The threads of a process besides its first one, as long as they have not been given what is theirs.
#[derive(Debug, Default)]
pub(crate) struct Crew {
    /// Those that are announced, by their own numbers.
    wanted: BTreeSet<i32>,
    /// Those that are there: at their births, under our hand.
    made: BTreeMap<i32, Injection>,
}

impl Crew {
    /// Takes the numbers that there shall be, which another node says. Whether they are numbers of threads.
    pub(crate) fn want(&mut self, numbers: impl IntoIterator<Item = i32>, first: i32) -> bool {
        self.wanted = numbers.into_iter().take(MOST_THREADS).collect();
        self.wanted.iter().all(|number| *number > 1 && *number != first)
    }

    /// Makes those that are missing by way of the first one, which is handed back as it was, and has those end that are
    /// not wanted any more.
    ///
    /// # Errors
    /// If a number is taken, or the kernel refuses. What has been made ends with the process.
    pub(crate) fn muster(
        &mut self,
        place: Place<'_>,
        first: Injection,
    ) -> std::result::Result<Injection, Failed> {
        let done: Vec<i32> = self.made.keys().copied().filter(|n| !self.wanted.contains(n)).collect();
        for number in done {
            if let Some(thread) = self.made.remove(&number) {
                place.end(thread)?;
            }
        }
        let missing: Vec<i32> =
            self.wanted.iter().copied().filter(|number| !self.made.contains_key(number)).collect();
        if missing.is_empty() {
            return Ok(first);
        }
        let args = [SHARED as u64, 0, 0, 0, 0, 0];
        let cloner = Cloner { reserve: place.reserve, listener: place.listener };
        let (before, mask) = (*first.before(), first.mask());
        let mut maker = first.finish()?;
        let host = maker.pid();
        // The kernel counts on from the last number by itself.
        let mut next = None;
        for number in missing {
            if next != Some(number) {
                place.sandbox.next_pid(number).map_err(|error| not_given(error, number))?;
            }
            next = number.checked_add(1);
            let Cloned::Made(begun) = cloner.make(maker, &before, &args)? else {
                let what = "no further thread can be made in it".into();
                return Err(Error::Astray { what, pid: host }.into());
            };
            let given;
            (maker, given) = come_out(host)?;
            if given != number {
                return Err(Unmovable::Pid(number).into());
            }
            self.made.insert(number, Injection::begin(begun, Site(place.reserve.start))?);
        }
        maker.set_registers(&before)?;
        maker.set_sigmask(mask)?;
        Ok(Injection::begin(maker, Site(place.reserve.start))?)
    }

    /// Gives them, all of which are there, what is theirs. Each then stands where it is to go on; in the order of the
    /// images.
    ///
    /// # Errors
    /// If one is not there, or gone.
    pub(crate) fn dress(mut self, place: Place<'_>, images: &[ThreadImage]) -> Result<Vec<Stopped>> {
        let gone = || Error::Gone { pid: place.memory.pid() };
        let mut threads = Vec::with_capacity(images.len());
        for image in images {
            threads.push(self.made.remove(&image.own_tid).ok_or_else(gone)?);
        }
        let theirs: Vec<&ThreadImage> = images.iter().collect();
        tern_image::thread::restore(&mut threads, &theirs, place.memory, place.reserve.wide_desk())?;
        let dressed = threads.into_iter().zip(images);
        dressed.map(|(thread, image)| thread.finish_with(&image.registers, image.sigmask)).collect()
    }
}

impl Place<'_> {
    /// Has a thread end that has not begun.
    fn end(self, mut thread: Injection) -> Result<()> {
        let pid = thread.pid();
        match self.listener.call_through(&mut thread, libc::SYS_exit, [0; 6], None) {
            Err(Error::Gone { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(Error::Astray { what: "it does not end".into(), pid }),
        }
    }

    /// Has the first thread end, before the others begin. Of that the kernel says nothing until they have ended as well.
    pub(crate) fn end_first(self, mut first: Injection) -> Result<()> {
        let pid = first.pid();
        let give_up = Instant::now() + PATIENCE;
        first.begin_call(libc::SYS_exit, [0; 6])?;
        while !procfs::has_ended(pid) {
            if Instant::now() > give_up || first.try_end_call()?.is_some() {
                return Err(Error::Astray { what: "its first thread does not end".into(), pid });
            }
            match self.listener.receive_new()? {
                Some(call) if call.pid == pid && i64::from(call.nr) == libc::SYS_exit => {
                    self.listener.pass(call.id)?;
                }
                Some(call) => self.listener.put_aside(call),
                None => std::thread::yield_now(),
            }
        }
        Ok(())
    }
}

fn not_given(error: std::io::Error, number: i32) -> Failed {
    match error.raw_os_error() {
        // What the kernel says to a number beyond its largest.
        Some(libc::EINVAL) => Unmovable::Pid(number).into(),
        _ => Error::Refused { operation: "choose a number", pid: number, source: error }.into(),
    }
}
