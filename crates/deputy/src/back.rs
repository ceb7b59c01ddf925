//! A deputy becomes the process again.
//!
//! The skeleton of its address space is still there; only differences are mapped, and only pages with content
//! come over. Then each thread's last call is settled ([`crate::settle`]), and those of which the deputy must go on with
//! that linger.

use crate::blob;
use crate::family::Family;
use crate::member::{Member, State};
use crate::out::raise_natively;
use crate::settle::{Settled, deliver_piece, deliver_result};
use crate::space::HomeSpace;
use std::collections::{BTreeSet, HashMap};
use tern_ids::HomePid;
use tern_image::layout::Layout;
use tern_image::process::{DEFAULT, IGNORE};
use tern_image::{ProcessImage, Reserve, ThreadImage, apply};
use tern_migrate::message::{CallRequest, Conversation};
use tern_migrate::{Partial, target};
use tern_tracee::inject::{Injection, Site};
use tern_tracee::pagemap::Run;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::registers::Registers;
use tern_tracee::siginfo::Siginfo;
use tern_tracee::stop::{FOLLOW_THREADS, Stopped};
use tern_tracee::{Error, Memory, PAGE, Result};

/// A process on its way home.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    /// What comes is of this journey.
    pub(crate) begun: bool,
    /// The address space that it has had built here last.
    pub(crate) layout: Layout,
    pub(crate) bytes: u64,
    /// Pages of its arguments and its environment that are to be forgotten, and of which nothing has come since: `ps` reads
    /// them, and the process itself may in a call that is still made here, so they stay until all is here.
    forgotten: BTreeSet<u64>,
    /// What has come last of it, as long as others that share its memory are still on their way.
    pub(crate) arrived: Option<Box<(ProcessImage, Conversation)>>,
}

/// A thread that is home but for its last call.
#[derive(Debug)]
pub(crate) struct Lingering {
    image: ThreadImage,
    carried: Vec<Siginfo>,
    partial: Option<Partial>,
}

/// What became of a thread that lingered.
#[derive(Default)]
enum Lingered {
    /// It is home.
    Over,
    /// It lingers on, with this call.
    Still(Option<Box<CallRequest>>),
    /// It is gone.
    #[default]
    Gone,
}

/// A thread that is home, in our hand, and what it is to go on with.
struct Home<'a> {
    injection: Injection,
    image: &'a ThreadImage,
    registers: Registers,
    carried: Vec<Siginfo>,
}

impl Member {
    pub(crate) fn injection(&self, stopped: Stopped) -> Result<(Injection, Reserve)> {
        let astray = || Error::Astray { what: "no deputy".into(), pid: self.pid.0 };
        let reserve = self.reserve.ok_or_else(astray)?;
        Ok((Injection::begin(stopped, Site(reserve.start + blob::call_site()))?, reserve))
    }

    /// Gives the standing deputy this address space; it goes on with its call afterwards.
    ///
    /// # Errors
    /// If it is gone, or a step fails.
    pub(crate) fn take_space(&mut self, stopped: Stopped, layout: &Layout) -> Result<()> {
        let reserve = match self.checked(layout) {
            Ok(reserve) => reserve,
            Err(error) => return self.go_on(stopped).and(Err(error)),
        };
        let (mut injection, _) = self.injection(stopped)?;
        let now = procfs::smaps(self.memory.pid())?;
        let files: HashMap<(u64, u64), u32> =
            layout.files.iter().enumerate().map(|(at, f)| ((f.device, f.inode), at as u32)).collect();
        let identify = |m: &Mapping| files.get(&(m.device, m.inode)).copied();
        let mut steps = apply::plan(&now, layout, Some(reserve), &identify);
        // Mailboxes are not the program's, nor the data of large calls.
        let mut ours: Vec<(u64, u64)> = self.outside(reserve).collect();
        // Nor is what holds a file for the way home: another layout may want it yet. It goes with our range.
        ours.extend(self.holders.iter().copied().chain(self.holders_to_be()));
        let is_ours = |start: u64, end: u64| ours.iter().any(|(a, b)| start < *b && *a < end);
        steps.retain(|s| !matches!(s, apply::Step::Unmap { start, end } if is_ours(*start, *end)));
        let mut space = HomeSpace::new(&mut injection, &self.memory, reserve, &layout.files);
        space.hold(&steps, &now, &self.files);
        let done = apply::carry_out(&steps, &mut space);
        let stopped = injection.finish()?;
        self.go_on(stopped)?;
        done
    }

