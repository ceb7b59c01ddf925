//! The image of a process except its pages, and checks whether it can be moved.

use crate::advice::MemoryAdvice;
use crate::apply::InjectedSpace;
use crate::guards;
use crate::layout::{Backing, Layout};
use crate::limits::{self, Limit};
use crate::pending;
use crate::reserve::Reserve;
use crate::rights::{self, Rights};
use crate::sharing::relative_in_same_memory;
use crate::thread::ThreadImage;
use crate::unmovable::Unmovable;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use tern_ids::HomePid;
use tern_tracee::pagemap::Run;
use tern_tracee::procfs::Status;
use tern_tracee::{Memory, Registers, Result, procfs};

/// Maximum number of threads of an image, so that their description fits one message.
pub const MAX_THREADS: usize = 4096;

/// Checks a process from outside, without stopping it, for reasons not to move it that are cheap to
/// find. `tracer` is Tern's own pid if it already traces the process or some of its threads, else 0.
/// Returns the rights of the process, which decide whether it may be moved.
///
/// # Errors
/// `Err` if the process is gone; `Ok(Err)` with the reason.
pub fn check(pid: i32, tracer: i32) -> Result<std::result::Result<Rights, Unmovable>> {
    // The thread through which the process is examined may exit during the check, for example
    // because another thread executes a program. Its /proc entries then look as if the process had
    // never had memory or namespaces.
    let mut found = check_once(pid, tracer);
    for _ in 0..MAX_RETRIES {
        let sure = !matches!(
            found,
            Err(_) | Ok(Err(Unmovable::NoMemory | Unmovable::ChildrenElsewhere | Unmovable::NoVdso))
        );
        if sure || procfs::status(pid).is_err() {
            break;
        }
        found = check_once(pid, tracer);
    }
    found
}

/// How often [`check`] retries if a thread may have exited meanwhile.
const MAX_RETRIES: u32 = 8;

fn check_once(pid: i32, tracer: i32) -> Result<std::result::Result<Rights, Unmovable>> {
    let first = procfs::status(pid)?;
    let threads = procfs::thread_statuses(pid);
    let live: Vec<&Status> = threads.iter().filter(|thread| !thread.has_exited()).collect();
    // If the first thread has exited, /proc shows little about it. So everything except `own_pid` is
    // read from a live thread.
    let pid = procfs::live_thread(pid);
    let status = procfs::status(pid)?;
    // A shim detaches from a process that comes home, except from threads whose calls have not ended.
    let reason = if let Some(other) = procfs::tracers_of(&threads).into_iter().find(|other| *other != tracer)
    {
        Some(Unmovable::Traced(other))
    } else if status.resident_kib == 0 {
        Some(Unmovable::NoMemory)
    } else if first.own_pid == 1 {
        Some(Unmovable::Init)
    } else if children_elsewhere(pid) {
        Some(Unmovable::ChildrenElsewhere)
    } else if program_is_32_bit(pid) {
        Some(Unmovable::ThirtyTwoBit)
    } else if status.threads as usize > MAX_THREADS {
        Some(Unmovable::Threads(status.threads))
    } else if live.iter().any(|thread| thread.seccomp != 0) {
        Some(Unmovable::Seccomp)
    } else if live.iter().any(|thread| thread.shadow_stack) {
        Some(Unmovable::ShadowStack)
    } else if status.code_kib > 0 && procfs::vdso(pid)?.is_none() {
        Some(Unmovable::NoVdso)
    } else {
        special_descriptor(pid)?
            .or_else(|| relative_in_same_memory(pid, status.parent).map(Unmovable::SharedAddressSpace))
    };
    Ok(reason.map_or_else(|| Ok(rights::rights(pid, &live)), Err))
}

/// Checks the registers of a stopped process: a 64-bit program may run 32-bit code.
///
/// # Errors
/// If it does.
pub fn check_registers(registers: &Registers) -> std::result::Result<(), Unmovable> {
    if registers.is_64_bit() { Ok(()) } else { Err(Unmovable::ThirtyTwoBit) }
}

