//! Calls on connections that are on this node, and calls before which they are returned.

use super::Connections;
use crate::error::GuestResult;
use crate::files::cache::Conflict;
use crate::process::shared::Process;
use crate::process::thread::Thread;
use std::os::fd::AsFd;
use tern_syscall::is_transfer;
use tern_tracee::Result;
use tern_tracee::listener::Notification;
use tern_tracee::stop::{Stop, Stopped};

/// The treatment of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// It does not concern the connections.
    Other,
    /// It is let through, on the connection with this descriptor.
    LetThrough(i32),
    /// It waits until this connection is taken.
    Take(i32),
    /// It waits until this connection is returned.
    Return(i32),
    /// It waits for a move in progress.
    Wait,
}

impl Connections {
    /// Decides about a call. `is_fresh`: home has not made it, or a part of it, already.
    fn plan(&self, nr: u32, args: &[u64; 6], is_fresh: bool, is_departing: bool) -> Plan {
        if self.is_moving() {
            return Plan::Wait;
        }
        let fd = args[0] as i32;
        if let Some(connection) = self.by_fd.get(&fd)
            && is_fresh
            && !is_departing
        {
            match &connection.socket {
                Some(local) if is_local_call(nr, args) && !local.is_broken => return Plan::LetThrough(fd),
                None if is_transfer(nr) => return Plan::Take(fd),
                _ => {}
            }
        }
        let returns = |fd: i32| match Conflict::of(nr, args) {
            _ if names_descriptors(nr) => true,
            Conflict::All => true,
            Conflict::File(conflicting) => conflicting == fd,
            Conflict::None => args[0] as i32 == fd && !is_about_descriptor(nr, args),
        };
        let is_member = |fd: i32| i64::from(nr) == libc::SYS_epoll_ctl && args[2] as i32 == fd;
        let returning = self.local_fds().find(|fd| returns(*fd) || is_member(*fd));
        returning.map_or(Plan::Other, Plan::Return)
    }

    /// Forgets the offers of descriptors that this call may share, close or replace. None of their
    /// connections is here any more.
    fn forget_shared(&mut self, nr: u32, args: &[u64; 6]) {
        let replaced = matches!(i64::from(nr), libc::SYS_dup2 | libc::SYS_dup3).then_some(args[1] as i32);
        let conflict = Conflict::of(nr, args);
        let is_shared = |fd: i32| match conflict {
            Conflict::All => true,
            Conflict::File(conflicting) => conflicting == fd && !keeps_offer(nr, args),
            Conflict::None => false,
        };
        self.by_fd.retain(|fd, offered| offered.socket.is_some() || !is_shared(*fd) && replaced != Some(*fd));
    }
}