    fn checked(&self, layout: &Layout) -> Result<Reserve> {
        let astray = |what: &str| Error::Astray { what: what.into(), pid: self.pid.0 };
        layout.check().map_err(astray)?;
        let reserve = self.reserve.ok_or_else(|| astray("no deputy"))?;
        let meets = |r: &tern_image::Region| {
            reserve.meets(r.start, r.end) || self.outside(reserve).any(|(a, b)| r.start < b && a < r.end)
        };
        if layout.regions.iter().any(meets) {
            return Err(astray("its node sent a layout that covers our range"));
        }
        Ok(reserve)
    }

    /// Where it has mailboxes that do not lie in our range.
    fn outside(&self, reserve: Reserve) -> impl Iterator<Item = (u64, u64)> {
        self.threads.values().filter_map(|t| t.mailbox.as_ref()).flat_map(move |m| m.outside(reserve))
    }

    /// Takes pages; the deputy does not look at them.
    ///
    /// # Errors
    /// If they lie outside its memory.
    pub(crate) fn take_pages(&mut self, runs: &[Run], bytes: &[u8]) -> Result<()> {
        if let Some(reserve) = self.reserve
            && runs.iter().any(|&(start, len)| {
                let end = start.saturating_add(len);
                reserve.meets(start, end) || self.outside(reserve).any(|(a, b)| start < b && a < end)
            })
        {
            return Err(Error::Astray { what: "its node sent pages in our range".into(), pid: self.pid.0 });
        }
        target::write_pages(&self.memory, runs, bytes)?;
        if let State::Inbound(inbound) = &mut self.state {
            inbound
                .forgotten
                .retain(|page| !runs.iter().any(|(start, len)| (*start..start + len).contains(page)));
        }
        Ok(())
    }