/// Whether the program is a 32-bit ELF file. If the file cannot be read, the registers show it
/// later.
fn program_is_32_bit(pid: i32) -> bool {
    const CLASS_32: [u8; 5] = [0x7f, b'E', b'L', b'F', 1];
    let mut begin = [0; 5];
    let read = File::open(format!("/proc/{pid}/exe")).and_then(|mut file| file.read_exact(&mut begin));
    read.is_ok() && begin == CLASS_32
}

/// Whether the process called unshare or setns for its children. Its first child would be pid 1 of
/// a namespace that exists only at home. As long as there is no such child, /proc shows no
/// namespace for children.
fn children_elsewhere(pid: i32) -> bool {
    let space = |which: &str| std::fs::read_link(format!("/proc/{pid}/ns/{which}"));
    space("pid").is_ok_and(|own| space("pid_for_children").map_or(true, |theirs| theirs != own))
}

fn special_descriptor(pid: i32) -> Result<Option<Unmovable>> {
    let special = [&b"anon_inode:[io_uring]"[..], b"anon_inode:[userfaultfd]", b"anon_inode:[perf_event]"];
    let all = procfs::descriptors(pid)?;
    let found = all.iter().find(|link| special.contains(&link.as_slice()));
    Ok(found.map(|link| Unmovable::SpecialDescriptor(String::from_utf8_lossy(link).into_owned())))
}

/// A signal's action in the kernel's form: handler, flags, restorer, mask.
pub type Action = [u64; 4];

/// Number of signals.
pub const SIGNALS: usize = 64;

/// The handler value for the default action.
pub const SIG_DFL: u64 = 0;
/// The handler value for an ignored signal.
pub const SIG_IGN: u64 = 1;

/// The image of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessImage {
    /// [`crate::VERSION`].
    pub version: u16,
    /// The process's name (comm).
    pub command: Vec<u8>,
    /// Start and end of code and of data, start and end of the heap, start of the stack, start and
    /// end of the arguments and of the environment (in the order of struct prctl_mm_map, without
    /// its last three fields).
    pub bounds: [u64; 11],
    /// The auxiliary vector.
    pub auxv: Vec<u8>,
    /// personality(2).
    pub personality: u64,
    /// The commands for which it is registered with membarrier(2), as a bit mask.
    pub membarrier: u32,
    /// Its limits on memory. A limit that is missing is unlimited.
    pub limits: Vec<Limit>,
    /// The actions of signals 1 to 64.
    pub actions: Vec<Action>,
    /// The address space.
    pub layout: Layout,
    /// Its guard pages (MADV_GUARD_INSTALL), in order.
    pub guards: Vec<Run>,
    /// Its threads. The process's first thread is at index 0, unless it has exited.
    pub threads: Vec<ThreadImage>,
}

impl ProcessImage {
    /// Captures a process. One of its threads is under injection; its layout and its threads have
    /// been captured before. Writes only to Tern's own range.
    ///
    /// # Errors
    /// If it is gone.
    pub fn capture(
        space: &mut dyn InjectedSpace,
        memory: &Memory,
        reserve: Reserve,
        layout: Layout,
        threads: Vec<ThreadImage>,
    ) -> Result<Self> {
        let pid = memory.pid();
        let stat = procfs::stat(pid)?;
        let brk = space.call("read the heap's end", libc::SYS_brk, [0; 6])?;
        let f = |n| stat.field(n);
        let bounds = [f(26), f(27), f(45), f(46), f(47), brk, f(28), f(48), f(49), f(50), f(51)];
        let personality =
            space.call("read the personality", libc::SYS_personality, [0xffff_ffff, 0, 0, 0, 0, 0])?;
        let membarrier = membarrier(space)?;
        let actions = signal_actions(space, memory, reserve)?;
        let command = procfs::status(pid)?.name;
        let auxv = procfs::auxv(pid)?;
        let limits = limits::of(pid)?;
        let guards = guards::of(pid, &layout)?;
        Ok(Self {
            version: crate::VERSION,
            command,
            bounds,
            auxv,
            personality,
            membarrier,
            limits,
            actions,
            layout,
            guards,
            threads,
        })
    }

