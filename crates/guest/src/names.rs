//! Names of home's files that are known here: what programs ask of them is answered without a trip (docs/design/direct.md,
//! "Names").
//!
//! Home says what is in a directory, and from then on what changes, before anything that a process could hear of the change by. Without
//! a word from home what it has said is good for a second; and what files are like in any case, since another name of a file, or
//! a mapping, changes that without a word.

use crate::forward::Failed;
use crate::member::{GuestMemory, Process};
use crate::thread::Thread;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tern_migrate::names::{Asks, Listing, MOST_NAMES, NameWord, Named, OnPath, split};
use tern_migrate::opened::About;
use tern_syscall::{Memory, read_text};
use tern_tracee::listener::Notification;

/// How long what home has said is good without another word.
const TERM: Duration = Duration::from_secs(1);

/// Paths of so many bytes and more home is asked for.
const LONGEST: usize = 1024;

/// What is known of names.
#[derive(Debug, Default)]
pub struct Names {
    directories: HashMap<Vec<u8>, Directory>,
    /// When home was asked for what it has told last.
    heard: Option<Instant>,
}

#[derive(Debug)]
struct Directory {
    /// What it is like, if nothing has changed in it, and so also without following links.
    about: Option<Box<About>>,
    direct: bool,
    names: HashMap<Vec<u8>, Named>,
    looked: Instant,
}

/// What a call is answered.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Number(i64),
    /// These bytes, at an address; and a number.
    Bytes(u64, Vec<u8>, i64),
}

impl Names {
    /// Takes what home says.
    pub fn take(&mut self, word: NameWord) {
        match word {
            NameWord::Listed(listing) => self.list(*listing),
            NameWord::Changed(directory, name) => {
                if let Some(directory) = self.directories.get_mut(directory.as_slice()) {
                    directory.about = None;
                    directory.names.insert(name.as_slice().to_vec(), Named::Unknown);
                }
            }
            NameWord::Forget(directory) => drop(self.directories.remove(directory.as_slice())),
            NameWord::ForgetAll => self.directories.clear(),
        }
    }

    fn list(&mut self, listing: Listing) {
        let age = Duration::from_micros(listing.age.into());
        let names = listing.names.into_iter().take(MOST_NAMES);
        let names = names.map(|(name, named)| (name.as_slice().to_vec(), named)).collect();
        if let Some(looked) = Instant::now().checked_sub(age) {
            let (about, direct) = (Some(listing.about), listing.direct);
            let directory = Directory { about, direct, names, looked };
            self.directories.insert(listing.directory.as_slice().to_vec(), directory);
        }
    }

    /// Home has answered what it was asked then.
    pub fn hear(&mut self, asked: Instant) {
        self.heard = self.heard.max(Some(asked));
    }

    /// The link to home is cut.
    pub fn forget(&mut self) {
        self.directories.clear();
    }

    fn is_empty(&self) -> bool {
        self.directories.is_empty() || self.heard.is_none_or(|heard| heard.elapsed() >= TERM)
    }

    /// What a call for a path is answered; nothing if home has to be asked.
    fn answer(&self, asks: Asks, path: &[u8], args: &[u64; 6]) -> Option<Answer> {
        let (directory, name) = split(path)?;
        if matches!(asks, Asks::Stat(..) | Asks::Statx(_))
            && let Some(itself) = self.directories.get([path, b"/"].concat().as_slice())
            && let Some(answer) = itself.answer(asks, args)
        {
            return Some(answer);
        }
        let directory = self.directories.get(directory)?;
        let Some(named) = directory.names.get(name) else {
            return Some(Answer::Number(-i64::from(libc::ENOENT)));
        };
        match (asks, named) {
            (_, Named::Unknown) => None,
            (Asks::Access, Named::File(_) | Named::Other) => Some(Answer::Number(0)),
            (Asks::Link(at), Named::Link(to)) => {
                // An int, to the kernel.
                let room = usize::try_from(*args.get(at + 1)? as i32).ok()?;
                let to = &to.as_slice()[..to.len().min(room)];
                Some(Answer::Bytes(args[at], to.to_vec(), to.len() as i64))
            }
            (Asks::Link(_), _) => Some(Answer::Number(-i64::from(libc::EINVAL))),
            (_, Named::File(_)) if directory.looked.elapsed() >= TERM => None,
            (_, Named::File(about)) => like(about, asks, args),
            _ => None,
        }
    }
}

/// What a call is answered that asks what this is like.
fn like(about: &About, asks: Asks, args: &[u64; 6]) -> Option<Answer> {
    match asks {
        Asks::Stat(at, _) => Some(Answer::Bytes(args[at], about.stat(), 0)),
        Asks::Statx(_) => Some(Answer::Bytes(args[4], about.statx(), 0)),
        _ => None,
    }
}

impl Directory {
    /// What a call is answered that is about the directory itself.
    fn answer(&self, asks: Asks, args: &[u64; 6]) -> Option<Answer> {
        let by_name = matches!(asks, Asks::Stat(_, true) | Asks::Statx(true));
        self.about.as_ref().filter(|_| self.direct || !by_name).and_then(|about| like(about, asks, args))
    }
}