impl Thread {
    /// Lets a call on a connection of this node through, or has it wait until a connection is taken
    /// or returned; false if it concerns no connection of this node.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn handle_connection_call(
        &mut self,
        trap: &Notification,
        process: &mut Process,
    ) -> GuestResult<bool> {
        if process.connections.is_empty() {
            return Ok(false);
        }
        let is_fresh = !self.sync.call_pending && self.sync.partial.is_none();
        let is_departing = process.files.is_returning_delegations();
        match process.connections.plan(trap.nr, &trap.args, is_fresh, is_departing) {
            Plan::Other => {
                process.connections.forget_shared(trap.nr, &trap.args);
                return Ok(false);
            }
            Plan::Take(fd) => process.connections.begin_take(fd),
            Plan::Return(fd) => process.connections.begin_return(fd),
            Plan::Wait => {}
            Plan::LetThrough(fd) if self.open_connection(trap, fd, process) => {
                self.sync.restart_code = None;
                process.connections.enter_native_call();
                self.let_through(trap.id)?;
                return Ok(true);
            }
            Plan::LetThrough(fd) => process.connections.begin_return(fd),
        }
        process.queued_traps.push(*trap);
        Ok(true)
    }

    /// Prepares a thread that was interrupted by the shim, perhaps in a call that was let through. A
    /// transfer that was cut short is completed by home, and one that has failed for the
    /// interruption only is repeated.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn settle_native_transfer(&mut self, stopped: &Stopped) -> Result<()> {
        let mut registers = stopped.registers()?;
        let Some(nr) = registers.call() else { return Ok(()) };
        if let Some(partial) = tern_migrate::partial::remainder(&mut registers, None) {
            if self.has_deliverable(None) {
                // A signal cuts the transfer short, as at home.
                return Ok(());
            }
            // The call for the rest counts as pending under the next number: home sees that it has not
            // received the call, and no handler runs here before the call is sent.
            self.sync.call += 1;
            (self.sync.partial, self.sync.call_pending) = (Some(partial), true);
        } else if registers.rax.cast_signed() == -i64::from(libc::EINTR)
            && is_transfer(nr as u32)
            && !self.has_deliverable(None)
        {
            // A socket with a time limit of its own reports a signal, but none was delivered.
            (registers.rax, registers.orig_rax) = (nr, u64::MAX);
            registers.rip -= 2;
        } else {
            return Ok(());
        }
        stopped.set_registers(&registers)
    }

    /// Whether a signal was raised by a call that was let through: SIGPIPE. Then the connection is
    /// returned and home makes the call again, so that the signal comes from home like all others.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn repeat_broken_transfer(
        &mut self,
        stopped: &Stopped,
        process: &mut Process,
    ) -> Result<bool> {
        let is_own = stopped.stop == Stop::Signal(libc::SIGPIPE)
            && process.connections.is_in_native_call()
            && !self.raised.has(libc::SIGPIPE);
        if !is_own {
            return Ok(false);
        }
        let mut registers = stopped.registers()?;
        let has_failed = registers.rax.cast_signed() == -i64::from(libc::EPIPE);
        let Some(nr) = registers.call().filter(|_| has_failed) else { return Ok(false) };
        process.connections.stop_local_calls(registers.rdi as i32);
        (registers.rax, registers.orig_rax) = (nr, u64::MAX);
        registers.rip -= 2;
        stopped.set_registers(&registers)?;
        Ok(true)
    }

    /// Gives the guest a descriptor of a connection, if it has none yet. False if that fails.
    fn open_connection(&self, trap: &Notification, fd: i32, process: &mut Process) -> bool {
        let Some(local) = process.connections.by_fd.get_mut(&fd).and_then(|known| known.socket.as_mut())
        else {
            return false;
        };
        if !local.in_guest {
            if let Err(error) = self.listener.add_fd(trap.id, local.socket.as_fd(), fd) {
                tracing::info!(%error, fd, "the guest cannot have a connection");
                return false;
            }
            local.in_guest = true;
            process.files.remove_stale_fd(fd);
        }
        true
    }
}

/// Whether this node's kernel makes the call on a connection as home's would.
fn is_local_call(nr: u32, args: &[u64; 6]) -> bool {
    const TIOCOUTQ: u64 = 0x5411;
    match i64::from(nr) {
        libc::SYS_sendmmsg
        | libc::SYS_recvmmsg
        | libc::SYS_shutdown
        | libc::SYS_getsockname
        | libc::SYS_getpeername
        | libc::SYS_getsockopt => true,
        libc::SYS_setsockopt => is_unprivileged_option(args[1] as i32, args[2] as i32),
        libc::SYS_ioctl => [libc::FIONREAD, TIOCOUTQ, libc::FIONBIO].contains(&args[1]),
        libc::SYS_fcntl => args[1] as i32 == libc::F_GETFL,
        _ => is_transfer(nr),
    }
}