    /// Updates the image of a guest with the state that changes while it runs away from home. One
    /// of its threads is under injection.
    ///
    /// # Errors
    /// If it is gone.
    pub fn update_guest(
        &mut self,
        space: &mut dyn InjectedSpace,
        memory: &Memory,
        layout: Layout,
        threads: Vec<ThreadImage>,
    ) -> Result<()> {
        self.bounds[5] = space.call("read the heap's end", libc::SYS_brk, [0; 6])?;
        self.membarrier = membarrier(space)?;
        self.guards = guards::of(memory.pid(), &layout)?;
        (self.layout, self.threads) = (layout, threads);
        Ok(())
    }

    /// Restores everything but the threads into a process that already has this layout. One of its
    /// threads is under injection.
    ///
    /// `title` is the command line that `ps` shows on this node; `None` at home, where the process
    /// has its own arguments.
    ///
    /// # Errors
    /// If the process is gone or a call fails.
    pub fn restore(
        &self,
        space: &mut dyn InjectedSpace,
        memory: &Memory,
        reserve: Reserve,
        title: Option<&str>,
    ) -> Result<()> {
        let scratch = reserve.scratch();
        let status = procfs::status(memory.pid())?;
        let changed = status.ignored | status.caught;
        for (at, action) in self.actions.iter().enumerate() {
            if *action == DEFAULT_ACTION && !may_differ(changed, at) {
                continue;
            }
            // To set an action that ignores the signal discards it if it waits, although it is
            // blocked. Signals wait at home, where such an action mostly is there already.
            let signal = at as u64 + 1;
            if title.is_some() || !is_ignored(action[0], at as i32 + 1) {
                set_signal_action(space, memory, reserve, signal, action)?;
            } else if signal_action(space, memory, reserve, signal)? != *action {
                pending::set_ignoring_action(space, memory, reserve, signal, action)?;
            }
        }
        self.set_bounds(space, memory, reserve, title)?;
        for bit in (0..32).map(|at| 1 << at).filter(|bit| self.membarrier & bit != 0) {
            // A command that this kernel does not have fails here, and will fail when the program
            // uses it.
            let _unknown = space.injection().call(libc::SYS_membarrier, [bit.into(), 0, 0, 0, 0, 0])?;
        }
        if let Some(title) = title {
            if self.personality != 0 {
                space.call(
                    "set the personality",
                    libc::SYS_personality,
                    [self.personality, 0, 0, 0, 0, 0],
                )?;
            }
            let mut name = title.as_bytes().to_vec();
            name.truncate(15);
            name.push(0);
            memory.write_forced(scratch, &name)?;
            let args = [libc::PR_SET_NAME as u64, scratch, 0, 0, 0, 0];
            space.call("set the name", libc::SYS_prctl, args)?;
            limits::set_all(memory.pid(), &self.limits);
        }
        guards::install(&self.guards, space, memory.pid(), title.is_none())?;
        self.lock(space, memory.pid(), status.locked_kib > 0)
    }