impl Thread {
    /// Answers a call about a name that is known here; false if it is another call, or one that home is to make.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn answer_of_names(
        &mut self,
        trap: &Notification,
        process: &mut Process,
    ) -> std::result::Result<bool, Failed> {
        // A call that home may have made already keeps its number; what waits to be written changes what files are like; and who reads
        // another node's files by himself may hear of something that home has not said.
        if process.names.is_empty() || self.talk.call_open || self.talk.partial.is_some() {
            return Ok(false);
        }
        let Some(on) = OnPath::of(trap.nr, &trap.args).filter(|_| process.files.are_homes()) else {
            return Ok(false);
        };
        let mut memory = GuestMemory(&process.memory);
        let Ok(path) = read_text(&mut memory, trap.args[on.path], LONGEST) else { return Ok(false) };
        let Some(path) = path.strip_suffix(b"\0").filter(|path| on.begins(&trap.args, path)) else {
            return Ok(false);
        };
        let ret = match process.names.answer(on.asks, path, &trap.args) {
            Some(Answer::Number(ret)) => ret,
            Some(Answer::Bytes(at, bytes, ret)) if memory.write(at, &bytes).is_ok() => ret,
            _ => return Ok(false),
        };
        self.talk.resumes = None;
        process.lend_again()?;
        self.reply(trap.id, ret)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inhand;
    use tern_syscall::ByteBuf;

    fn bytes(of: &str) -> ByteBuf {
        ByteBuf::from(of.as_bytes().to_vec())
    }

    fn about() -> Box<About> {
        Box::new(inhand::tests::about(3))
    }

    fn known() -> Names {
        let mut names = Names::default();
        let listed = vec![
            (bytes("file"), Named::File(about())),
            (bytes("link"), Named::Link(bytes("file"))),
            (bytes("directory"), Named::Other),
        ];
        let (directory, about) = (bytes("/d/"), Box::new(About { mode: 0o040_755, ..*about() }));
        let listing = Listing { directory, about, direct: false, names: listed, age: 0 };
        names.take(NameWord::Listed(Box::new(listing)));
        names.hear(Instant::now());
        names
    }

    #[test]
    fn what_is_known_is_answered_and_the_rest_is_homes() {
        let names = known();
        assert!(!names.is_empty());
        let args = [0, 100, 200, 2, 500, 0];
        let of = |asks, path: &str| names.answer(asks, path.as_bytes(), &args);
        let number = |errno: i32| Some(Answer::Number(-i64::from(errno)));
        assert_eq!(of(Asks::Open, "/d/none"), number(libc::ENOENT));
        assert_eq!(of(Asks::Open, "/d/file"), None, "a descriptor is home's");
        assert_eq!(of(Asks::Access, "/d/file"), number(0));
        assert_eq!(of(Asks::Access, "/d/link"), None, "where it leads is not known");
        assert_eq!(of(Asks::Link(1), "/d/file"), number(libc::EINVAL));
        assert_eq!(of(Asks::Link(2), "/d/link"), Some(Answer::Bytes(200, b"fi".to_vec(), 2)));
        assert_eq!(of(Asks::Stat(1, true), "/d/file"), Some(Answer::Bytes(100, about().stat(), 0)));
        assert_eq!(of(Asks::Statx(false), "/d/file"), Some(Answer::Bytes(500, about().statx(), 0)));
        assert_eq!(of(Asks::Stat(1, true), "/d/link"), None);
        assert_eq!(of(Asks::Stat(1, true), "/d/directory"), None);
        assert_eq!(of(Asks::Open, "/e/none"), None);
        assert!(matches!(of(Asks::Stat(1, false), "/d"), Some(Answer::Bytes(100, ..))));
        assert_eq!(of(Asks::Stat(1, true), "/d"), None, "a link may lead to it");
        assert_eq!(of(Asks::Open, "/d/./none"), None, "another way to write it is another directory");
    }

    #[test]
    fn what_has_changed_is_not_known() {
        let mut names = known();
        let args = [0, 100, 200, 2, 500, 0];
        names.take(NameWord::Changed(bytes("/d/"), bytes("new")));
        assert_eq!(names.answer(Asks::Open, b"/d/new", &args), None);
        assert_eq!(names.answer(Asks::Stat(1, false), b"/d", &args), None, "its times are others");
        assert!(names.answer(Asks::Open, b"/d/other", &args).is_some());
        names.take(NameWord::Forget(bytes("/d/")));
        assert_eq!(names.answer(Asks::Open, b"/d/other", &args), None);
        assert!(names.is_empty());
    }

    #[test]
    fn without_a_word_nothing_is_believed_for_long() {
        let mut names = known();
        names.heard = Instant::now().checked_sub(TERM);
        assert!(names.is_empty());
        names.hear(Instant::now());
        let directory = names.directories.get_mut(b"/d/".as_slice()).unwrap();
        directory.looked = Instant::now().checked_sub(TERM).unwrap();
        let args = [0, 100, 200, 2, 500, 0];
        assert_eq!(names.answer(Asks::Stat(1, true), b"/d/file", &args), None);
        assert_eq!(names.answer(Asks::Access, b"/d/file", &args), Some(Answer::Number(0)));
    }
}