    /// Has the standing deputy forget pages; it goes on with its call afterwards.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn forget(&mut self, stopped: Stopped, runs: &[Run]) -> Result<()> {
        let title = procfs::stat(stopped.pid())?.title();
        let (mut injection, reserve) = self.injection(stopped)?;
        let ours: Vec<(u64, u64)> = self.outside(reserve).chain([(reserve.start, reserve.end())]).collect();
        let is_safe = |&(s, l): &Run| !ours.iter().any(|(a, b)| s < *b && *a < s.saturating_add(l));
        let mut safe: Vec<Run> = Vec::new();
        for &(start, len) in runs.iter().filter(|run| is_safe(run)) {
            let end = start.saturating_add(len);
            safe.extend(apply::subtract(start, end, [title].into_iter()).map(|(s, e)| (s, e - s)));
            if let State::Inbound(inbound) = &mut self.state {
                let pages = (start.max(title.0)..end.min(title.1)).step_by(PAGE as usize);
                inbound.forgotten.extend(pages);
            }
        }
        let mut space = HomeSpace::new(&mut injection, &self.memory, reserve, &[]);
        let done = target::forget(&mut space, self.pid.0, &safe);
        let stopped = injection.finish()?;
        self.go_on(stopped)?;
        done
    }

    /// Gives a process that is home everything but what is its threads', in one of these, which are all of its threads,
    /// under injection.
    fn restore(&mut self, injections: &mut [Injection], image: &ProcessImage) -> Result<()> {
        let pid = self.pid.0;
        let reserve = self.reserve.ok_or_else(|| Error::Astray { what: "no deputy".into(), pid })?;
        let first = injections.first_mut().ok_or(Error::Gone { pid })?;
        let mut space = HomeSpace::new(first, &self.memory, reserve, &[]);
        if let State::Inbound(inbound) = &mut self.state {
            let forgotten: Vec<Run> = inbound.forgotten.iter().map(|page| (*page, PAGE)).collect();
            target::forget(&mut space, pid, &forgotten)?;
        }
        image.restore(&mut space, &self.memory, reserve, None)?;
        // Not by its number: the first thread may have ended.
        let memory = Memory::open(first.pid())?;
        self.give_timers(first, &memory, reserve)?;
        self.actions.clone_from(&image.actions);
        if self.threads.values().all(|thread| thread.lingering.is_none()) {
            return Ok(());
        }
        // What it forks from now on at home is none of ours, and has no use for our range.
        let dont_fork = [reserve.start, Reserve::LEN, libc::MADV_DONTFORK as u64, 0, 0, 0];
        first.must("keep our range to one process", libc::SYS_madvise, dont_fork).map(drop)
    }

    /// The last step for threads: they get back what is their own, and stand. With the last ones our range goes.
    fn finish(&mut self, home: Vec<Home<'_>>, last: bool) -> Result<()> {
        let pid = self.pid.0;
        let reserve = self.reserve.ok_or_else(|| Error::Astray { what: "no deputy".into(), pid })?;
        // Others may be home already, and gone.
        let seen = home.first().map_or(self.memory.pid(), |home| home.injection.pid());
        let memory = Memory::open(seen)?;
        let images: Vec<&ThreadImage> = home.iter().map(|home| home.image).collect();
        let (mut injections, rest): (Vec<Injection>, Vec<_>) =
            home.into_iter().map(|home| (home.injection, (home.registers, home.carried))).unzip();
        let desk = if last { reserve.wide_desk() } else { reserve.narrow_desk() };
        tern_image::thread::restore(&mut injections, &images, &memory, desk)?;
        let vdso = Site::in_vdso(&memory, &procfs::maps(memory.pid())?)?;
        let count = injections.len();
        for (at, ((mut injection, image), (registers, carried))) in
            injections.into_iter().zip(images).zip(rest).enumerate()
        {
            // What lingers may need its own longer than this one.
            let mailbox = self.thread(image.tid)?.mailbox.take();
            self.leftover.extend(mailbox.and_then(|mailbox| mailbox.large()));
            let own = (self.own_pid, image.own_tid);
            raise_natively(&mut injection, &memory, reserve, own, &carried)?;
            if last && at + 1 == count {
                injection.set_site(vdso);
                self.release(&mut injection, reserve)?;
            }
            injection.stopped()?.set_options(FOLLOW_THREADS)?;
            let stopped = injection.finish_with(&registers, image.sigmask)?;
            let thread = self.thread(image.tid)?;
            thread.is_home();
            thread.standing = Some(stopped);
        }
        Ok(())
    }

    /// A thread that lingered is home now, with these registers.
    fn linger_over(&mut self, stopped: Stopped, lingering: &Lingering, registers: &Registers) -> Result<()> {
        let last = !self.threads.values().any(|t| t.tid != lingering.image.tid && t.lingering.is_some());
        let injection = self.injection(stopped)?.0;
        let (image, carried) = (&lingering.image, lingering.carried.clone());
        self.finish(vec![Home { injection, image, registers: *registers, carried }], last)
    }

    /// The call with which a standing thread lingered has ended: it is home now. Else the call that is to be made for the
    /// rest of its transfer, or nothing.
    ///
    /// # Errors
    /// If it is gone.
    fn linger_ended(&mut self, stopped: Stopped) -> Result<Lingered> {
        let memory = Memory::open(stopped.pid())?;
        let thread = self.thread(HomePid(stopped.pid()))?;
        let ended = thread.mailbox.as_ref().is_some_and(crate::mailbox::Mailbox::is_done);
        let current = if ended { thread.current.take() } else { None };
        let (Some(mailbox), Some(current)) = (&mut thread.mailbox, current) else {
            return self.go_on(stopped).map(|()| Lingered::Still(None));
        };
        let outcome = mailbox.collect(&current);
        let astray = || Error::Astray { what: "it does not linger".into(), pid: stopped.pid() };
        let mut lingering = thread.lingering.take().ok_or_else(astray)?;
        let mut registers = lingering.image.registers;
        let (number, signals) = (current.request.number, current.request.signals);
        if let Some(partial) = deliver_piece(&memory, &mut registers, &outcome, lingering.partial)? {
            (lingering.image.registers, lingering.partial) = (registers, Some(partial));
            thread.lingering = Some(lingering);
            let rest = self.the_rest(&registers, number, signals)?;
            return self.go_on(stopped).map(|()| Lingered::Still(Some(Box::new(rest))));
        }
        // Nothing that comes now is for a guest: there is none.
        self.linger_over(stopped, &lingering, &registers).map(|()| Lingered::Over)
    }

    /// A signal for which the program has a handler reaches a thread that lingers: it gets its program's registers back,
    /// with the kernel's own code for the interrupted call, and then the signal, all natively.
    fn called_off(&mut self, stopped: Stopped) -> Result<()> {
        let now = stopped.registers()?;
        let info = stopped.siginfo()?;
        let in_call = self.is_in_call(&now);
        let memory = Memory::open(stopped.pid())?;
        let thread = self.thread(HomePid(stopped.pid()))?;
        let astray = || Error::Astray { what: "it does not linger".into(), pid: stopped.pid() };
        let mut lingering = thread.lingering.take().ok_or_else(astray)?;
        let mut registers = lingering.image.registers;
        if in_call && let (Some(mailbox), Some(current)) = (&mut thread.mailbox, thread.current.take()) {
            // What the call has written until now, a sleep's rest among it, is the program's.
            let outcome = mailbox.cut_short(&current, now.rax.cast_signed());
            deliver_result(&memory, &mut registers, &outcome, lingering.partial)?;
        }
        lingering.carried.push(info);
        self.linger_over(stopped, &lingering, &registers)
    }
}