/// Whether every process may set this option of a connection, and the option moves with it. A guest
/// has no capabilities on its node, but its process may have some at home.
fn is_unprivileged_option(level: i32, option: i32) -> bool {
    match level {
        libc::SOL_SOCKET => {
            matches!(option, libc::SO_KEEPALIVE | libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | libc::SO_RCVLOWAT)
        }
        libc::IPPROTO_TCP => matches!(
            option,
            libc::TCP_NODELAY
                | libc::TCP_CORK
                | libc::TCP_QUICKACK
                | libc::TCP_KEEPIDLE
                | libc::TCP_KEEPINTVL
                | libc::TCP_KEEPCNT
                | libc::TCP_USER_TIMEOUT
        ),
        _ => false,
    }
}

/// Whether a call on a connection neither shares nor closes its descriptor, and home keeps its offer.
fn keeps_offer(nr: u32, args: &[u64; 6]) -> bool {
    match i64::from(nr) {
        libc::SYS_setsockopt => args[1..3] != [libc::SOL_SOCKET as u64, libc::SO_LINGER as u64],
        libc::SYS_fcntl => ![libc::F_DUPFD, libc::F_DUPFD_CLOEXEC].contains(&(args[1] as i32)),
        libc::SYS_ioctl
        | libc::SYS_getsockopt
        | libc::SYS_getsockname
        | libc::SYS_getpeername
        | libc::SYS_shutdown => true,
        _ => is_transfer(nr),
    }
}

/// Whether a call names descriptors in memory.
fn names_descriptors(nr: u32) -> bool {
    matches!(
        i64::from(nr),
        libc::SYS_poll | libc::SYS_ppoll | libc::SYS_select | libc::SYS_pselect6 | libc::SYS_io_submit
    )
}

