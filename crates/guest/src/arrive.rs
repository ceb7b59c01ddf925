//! An empty process becomes a guest.
//!
//! ```text
//!  offer   judged; a process with the right pid is made in the sandbox          → Accepted
//!  space   its own memory is removed, the filter installed, regions mapped      → Want
//!  pages   written, round by round
//!  image   bounds, actions, thread                                              → Ready
//!  go      registers; it runs                                                   → Running
//! ```
//! A failure before `Go` ends the process here; at its old place nothing has happened.

use crate::member::{Member, State};
use crate::space::{GuestSpace, Shown, apply};
use std::collections::HashSet;
use std::rc::Rc;
use tern_image::content::Cache;
use tern_image::{Layout, ProcessImage, Reserve, Unmovable};
use tern_migrate::message::{Conversation, Machine, Offer};
use tern_migrate::{target, wall};
use tern_tracee::inject::{self, Injection, SYSCALL, Site};
use tern_tracee::listener::{Instruction, Listener};
use tern_tracee::pagemap::Run;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, PAGE, Result};

/// A guest in the making.
#[derive(Debug)]
pub struct Arriving {
    /// What was offered.
    pub offer: Offer,
    injection: Option<Injection>,
    listener: Option<Rc<Listener>>,
    shown: Shown,
    layout: Option<Layout>,
    missing: HashSet<u32>,
    image: Option<(Box<ProcessImage>, Conversation)>,
}

/// Why a process may not come here, where the wall clock shows `clock`.
///
/// # Errors
/// With the sentence for home.
pub fn judge(offer: &Offer, ours: &Machine, clock: u64) -> std::result::Result<(), String> {
    if offer.version != tern_image::VERSION {
        return Err(format!("image version {} is not known here ({})", offer.version, tern_image::VERSION));
    }
    let theirs = &offer.machine;
    let missing: Vec<&str> = theirs
        .cpu_flags
        .iter()
        .filter(|f| ours.cpu_flags.binary_search(f).is_err())
        .map(String::as_str)
        .collect();
    if !missing.is_empty() {
        return Err(format!("the processor here lacks {}", missing.join(", ")));
    }
    // Without faulting CPUID the program could find features here that home does not have.
    if theirs.cpu_flags != ours.cpu_flags || theirs.xstate_len != ours.xstate_len {
        return Err("the processor here has other features than home's".into());
    }
    // What the kernel is told not to use is missing in its list, and found by a program all the same.
    if theirs.cpuid != ours.cpuid {
        return Err("the processor here tells programs of other features than home's (CPUID)".into());
    }
    if theirs.vdso != ours.vdso {
        return Err("the kernel here has another vDSO than home's".into());
    }
    wall::judge(offer.wall, clock).map_err(|behind| behind.to_string())?;
    if offer.own_pid <= 1 {
        return Err(Unmovable::Init.to_string());
    }
    Ok(())
}

impl Arriving {
    /// Begins, with a fresh process of the sandbox.
    ///
    /// # Errors
    /// If it is gone.
    pub fn begin(offer: Offer, child: Stopped) -> Result<Member> {
        let host = child.pid();
        let injection = Injection::begin(child, inject::own_site())?;
        let (pid, own_pid, epoch, reserve) = (offer.pid, offer.own_pid, offer.epoch, offer.reserve);
        let arriving = Self {
            offer,
            injection: Some(injection),
            listener: None,
            shown: Shown::new(),
            layout: None,
            missing: HashSet::new(),
            image: None,
        };
        Member::new(pid, own_pid, host, epoch, reserve, State::Arriving(Box::new(arriving)))
    }