    /// Locks the private memory that the program has locked, and unlocks all other private memory.
    /// If this node's limit is lower than home's, the memory stays unlocked and may be swapped.
    fn lock(&self, space: &mut dyn InjectedSpace, pid: i32, is_any_locked: bool) -> Result<()> {
        if !is_any_locked && !self.layout.regions.iter().any(|region| region.advice.is_locked()) {
            return Ok(());
        }
        let locked: Vec<_> =
            procfs::smaps(pid)?.into_iter().filter(|m| MemoryAdvice::of(m).is_locked()).collect();
        for region in self.layout.regions.iter().filter(|region| region.is_private()) {
            let overlapping = locked.iter().filter(|m| m.start < region.end && region.start < m.end);
            let is_same =
                |m: &&procfs::Mapping| MemoryAdvice::of(m).mlock2_flags() == region.advice.mlock2_flags();
            let already_locked: u64 = overlapping
                .clone()
                .filter(is_same)
                .map(|m| m.end.min(region.end) - m.start.max(region.start))
                .sum();
            let args = |flags| [region.start, region.len(), flags, 0, 0, 0];
            match region.advice.mlock2_flags() {
                Some(flags) => {
                    // Memory without access cannot be faulted in, but can be locked on fault. A
                    // file that this node opened by its location is locked on fault too: it may be
                    // on another node, and all its pages would be fetched now.
                    let file = match region.backing {
                        Backing::File { file, .. } => self.layout.files.get(file as usize),
                        _ => None,
                    };
                    let on_fault = u64::from(region.prot == 0 || file.is_some_and(|f| f.location.is_some()));
                    // Locked memory must be locked again even so: its pages that were never written
                    // are missing after a return home, and the kernel faults them in.
                    if already_locked == region.len() && (flags | on_fault) != 0 {
                        continue;
                    }
                    let done = space.call("lock memory", libc::SYS_mlock2, args(flags | on_fault));
                    if let Err(error) = done {
                        tracing::warn!(pid, %error, "cannot lock memory that the program has locked");
                    }
                }
                None if overlapping.clone().next().is_none() => {}
                None => drop(space.call("unlock memory", libc::SYS_munlock, args(0))?),
            }
        }
        Ok(())
    }

    /// Sets the kernel's record of the bounds of code, data, heap, stack and arguments. This is
    /// needed at home too: mmap and munmap do not change the kernel's record of the heap's end.
    /// Without this, a program that shrank its heap while away would get brk results for
    /// memory that is not mapped.
    fn set_bounds(
        &self,
        space: &mut dyn InjectedSpace,
        memory: &Memory,
        reserve: Reserve,
        title: Option<&str>,
    ) -> Result<()> {
        let mut words: Vec<u64> = self.bounds.to_vec();
        if let Some(title) = title {
            // The title is at the end of Tern's range, and `ps` shows it instead of the arguments.
            let mut title = title.as_bytes().to_vec();
            title.truncate(2000);
            title.push(0);
            let title_at = reserve.end() - 2048;
            memory.write_forced(title_at, &title)?;
            words[7] = title_at;
            words[8] = title_at + title.len() as u64;
        }
        let scratch = reserve.scratch();
        let auxv = &self.auxv[..self.auxv.len().min(46 * 8)];
        let auxv_at = scratch + 256;
        memory.write_forced(auxv_at, auxv)?;
        words.push(auxv_at);
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.extend_from_slice(&(auxv.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&u32::MAX.to_le_bytes()); // exe_fd -1: not changed
        memory.write_forced(scratch, &bytes)?;
        const PR_SET_MM_MAP: u64 = 14;
        let args = [libc::PR_SET_MM as u64, PR_SET_MM_MAP, scratch, bytes.len() as u64, 0, 0];
        space.call("set the bounds of memory", libc::SYS_prctl, args).map(drop)
    }

    /// Checks an image received from another node.
    ///
    /// # Errors
    /// With the defect found.
    pub fn check(&self) -> std::result::Result<(), &'static str> {
        self.layout.check()?;
        if self.version != crate::VERSION {
            return Err("an image of another version");
        }
        if !limits::are_valid(&self.limits) {
            return Err("an image with unsupported limits");
        }
        if !guards::are_valid(&self.guards, &self.layout) {
            return Err("an image with misplaced guard pages");
        }
        if self.actions.len() != SIGNALS || self.command.len() > 64 || self.auxv.len() > 4096 {
            return Err("an image with invalid lengths");
        }
        let own: HashSet<i32> = self.threads.iter().map(|t| t.own_tid).collect();
        let home: HashSet<HomePid> = self.threads.iter().map(|t| t.tid).collect();
        let count = self.threads.len();
        if count == 0 || count > MAX_THREADS || own.len() != count || home.len() != count {
            return Err("an image with no, too many or duplicate threads");
        }
        if own.iter().any(|tid| *tid <= 1) || home.iter().any(|tid| tid.0 <= 1) {
            return Err("a thread with an invalid number");
        }
        // The process may have started to run 32-bit code after it was checked.
        if self.threads.iter().any(|thread| !thread.registers.is_64_bit()) {
            return Err("an image of 32-bit code");
        }
        Ok(())
    }
}