impl Family {
    /// Everything of a process is here: makes the deputy the process again. Threads whose last call is still to end
    /// linger, and those whose call is to be made now are returned; the others stand.
    ///
    /// # Errors
    /// If it is gone, or the image is unsound.
    pub(crate) fn come_home(
        &mut self,
        pid: HomePid,
        image: &ProcessImage,
        talk: &Conversation,
    ) -> Result<Option<Vec<(HomePid, CallRequest)>>> {
        let astray = |what: &str| Error::Astray { what: what.into(), pid: pid.0 };
        image.check().map_err(astray)?;
        let Some(member) = self.members.get(&pid) else { return Ok(None) };
        let known = member.living().all(|thread| image.threads.iter().any(|t| t.tid == thread.tid));
        if !known || image.threads.len() != member.living().count() || image.threads.len() != talk.talks.len()
        {
            return Err(astray("its node sent other threads than it has"));
        }
        self.call_to_stand(pid)?;
        let mut settled = Vec::with_capacity(image.threads.len());
        for (thread, talk) in image.threads.iter().zip(&talk.talks) {
            settled.push(loop {
                let Some(stopped) = self.stand(thread.tid)? else { return Ok(None) };
                self.take_result(pid, thread.tid);
                let Some(member) = self.members.get_mut(&pid) else { return Ok(None) };
                match member.settle(stopped, thread, talk)? {
                    Settled::Soon => std::thread::yield_now(),
                    settled => break settled,
                }
            });
        }
        let Some(member) = self.members.get_mut(&pid) else { return Ok(None) };
        let (mut home, mut linger, mut rests) = (Vec::new(), Vec::new(), Vec::new());
        for ((thread, talk), settled) in image.threads.iter().zip(&talk.talks).zip(settled) {
            // Signals that the last life has taken over and not delivered, and those that it has not taken over.
            let unheard = member.thread(thread.tid)?.unheard.drain(..);
            let unheard = unheard.filter(|(count, _)| *count > talk.signals).map(|(_, info)| info);
            let mut carried: Vec<Siginfo> =
                talk.carried.iter().filter_map(|i| i.as_slice().try_into().ok()).collect();
            carried.extend(unheard);
            let (stopped, registers, rest, partial) = match settled {
                Settled::Registers(stopped, registers) => {
                    let injection = member.injection(stopped)?.0;
                    home.push(Home { injection, image: thread, registers, carried });
                    continue;
                }
                Settled::Linger(stopped, registers) => (stopped, registers, false, talk.partial),
                Settled::Rest(stopped, registers, partial) => (stopped, registers, true, Some(partial)),
                Settled::Soon => continue,
            };
            if rest {
                rests.push((thread.tid, member.the_rest(&registers, talk.call, talk.signals)?));
            }
            let image = ThreadImage { registers, ..thread.clone() };
            member.thread(thread.tid)?.lingering = Some(Box::new(Lingering { image, carried, partial }));
            linger.push(stopped);
        }
        // What lingers lends its hand if nobody else can.
        let mut hands: Vec<Injection> = Vec::new();
        if home.is_empty()
            && let Some(stopped) = linger.pop()
        {
            hands.push(member.injection(stopped)?.0);
        }
        match home.first_mut() {
            Some(home) => member.restore(std::slice::from_mut(&mut home.injection), image)?,
            None => member.restore(&mut hands, image)?,
        }
        for injection in hands {
            linger.push(injection.finish()?);
        }
        let lingers = !linger.is_empty();
        member.finish(home, !lingers)?;
        for stopped in linger {
            member.go_on(stopped)?;
        }
        member.state = if lingers { State::Lingering } else { State::Resident };
        Ok(Some(rests))
    }