    /// Takes an address space; says which files' content is missing. When none is, the space is built.
    ///
    /// # Errors
    /// If it is unsound, or cannot be built.
    pub fn take_space(&mut self, layout: Layout, memory: &Memory, cache: &mut Cache) -> Result<Vec<u32>> {
        layout.check().map_err(|what| self.astray(what))?;
        if layout.regions.iter().any(|r| self.offer.reserve.meets(r.start, r.end)) {
            return Err(self.astray("a layout that covers our range"));
        }
        let missing = layout.files.iter().enumerate().filter(|(_, f)| !cache.has(f)).map(|(at, _)| at as u32);
        self.missing = missing.collect();
        self.layout = Some(layout);
        self.build(memory, cache)?;
        Ok(self.missing.iter().copied().collect())
    }

    /// Takes a piece of a file's content.
    ///
    /// # Errors
    /// If it is not the content that was announced.
    pub fn take_file(
        &mut self,
        file: u32,
        offset: u64,
        piece: &[u8],
        memory: &Memory,
        cache: &mut Cache,
    ) -> Result<()> {
        let layout = self.layout.as_ref();
        let reference =
            layout.and_then(|l| l.files.get(file as usize)).filter(|_| self.missing.contains(&file));
        let reference = reference.ok_or_else(|| self.astray("a file that was not wanted"))?;
        let complete = cache.put(reference, offset, piece);
        if complete.map_err(|e| self.astray(&e.to_string()))? {
            self.missing.remove(&file);
            self.build(memory, cache)?;
        }
        Ok(())
    }

    fn build(&mut self, memory: &Memory, cache: &Cache) -> Result<()> {
        if !self.missing.is_empty() {
            return Ok(());
        }
        let Some(layout) = &self.layout else { return Ok(()) };
        let Some(injection) = &mut self.injection else { return Ok(()) };
        let reserve = self.offer.reserve;
        let listener = match &self.listener {
            Some(listener) => Rc::clone(listener),
            None => {
                empty(injection, memory, layout, reserve)?;
                let listener = Rc::new(Listener::install(injection, reserve.room(), &filter())?);
                self.listener = Some(Rc::clone(&listener));
                listener
            }
        };
        let mut space = GuestSpace { injection, listener: &listener, cache, files: &layout.files };
        apply(&mut space, layout, reserve, &mut self.shown)
    }

    /// The listening end of its filter, once it has one.
    #[must_use]
    pub fn listener(&self) -> Option<&Rc<Listener>> {
        self.listener.as_ref()
    }

    /// Takes pages.
    ///
    /// # Errors
    /// If they lie outside its memory.
    pub fn take_pages(&mut self, runs: &[Run], bytes: &[u8], memory: &Memory) -> Result<()> {
        let reserve = self.offer.reserve;
        // Before the space is built this process still is a copy of ourselves.
        if self.listener.is_none() || !self.missing.is_empty() {
            return Err(self.astray("pages before their address space"));
        }
        if runs.iter().any(|&(start, len)| reserve.meets(start, start.saturating_add(len))) {
            return Err(self.astray("pages in our range"));
        }
        target::write_pages(memory, runs, bytes)
    }

    /// Forgets pages.
    ///
    /// # Errors
    /// If they lie outside its memory.
    pub fn forget(&mut self, runs: &[Run], cache: &Cache) -> Result<()> {
        let reserve = self.offer.reserve;
        if runs.iter().any(|&(start, len)| reserve.meets(start, start.saturating_add(len))) {
            return Err(self.astray("pages in our range"));
        }
        let astray = self.astray("pages before their address space");
        let (Some(injection), Some(listener)) = (&mut self.injection, &self.listener) else {
            return Err(astray);
        };
        let pid = injection.pid();
        let mut space = GuestSpace { injection, listener, cache, files: &[] };
        target::forget(&mut space, pid, runs)
    }