/// Whether a signal's default action is to ignore it.
#[must_use]
pub fn is_ignored_by_default(signal: i32) -> bool {
    matches!(signal, libc::SIGCHLD | libc::SIGURG | libc::SIGWINCH | libc::SIGCONT)
}

/// The default action.
const DEFAULT_ACTION: Action = [SIG_DFL; 4];

/// Whether the action of signal `at + 1` may differ from [`DEFAULT_ACTION`]; this saves most of the
/// 64 calls. SIGCHLD may have flags even if its handler is the default.
fn may_differ(changed: u64, at: usize) -> bool {
    changed >> at & 1 == 1 || at as i32 + 1 == libc::SIGCHLD
}

/// The commands for which a process is registered with membarrier. Zero on kernels before 6.3,
/// which do not report them.
fn membarrier(space: &mut dyn InjectedSpace) -> Result<u32> {
    const GET_REGISTRATIONS: u64 = 1 << 9;
    let registered = space.injection().call(libc::SYS_membarrier, [GET_REGISTRATIONS, 0, 0, 0, 0, 0])?;
    Ok(u32::try_from(registered).unwrap_or(0))
}

/// Reads the actions of all signals.
///
/// # Errors
/// If the process is gone.
pub(crate) fn signal_actions(
    space: &mut dyn InjectedSpace,
    memory: &Memory,
    reserve: Reserve,
) -> Result<Vec<Action>> {
    let status = procfs::status(memory.pid())?;
    let changed = status.ignored | status.caught;
    let mut all = vec![DEFAULT_ACTION; SIGNALS];
    for (at, action) in all.iter_mut().enumerate().filter(|(at, _)| may_differ(changed, *at)) {
        let signal = at as u64 + 1;
        *action = signal_action(space, memory, reserve, signal)?;
    }
    Ok(all)
}

/// Reads the action of a signal.
fn signal_action(
    space: &mut dyn InjectedSpace,
    memory: &Memory,
    reserve: Reserve,
    signal: u64,
) -> Result<Action> {
    let scratch = reserve.scratch();
    space.call("read a signal's action", libc::SYS_rt_sigaction, [signal, 0, scratch, 8, 0, 0])?;
    let mut action = DEFAULT_ACTION;
    for (word, at) in action.iter_mut().zip((scratch..).step_by(8)) {
        *word = memory.word(at)?;
    }
    Ok(action)
}

/// Whether this handler value ignores the signal.
#[must_use]
pub fn is_ignored(handler: u64, signal: i32) -> bool {
    handler == SIG_IGN || handler == SIG_DFL && is_ignored_by_default(signal)
}

/// Sets the action of a signal, except SIGKILL and SIGSTOP.
///
/// # Errors
/// If the process is gone.
pub fn set_signal_action(
    space: &mut dyn InjectedSpace,
    memory: &Memory,
    reserve: Reserve,
    signal: u64,
    action: &Action,
) -> Result<()> {
    if signal == libc::SIGKILL as u64 || signal == libc::SIGSTOP as u64 {
        return Ok(());
    }
    let scratch = reserve.scratch();
    let bytes: Vec<u8> = action.iter().flat_map(|w| w.to_le_bytes()).collect();
    memory.write_forced(scratch, &bytes)?;
    space.call("set a signal's action", libc::SYS_rt_sigaction, [signal, scratch, 0, 8, 0, 0]).map(drop)
}