    /// Has the deputy of a thread that lingers make the call for the rest of its transfer.
    pub(crate) fn make_rest(&mut self, tid: HomePid, request: CallRequest) {
        match self.post(tid, request, false) {
            Ok(true) => self.finish_lingering(tid),
            Ok(false) => {}
            Err(errno) => {
                let what = format!("the rest of its transfer cannot be made here: error {errno}");
                self.lost(tid, &Error::Astray { what, pid: tid.0 });
            }
        }
    }

    /// The call of a thread that lingers has ended.
    pub(crate) fn finish_lingering(&mut self, tid: HomePid) {
        let Some(pid) = self.of_thread(tid).map(|member| member.pid) else { return };
        match self.with_deputy(tid, Member::linger_ended) {
            Ok(Lingered::Over) => self.let_go(pid),
            Ok(Lingered::Still(None) | Lingered::Gone) => {}
            Ok(Lingered::Still(Some(rest))) => self.make_rest(tid, *rest),
            Err(error) => self.lost(tid, &error),
        }
    }

    /// A signal reaches a thread that lingers.
    pub(crate) fn signalled_lingering(&mut self, tid: HomePid, stopped: Stopped, signal: i32) -> Result<()> {
        let Some(member) = self.of_thread(tid) else { return stopped.resume(signal) };
        // The program's other threads may have changed that since they are home.
        let status = procfs::status(tid.0)?;
        let of = |set: u64| set >> (signal - 1) & 1 == 1;
        let action = if of(status.ignored) {
            IGNORE
        } else if of(status.caught) {
            IGNORE + 1
        } else {
            DEFAULT
        };
        match crate::signal::judge(action, signal) {
            crate::signal::Verdict::Ignored => member.go_on(stopped),
            crate::signal::Verdict::Natural => stopped.resume(signal),
            crate::signal::Verdict::Forward => {
                member.called_off(stopped)?;
                let pid = member.pid;
                self.let_go(pid);
                Ok(())
            }
        }
    }
}
