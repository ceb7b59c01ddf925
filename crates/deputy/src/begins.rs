//! What comes along with a file that a guest has just opened and has in hand: what home's kernel says of it, and its first
//! bytes, which the program asks for next, as a rule (docs/design/direct.md).
//!
//! The open has been made then, and its result is what home remembers of the call; only that it is told waits for one call of ours, by
//! which the deputy reads. If the process comes home, or the link breaks meanwhile, the result is found as it is, without the bytes.

use crate::chain::Chain;
use crate::family::Family;
use crate::member::Member;
use crate::perform::ours;
use crate::thread::Current;
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::os::fd::OwnedFd;
use std::time::SystemTime;
use tern_ids::{Epoch, HomePid};
use tern_migrate::message::{CallResult, FileWord, Message};
use tern_migrate::opened::{About, Content, MOST_BROUGHT};
use tern_syscall::{Arg, Call, Outcome};

/// Of files that are longer than what may come along this much does: they are seldom read from end to end.
const OF_LONG: u64 = 16 << 10;

/// A file whose first bytes the deputy reads.
#[derive(Debug)]
pub(crate) struct Brought {
    fd: i32,
    /// So many are wanted.
    length: u64,
    /// What is told then, to this life.
    result: CallResult,
    epoch: Epoch,
}

/// The call that reads them.
fn reads(fd: i32, length: u64) -> Call {
    let [zero, fd, length] = [0, u64::from(fd.cast_unsigned()), length].map(Arg::Value);
    let args = [fd, Arg::Room, length, zero.clone(), zero.clone(), zero];
    Call { nr: libc::SYS_pread64 as u32, args }
}

/// What the kernel says of a file.
pub(crate) fn about(file: &OwnedFd) -> Option<About> {
    let asked = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let said = statx(file, "", AtFlags::EMPTY_PATH, asked).ok()?;
    let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
    Some(About {
        // Of what else newer kernels say nobody has asked.
        mask: said.stx_mask & (asked | StatxFlags::MNT_ID).bits(),
        blksize: said.stx_blksize,
        attributes: said.stx_attributes.bits(),
        nlink: said.stx_nlink,
        uid: said.stx_uid,
        gid: said.stx_gid,
        mode: said.stx_mode,
        ino: said.stx_ino,
        size: said.stx_size,
        blocks: said.stx_blocks,
        attributes_mask: said.stx_attributes_mask.bits(),
        times: [said.stx_atime, said.stx_btime, said.stx_ctime, said.stx_mtime].map(time),
        rdev: (said.stx_rdev_major, said.stx_rdev_minor),
        dev: (said.stx_dev_major, said.stx_dev_minor),
        mnt_id: said.stx_mnt_id,
    })
}

impl Family {
    /// Has the deputy read the first bytes of the file that this call has opened; whether it does. Then the result is told when
    /// it has.
    pub(crate) fn brings_beginning(&mut self, tid: HomePid, current: &Current, result: &CallResult) -> bool {
        let fd = result.outcome.ret as i32;
        let is_said = |(of, word): &(i32, FileWord)| *of == fd && matches!(word, FileWord::Begins(_));
        let wanted = u64::from(current.request.brings).min(MOST_BROUGHT);
        if wanted == 0 || !result.files.iter().any(is_said) {
            return false;
        }
        let Some(member) = self.of_thread(tid).filter(|member| !member.job_stopped) else { return false };
        let length = match member.direct.length_if_settled(fd, SystemTime::now()) {
            None | Some(0) => return false,
            Some(size) if size <= wanted => size,
            Some(_) => wanted.min(OF_LONG),
        };
        let epoch = member.epoch;
        // It may have to follow a mask first.
        let idle = member.threads.get_mut(&tid).filter(|thread| thread.current.is_none());
        let Some(thread) = idle else { return false };
        thread.brought = Some(Box::new(Brought { fd, length, result: result.clone(), epoch }));
        let posted = self.post_next(tid, ours(reads(fd, length)), Chain::default());
        match posted {
            Ok(true) => self.ended(tid),
            Ok(false) => {}
            Err(_) => {
                if let Some(thread) = self.of_thread(tid).and_then(|member| member.threads.get_mut(&tid)) {
                    thread.brought = None;
                }
                return false;
            }
        }
        true
    }

    /// The deputy has read them, or has been kept from it: the result of the open is told, unless it is asked for anew. Then it is
    /// told as it is, without what is old by then, and to the life that asks.
    pub(crate) fn bring(&mut self, tid: HomePid, brought: Brought, outcome: &Outcome) {
        let Some(member) = self.of_thread(tid) else { return };
        let (epoch, result) = (brought.epoch, member.with_beginning(brought, outcome));
        let asked = member.threads.get(&tid).and_then(|thread| thread.next_call.as_ref());
        if epoch == member.epoch && asked.is_none_or(|next| next.number != result.number) {
            self.tell(tid, &Message::Result(Box::new(result)));
        }
    }
}

impl Member {
    fn with_beginning(&mut self, brought: Brought, outcome: &Outcome) -> CallResult {
        let Brought { fd, length, mut result, .. } = brought;
        self.calls[1] += outcome.carries();
        let read = u64::try_from(outcome.ret).ok().filter(|read| *read <= length);
        let begins = result.files.iter_mut().find_map(|(of, word)| match word {
            FileWord::Begins(begins) if *of == fd => Some(begins),
            _ => None,
        });
        if let (Some(size), Some(read), Some(bytes), Some(begins)) =
            (self.direct.length_if_unchanged(fd), read, outcome.outs.first(), begins)
        {
            let mut bytes = bytes.clone();
            bytes.resize(read as usize, 0);
            begins.content = Some(Content { bytes, ends: read == size });
        }
        result
    }
}

/// The same result as it is remembered, to be told when it is asked for again.
pub(crate) fn without_beginning(result: &CallResult) -> CallResult {
    let mut kept = CallResult { files: Vec::new(), ..result.clone() };
    kept.files.extend(result.files.iter().filter(|(_, word)| !matches!(word, FileWord::Begins(_))).cloned());
    kept
}
