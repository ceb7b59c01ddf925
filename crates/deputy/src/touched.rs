//! Calls by which a process away would see or change at home what is shared and written away, or take it with it: they are made
//! at home, when it is there.

use crate::family::Family;
use crate::member::Member;
use crate::perform::refused;
use crate::sharers::who_opens;
use std::collections::{BTreeSet, HashSet};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use tern_ids::HomePid;
use tern_image::object::ObjectId;
use tern_migrate::message::{CallRequest, Message};
use tern_syscall::{Arg, Arguments, Shape};
use tern_tracee::registers::restart;

impl Family {
    /// Fetches a process home for a call that has the effect it should have only then. Its caller makes it again.
    pub(crate) fn make_it_at_home(&mut self, tid: HomePid, pid: HomePid, request: &CallRequest) {
        let name = tern_syscall::row(request.call.nr).map_or("a call", |row| row.name);
        self.fetch(pid, &format!("shared memory: {name} of what it maps is done at home only"));
        let mut again = refused(request.number, 0);
        again.outcome.ret = request.resumes.filter(|c| restart::is(*c)).unwrap_or(restart::NOINTR);
        self.tell(tid, &Message::Result(Box::new(again)));
    }

    /// If a call would see or change at home what is shared and written away: who is to come home before it is made. That is
    /// its caller, unless that has only inherited the descriptor.
    pub(crate) fn touches_shared(&self, tid: HomePid, request: &CallRequest) -> Option<HomePid> {
        // Who closes it tells others, as a rule, that they find it written.
        const TOUCHING: [i64; 22] = [
            libc::SYS_close,
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_readv,
            libc::SYS_writev,
            libc::SYS_preadv,
            libc::SYS_pwritev,
            libc::SYS_preadv2,
            libc::SYS_pwritev2,
            libc::SYS_ftruncate,
            libc::SYS_fallocate,
            libc::SYS_fsync,
            libc::SYS_fdatasync,
            libc::SYS_sync_file_range,
            libc::SYS_sendfile,
            libc::SYS_copy_file_range,
            libc::SYS_splice,
            libc::SYS_mmap,
            libc::SYS_fadvise64,
            libc::SYS_vmsplice,
        ];
        let call = &request.call;
        if self.inodes.is_empty() || !TOUCHING.contains(&i64::from(call.nr)) {
            return None;
        }
        let member = self.members.values().find(|m| m.threads.contains_key(&tid))?;
        let Some(Arguments::Fixed(shapes)) = tern_syscall::row(call.nr).map(|row| row.arguments) else {
            return None;
        };
        let descriptors = call.args.iter().zip(shapes).filter(|(_, shape)| matches!(shape, Shape::Fd));
        let touched = descriptors.into_iter().find_map(|(arg, _)| {
            let Arg::Value(fd) = arg else { return None };
            let meta = std::fs::metadata(format!("/proc/{}/fd/{}", member.pid, *fd as i32)).ok()?;
            let inode = (meta.dev(), meta.ino());
            self.inodes.iter().find(|(_, known)| **known == inode).map(|(id, _)| *id)
        })?;
        let shares = |m: &&Member| m.is_away() && m.files.objects.contains(&touched);
        let sharer = Some(member).filter(shares).or_else(|| self.members.values().find(shares));
        sharer.map(|member| member.pid)
    }

    /// If a process away ends by this call, or executes another program, and is the last that has the content of something
    /// there: what it has written would be gone with its guest. So it comes home before it makes the call.
    pub(crate) fn takes_shared_along(&self, tid: HomePid, request: &CallRequest) -> Option<HomePid> {
        const ALL: [i64; 3] = [libc::SYS_exit_group, libc::SYS_execve, libc::SYS_execveat];
        let nr = i64::from(request.call.nr);
        if self.inodes.is_empty() || !ALL.contains(&nr) && nr != libc::SYS_exit {
            return None;
        }
        let member = self.members.values().find(|m| m.threads.contains_key(&tid))?;
        if member.lent || nr == libc::SYS_exit && member.living().count() > 1 {
            return None;
        }
        // Those that end at the same time do not rely on each other.
        let ends = |m: &Member| {
            let mut calls = m.threads.values().filter_map(|thread| thread.current.as_ref());
            calls.any(|current| ALL.contains(&i64::from(current.request.call.nr)))
        };
        let others = |id: &ObjectId| {
            let has = |m: &&Member| m.is_away() && !m.lent && m.files.objects.contains(id) && !ends(m);
            self.members.values().filter(has).any(|other| other.pid != member.pid)
        };
        let exits = nr == libc::SYS_exit || nr == libc::SYS_exit_group;
        let lost = |id: &&ObjectId| !others(id) && !self.is_out_of_reach(**id, member.pid, exits);
        member.files.objects.iter().find(lost).map(|_id| member.pid)
    }

    /// Whether nobody can reach an object any more once this process does not map it, or has exited: memory that was mapped
    /// without a file; a file without a name that nobody else has open (a Java machine removes its own before it ends).
    fn is_out_of_reach(&self, id: ObjectId, pid: HomePid, exits: bool) -> bool {
        let Some(file) = self.objects.get(id) else { return false };
        let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
        let name = name.as_os_str().as_bytes();
        if name.starts_with(b"/dev/zero") {
            return true;
        }
        let Ok(meta) = file.metadata() else { return false };
        let unnamed = meta.nlink() == 0 && !name.starts_with(b"/SYSV");
        let (this, itself) = (HashSet::from([(meta.dev(), meta.ino())]), BTreeSet::from([pid.0]));
        exits && unnamed && who_opens(&this, &itself).is_none()
    }
}