    /// Takes the rest; the process could be resumed after it.
    ///
    /// # Errors
    /// If it is unsound, or cannot be restored here.
    pub fn take_image(
        &mut self,
        image: Box<ProcessImage>,
        talk: Conversation,
        memory: &Memory,
        cache: &Cache,
    ) -> Result<()> {
        image.check().map_err(|what| self.astray(what))?;
        wall::wait(talk.wall, wall::now()).map_err(|behind| self.astray(&behind.to_string()))?;
        let (offer, astray) = (&self.offer, self.astray("an image before its address space"));
        let title = Member::title(offer.home, offer.pid, &offer.command);
        let (Some(injection), Some(listener)) = (&mut self.injection, &self.listener) else {
            return Err(astray);
        };
        let mut space = GuestSpace { injection, listener, cache, files: &image.layout.files };
        image.restore(&mut space, memory, offer.reserve, Some(&title))?;
        injection.stopped()?.set_xstate(&image.thread.xstate)?;
        self.image = Some((image, talk));
        Ok(())
    }

    /// Everything is there: the guest with its registers, stopped; what it is to go on with.
    ///
    /// # Errors
    /// If something is missing, or the guest is gone.
    pub fn finish(mut self) -> Result<Arrived> {
        let astray = self.astray("a start without an image");
        let (Some(injection), Some((image, talk)), Some(listener)) =
            (self.injection.take(), self.image.take(), self.listener.take())
        else {
            return Err(astray);
        };
        let stopped = injection.finish_with(&image.thread.registers, image.thread.sigmask)?;
        Ok(Arrived { stopped, image, talk, listener, shown: self.shown })
    }

    fn astray(&self, what: &str) -> Error {
        let pid = self.injection.as_ref().map_or(0, Injection::pid);
        Error::Astray { what: format!("its sender sent {what}"), pid }
    }
}

/// A guest ready to run.
#[derive(Debug)]
pub struct Arrived {
    /// Itself.
    pub stopped: Stopped,
    /// Its image.
    pub image: Box<ProcessImage>,
    /// Its calls and signals.
    pub talk: Conversation,
    /// The listening end of its filter.
    pub listener: Rc<Listener>,
    /// How its files are shown.
    pub shown: Shown,
}

/// The filter that every guest runs under, from the table of calls.
fn filter() -> Vec<Instruction> {
    tern_syscall::filter().iter().map(|i| Instruction { code: i.code, jt: i.jt, jf: i.jf, k: i.k }).collect()
}

