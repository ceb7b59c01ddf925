//! A process at home, as the sending half of a migration looks at it.

use crate::company::Company;
use crate::member::Member;
use crate::space::HomeSpace;
use std::collections::HashSet;
use std::fs::File;
use tern_ids::HomePid;
use tern_image::layout::Layout;
use tern_image::object::{ObjectId, Objects};
use tern_image::{FileRef, ProcessImage, Reserve, ThreadImage};
use tern_migrate::message::{Conversation, Talk};
use tern_migrate::source::{Movable, SendError, Shared};
use tern_syscall::waits_here;
use tern_tracee::inject::Injection;
use tern_tracee::procfs;
use tern_tracee::{Error, Memory, Result};

/// So often the maps of a running process are read again when they do not fit together.
const MOST_LOOKS: u32 = 5;

/// What sending needs of a process at home.
pub(crate) struct Leaving<'a> {
    pub(crate) member: &'a mut Member,
    pub(crate) image: Option<Box<ProcessImage>>,
    /// With whom it leaves.
    pub(crate) company: Company,
    /// What they share.
    pub(crate) objects: &'a Objects,
    /// It is ready to stand.
    pub(crate) ready: bool,
    /// The shared memory whose content goes with it.
    pub(crate) carries: HashSet<ObjectId>,
    /// The memory that it shares, as it stands.
    pub(crate) live: HashSet<ObjectId>,
    /// It must stand before this can go on.
    pub(crate) must_stand: bool,
}

impl Movable for Leaving<'_> {
    fn describe(&mut self) -> std::result::Result<Layout, SendError> {
        let pid = self.member.memory.pid();
        let stands = self.member.stands();
        if stands {
            // While it ran and was sent it may have begun what keeps it at home: a filter, a ring, a child in its memory.
            self.member.files.measure_again();
            tern_image::process::check(pid, std::process::id() as i32)??;
        }
        // The maps of a running process are read in pieces, which need not fit; and in the middle of an exec an
        // address space is not complete: the kernel's own mappings come late.
        let expected = self.member.machine.as_ref().map_or(0, |m| m.vdso.lengths.len());
        for _ in 0..MOST_LOOKS {
            let maps = procfs::smaps(pid)?;
            let layout = Layout::describe(&maps, self.member.reserve, &mut self.member.files);
            if stands {
                let layout = layout?;
                let live = layout.files.iter().filter(|file| file.live);
                self.live = live.map(|file| (file.device, file.inode)).collect();
                return Ok(layout);
            }
            if let Ok(layout) = layout
                && layout.check().is_ok()
                && layout.kernels().count() == expected
            {
                return Ok(layout);
            }
        }
        self.must_stand = true;
        Err(SendError::Restless)
    }

    fn crew(&self) -> Vec<i32> {
        let others = self.member.living().filter(|thread| thread.tid != self.member.pid);
        others.map(|thread| thread.own_tid).collect()
    }

    fn content(&mut self, file: &FileRef) -> std::io::Result<File> {
        open_mapped(self.member, file)
    }

    fn freeze(&mut self) -> Result<bool> {
        self.ready = true;
        if !self.company.ready {
            return Ok(false);
        }
        // In the middle of a transfer that we have cut short it has not been let go on.
        self.must_stand = !self.member.stands();
        Ok(!self.must_stand)
    }

    fn shared(&mut self, files: &[FileRef]) -> std::io::Result<Option<Vec<Shared>>> {
        if self.company.alone && self.live.is_empty() {
            return Ok(Some(Vec::new()));
        }
        if !self.company.stands || !self.company.complete {
            return Ok(None);
        }
        Shared::to_carry(files, self.objects, &self.company.taken, &mut self.carries).map(Some)
    }

    fn capture(&mut self, layout: Layout) -> Result<(ProcessImage, Conversation)> {
        let member = &mut *self.member;
        let astray = || Error::Astray { what: "captured while it ran".into(), pid: member.pid.0 };
        let (reserve, memory) = (member.reserve.ok_or_else(astray)?, Memory::open(member.memory.pid())?);
        let mut injections = member.injections()?;
        let captured = member.capture(&mut injections, &memory, reserve, layout);
        // A call that went astray is the error to report, not that it cannot be ended either.
        let mut finished = Ok(());
        for injection in injections {
            let tid = HomePid(injection.pid());
            let stopped = injection.finish();
            finished = finished.and(stopped.and_then(|stopped| {
                member.thread(tid)?.standing = Some(stopped);
                Ok(())
            }));
        }
        let image = captured?;
        finished?;
        self.image = Some(Box::new(image.clone()));
        let talk = |thread: &ThreadImage| {
            let known = member.threads.get(&thread.tid);
            let registers = &thread.registers;
            let code = registers
                .restart_code()
                .filter(|_| !waits_here(registers.orig_rax as u32, &registers.arguments()));
            Talk {
                signals: known.map_or(0, |known| known.signals),
                resumes: code,
                partial: known.and_then(|known| known.partial),
                used: member.shares.get(&thread.tid).copied().unwrap_or_default(),
                ..Talk::default()
            }
        };
        let talks = image.threads.iter().map(talk).collect();
        Ok((image, Conversation { talks, used: member.used, ..Conversation::default() }))
    }
}

impl Member {
    fn capture(
        &self,
        injections: &mut [Injection],
        memory: &Memory,
        reserve: Reserve,
        layout: Layout,
    ) -> Result<ProcessImage> {
        let numbers = injections.iter().map(|injection| {
            let tid = HomePid(injection.pid());
            (tid, self.threads.get(&tid).map_or(0, |thread| thread.own_tid))
        });
        let numbers: Vec<(HomePid, i32)> = numbers.collect();
        let mut threads = tern_image::thread::capture(injections, &numbers, memory, reserve)?;
        // The first one first, unless it has ended.
        threads.sort_by_key(|thread| thread.tid != self.pid);
        let gone = || Error::Gone { pid: self.pid.0 };
        let mut space = HomeSpace::new(injections.first_mut().ok_or_else(gone)?, memory, reserve, &[]);
        ProcessImage::capture(&mut space, memory, reserve, layout, threads)
    }
}

/// Opens the content of a file that a process maps.
pub(crate) fn open_mapped(member: &Member, file: &FileRef) -> std::io::Result<File> {
    let maps = procfs::maps(member.memory.pid()).map_err(std::io::Error::other)?;
    member.files.content(file, &maps)
}