/// Whether a call without effect on the open file concerns the descriptor or the inode only, which
/// home's placeholder has as well.
fn is_about_descriptor(nr: u32, args: &[u64; 6]) -> bool {
    match i64::from(nr) {
        libc::SYS_fcntl => [libc::F_GETFD, libc::F_SETFD].contains(&(args[1] as i32)),
        libc::SYS_fstat | libc::SYS_newfstatat | libc::SYS_statx | libc::SYS_fstatfs => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Connection, LocalSocket};
    use super::*;
    use std::collections::BTreeMap;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use tern_ids::ConnectionToken;

    /// Descriptor 5 is here, and 6 is offered.
    fn connections() -> Connections {
        let connection = |socket| Connection { token: ConnectionToken([0; 16]), socket, returns: 0 };
        let (one, other) = UnixStream::pair().unwrap();
        let local =
            LocalSocket { socket: Arc::new(one.into()), _use: other, in_guest: true, is_broken: false };
        let by_fd = BTreeMap::from([(5, connection(Some(local))), (6, connection(None))]);
        Connections { by_fd, ..Connections::default() }
    }

    fn plan(connections: &Connections, nr: i64, args: [u64; 3]) -> Plan {
        let [first, second, third] = args;
        connections.plan(nr as u32, &[first, second, third, 0, 0, 0], true, false)
    }

    #[test]
    fn transfers_are_let_through_or_take_the_connection() {
        let all = connections();
        for nr in [libc::SYS_read, libc::SYS_sendto, libc::SYS_recvmsg, libc::SYS_writev] {
            assert_eq!(plan(&all, nr, [5, 0, 0]), Plan::LetThrough(5));
            assert_eq!(plan(&all, nr, [6, 0, 0]), Plan::Take(6));
            assert_eq!(plan(&all, nr, [7, 0, 0]), Plan::Other);
        }
        assert_eq!(plan(&all, libc::SYS_shutdown, [5, 0, 0]), Plan::LetThrough(5));
        assert_eq!(plan(&all, libc::SYS_shutdown, [6, 0, 0]), Plan::Other, "home makes it");
        let departing = all.plan(libc::SYS_read as u32, &[5, 0, 0, 0, 0, 0], true, true);
        assert_eq!(departing, Plan::Return(5));
        let repeated = all.plan(libc::SYS_read as u32, &[6, 0, 0, 0, 0, 0], false, false);
        assert_eq!(repeated, Plan::Other, "home may have made it");
    }

    #[test]
    fn connection_is_returned_before_it_can_be_shared_or_closed() {
        let all = connections();
        let fcntl = |command: i32| [5, command as u64, 0];
        for (nr, args) in [
            (libc::SYS_close, [5, 0, 0]),
            (libc::SYS_dup, [5, 0, 0]),
            (libc::SYS_dup2, [1, 5, 0]),
            (libc::SYS_clone, [0, 0, 0]),
            (libc::SYS_fork, [0, 0, 0]),
            (libc::SYS_execve, [0, 0, 0]),
            (libc::SYS_exit_group, [0, 0, 0]),
            (libc::SYS_sendmsg, [9, 0, 0]),
            (libc::SYS_poll, [0, 1, 0]),
            (libc::SYS_select, [9, 0, 0]),
            (libc::SYS_epoll_ctl, [9, 1, 5]),
            (libc::SYS_sendfile, [5, 9, 0]),
            (libc::SYS_setsockopt, [5, libc::SOL_SOCKET as u64, libc::SO_MARK as u64]),
            (libc::SYS_setsockopt, [5, libc::IPPROTO_TCP as u64, libc::TCP_ULP as u64]),
            (libc::SYS_ioctl, [5, libc::FIOASYNC, 0]),
            (libc::SYS_connect, [5, 0, 0]),
            (libc::SYS_lseek, [5, 0, 0]),
            (libc::SYS_fcntl, fcntl(libc::F_DUPFD)),
            (libc::SYS_fcntl, fcntl(libc::F_SETFL)),
            (libc::SYS_fcntl, fcntl(libc::F_SETOWN)),
        ] {
            assert_eq!(plan(&all, nr, args), Plan::Return(5), "{nr} {args:?}");
        }
        for (nr, args) in [
            (libc::SYS_close, [9, 0, 0]),
            (libc::SYS_read, [9, 0, 0]),
            (libc::SYS_epoll_ctl, [9, 1, 8]),
            (libc::SYS_fstat, [5, 0, 0]),
            (libc::SYS_openat, [9, 0, 0]),
            (libc::SYS_fcntl, fcntl(libc::F_GETFD)),
        ] {
            assert_eq!(plan(&all, nr, args), Plan::Other, "{nr} {args:?}");
        }
        for nr in 0..500 {
            let plan = all.plan(nr, &[5, 0, 0, 0, 0, 0], true, true);
            assert!(!matches!(plan, Plan::LetThrough(_) | Plan::Take(_)), "{nr} while departing");
        }
    }

    #[test]
    fn offers_end_when_their_descriptor_may_be_shared() {
        let after = |nr: i64, args: [u64; 3]| {
            let mut all = connections();
            let [first, second, third] = args;
            all.forget_shared(nr as u32, &[first, second, third, 0, 0, 0]);
            plan(&all, libc::SYS_read, [6, 0, 0])
        };
        for (nr, args) in [
            (libc::SYS_close, [6, 0, 0]),
            (libc::SYS_dup, [6, 0, 0]),
            (libc::SYS_dup2, [9, 6, 0]),
            (libc::SYS_fork, [0; 3]),
            (libc::SYS_sendmsg, [9, 0, 0]),
            (libc::SYS_fcntl, [6, libc::F_DUPFD as u64, 0]),
            (libc::SYS_setsockopt, [6, libc::SOL_SOCKET as u64, libc::SO_LINGER as u64]),
        ] {
            assert_eq!(after(nr, args), Plan::Other, "{nr} {args:?}");
        }
        for (nr, args) in [
            (libc::SYS_close, [9, 0, 0]),
            (libc::SYS_fcntl, [6, libc::F_SETFL as u64, 0]),
            (libc::SYS_setsockopt, [6, 0, 0]),
            (libc::SYS_getpeername, [6, 0, 0]),
            (libc::SYS_poll, [6, 0, 0]),
        ] {
            assert_eq!(after(nr, args), Plan::Take(6), "{nr} {args:?}");
        }
    }
}