/// Turns a copy of ourselves into an empty process: our range with the stub, the kernel's own mappings where
/// the process had them, nothing else; no descriptors, no capabilities.
fn empty(injection: &mut Injection, memory: &Memory, layout: &Layout, reserve: Reserve) -> Result<()> {
    let pid = injection.pid();
    let now = procfs::maps(pid)?;
    let kernels: Vec<&Mapping> = now.iter().filter(|m| m.is_kernels() && m.name != b"[vsyscall]").collect();
    let targets: Vec<u64> = layout.kernels().map(|r| r.start).collect();
    let same = kernels.len() == targets.len()
        && kernels.iter().zip(layout.kernels()).all(|(m, r)| m.len() == r.len());
    if !same {
        return Err(Error::Astray {
            what: "the kernel's own mappings are not those of its home".into(),
            pid,
        });
    }
    let code = inject::own_site().0;
    if reserve.meets(code & !(PAGE - 1), code + 2) {
        return Err(Error::Astray { what: "our code lies where our range must be".into(), pid });
    }
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let fixed = (libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    tern_image::thread::withdraw(injection)?;
    // First away from where anything is or will be: old and new places may overlap. Then our range.
    let away = gap(&now, layout, reserve);
    let mut at = away;
    for m in &kernels {
        mremap(injection, m.start, m.len(), at)?;
        at += m.len();
    }
    injection.must(
        "map our range",
        libc::SYS_mmap,
        [reserve.start, Reserve::LEN, prot, fixed, u64::MAX, 0],
    )?;
    memory.write(reserve.start, &SYSCALL)?;
    let exec = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    injection.must("protect the stub", libc::SYS_mprotect, [reserve.start, PAGE, exec, 0, 0, 0])?;
    injection.set_site(Site(reserve.start));
    for (start, end) in [
        (0, reserve.start.min(away)),
        (reserve.end().min(at), reserve.start.max(away)),
        (reserve.end().max(at), tern_tracee::TASK_END),
    ] {
        if start < end {
            injection.must("remove our memory", libc::SYS_munmap, [start, end - start, 0, 0, 0, 0])?;
        }
    }
    let mut at = away;
    for (m, target) in kernels.iter().zip(targets) {
        mremap(injection, at, m.len(), target)?;
        at += m.len();
    }
    injection.must("close descriptors", libc::SYS_close_range, [0, u64::from(u32::MAX), 0, 0, 0, 0])?;
    drop_capabilities(injection, memory, reserve)
}

fn mremap(injection: &mut Injection, from: u64, len: u64, to: u64) -> Result<()> {
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    injection.must("place the vDSO", libc::SYS_mremap, [from, len, len, flags, to, 0]).map(drop)
}

/// An address range that is free now and in the layout, large enough for the kernel's own mappings.
fn gap(now: &[Mapping], layout: &Layout, reserve: Reserve) -> u64 {
    const ROOM: u64 = 1 << 20;
    let free = |start: u64| {
        let end = start + ROOM;
        !now.iter().any(|m| m.start < end && start < m.end)
            && !layout.regions.iter().any(|r| r.start < end && start < r.end)
            && !reserve.meets(start, end)
    };
    (1u64..).map(|n| n << 32).find(|&start| free(start)).unwrap_or(1 << 32)
}

fn drop_capabilities(injection: &mut Injection, memory: &Memory, reserve: Reserve) -> Result<()> {
    // struct __user_cap_header_struct: version 3, pid 0 (itself); then two empty sets of three words.
    let mut bytes = 0x2008_0522_u32.to_le_bytes().to_vec();
    bytes.resize(8 + 24, 0);
    memory.write(reserve.room(), &bytes)?;
    let args = [reserve.room(), reserve.room() + 8, 0, 0, 0, 0];
    injection.must("drop capabilities", libc::SYS_capset, args).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::{Epoch, HomePid, MigrationId, NodeId, ShimId};

    fn machine() -> Machine {
        let cpu_flags = ["avx", "fpu", "sse2"].map(String::from).to_vec();
        Machine { cpu_flags, cpuid: vec![3, 1 << 26], xstate_len: 832, vdso: ([7; 32], vec![0x4000, 0x2000]) }
    }

    fn offer() -> Offer {
        Offer {
            version: tern_image::VERSION,
            migration: MigrationId([1; 16]),
            pid: HomePid(4711),
            epoch: Epoch(1),
            home: NodeId(1),
            shim: ShimId([2; 16]),
            own_pid: 4711,
            command: "work".into(),
            reserve: Reserve { start: Reserve::AREA },
            wall: 1_000_000_000,
            machine: machine(),
        }
    }

    #[test]
    fn offers_are_declined_with_a_sentence() {
        let clock = 1_000_000_000;
        assert_eq!(judge(&offer(), &machine(), clock), Ok(()));
        let why = |change: fn(&mut Offer)| {
            let mut offer = offer();
            change(&mut offer);
            judge(&offer, &machine(), clock).unwrap_err()
        };
        assert!(why(|o| o.version += 1).starts_with("image version"));
        assert_eq!(why(|o| o.machine.cpu_flags.push("zfp".into())), "the processor here lacks zfp");
        assert!(why(|o| drop(o.machine.cpu_flags.pop())).contains("other features"));
        assert!(why(|o| o.machine.cpuid[0] = 2).contains("CPUID"));
        assert!(why(|o| o.machine.vdso.0 = [8; 32]).contains("vDSO"));
        assert!(why(|o| o.own_pid = 1).starts_with("init:"));
        assert!(why(|o| o.wall += 51_000_000).starts_with("the clock here is 51 ms behind"));
    }
}
